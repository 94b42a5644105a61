"""Distinct values, counts and cells of columns that are seen in blocks, by one process or by several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.canonical import Words

_TAIL = 256  # largest and smallest values of the sample that are all edges: scores change fastest there


class RowSample:
    """The rows with the smallest hashes of all that were added: a random sample, and the same in whatever order."""

    def __init__(self, most: int, d: int, dtype: np.dtype[Any] | None) -> None:
        self.most = most
        self.hashes: Words = np.empty(0, dtype=np.uint64)
        self.rows: NDArray[Any] = np.empty((0, d), dtype=dtype)

    def add(self, hashes: Words, rows: NDArray[Any]) -> None:
        """See rows (m, d) with their hashes (m,)."""
        full = len(self.hashes) == self.most > 0
        small = hashes <= self.hashes.max() if full else np.full(len(hashes), self.most > 0)
        if not small.any():
            return
        hashes, rows = np.concatenate([self.hashes, hashes[small]]), np.concatenate([self.rows, rows[small]])
        order = np.argsort(hashes, kind="stable")[: self.most]
        self.hashes, self.rows = hashes[order], rows[order]


def more_levels(known: NDArray[Any] | None, column: NDArray[Any], most: int) -> NDArray[Any] | None:
    """The distinct values so far with those of `column`, or None where they are more than `most`."""
    if known is None or not most:
        return None
    if len(known):
        column = column[known[np.minimum(np.searchsorted(known, column), len(known) - 1)] != column]
    if len(column):
        known = np.union1d(known, column)
    return known if len(known) <= most else None


def union_levels(levels: list[NDArray[Any] | None], most: int) -> NDArray[Any] | None:
    """The distinct values of all processes, or None where they are more than `most`."""
    known: NDArray[Any] | None = levels[0]
    for more in levels[1:]:
        known = None if more is None else more_levels(known, more, most)
    return known


def counted(values: NDArray[Any]) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
    """The distinct values of each column of `values` (n, d), and how often they occur."""
    return [np.unique(column, return_counts=True) for column in values.T]


def add_counts(shares: Iterable[tuple[NDArray[Any], NDArray[np.int64]]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Distinct values and how often they occur, of all shares together."""
    values, counts = zip(*shares, strict=True)
    levels, place = np.unique(np.concatenate(values), return_inverse=True)
    count = np.zeros(len(levels), dtype=np.int64)
    np.add.at(count, place, np.concatenate(counts))
    return levels, count


def cell_edges(levels: NDArray[Any] | None, sample: NDArray[Any], most: int) -> NDArray[Any]:
    """Upper edges (inclusive) of the cells of a column: its distinct values, or at most `most` values of a sample.

    The edges are equally frequent values and all of the extreme ones. A value that occurs again and again (the zeros of
    a ReLU feature) gets a cell of its own, by an edge just below it.
    """
    if levels is not None:
        return levels[:-1]
    ordered = np.sort(sample)
    tail = min(_TAIL, most // 8, len(ordered) // 2)
    middle = np.linspace(0, len(ordered) - 1, most - 2 * tail - most // 4).astype(np.intp)
    chosen = np.concatenate([ordered[:tail], ordered[middle], ordered[len(ordered) - tail :]])
    values, times = np.unique(ordered, return_counts=True)
    repeated = times > 1
    most_repeated = values[repeated][np.argsort(-times[repeated], kind="stable")[: most // 8]]
    if ordered.dtype.kind == "f":
        below = np.nextafter(most_repeated, np.array(-np.inf, dtype=ordered.dtype))
    else:
        below = most_repeated[most_repeated > values[0]] - 1
    return np.unique(np.concatenate([chosen, most_repeated, below]))
