"""What stands between the rows that people have and the numbers that a network reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_sample_weight

from brainet_pl.serving.tables import Feature, features_of
from brainet_pl.tables import Column, encode_frame, is_frame, read_frame
from brainet_pl.tables.frame import columns_of

Floats = NDArray[np.float64]
LARGEST = 1e15  # usual distances from the median, beyond which squares leave 32 bits
MOST_DENSE = 2**28  # cells of a sparse matrix that are written out, 2 GiB


@dataclass(frozen=True)
class RowEncoder:
    """Rows of numbers (N, d), NaN where one is missing → what a network reads, (N, d + k), learned in 64 bits.

    Attributes:
        columns: how the columns of a table became these numbers; None where they were numbers.
        fill: (d,) the mean of each, which a missing one is taken for.
        marked: (k,) numbers of the columns of which rows of `fit` miss some; whether one is missing stands beside them.
        center: (d,) the median of each, which is subtracted.
        scale: (d,) how far a value usually lies from it, which is divided by.
        names: (d + k,) of what is read; None where columns have no names.
    """

    columns: list[Column] | None
    fill: Floats
    marked: NDArray[np.int64]
    center: Floats
    scale: Floats
    names: list[str] | None

    @staticmethod
    def learn(x: Floats, columns: list[Column] | None, names: Sequence[str] | None) -> RowEncoder:
        """Learn from rows (N, d) and the names of their columns."""
        gaps = np.isnan(x)
        empty = gaps.all(axis=0)
        marked = np.flatnonzero(gaps.any(axis=0) & ~empty)
        known = np.where(empty, 0.0, x)
        largest = np.maximum(np.nanmax(np.abs(known), axis=0), np.finfo(float).tiny)
        fill = np.nanmean(known / largest, axis=0) * largest  # else a sum of large numbers may be infinite
        center = np.nanmedian(known, axis=0)
        scale = _usual_distance(known - center)
        of_numbers = np.array([feature.kind in ("number", "date") for feature in _plain_features(columns, x.shape[1])])
        center, scale = np.where(of_numbers, center, 0.0), np.where(of_numbers, scale, 1.0)
        named = None if names is None else [*names, *(f"{names[i]} missing" for i in marked.tolist())]
        found = RowEncoder(columns, fill, marked, center, scale, named)
        found._refuse_huge(known)
        return found

    def _refuse_huge(self, x: Floats) -> None:
        far = np.abs(x - self.center) / self.scale > LARGEST
        if far.any():
            row, column = np.argwhere(far)[0].tolist()
            name = str(column) if self.names is None else self.names[column]
            raise ValueError(
                f"expected numbers within {LARGEST:g} times the usual distance from the median, got {x[row, column]:g} "
                f"in column {name!r}, row {row} ({int(far.sum()):,} such values in all): correct the value, or drop "
                "the row"
            )

    def __call__(self, x: Floats) -> Floats:
        """Fills, marks and scales rows (N, d)."""
        gaps = np.isnan(x)
        scaled = (np.where(gaps, self.fill, x) - self.center) / self.scale
        return np.concatenate([scaled, gaps[:, self.marked].astype(np.float64)], axis=1)

    def features(self) -> list[Feature]:
        """What a network reads, as the folder of an exported model keeps it."""
        found = _plain_features(self.columns, len(self.fill))
        if self.columns is None and self.names is not None:
            found = [Feature(name) for name in self.names[: len(found)]]
        filled = []
        for place, feature in enumerate(found):
            if feature.kind in ("number", "date"):
                fill, center, scale = (float(part[place]) for part in (self.fill, self.center, self.scale))
                feature = replace(feature, fill=fill, center=center, scale=scale)
            filled.append(feature)
        return filled + [Feature(found[i].column, "missing") for i in self.marked]

    def to_dict(self) -> dict[str, Any]:
        """Plain values of `StoredRows`."""
        columns = None if self.columns is None else [asdict(column) for column in self.columns]
        arrays = {name: getattr(self, name).tolist() for name in ("fill", "marked", "center", "scale")}
        return {"columns": columns, "names": self.names, **arrays}

    @staticmethod
    def from_stored(stored: StoredRows) -> RowEncoder:
        """The encoder that `to_dict` describes."""
        fill, center, scale = (np.array(part) for part in (stored.fill, stored.center, stored.scale))
        return RowEncoder(stored.columns, fill, np.array(stored.marked, dtype=np.int64), center, scale, stored.names)


class StoredRows(Struct, forbid_unknown_fields=True):
    """A `RowEncoder` in the file of an estimator."""

    columns: list[Column] | None
    names: list[str] | None
    fill: list[float]
    marked: list[int]
    center: list[float]
    scale: list[float]


def _plain_features(columns: list[Column] | None, count: int) -> list[Feature]:
    if columns is None:
        return [Feature(f"x{i}") for i in range(count)]
    return [feature for column in columns for feature in features_of(column)]


def _usual_distance(away: Floats) -> Floats:
    """(N, d) distances → (d,) the median of those that are not 0; 1 where all are."""
    found = np.ones(away.shape[1])
    for number, column in enumerate(np.abs(away).T):
        others = column[column > 0]  # without NaN
        if len(others):
            found[number] = np.median(others)
    return found


# -- what people have -------------------------------------------------------------------------------------------------


def read_inputs(x: Any) -> list[Column] | None:
    """How the columns of a data frame, or of an array with text, become numbers; None where all are numbers."""
    if not is_frame(x) and not _has_text(x):
        return None
    columns = read_frame(_table(x))
    return None if all(column.plain for column in columns) and _all_numbers(x) else columns


def columns_now(columns: list[Column] | None, x: Any, names: Sequence[str] | None) -> list[Column] | None:
    """The columns of `fit`, those of numbers too where a data frame has come with text in them."""
    if columns is None and names is not None and is_frame(x) and not _all_numbers(x):
        return [Column(str(name)) for name in names]
    return columns


def encode_inputs(columns: Sequence[Column], x: Any) -> Floats:
    """All columns of `fit` as numbers side by side, (N, d)."""
    if not is_frame(x) and not _is_unnamed(columns):
        raise ValueError(
            f"expected a data frame with the columns {', '.join(c.name for c in columns)}, as in fit, got "
            f"{type(x).__name__}: give a data frame"
        )
    table = _table(x)
    if _is_unnamed(columns) and len(table) != len(columns):
        raise ValueError(f"expected {len(columns)} columns, as in fit, got {len(table)}: give the same columns")
    return encode_frame(columns, table)


def counted_rows(x: Any, y: Any, sample_weight: Any, groups: Any) -> tuple[Any, Any, Any, Any]:
    """Rows, targets, weights and groups without the rows of weight 0, before anything is learned from these."""
    if sample_weight is None or y is None:
        return x, y, sample_weight, groups
    weights = np.asarray(_check_sample_weight(sample_weight, x, ensure_non_negative=True))
    kept = np.flatnonzero(weights > 0)
    if len(kept) < 2:
        raise ValueError(f"expected at least two rows of a sample_weight above 0, got {len(kept)}: give more weights")
    if len(kept) == len(weights):
        return x, y, weights, groups
    parts = (part if part is None else _safe_indexing(part, kept) for part in (x, y, weights, groups))
    return tuple(parts)  # type: ignore[return-value]


def dense(x: Any) -> Any:
    """A sparse matrix written out; anything else as it is."""
    if not hasattr(x, "toarray") or is_frame(x):
        return x
    if x.shape[0] * x.shape[1] > MOST_DENSE:
        raise ValueError(
            f"expected at most {MOST_DENSE:,} cells of a sparse matrix, got {x.shape[0]:,} × {x.shape[1]:,}: reduce "
            "its columns first, as sklearn.decomposition.TruncatedSVD does"
        )
    return x.toarray()


def column_name(number: int) -> str:
    """What a column without a name is called."""
    return f"x{number}"


def _is_unnamed(columns: Sequence[Column]) -> bool:
    return all(column.name == column_name(number) for number, column in enumerate(columns))


def _table(x: Any) -> dict[str, Any]:
    if is_frame(x):
        return columns_of(x)
    array = np.asarray(x)
    return {column_name(number): array[:, number] for number in range(array.shape[1])}


def _has_text(x: Any) -> bool:
    """Whether an array or list (N, d) holds text."""
    array = np.asarray(x) if isinstance(x, list | tuple | np.ndarray) else None
    if array is None or array.ndim != 2 or array.dtype.kind not in "OUS":
        return False
    return array.dtype.kind != "O" or any(isinstance(cell, str) for cell in array.ravel().tolist())


def _all_numbers(x: Any) -> bool:
    return is_frame(x) and all(np.asarray(x[name]).dtype.kind in "fiub" for name in x.columns)
