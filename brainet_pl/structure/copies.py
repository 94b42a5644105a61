"""Columns that say the same: found, left out of the tests, and given back to the graph.

Two columns that determine each other separate each other from everything else, so tests would take both out of the
graph. One of them speaks for all: the others are joined to it afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.pdag import Bools, Ints, meek


def find_copies(values: NDArray[Any]) -> Ints:
    """(d,) for each column of `values` (N, d) the first column that it determines and that determines it.

    A column without a copy has its own number; so have columns that never vary, which say nothing.

    Example:
        The second column is the first with its levels renamed; the third joins two of them, which can't be undone.

        >>> find_copies(np.array([[0, 2, 0], [1, 0, 1], [2, 1, 1], [1, 0, 1]])).tolist()
        [0, 0, 2]
    """
    first: dict[bytes, int] = {}
    original = np.arange(values.shape[1])
    for j in range(values.shape[1]):
        _, where, code = np.unique(values[:, j], return_index=True, return_inverse=True)
        if len(where) > 1:
            # Levels numbered by their first row are the same for every renaming.
            renamed = np.argsort(np.argsort(where))[code].astype(np.int32)
            original[j] = first.setdefault(renamed.tobytes(), j)
    return original


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
