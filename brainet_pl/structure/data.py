"""A table of features as the tests and scores read it: checked, in canonical order, as codes and as normal scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl.structure.canonical import CanonicalOrder, canonical_order
from brainet_pl.structure.discretize import MAX_LEVELS, discretize, normal_scores
from brainet_pl.structure.levels import order_levels
from brainet_pl.structure.statistics import CodeTable, correlation
from brainet_pl.tables import Column, read_column
from brainet_pl.tables.column import MISSING

MOST_WHOLE = 2.0**53  # whole numbers beyond it are not told apart as floats
DataKind = Literal["discrete", "gaussian"]  # of a test or score: whether it reads the codes or the normal scores
Weights = NDArray[np.int64]
Path = tuple[int, ...]
Floats = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def register(known: dict[K, type[T]], key: K, member: type[T]) -> None:
    """Add `member` to `known`; a class defined anew (a cell run again, a module reloaded) takes its own place."""
    taken = known.get(key)
    if taken is not None and (taken.__module__, taken.__qualname__) != (member.__module__, member.__qualname__):
        raise ValueError(
            f"expected a name that is free for {member.__qualname__}, got {key!r}, which belongs to "
            f"{taken.__module__}.{taken.__qualname__}: choose another name"
        )
    known[key] = member


class PreparedData(ABC):
    """Checked features with rows and columns in canonical order, as the tests and scores read them.

    `TableData` holds them in memory; sources of other kinds, such as `FeatureStream`, enter themselves in `sources`.

    Attributes:
        columns: (d,) the user's number of each column.
        digest: a hash of the whole table that does not see the order of rows and columns.
        bins: the number of levels that `table` gives a continuous column.
    """

    columns: NDArray[np.intp]
    digest: str
    bins: int
    sources: ClassVar[dict[type, Callable[[Any, int, int | None], PreparedData]]] = {}

    @staticmethod
    def prepare(features: Any, bins: int, max_rows: int | None = None) -> PreparedData:
        """Check and sort `features`: an array or tensor (N, d), a `FeatureStream`, or what this has given already.

        Continuous columns have `bins` levels. A random sample of `max_rows` rows is kept; None keeps all.
        """
        if isinstance(features, PreparedData):
            return features
        for kind, make in PreparedData.sources.items():
            if isinstance(features, kind):
                return make(features, bins, max_rows)
        values = as_table(features)
        order: CanonicalOrder = canonical_order(values)
        rows = order.rows
        if max_rows is not None:
            rows = rows[:max_rows]  # sorted by hash: the first rows are a random sample
        return TableData(values[rows][:, order.columns], order.columns, order.digest, bins)

    @property
    @abstractmethod
    def n(self) -> int:
        """The number of rows that are learned from."""

    @property
    def d(self) -> int:
        """The number of variables, that is of columns."""
        return len(self.columns)

    @property
    @abstractmethod
    def categories(self) -> bool:
        """Whether columns are integers, and so categories where they have few levels."""

    @property
    @abstractmethod
    def only_categories(self) -> bool:
        """Whether every column is taken as categories: whole numbers with few levels."""

    @property
    @abstractmethod
    def table(self) -> CodeTable:
        """The codes (n, d) that discrete tests and scores read."""

    @property
    @abstractmethod
    def scores(self) -> NDArray[np.float32]:
        """The normal scores (n, d); prefer `correlation`, which needs no row in memory."""

    @abstractmethod
    def correlation(self, weights: Weights | None = None) -> Floats:
        """Computes the correlation (d, d) of the normal scores, rows counted as often as `weights` (n,) says."""

    def announce(self, samples: Iterable[Weights]) -> None:  # noqa: B027
        """Hear which samples `correlation` will be asked for, in about this order; whoever reads data anew listens."""

    def resampled(self, weights: Weights) -> PreparedData:
        """The same columns with each row as often as `weights` (n,) says; bins and ranks stay those of all rows."""
        return _ResampledData(self, weights)


@dataclass(frozen=True, eq=False)
class TableData(PreparedData):
    """A table in memory, and what the tests and scores need of it, made when first asked for."""

    values: NDArray[Any]  # (n, d) the table with rows and columns in canonical order
    columns: NDArray[np.intp]
    digest: str
    bins: int

    @property
    def n(self) -> int:
        """The number of rows that are learned from."""
        return len(self.values)

    @property
    def categories(self) -> bool:
        """Whether columns are integers, and so categories where they have few levels."""
        return self.values.dtype.kind in "iub"

    @cached_property
    def only_categories(self) -> bool:
        """Whether every column is taken as categories: whole numbers with few levels."""
        return are_categories(self.values)

    @cached_property
    def table(self) -> CodeTable:
        """The codes (n, d) that discrete tests and scores read."""
        return CodeTable(discretize(self.values, self.bins))

    @cached_property
    def scores(self) -> NDArray[np.float32]:
        """(n, d) the normal scores that Gaussian tests and scores read."""
        return normal_scores(self.values)

    def correlation(self, weights: Weights | None = None) -> Floats:
        """Computes the correlation (d, d) of the normal scores, rows counted as often as `weights` (n,) says."""
        return correlation(self.scores, weights)


class _ResampledData(PreparedData):
    """Rows of other data, each as often as `weights` (n,) says."""

    def __init__(self, data: PreparedData, weights: Weights) -> None:
        self.data, self.weights = data, weights
        self.columns, self.digest, self.bins = data.columns, data.digest, data.bins

    @property
    def n(self) -> int:
        """The number of rows, repeated ones counted."""
        return int(self.weights.sum())

    @property
    def categories(self) -> bool:
        """Whether columns are integers, and so categories where they have few levels."""
        return self.data.categories

    @property
    def only_categories(self) -> bool:
        """Whether every column is taken as categories: whole numbers with few levels."""
        return self.data.only_categories

    @cached_property
    def table(self) -> CodeTable:
        """The codes (n, d); levels that no longer occur still count."""
        return self.data.table.drawn(self.weights)

    @cached_property
    def scores(self) -> NDArray[np.float32]:
        """(n, d) the normal scores of the rows among all."""
        return np.repeat(self.data.scores, self.weights, axis=0)

    def correlation(self, weights: Weights | None = None) -> Floats:
        """Computes the correlation (d, d) of the normal scores; `weights` (n,) are of the repeated rows."""
        if weights is None:
            return self.data.correlation(self.weights)
        drawn = np.bincount(np.repeat(np.arange(self.data.n), self.weights), weights, self.data.n)
        return self.data.correlation(drawn.astype(np.int64))


def are_categories(values: NDArray[Any]) -> bool:
    """Whether every column of a table (N, d) is taken as categories: whole numbers with few levels."""
    if values.dtype.kind not in "iub":
        return False
    return all(len(np.unique(values[:, j])) <= MAX_LEVELS for j in range(values.shape[1]))


def column_names(features: Any) -> tuple[str, ...] | None:
    """The names of a data frame's columns, which must differ; None for anything else."""
    if not (hasattr(features, "columns") and hasattr(features, "to_numpy")):
        return None
    names = tuple(map(str, features.columns))
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"expected columns with names that differ, got {twice[0]!r} twice: rename one of them")
    return names


