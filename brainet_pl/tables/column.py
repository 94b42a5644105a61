"""One column of a table, and how its cells become numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl.tables.cells import DAY, POINTS, Notation, days_of, plain_number, texts_of, without_placeholders

Floats = NDArray[np.float64]
Kind = Literal["number", "date", "category"]
MISSING = "missing"  # the category of cells without a value
OTHER = "(other)"  # that of rare categories


class Encoded(NamedTuple):
    """A column of a table, as the numbers that a model reads.

    Attributes:
        numbers: (N, k), NaN where a number or date is missing.
        unread: the text of every cell that is none of the categories of `fit`, or no number.
    """

    numbers: Floats
    unread: list[str]


@dataclass(frozen=True)
class Column:
    """How one column of a table becomes numbers.

    Attributes:
        name: the name of the column.
        kind: a "number", the days since 1970 of a "date", or a "category".
        categories: the categories, each a column of zeros and ones; None for any other column.
        grouped: whether rare categories share one more column.
        separators: characters that numbers written as text have between thousands.
        decimal: the character that they have before decimals.
        symbol: a sign that stands beside each of them, such as "$" or "%".
        note: what was decided about the column that its owner may not expect, "" for nothing.
    """

    name: str
    kind: Kind = "number"
    categories: list[str] | None = None
    grouped: bool = False
    separators: str = ""
    decimal: str = "."
    symbol: str = ""
    note: str = ""

    @property
    def plain(self) -> bool:
        """Whether it is a number that needs no notation."""
        return self == Column(self.name)

    @property
    def notation(self) -> Notation:
        """How its numbers are written."""
        return Notation(self.separators, self.decimal, self.symbol)

    def names(self) -> list[str]:
        """The names of what it becomes."""
        if self.categories is None:
            return [self.name]
        return [f"{self.name}={known}" for known in [*self.categories, *([OTHER] if self.grouped else [])]]

    def describe(self) -> str:
        """What it was read as, in a few words."""
        if self.categories is not None:
            count = f"{len(self.categories)} categories"
            return f"{count} and others" if self.grouped else count
        if self.kind == "date" or self.notation == Notation():
            return self.kind
        return f"number, written as {self.notation.example()}"

    def encode(self, values: Any) -> Encoded:
        """Turn the cells (N,) of the column into numbers."""
        array = array_of(values)
        if self.kind == "category":
            return self._one_hot(cells_as_text(array, self.name))
        if array.dtype.kind in "fiub" and self.kind == "number":
            return Encoded(array.astype(np.float64)[:, None], [])
        if array.dtype.kind == ("M" if self.kind == "date" else "m"):
            return Encoded(_days(array)[:, None], [])
        texts = without_placeholders(cells_as_text(array, self.name))
        if self.kind == "date":
            return Encoded(self._dates(texts)[:, None], [])
        return self._numbers(texts)

    def codes(self, values: Any) -> NDArray[np.intp]:
        """The place (N,) of each cell's category among the categories, or their number for any other."""
        return self._codes(cells_as_text(array_of(values), self.name))

    def _codes(self, texts: Sequence[str]) -> NDArray[np.intp]:
        place = {known: number for number, known in enumerate(self.categories or [])}
        return np.array([place.get(text or MISSING, len(place)) for text in texts], dtype=np.intp)

    def _one_hot(self, texts: Sequence[str]) -> Encoded:
        codes, rest = self._codes(texts), len(self.categories or [])
        unread = [] if self.grouped else [texts[row] or MISSING for row in np.flatnonzero(codes == rest).tolist()]
        return Encoded(np.eye(rest + 1)[codes][:, : rest + self.grouped], unread)

    def _numbers(self, texts: Sequence[str]) -> Encoded:
        notation, unread = self.notation, []
        numbers = np.full(len(texts), np.nan)
        for row, text in enumerate(texts):
            if not text:
                continue
            number = notation.number(text)
            if number is not None:
                numbers[row] = number
                continue
            if any(other.number(text) is not None for other in POINTS) or plain_number(text) is not None:
                raise ValueError(
                    f"expected numbers such as {notation.example()} in column {self.name!r}, as in fit, got "
                    f"{text[:40]!r} in row {row}, which may mean something else there: write it as in fit"
                )
            unread.append(text)
        return Encoded(numbers[:, None], unread)

    def _dates(self, texts: Sequence[str]) -> Floats:
        days = np.full(len(texts), np.nan)
        for row, text in enumerate(texts):
            found = days_of(text) if text else np.nan
            if found is None:
                raise ValueError(
                    f"expected dates such as 2024-12-31 in column {self.name!r}, as in fit, got {text[:40]!r} in row "
                    f"{row}: correct the value"
                )
            days[row] = found
        return days


def array_of(values: Any) -> NDArray[Any]:
    """A column as an array (N,): its numbers, or its cells as they are."""
    if is_categorical(values):
        return np.asarray(values, dtype=object)
    array = np.asarray(values)
    if array.ndim != 1:  # cells that hold lists of equal length
        found = np.empty(len(array), dtype=object)
        found[:] = list(values)
        return found
    return array


def is_categorical(values: Any) -> bool:
    """Whether a column of pandas or polars says of itself that it holds categories."""
    return str(getattr(values, "dtype", "")).partition("(")[0] in ("category", "Categorical", "Enum")


def cells_as_text(array: NDArray[Any], name: str) -> list[str]:
    """The cells (N,) of a column as text; a cell that holds several values is refused."""
    try:
        return texts_of(array.tolist() if array.dtype.kind not in "Mm" else array.astype(str))
    except ValueError as error:
        raise ValueError(f"expected one value in every cell of column {name!r}, {error}") from error


def _days(array: NDArray[Any]) -> Floats:
    """Dates (N,) as days since 1970, spans of time as days; NaN where missing."""
    since = (array - np.datetime64(0, "s") if array.dtype.kind == "M" else array) / DAY
    return np.where(np.isnat(array), np.nan, since.astype(np.float64))
