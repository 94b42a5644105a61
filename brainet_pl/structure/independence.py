"""Conditional-independence tests, all answering one question: how far are pairs from being called independent?

The answer is a margin: below zero means independent, and the smaller the more so. It can be asked for a block of pairs
left × right given one condition set (`block`), or for a list of pairs each with its own (`pairs`); the two differ only
in cost. Tests never see a graph, and graphs never see data.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc, ndtr

from brainet_pl.structure.statistics import CountSample, JointCounts

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]


MOST_CELLS = 1 << 21  # of the dense tables in memory at a time


class IndependenceTest(Protocol):
    """What the learner asks of a test."""

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """(L, R) margins of left × right given `condition`."""
        ...

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) margins of x (T,) and y (T,) given conditions (T, n)."""
        ...


class ConditionalMutualInformation:
    """The paper's test: independent when the conditional mutual information, in nats, is below `threshold`."""

    def __init__(self, sample: CountSample, threshold: float) -> None:
        self.sample, self.threshold = sample, threshold
        self.keeps_all = threshold <= 0  # information is never negative

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """(L, R) information less the threshold."""
        joint = self.sample.joint(condition, left, right)
        return information(joint, self.sample.n_log_n) / self.sample.total - self.threshold

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) information less the threshold."""
        return _in_small_lists(self, x, y, conditions)

    def small_list(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) margins from dense tables."""
        counts = self.sample.pair_tables(x, y, conditions)
        return table_information(counts, self.sample.n_log_n) / self.sample.total - self.threshold


class GSquare:
    """The likelihood-ratio test: independent when G² = 2·N·CMI is unsurprising at significance level `threshold`.

    Degrees of freedom count only levels that occur in each configuration of the condition set.
    """

    def __init__(self, sample: CountSample, threshold: float) -> None:
        self.sample, self.threshold = sample, threshold

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """(L, R) significance level less the p-value."""
        joint = self.sample.joint(condition, left, right)
        return self._margin(information(joint, self.sample.n_log_n), degrees_of_freedom(joint))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) significance level less the p-value."""
        return _in_small_lists(self, x, y, conditions)

    def small_list(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) margins from dense tables."""
        counts = self.sample.pair_tables(x, y, conditions)
        seen_x, seen_y = (counts.any(axis=3).sum(axis=2), counts.any(axis=2).sum(axis=2))  # (T, q)
        freedom = (np.maximum(seen_x - 1, 0) * np.maximum(seen_y - 1, 0)).sum(axis=1)
        return self._margin(table_information(counts, self.sample.n_log_n), freedom.astype(np.float64))

    def _margin(self, half_g: Floats, freedom: Floats) -> Floats:
        p = np.where(freedom > 0, gammaincc(np.maximum(freedom, 1) / 2.0, half_g), 1.0)
        return np.asarray(self.threshold - p)


def _in_small_lists(test: ConditionalMutualInformation | GSquare, x: Ints, y: Ints, conditions: Ints) -> Floats:
    """(T,) margins, as many tests at a time as dense tables allow; one by one where a single table is too large."""
    cells = test.sample.most_levels(x, y, conditions) ** (conditions.shape[1] + 2)
    if cells > MOST_CELLS:
        tests = zip(x, y, conditions.tolist(), strict=True)
        return np.array([test.block(tuple(z), np.array([a]), np.array([b]))[0, 0] for a, b, z in tests])
    step = MOST_CELLS // cells
    parts = [slice(i, i + step) for i in range(0, len(x), step)]
    return np.concatenate([test.small_list(x[part], y[part], conditions[part]) for part in parts])


def table_information(counts: NDArray[np.int64], n_log_n: Floats) -> Floats:
    """(T,) N times the conditional mutual information of each table of `counts` (T, q, r, r)."""
    joint = n_log_n.take(counts).sum(axis=(1, 2, 3))
    rows, columns = counts.sum(axis=3), counts.sum(axis=2)
    margins = n_log_n.take(rows).sum(axis=(1, 2)) + n_log_n.take(columns).sum(axis=(1, 2))
    return np.asarray(np.maximum(joint - margins + n_log_n.take(rows.sum(axis=2)).sum(axis=1), 0.0))


