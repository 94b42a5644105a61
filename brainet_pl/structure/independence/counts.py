"""The discrete tests, "cmi" and "g2": information and degrees of freedom from contingency counts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc

from brainet_pl.structure.data import PreparedData, Weights
from brainet_pl.structure.independence.base import Floats, IndependenceTest, Ints
from brainet_pl.structure.statistics import CountSample, JointCounts

MOST_CELLS = 1 << 21  # of the dense tables in memory at a time
SPARSE = 4  # times as many cells as rows, from which on rows are sorted instead
CODE_BITS = 62  # of the number of a cell at the most
SIZES_TOGETHER = 3.0  # bits by which tables of one list may differ in size before they are padded


class CountTest(IndependenceTest):
    """The base of tests that read a sample of counts, in blocks or, for few pairs, from dense tables."""

    kind = "discrete"
    default_score = "bdeu"

    def __init__(self, sample: CountSample, threshold: float) -> None:
        self.sample, self.threshold = sample, threshold

    @classmethod
    def on(cls, data: PreparedData, weights: Weights | None, threshold: float) -> CountTest:
        """The test on the codes of `data`, rows counted as often as `weights` (N,) says."""
        return cls(CountSample(data.table, weights), threshold)

    @abstractmethod
    def margin(self, information: Floats, freedom: Callable[[], Floats], order: int) -> Floats:
        """The margins of N times the information of pairs given `order` variables; `freedom` is that of each pair."""

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the margins (L, R) of left × right given `condition`."""
        joint = self.sample.joint(condition, left, right)
        return self.margin(information(joint, self.sample.n_log_n), lambda: degrees_of_freedom(joint), len(condition))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes margins (T,): from dense tables, many tests at a time, or by sorted rows where tables are larger.

        Tables of a list are padded to one shape, so tests are gathered by the size of their own: a variable with many
        levels would otherwise make all tables of its list as large.
        """
        arities = self.sample.table.arities
        swap = arities[x] < arities[y]
        x, y = np.where(swap, y, x), np.where(swap, x, y)
        sizes = np.log2(arities[x]) + np.log2(arities[y]) + np.log2(arities[conditions]).sum(axis=1)
        group_of = (sizes / SIZES_TOGETHER).astype(np.intp)
        margins = np.empty(len(x))
        for number in np.unique(group_of):
            group = np.flatnonzero(group_of == number)
            cells = math.prod(self.sample.table_shape(x[group], y[group], conditions[group]))
            if cells > SPARSE * self.sample.total and sizes[group].max() < CODE_BITS:
                sums, freedom = self.sample.pair_sums(x[group], y[group], conditions[group])
                margins[group] = self.margin(sums, partial(np.asarray, freedom), conditions.shape[1])
                continue
            if cells > MOST_CELLS:
                for i in group:
                    margins[i] = self.block(tuple(conditions[i].tolist()), x[i : i + 1], y[i : i + 1])[0, 0]
                continue
            step = MOST_CELLS // cells
            for start in range(0, len(group), step):
                part = group[start : start + step]
                counts = self.sample.pair_tables(x[part], y[part], conditions[part])
                few = table_information(counts, self.sample.n_log_n)
                margins[part] = self.margin(few, partial(table_freedom, counts), conditions.shape[1])
        return margins


class ConditionalMutualInformation(CountTest):
    """The paper's test: independent when the conditional mutual information, in nats, is below `threshold`."""

    name = "cmi"
    unit = "nats"
    default_threshold = 0.02

    def __init__(self, sample: CountSample, threshold: float) -> None:
        super().__init__(sample, threshold)
        self.keeps_all = threshold <= 0  # information is never negative

    def margin(self, information: Floats, freedom: Callable[[], Floats], order: int) -> Floats:
        """Computes the information less the threshold."""
        return information / self.sample.total - self.threshold

    def weakest(self, x: int, y: Ints, z: Ints) -> tuple[Floats, Ints]:
        """Finds the smallest margin of `x` and each of `y` (Y,) given one of `z` (Z,), and its place in z.

        Counts of y × z for each level of x say all: variables far from x are never counted.
        """
        joint = self.sample.joint((x,), y, z)
        margins = self.margin(information_of_condition(joint, self.sample.n_log_n), lambda: np.empty(0), 1)
        margins = np.round(margins, 12)  # ties, up to rounding, go to the first
        margins[y[:, None] == z] = np.inf
        place = margins.argmin(axis=1)
        return margins[np.arange(len(y)), place], place


class GSquare(CountTest):
    """The likelihood-ratio test: independent when G² = 2·N·CMI is unsurprising at significance level `threshold`.

    Degrees of freedom count only levels that occur in each configuration of the condition set. Without any, because the
    set determines one of the pair, the margin is 0: nothing was tested, so nothing is called independent.
    """

    name = "g2"
    version = 2
    unit = "significance level"
    default_threshold = 0.01

    def margin(self, information: Floats, freedom: Callable[[], Floats], order: int) -> Floats:
        """Computes the significance level less the p-value."""
        # Only given nothing is it an answer: a column that never varies depends on nothing.
        untested, degrees = self.threshold if order else 1.0, freedom()
        p = np.where(degrees > 0, gammaincc(np.maximum(degrees, 1) / 2.0, information), untested)
        return np.asarray(self.threshold - p)

    def dependence(self, left: Ints, right: Ints) -> Floats:
        """Computes the information (L, R) that left and right have about each other, in nats."""
        return information(self.sample.joint((), left, right), self.sample.n_log_n) / self.sample.total