def _from_frame(frame: Any) -> NDArray[Any]:
    """A data frame as an array (N, d): numbers as they are, dates as days, categories as numbers of their levels.

    What a column holds is read as everywhere (`brainet_pl.tables`); the order of levels follows from the data, see
    `order_levels`, and never from their names.
    """
    columns, nominal = [], []
    for name in frame.columns:
        values = frame[name]
        column = read_column(str(name), values, most=max(2, len(values)))
        if column.plain and np.asarray(values).dtype.kind in "fiub":
            columns.append(np.asarray(values))
        else:
            columns.append(_numbers_of(column, values))
        nominal.append(column.kind == "category")
    if not columns:
        return np.empty((len(frame), 0))
    return np.column_stack(order_levels(columns, nominal) if any(nominal) else columns)


def _numbers_of(column: Column, values: Any) -> NDArray[Any]:
    """A column of text, dates or categories as numbers (N,): whole ones as integers, categories as codes."""
    if column.kind == "category":
        found: NDArray[Any] = column.codes(values)
        missing = (
            found == (column.categories or []).index(MISSING) if MISSING in (column.categories or []) else found < 0
        )
    else:
        found = column.encode(values).numbers[:, 0]
        missing = np.isnan(found)
    if missing.any():
        raise ValueError(
            f"expected columns without gaps, got {int(missing.sum()):,} missing values in {column.name!r}: impute or "
            "drop them"
        )
    if column.kind == "category":
        return found
    whole = np.isfinite(found).all() and (found == np.round(found)).all() and np.abs(found).max() < MOST_WHOLE
    return found.astype(np.int64) if whole else found


def as_array(features: Any) -> NDArray[Any]:
    """An array of whatever shape from an array, tensor or data frame, unchecked."""
    if column_names(features) is not None:
        return _from_frame(features)
    if hasattr(features, "detach"):
        features = features.detach().cpu()
        # NumPy has no bfloat16; 16 bits of either kind are exact in 32.
        features = (features.float() if str(features.dtype) == "torch.bfloat16" else features).numpy()
    try:
        return np.asarray(features)
    except ValueError as error:
        raise ValueError("expected rows of equal length, got some that differ: fill them up or drop them") from error


def as_table(features: Any, part: bool = False) -> NDArray[Any]:
    """`features` as a numeric array (N, d) without gaps; refuses what no structure can be learned from.

    A `part` of a table may be a single row.
    """
    values = as_array(features)
    if values.ndim == 0:
        raise ValueError(
            f"expected a table as an array, tensor, data frame or FeatureStream, got {checks.shown(features)}: read it "
            "first"
        )
    if values.ndim != 2 or not values.shape[0] or not values.shape[1]:
        raise ValueError(
            f"expected features of shape (rows, columns) with at least one of each, got {values.shape}: "
            "flatten images to one row each, and check that the data is not empty"
        )
    if values.dtype.kind not in "fiub":
        raise ValueError(
            f"expected numbers, got dtype {values.dtype}: encode categories as integers first, or give a data frame"
        )
    if values.dtype.kind == "f":
        _check_finite(values, column_names(features))
        if values.dtype != np.float32:
            values = values.astype(np.float64)
    if len(values) < 2 and not part:
        raise ValueError("expected at least 2 rows, got 1: dependence can't be seen in one row")
    return values


def _check_finite(values: NDArray[Any], names: tuple[str, ...] | None) -> None:
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"expected finite features, got {int(bad.sum()):,} NaN or infinite values, the first in row {row}, "
            f"column {column if names is None else names[column]!r}: impute or drop them"
        )