def information(joint: JointCounts, n_log_n: Floats) -> Floats:
    """(L, R) N times the conditional mutual information of each pair, from its joint counts.

    With f(n) = n·log n: Σf(n_abc) - Σf(n_ac) - Σf(n_bc) + Σf(n_c) over levels a, b and configurations c. Counts of the
    level left out of a block are what the others leave of the block's sum.
    """
    counts, left, right = joint
    simple = counts.shape[1] - 1 == len(left) and counts.shape[2] - 1 == len(right)  # all binary: a block is a column

    def f(n: NDArray[Any]) -> Floats:
        return n_log_n.take(n.astype(np.int64))

    def over(n: NDArray[Any], blocks: Ints, axis: int) -> NDArray[Any]:
        return n if simple else np.add.reduceat(n, blocks, axis=axis)

    n_c = counts[:, :1, :1]
    n_a, n_b, n_ab = counts[:, 1:, :1], counts[:, :1, 1:], counts[:, 1:, 1:]
    n_ab_right = over(n_ab, right, 2)
    n_a0 = n_a - n_ab_right
    n_0b = n_b - over(n_ab, left, 1)
    n_0, n_0_right = n_c - over(n_a, left, 1), n_c - over(n_b, right, 2)
    n_00 = n_0_right - over(n_a0, left, 1)

    joint_sum = over(over(f(n_ab).sum(axis=0), left, 0), right, 1)
    joint_sum = joint_sum + over(f(n_a0).sum(axis=0), left, 0) + over(f(n_0b).sum(axis=0), right, 1)
    joint_sum += f(n_00).sum(axis=0)
    left_sum = over(f(n_a).sum(axis=0), left, 0) + f(n_0).sum(axis=0)
    right_sum = over(f(n_b).sum(axis=0), right, 1) + f(n_0_right).sum(axis=0)
    return np.asarray(np.maximum(joint_sum - left_sum - right_sum + f(n_c).sum(), 0.0))


def degrees_of_freedom(joint: JointCounts) -> Floats:
    """(L, R) Σ_c (levels of left seen in c - 1)·(levels of right seen in c - 1)."""
    counts, left, right = joint
    n_a, n_b, n_c = counts[:, 1:, 0], counts[:, 0, 1:], counts[:, 0, :1]
    free_left = np.add.reduceat(n_a > 0, left, axis=1, dtype=np.float64)
    free_left += n_c > np.add.reduceat(n_a, left, axis=1)
    free_right = np.add.reduceat(n_b > 0, right, axis=1, dtype=np.float64)
    free_right += n_c > np.add.reduceat(n_b, right, axis=1)
    return np.asarray(np.maximum(free_left - 1, 0).T @ np.maximum(free_right - 1, 0))


