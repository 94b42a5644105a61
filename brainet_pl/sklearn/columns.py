"""Columns of a data frame as numbers: which are numbers, dates or categories is found in the rows of `fit`.

Text is read as `brainet_pl.datamodules.Table` reads it: the same ways to write a missing value, and categories of which
a missing value is one. Beyond that, dates and numbers with thousands separators or decimal commas are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.missing import is_missing
from brainet_pl._utils.unseen import about_unseen
from brainet_pl._utils.warn import warn
from brainet_pl.serving.tables import ISO_DATE, Feature

Floats = NDArray[np.float64]
MOST_CATEGORIES = 50  # of one column
DAY = np.timedelta64(1, "D")
GROUPED = re.compile(r"[+-]?\d{1,3}([,' \u00a0\u202f]\d{3})+(\.\d+)?")  # 1,234.5
COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?")  # 1.234,5


@dataclass(frozen=True)
class Column:
    """How one column of a data frame becomes numbers.

    Attributes:
        name: The name of the column.
        categories: The categories of a column of text, each a column of zeros and ones; None for any other column.
        dates: Whether it holds dates, which become days since 1970.
        separators: Characters that numbers written as text have between thousands.
        decimal: The character that numbers written as text have before decimals.
    """

    name: str
    categories: list[str] | None = None
    dates: bool = False
    separators: str = ""
    decimal: str = "."

    @property
    def plain(self) -> bool:
        """Whether it was a column of numbers to begin with."""
        return self == Column(self.name)

    def names(self) -> list[str]:
        """The names of what it becomes."""
        return [self.name] if self.categories is None else [f"{self.name}={known}" for known in self.categories]

    def features(self) -> list[Feature]:
        """What it becomes, as the folder of an exported model keeps it."""
        if self.categories is not None:
            return [Feature(self.name, "category", known) for known in self.categories]
        return [
            Feature(self.name, "date" if self.dates else "number", separators=self.separators, decimal=self.decimal)
        ]

    def encode(self, values: Any) -> Floats:
        """Turns values (N,) into numbers (N, k), NaN where missing; a category not seen in `fit` is all zeros."""
        array = np.asarray(values)
        if self.dates:
            return _days(array, self.name)[:, None]
        if self.categories is None:
            return self._numbers(array)[:, None]
        texts = np.array(_texts(array, missing="missing"), dtype=object)
        return np.stack([texts == known for known in self.categories], axis=1).astype(np.float64)

    def unseen(self, values: Any) -> list[str]:
        """Those of these values that are categories which `fit` did not see."""
        if self.categories is None:
            return []
        known = set(self.categories)
        return [text for text in _texts(np.asarray(values), missing="missing") if text not in known]

    def _numbers(self, array: NDArray[Any]) -> Floats:
        if array.dtype.kind in "fiub":
            return array.astype(np.float64)
        texts = _texts(array, missing="nan")
        for separator in self.separators:
            texts = [text.replace(separator, "") for text in texts]
        try:
            return np.array([float(text.replace(self.decimal, ".")) for text in texts])
        except ValueError as error:
            raise ValueError(
                f"expected numbers in column {self.name!r}, as in fit, got {str(error).rpartition(': ')[2]}: correct "
                "the value"
            ) from error


def is_frame(x: Any) -> bool:
    """Whether it is a table with named columns, of pandas or polars."""
    return hasattr(x, "columns") and hasattr(x, "dtypes")


def read_columns(frame: Any) -> list[Column] | None:
    """How each column of a data frame becomes numbers; None where all are numbers already, or it is no data frame.

    All that can't be read is told in one error.
    """
    if not is_frame(frame):
        return None
    columns: list[Column] = []
    problems: list[str] = []
    for name in frame.columns:
        try:
            columns.append(_read_column(str(name), np.asarray(frame[name])))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        many = f"{len(problems)} columns can't be read\n  " if len(problems) > 1 else ""
        raise ValueError(many + "\n  ".join(problems))
    return None if all(column.plain for column in columns) and _all_numbers(frame) else columns


def encode(columns: Sequence[Column], frame: Any) -> Floats:
    """All columns of `fit` of a data frame as numbers side by side, (N, d)."""
    if not is_frame(frame):
        raise ValueError(
            f"expected a data frame with the columns {', '.join(c.name for c in columns)}, as in fit, got "
            f"{type(frame).__name__}: give a data frame"
        )
    names = {str(name): name for name in frame.columns}
    missing = [column.name for column in columns if column.name not in names]
    if missing:
        raise ValueError(f"expected the columns of fit, got none called {', '.join(missing)}: add them")
    unseen, encoded = {}, []
    for column in columns:
        values = frame[names[column.name]]
        unseen[column.name] = column.unseen(values)
        encoded.append(column.encode(values))
    message = about_unseen(unseen)
    if message is not None:
        warn(message)
    return np.concatenate(encoded, axis=1)


def _read_column(name: str, values: NDArray[Any]) -> Column:
    from brainet_pl.datamodules.columns import is_text, recognise

    if values.dtype.kind in "fiub":
        return Column(name)
    if values.dtype.kind == "M":
        return Column(name, dates=True)
    if values.dtype.kind == "m":
        raise ValueError(f"expected numbers, dates or categories in column {name!r}, got spans of time: give numbers")
    texts = _texts(values, missing="missing")
    given = [text for text in texts if text != "missing"]
    no_numbers = list(filter(is_text, given))
    if not no_numbers:
        return Column(name)  # numbers as objects or text
    column = _as_dates_or_numbers(name, given, is_text)
    if column is not None:
        return column
    notation = recognise(no_numbers)
    if notation is not None:
        raise ValueError(
            f"expected numbers, dates or categories in column {name!r}, got {notation.name} such as {no_numbers[0]!r}: "
            f"{notation.advice}, or write dates as 2024-12-31"
        )
    categories = sorted(set(texts))
    if len(categories) > MOST_CATEGORIES:
        raise ValueError(
            f"expected at most {MOST_CATEGORIES} categories, got {len(categories)} in column {name!r}: drop it if it "
            "is a name or a number of a row, or group its values"
        )
    return Column(name, categories)


def _as_dates_or_numbers(name: str, given: Sequence[str], is_text: Callable[[str], bool]) -> Column | None:
    """A column of text that is all dates, or all numbers with separators or decimal commas; None for any other."""
    if all(map(ISO_DATE.fullmatch, given)):
        return Column(name, dates=True)
    if all(GROUPED.fullmatch(text) or not is_text(text) for text in given):
        return Column(name, separators=",' \u00a0\u202f")
    if all(map(COMMA.fullmatch, given)):
        return Column(name, separators=".", decimal=",")
    return None


def _all_numbers(frame: Any) -> bool:
    return all(np.asarray(frame[name]).dtype.kind in "fiub" for name in frame.columns)


def _texts(values: NDArray[Any], missing: str) -> list[str]:
    """Values (N,) as text without blanks around it; all ways to write a missing value are one."""
    texts = [str(value).strip() for value in values.tolist()]
    return [missing if is_missing(text) or text in ("<NA>", "NaT") else text for text in texts]


def _days(values: NDArray[Any], name: str) -> Floats:
    """Dates (N,) as days since 1970, NaN where missing."""
    if values.dtype.kind != "M":
        texts = _texts(values, missing="NaT")
        try:
            for text in texts:
                if text != "NaT" and ISO_DATE.fullmatch(text) is None:  # numpy also reads "now", and long years
                    raise ValueError(repr(text[:40]))
            values = np.array(texts, dtype="datetime64[s]")
        except ValueError as error:
            raise ValueError(f"expected dates such as 2024-12-31 in column {name!r}, as in fit, got {error}") from error
    since = (values - np.datetime64(0, "s")) / DAY
    return np.where(np.isnat(values), np.nan, since.astype(np.float64))
