"""Cells of a table: as text, as a number in the notation of their column, as days since 1970."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from brainet_pl._utils.missing import is_missing

DAY = np.timedelta64(1, "D")
SECONDS_OF_DAY = 86_400.0
NO_VALUE = frozenset({"<NA>", "NaT"})  # how pandas writes it, beside what people write
PLACEHOLDERS = frozenset(  # in lower case: no value, where numbers are expected; else they may be categories
    {"-", "--", "–", "—", ".", "..", "missing", "unknown", "n.a.", "#n/a", "#div/0!", "#value!", "#ref!"}
)
CONTAINERS = (list, tuple, dict, set, frozenset, np.ndarray)
MOST_EXACT = 2.0**53  # whole numbers beyond it are not told apart as floats
SPACES = " \u00a0\u202f"
THOUSANDS = f",'{SPACES}"  # where decimals have a point
SYMBOLS = "$€£¥₹%‰"  # that stand beside a number without changing it
EXPONENT = r"([eE][+-]?\d+)?"
ISO_DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}(-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?( ?(Z|[+-][0-9]{2}:?[0-9]{2}))?)?)?"
)
QUARTER = re.compile(r"([0-9]{4})-?Q([1-4])")
ZONE = re.compile(r" ?(Z|([+-])([0-9]{2}):?([0-9]{2}))$")


# -- text -------------------------------------------------------------------------------------------------------------


def text_of(cell: Any) -> str:
    """A cell as text without blanks around it; "" where there is no value.

    A whole number is written the same whether it came as an integer or as a float; a span of time is its days.

    >>> text_of(3.0), text_of(" red "), text_of(float("nan")), text_of("N/A")
    ('3', 'red', '', '')
    """
    if isinstance(cell, str):
        text = cell.strip()
        return "" if is_missing(text) or text in NO_VALUE else text
    if cell is None:
        return ""
    if isinstance(cell, float | np.floating):
        return _text_of_float(float(cell))
    if isinstance(cell, datetime.timedelta):  # of pandas too, whose NaT is none
        return _text_of_float(cell.total_seconds() / SECONDS_OF_DAY)
    if isinstance(cell, CONTAINERS):
        raise ValueError(f"got a {type(cell).__name__} in a cell: make a column of each of its parts")
    start = getattr(cell, "start_time", None)  # of a period
    return text_of(str(cell if start is None else start))


def _text_of_float(value: float) -> str:
    if math.isnan(value):
        return ""
    whole = value.is_integer() and abs(value) < MOST_EXACT
    return str(int(value)) if whole else repr(value)


def texts_of(values: Iterable[Any]) -> list[str]:
    """Cells as text, see `text_of`."""
    return [text_of(value) for value in values]


# -- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Notation:
    """How the numbers of a column are written as text.

    Attributes:
        separators: characters that stand between thousands.
        decimal: the character before decimals, "." or ",".
        symbol: a sign beside each number, such as "$" or "%", which changes nothing.
    """

    separators: str = ""
    decimal: str = "."
    symbol: str = ""

    def number(self, text: str) -> float | None:
        """A text as a number; None for one that is none in this notation."""
        plain = without_symbol(text, self.symbol) if self.symbol else text
        if not self.separators and self.decimal == ".":
            return plain_number(plain)
        if self._pattern().fullmatch(plain) is None:
            return plain_number(plain) if self.decimal == "." else None
        for separator in self.separators:
            plain = plain.replace(separator, "")
        return float(plain.replace(self.decimal, "."))

    def _pattern(self) -> re.Pattern[str]:
        whole, decimal = r"\d+", re.escape(self.decimal)
        if self.separators:
            whole = rf"(\d+|\d{{1,3}}([{re.escape(self.separators)}]\d{{3}})+)"
        return re.compile(rf"[+-]?{whole}({decimal}\d+)?{EXPONENT}")

    def example(self) -> str:
        """A number in this notation.

        >>> Notation(".", ",", "€").example()
        '1.234,5 €'
        """
        separator = self.separators[:1]
        return f"1{separator}234{self.decimal}5 {self.symbol}".strip()


PLAIN = Notation()
POINTS = (Notation(THOUSANDS, "."), Notation("." + THOUSANDS[1:], ","))  # what commas may mean


def plain_number(text: str) -> float | None:
    """A text as Python reads a number; None for any other."""
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def without_placeholders(texts: Sequence[str]) -> list[str]:
    """Cells of a column of numbers or dates, "" in place of what people write where they have none.

    >>> without_placeholders(["3", "-", "unknown", "-3"])
    ['3', '', '', '-3']
    """
    return ["" if text.lower() in PLACEHOLDERS else text for text in texts]


def without_symbol(text: str, symbol: str) -> str:
    """A number without the sign beside it, of either side; any other text as it is.

    >>> without_symbol("-$5.20", "$"), without_symbol("12 %", "%"), without_symbol("12", "%")
    ('-5.20', '12', '12')
    """
    sign = text[:1] if text[:1] in "+-" else ""
    rest = text[len(sign) :]
    if rest.startswith(symbol):
        return sign + rest[len(symbol) :].lstrip()
    return sign + rest.removesuffix(symbol).rstrip()


# -- dates ------------------------------------------------------------------------------------------------------------


def days_of(text: str) -> float | None:
    """An ISO date, month or quarter as days since 1970, a time zone taken into account; None for any other text.

    >>> days_of("1970-01-02"), days_of("1970-02"), days_of("1970-01-01T12:00+06:00"), days_of("soon")
    (1.0, 31.0, 0.25, None)
    """
    quarter = QUARTER.fullmatch(text)
    if quarter is not None:
        text = f"{quarter[1]}-{3 * int(quarter[2]) - 2:02}"
    if ISO_DATE.fullmatch(text) is None:  # numpy also reads "now", and years of any length
        return None
    zone = ZONE.search(text) if len(text) > len("2024-12-31") else None
    offset = 0.0
    if zone is not None:
        text = text[: zone.start()]
        if zone[2] is not None:
            offset = (int(zone[3]) * 60 + int(zone[4])) / 1440 * (-1 if zone[2] == "-" else 1)
    try:
        since = np.datetime64(text.replace("T", " "), "us") - np.datetime64(0, "us")
    except ValueError:  # a month 13
        return None
    return float(since / DAY) - offset