class PartialCorrelation:
    """Gaussian information -½·log(1-ρ²), in nats, against a threshold; ρ from a correlation matrix alone."""

    def __init__(self, correlation: Floats, threshold: float) -> None:
        self.correlation, self.threshold = correlation, threshold
        self.keeps_all = threshold <= 0  # information is never negative

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """(L, R) information less the threshold."""
        return self._margin(partial_correlation(self.correlation, condition, left, right))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) information less the threshold."""
        return self._margin(partial_correlation_of_pairs(self.correlation, x, y, conditions))

    def _margin(self, rho: Floats) -> Floats:
        with np.errstate(divide="ignore"):  # ρ = 1 is infinite information
            return np.asarray(-0.5 * np.log1p(-(rho**2)) - self.threshold)


class FisherZ:
    """Fisher's z test of a vanishing partial correlation at significance level `threshold`, for `n` rows."""

    def __init__(self, correlation: Floats, threshold: float, n: int) -> None:
        self.correlation, self.threshold, self.n = correlation, threshold, n

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """(L, R) significance level less the p-value."""
        return self._margin(partial_correlation(self.correlation, condition, left, right), len(condition))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) significance level less the p-value."""
        rho = partial_correlation_of_pairs(self.correlation, x, y, conditions)
        return self._margin(rho, conditions.shape[1])

    def _margin(self, rho: Floats, order: int) -> Floats:
        with np.errstate(divide="ignore"):
            z = np.abs(np.arctanh(rho)) * np.sqrt(max(self.n - order - 3, 1))
        return np.asarray(self.threshold - 2.0 * ndtr(-z))


def partial_correlation(correlation: Floats, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
    """(L, R) correlation of what a linear fit on `condition` leaves of left and right.

    A variable that the condition set explains wholly has nothing left to correlate: 0.
    """
    rho = correlation[np.ix_(left, right)]
    if condition:
        z = np.asarray(condition)
        inner = correlation[np.ix_(z, z)]
        to_left, to_right = correlation[np.ix_(z, left)], correlation[np.ix_(z, right)]
        # Least squares, because copied columns make the inner matrix singular.
        weights = to_right if len(z) == 1 else np.linalg.lstsq(inner, to_right, rcond=1e-10)[0]
        left_weights = to_left if len(z) == 1 else np.linalg.lstsq(inner, to_left, rcond=1e-10)[0]
        rest_left = 1.0 - (to_left * left_weights).sum(axis=0)
        rest_right = 1.0 - (to_right * weights).sum(axis=0)
        scale_left = np.where(rest_left > 1e-6, 1.0 / np.sqrt(np.maximum(rest_left, 1e-6)), 0.0)
        scale_right = np.where(rest_right > 1e-6, 1.0 / np.sqrt(np.maximum(rest_right, 1e-6)), 0.0)
        rho = (rho - to_left.T @ weights) * scale_left[:, None] * scale_right
    return np.clip(rho, -1.0, 1.0)


def partial_correlation_of_pairs(correlation: Floats, x: Ints, y: Ints, conditions: Ints) -> Floats:
    """(T,) partial correlations of pairs, each given its own condition set (T, n)."""
    ends = np.stack([x, y], axis=1)
    covariance = correlation[ends[:, :, None], ends[:, None, :]]  # (T, 2, 2)
    if conditions.shape[1]:
        inner = correlation[conditions[:, :, None], conditions[:, None, :]]
        outer = correlation[conditions[:, :, None], ends[:, None, :]]
        # A generalised inverse, because copied columns make the inner matrix singular.
        weights = np.linalg.pinv(inner, rcond=1e-10, hermitian=True) @ outer
        covariance = covariance - outer.transpose(0, 2, 1) @ weights
    rest = np.diagonal(covariance, axis1=1, axis2=2)
    scale = np.where(rest > 1e-6, 1.0 / np.sqrt(np.maximum(rest, 1e-6)), 0.0)
    return np.clip(covariance[:, 0, 1] * scale[:, 0] * scale[:, 1], -1.0, 1.0)


class DSeparation:
    """An oracle that reads independence off a known DAG (d, d): the learner's reference in tests."""

    def __init__(self, dag: NDArray[np.bool_]) -> None:
        self.dag = np.asarray(dag, dtype=bool)

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) -1 where d-separated, else +1."""
        tests = zip(x, y, conditions.tolist(), strict=True)
        return np.array([self.block(tuple(z), np.array([a]), np.array([b]))[0, 0] for a, b, z in tests])

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """(L, R) -1 where d-separated, else +1."""
        given = np.zeros(len(self.dag), dtype=bool)
        given[list(condition)] = True
        connected = np.stack([self._reachable(int(x), given) for x in left])
        return np.where(connected[:, right], 1.0, -1.0)

    def _reachable(self, source: int, given: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(d,) variables that an active trail joins to `source` (the Bayes-ball walk)."""
        ancestors = given.copy()
        while True:
            more = ancestors | self.dag[:, ancestors].any(axis=1)
            if (more == ancestors).all():
                break
            ancestors = more
        seen: set[tuple[int, bool]] = set()  # (variable, whether the walk entered it from a child)
        stack = [(source, True)]
        while stack:
            v, from_child = stack.pop()
            if (v, from_child) in seen:
                continue
            seen.add((v, from_child))
            if from_child and not given[v]:
                stack += [(int(p), True) for p in np.flatnonzero(self.dag[:, v])]
            if not given[v]:
                stack += [(int(c), False) for c in np.flatnonzero(self.dag[v])]
            if not from_child and ancestors[v]:
                stack += [(int(p), True) for p in np.flatnonzero(self.dag[:, v])]
        reached = np.zeros(len(self.dag), dtype=bool)
        reached[[v for v, _ in seen if not given[v]]] = True
        return reached
