"""Numbers for the levels of nominal columns, which have no order of their own and whose names must not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc

from brainet_pl.structure.discretize import normal_scores

Floats = NDArray[np.float64]
Codes = NDArray[np.intp]
LEVEL = 0.01  # at which a column is called dependent on a nominal one, divided by the number of columns
MOST_LEVELS = 256  # of a column beside others; one of more says little of each
DIGITS = 9  # of a level's score: what differs in rounding alone is a tie


def order_levels(columns: Sequence[NDArray[Any]], nominal: Sequence[bool]) -> list[NDArray[Any]]:
    """The columns of a table, each (N,), with the codes of nominal ones put in an order that the data give.

    Tests and scores of numbers read a column by its ranks. The levels of a nominal column are ranked by the one
    direction in which they go best with the columns that depend on them; where none does, by how frequent they are.
    Either way the names of levels do not matter, and a column that depends on nothing is not made to.

    Example:
        Only the middle one of three levels, by its name, goes with large numbers; it becomes the first or last.

        >>> colour = np.repeat([0, 1, 2], 40)
        >>> size = np.where(colour == 1, 5.0, 0.0) + np.tile([0.0, 0.1, 0.2, 0.3], 30)
        >>> int(order_levels([colour, size], [True, False])[0][colour == 1][0])
        2
    """
    beside = [_beside(column, is_nominal) for column, is_nominal in zip(columns, nominal, strict=True)]
    found = []
    for place, (column, is_nominal) in enumerate(zip(columns, nominal, strict=True)):
        if not is_nominal:
            found.append(column)
            continue
        others = [part for number, part in enumerate(beside) if number != place]
        found.append(_ordered(column, np.concatenate([np.empty((len(column), 0)), *others], axis=1)))
    return found


def _beside(column: NDArray[Any], is_nominal: bool) -> Floats:
    """A column as what others are compared with: its normal scores, or its levels as standardised zeros and ones."""
    if not is_nominal:
        return normal_scores(column[:, None]).astype(np.float64)
    codes = column.astype(np.intp)
    count = int(codes.max()) + 1
    if count > MOST_LEVELS:
        return np.empty((len(codes), 0))
    share = np.bincount(codes) / len(codes)
    deviation = np.sqrt(np.maximum(share * (1 - share), 1e-12))
    return np.asarray((np.eye(count)[codes] - share) / deviation)


def _ordered(codes: NDArray[Any], others: Floats) -> Codes:
    """Codes (N,) of levels by rank, beside other columns (N, D) of mean 0 and variance 1."""
    codes = codes.astype(np.intp)
    count = np.bincount(codes)
    if others.size:
        sums = np.stack([np.bincount(codes, column, len(count)) for column in others.T], axis=1)
        means: Floats = np.asarray(sums / count[:, None], dtype=np.float64)
        explained = (count[:, None] * means**2).sum(axis=0)  # N·R², χ² of K - 1 degrees where nothing depends
        p = gammaincc((len(count) - 1) / 2, explained / 2) if len(count) > 1 else np.ones(others.shape[1])
        dependent = p < LEVEL / others.shape[1]
        first = _direction(means[:, dependent], count) if dependent.any() else count.astype(np.float64)
        order = np.lexsort((_direction(means, count), count, first))  # the last one decides
    else:
        order = np.argsort(count, kind="stable")
    rank = np.empty(len(count), dtype=np.intp)
    rank[order] = np.arange(len(count))
    return np.asarray(rank[codes])


def _direction(means: Floats, count: NDArray[np.int64]) -> Floats:
    """The score (K,) of each level in the direction in which their means (K, D) vary most."""
    root = np.sqrt(count / count.sum())
    left, _, right = np.linalg.svd(root[:, None] * means, full_matrices=False)
    sign = 1.0 if right[0].sum() >= 0 else -1.0
    return np.asarray(np.round(sign * left[:, 0] / root, DIGITS))
