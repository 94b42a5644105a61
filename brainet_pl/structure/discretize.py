"""Features to integer codes (the paper's discrete path) and to normal scores (the Gaussian path)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from brainet_pl._utils import checks

BINS = 3  # levels of a continuous column, where nobody says otherwise
MAX_BINS = 256  # codes are bytes: more levels would wrap around, and no test could fill their tables
MAX_LEVELS = 16  # integer columns with more distinct values (pixels, counts) are binned like continuous ones


class Codes(NamedTuple):
    """`codes` (N, d) with values 0 … arities[j] - 1 in column j; `arities` (d,)."""

    codes: NDArray[np.uint8]
    arities: NDArray[np.int64]


def discretize(values: NDArray[np.generic], bins: int) -> Codes:
    """Code every column of `values` (N, d) with at most `bins` levels of about equal frequency.

    Integer and boolean columns with at most 16 distinct values are taken as they are; gaps between their codes are
    closed. A constant column gets arity 1.

    Example:
        Nine different values fall into three bins; categories keep their levels.

        >>> import numpy as np
        >>> discretize(np.arange(9.0)[:, None], bins=3).codes[:, 0].tolist()
        [0, 0, 0, 1, 1, 1, 2, 2, 2]
        >>> discretize(np.array([[5], [5], [7], [9]]), bins=2).arities.tolist()
        [3]
    """
    bins = check_bins(bins)
    integer = values.dtype.kind in "iub"
    codes = np.empty(values.shape, dtype=np.uint8, order="F")
    arities = np.empty(values.shape[1], dtype=np.int64)
    for j in range(values.shape[1]):
        levels, count = np.unique(values[:, j], return_counts=True)
        edges = level_edges(levels, count, bins, integer)
        codes[:, j], arities[j] = np.searchsorted(edges, values[:, j], side="left"), len(edges) + 1
    return Codes(codes, arities)


def check_bins(bins: int) -> int:
    """The number of levels of a continuous column as an `int` from 2 to 256; one level would hide every dependence."""
    return checks.whole(
        "bins", bins, 2, MAX_BINS, hint="it is the number of levels of a continuous column; 2 to 8 is usual"
    )


def normal_scores(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Rank-normalise every column of `values` (N, d): ties share their mean rank; mean 0 and variance 1.

    A constant column becomes zeros.
    """
    n = len(values)
    scores = np.empty(values.shape, dtype=np.float32)
    for j in range(values.shape[1]):
        order = np.argsort(values[:, j], kind="stable")
        ordered = values[order, j]
        first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        count = np.diff(np.append(first, n))
        scores[order, j] = np.repeat(level_scores(count), count)
    return scores


def level_scores(count: NDArray[np.int64]) -> NDArray[np.float64]:
    """Computes the normal score (K,) of each distinct value of a column, in ascending order, from its counts (K,)."""
    first = np.cumsum(count) - count
    score = ndtri((first + 0.5 * count) / count.sum())
    score -= np.average(score, weights=count)
    spread = np.sqrt(np.average(score**2, weights=count))
    return np.asarray(score / spread if spread > 0 else score)


def level_edges(levels: NDArray[Any], count: NDArray[np.int64], bins: int, integer: bool) -> NDArray[Any]:
    """Upper edges (inclusive) of all codes of a column but the last.

    A value that alone fills more than a bin (the zeros of a ReLU feature) becomes a level of its own and the other
    bins share the rest, so that `bins` levels carry as much information as ties allow.

    Args:
        levels: (K,) the distinct values, ascending.
        count: (K,) how often each occurs.
        bins: the number of codes of a continuous column.
        integer: whether values are integers, and so categories if they are few.
    """
    if len(levels) <= (MAX_LEVELS if integer else bins):
        return levels[:-1]
    ends = np.cumsum(count)  # row number at which each level ends, were the column sorted
    n, last, edges, start = int(ends[-1]), int(ends[-2]), [], 0
    for remaining in range(bins, 1, -1):
        position = start + max(0, (n - start) // remaining - 1)
        end = min(int(ends[np.searchsorted(ends, position, side="right")]), last)  # never the ties with the maximum
        if end <= start:
            break
        edges.append(levels[np.searchsorted(ends, end)])
        start = end
    return np.asarray(edges)
