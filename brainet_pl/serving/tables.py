"""Rows of a table as a network reads them, without torch and scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl.tables.cells import Notation, days_of, text_of, without_placeholders
from brainet_pl.tables.column import MISSING, Column

Floats = NDArray[np.float64]
Kind = Literal["number", "date", "category", "other", "missing"]


@dataclass(frozen=True)
class Feature:
    """One number that a network reads, made of one column.

    Attributes:
        column: the name of the column.
        kind: the "number" itself, the days since 1970 of a "date", whether it is one "category", whether it is any
            "other" than those that are known, or whether it is "missing".
        value: the category.
        known: the categories that are no other.
        fill: what a missing number is taken for, before it is scaled.
        center: what is subtracted.
        scale: what is divided by.
        separators: characters that may stand between thousands of numbers written as text.
        decimal: the character before their decimals.
        symbol: a sign beside them, such as "$" or "%".
    """

    column: str
    kind: Kind = "number"
    value: str | None = None
    known: list[str] | None = None
    fill: float | None = None
    center: float = 0.0
    scale: float = 1.0
    separators: str = ""
    decimal: str = "."
    symbol: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Primitives that `Feature(**…)` takes."""
        return asdict(self)

    def of(self, cells: Sequence[Any] | NDArray[Any]) -> Floats:
        """Cells (N,) of the column → numbers (N,)."""
        if isinstance(cells, np.ndarray):
            if self.kind == "number" and cells.dtype.kind in "iuf":
                return self._of_numbers(cells.astype(np.float64))
            cells = cells.tolist()
        texts = [_text(cell) for cell in cells]
        if self.kind in ("number", "date", "missing"):
            texts = without_placeholders(texts)
        if self.kind == "missing":
            return np.array([float(text == "") for text in texts])
        if self.kind == "category":
            return np.array([float((text or MISSING) == self.value) for text in texts])
        if self.kind == "other":
            known = set(self.known or [])
            return np.array([float((text or MISSING) not in known) for text in texts])
        return (np.array([self._filled(text) for text in texts]) - self.center) / self.scale

    def _of_numbers(self, values: Floats) -> Floats:
        """What `of` gives for numbers, without a look at each."""
        missing = np.isnan(values)
        if missing.any():
            values = np.where(missing, self._filled(""), values)
        if not np.isfinite(values).all():
            self._number(str(values[~np.isfinite(values)][0]))  # says what is wrong with it
        return (values - self.center) / self.scale

    def _filled(self, text: str) -> float:
        if text:
            return self._date(text) if self.kind == "date" else self._number(text)
        if self.fill is None:
            raise ValueError(f"expected a value in column {self.column!r}, got none: give one")
        return self.fill

    def _number(self, text: str) -> float:
        found = Notation(self.separators, self.decimal, self.symbol).number(text)
        if found is None or not math.isfinite(found):
            raise ValueError(
                f"expected a finite number in column {self.column!r}, got {text[:40]!r}: correct the value"
            )
        return found

    def _date(self, text: str) -> float:
        found = days_of(text)
        if found is None:
            raise ValueError(f"expected a date such as 2024-12-31, got {text[:40]!r}: correct the value")
        return found


def _text(cell: Any) -> str:
    """A cell as text without blanks around it; "" where there is no value."""
    if cell is not None and not isinstance(cell, str | int | float | np.generic):
        raise ValueError(f"expected a number or a text in every cell, got a {type(cell).__name__}: correct it")
    return text_of(cell)


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
    return encode_columns(features, table)


def encode_columns(features: Sequence[Feature], columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> Floats:
    """Columns (N,) by their names → numbers (N, d); an array of numbers is not looked at cell by cell."""
    return np.stack([feature.of(columns[feature.column]) for feature in features], axis=1)


def encode_array(features: Sequence[Feature], rows: Any) -> Floats:
    """An array of rows (N, columns), in the order of the columns → numbers (N, d)."""
    names = list(dict.fromkeys(feature.column for feature in features))
    table = np.asarray(rows)
    if table.ndim != 2 or table.shape[1] != len(names) or not len(table):
        raise ValueError(
            f"expected rows of {len(names)} columns, {', '.join(names)}, got {checks.shown(table.shape)}: give a row "
            "of all columns for each sample"
        )
    return encode_columns(features, dict(zip(names, table.T, strict=True)))


def features_of(column: Column) -> list[Feature]:
    """What a column becomes, as the folder of an exported model keeps it; without fill, center and scale."""
    if column.categories is None:
        kind: Kind = "date" if column.kind == "date" else "number"
        return [Feature(column.name, kind, **asdict(column.notation))]
    found = [Feature(column.name, "category", known) for known in column.categories]
    return found + ([Feature(column.name, "other", known=column.categories)] if column.grouped else [])