def table_information(counts: NDArray[np.int64], n_log_n: Floats) -> Floats:
    """Computes N times the conditional mutual information of each table of `counts` (T, q, r, r), (T,)."""
    joint = n_log_n.take(counts).sum(axis=(1, 2, 3))
    rows, columns = counts.sum(axis=3), counts.sum(axis=2)
    margins = n_log_n.take(rows).sum(axis=(1, 2)) + n_log_n.take(columns).sum(axis=(1, 2))
    return np.asarray(np.maximum(joint - margins + n_log_n.take(rows.sum(axis=2)).sum(axis=1), 0.0))


def table_freedom(counts: NDArray[np.int64]) -> Floats:
    """Computes the degrees of freedom of each table of `counts` (T, q, r, r), (T,), as `degrees_of_freedom` does."""
    seen_x, seen_y = counts.any(axis=3).sum(axis=2), counts.any(axis=2).sum(axis=2)  # (T, q)
    return np.asarray((np.maximum(seen_x - 1, 0) * np.maximum(seen_y - 1, 0)).sum(axis=1), dtype=np.float64)


def information(joint: JointCounts, n_log_n: Floats) -> Floats:
    """Computes N times the information of left and right given the condition set, (L, R).

    With f(n) = n·log n: Σf(n_abc) - Σf(n_ac) - Σf(n_bc) + Σf(n_c) over levels a, b and configurations c.
    """
    sums = _Entropies(joint, n_log_n)
    return np.asarray(np.maximum(sums.joint() - sums.left() - sums.right() + sums.nothing(), 0.0))


def information_of_condition(joint: JointCounts, n_log_n: Floats) -> Floats:
    """Computes N times the information of the condition set and left given right, (L, R).

    The same counts as for `information`: Σf(n_abc) - Σf(n_ab) - Σf(n_bc) + Σf(n_b).
    """
    sums = _Entropies(joint, n_log_n)
    whole = _Entropies(JointCounts(joint.counts.sum(axis=0, keepdims=True), joint.left, joint.right), n_log_n)
    return np.asarray(np.maximum(sums.joint() - whole.joint() - sums.right() + whole.right(), 0.0))


class _Entropies:
    """Sums of f(n) = n·log n over levels and configurations of joint counts.

    Counts of the level left out of a block are what the others leave of the block's sum.
    """

    def __init__(self, joint: JointCounts, n_log_n: Floats) -> None:
        self.counts, self.left_blocks, self.right_blocks = joint
        self.n_log_n = n_log_n
        blocks = len(joint.left), len(joint.right)
        self.simple = self.counts.shape[1] - 1 == blocks[0] and self.counts.shape[2] - 1 == blocks[1]  # all binary

    def _f(self, n: NDArray[Any]) -> Floats:
        return np.asarray(self.n_log_n.take(n.astype(np.int64)).sum(axis=0))

    def _over(self, n: NDArray[Any], blocks: Ints, axis: int) -> NDArray[Any]:
        return n if self.simple else np.add.reduceat(n, blocks, axis=axis)

    def joint(self) -> Floats:
        """(L, R) over levels of left and right."""
        left, right = self.left_blocks, self.right_blocks
        n_a, n_b, n_ab = self.counts[:, 1:, :1], self.counts[:, :1, 1:], self.counts[:, 1:, 1:]
        n_a0, n_0b = n_a - self._over(n_ab, right, 2), n_b - self._over(n_ab, left, 1)
        n_00 = self.counts[:, :1, :1] - self._over(n_b, right, 2) - self._over(n_a0, left, 1)
        found = self._over(self._over(self._f(n_ab), left, 0), right, 1)
        found = found + self._over(self._f(n_a0), left, 0) + self._over(self._f(n_0b), right, 1)
        return np.asarray(found + self._f(n_00))

    def left(self) -> Floats:
        """(L, 1) over levels of left."""
        n_a, n_c = self.counts[:, 1:, :1], self.counts[:, :1, :1]
        rest = n_c - self._over(n_a, self.left_blocks, 1)
        return np.asarray(self._over(self._f(n_a), self.left_blocks, 0) + self._f(rest))

    def right(self) -> Floats:
        """(1, R) over levels of right."""
        n_b, n_c = self.counts[:, :1, 1:], self.counts[:, :1, :1]
        rest = n_c - self._over(n_b, self.right_blocks, 2)
        return np.asarray(self._over(self._f(n_b), self.right_blocks, 1) + self._f(rest))

    def nothing(self) -> Floats:
        """(1, 1) over configurations alone."""
        return self._f(self.counts[:, :1, :1])


def degrees_of_freedom(joint: JointCounts) -> Floats:
    """Computes Σ_c (levels of left seen in c - 1)·(levels of right seen in c - 1), (L, R)."""
    counts, left, right = joint
    n_a, n_b, n_c = counts[:, 1:, 0], counts[:, 0, 1:], counts[:, 0, :1]
    free_left = np.add.reduceat(n_a > 0, left, axis=1, dtype=np.float64)
    free_left += n_c > np.add.reduceat(n_a, left, axis=1)
    free_right = np.add.reduceat(n_b > 0, right, axis=1, dtype=np.float64)
    free_right += n_c > np.add.reduceat(n_b, right, axis=1)
    return np.asarray(np.maximum(free_left - 1, 0).T @ np.maximum(free_right - 1, 0))
