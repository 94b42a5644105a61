"""Columns that say the same: found, left out of the tests, and given back to the graph.

Two columns that determine each other separate each other from everything else, so tests would take both out of the
graph. One of them speaks for all: the others are joined to it afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.data import Kind, PreparedData
from brainet_pl.structure.pdag import Bools, Ints, meek


def find_copies(data: PreparedData, kind: Kind) -> Ints:
    """(d,) for each column of `data` the first column that it determines and that determines it, as a test sees them.

    Discrete: the levels of one are those of the other by other names. Gaussian: one rises, or falls, exactly where the
    other does. A column without a copy has its own number; so have columns that never vary, which say nothing.

    Example:
        The second column is the first with its levels renamed; the third joins two of them, which can't be undone.

        >>> table = np.array([[0, 2, 0], [1, 0, 1], [2, 1, 1], [1, 0, 1]])
        >>> data = PreparedData.prepare(table, bins=3)
        >>> first = find_copies(data, "discrete")
        >>> len(np.unique(first)), sorted(data.columns[first != np.arange(3)].tolist()) in ([0], [1])
        (2, True)
    """
    first: dict[bytes, int] = {}
    original = np.arange(data.d)
    columns, name = (data.table.codes, _renamed) if kind == "discrete" else (data.scores, _signed)
    for j in range(data.d):
        if (columns[:, j] != columns[0, j]).any():
            original[j] = first.setdefault(name(columns[:, j]).tobytes(), j)
    return original


def _renamed(codes: NDArray[Any]) -> NDArray[Any]:
    """(N,) levels numbered by the first row that has them: the same for every renaming."""
    seen, where = np.unique(codes, return_index=True)
    number = np.zeros(int(seen[-1]) + 1, dtype=np.uint8)
    number[seen[np.argsort(where)]] = np.arange(len(seen))
    return np.asarray(number[codes])


def _signed(scores: NDArray[Any]) -> NDArray[Any]:
    """(N,) scores, up to rounding, with the sign that makes the first one that is not zero positive."""
    rounded = np.round(scores, 5) + 0.0
    return np.asarray(rounded * np.sign(rounded[np.flatnonzero(rounded)[:1]].sum()) + 0.0)


def with_copies(A: Bools, original: Ints) -> Bools:
    """The graph with each copy joined to its `original` (d,), as a child that nothing else is joined to.

    The edge itself can be turned unless something already points to the original, as in any such graph.
    """
    copies = np.flatnonzero(original != np.arange(len(A)))
    if not len(copies):
        return A
    A = A.copy()
    A[copies, original[copies]] = A[original[copies], copies] = True
    return meek(A)
