"""Rows of a table as a network reads them, without torch and scikit-learn."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.missing import is_missing

Floats = NDArray[np.float64]
Kind = Literal["number", "date", "category", "missing"]
DAY = np.timedelta64(1, "D")
ISO_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?)?")


@dataclass(frozen=True)
class Feature:
    """One number that a network reads, made of one column.

    Attributes:
        column: the name of the column.
        kind: the "number" itself, the days since 1970 of a "date", whether it is one "category", or whether it is
            "missing".
        value: the category.
        fill: what a missing number is taken for, before it is scaled.
        center: what is subtracted.
        scale: what is divided by.
        separators: characters that may stand between thousands of numbers written as text.
        decimal: the character before their decimals.
    """

    column: str
    kind: Kind = "number"
    value: str | None = None
    fill: float | None = None
    center: float = 0.0
    scale: float = 1.0
    separators: str = ""
    decimal: str = "."

    def to_dict(self) -> dict[str, Any]:
        """Primitives that `Feature(**…)` takes."""
        return asdict(self)

    def of(self, cells: Sequence[Any]) -> Floats:
        """Cells (N,) of the column → numbers (N,)."""
        texts = [_text(cell) for cell in cells]
        if self.kind == "missing":
            return np.array([float(text == "") for text in texts])
        if self.kind == "category":
            return np.array([float((text or "missing") == self.value) for text in texts])
        read = _days if self.kind == "date" else self._number
        return (np.array([self._filled(text, read) for text in texts]) - self.center) / self.scale

    def _filled(self, text: str, read: Any) -> float:
        if text:
            return float(read(text))
        if self.fill is None:
            raise ValueError(f"expected a value in column {self.column!r}, got none: give one")
        return self.fill

    def _number(self, text: str) -> float:
        plain = text
        for separator in self.separators:
            plain = plain.replace(separator, "")
        try:
            found = float(plain.replace(self.decimal, "."))
        except ValueError:
            found = math.inf
        if not math.isfinite(found):
            raise ValueError(
                f"expected a finite number in column {self.column!r}, got {text[:40]!r}: correct the value"
            )
        return found


def _text(cell: Any) -> str:
    """A cell as text without blanks around it; "" where there is no value."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if not isinstance(cell, str | int | float | np.generic):
        raise ValueError(f"expected a number or a text in every cell, got a {type(cell).__name__}: correct it")
    text = str(cell).strip()
    return "" if is_missing(text) or text in ("<NA>", "NaT") else text


def _days(text: str) -> float:
    try:
        if ISO_DATE.fullmatch(text) is None:  # numpy also reads "now", and years of any length
            raise ValueError
        return float((np.datetime64(text, "s") - np.datetime64(0, "s")) / DAY)
    except ValueError as error:
        raise ValueError(f"expected a date such as 2024-12-31, got {text[:40]!r}: correct the value") from error


def encode_rows(features: Sequence[Feature], rows: Sequence[Mapping[str, Any] | Sequence[Any]]) -> Floats:
    """Rows, each a mapping by columns or a list in their order → numbers (N, d)."""
    names = list(dict.fromkeys(feature.column for feature in features))
    table: dict[str, list[Any]] = {name: [] for name in names}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != len(names):
                raise ValueError(
                    f"expected {len(names)} values in row {number}, {', '.join(names)}, got others: give them"
                )
            row = dict(zip(names, row, strict=True))
        missing = [name for name in names if name not in row]
        if missing:
            raise ValueError(
                f"expected the columns {', '.join(names)}, got no {', '.join(missing)} in row {number}: add them"
            )
        for name in names:
            table[name].append(row[name])
    return np.stack([feature.of(table[feature.column]) for feature in features], axis=1)
