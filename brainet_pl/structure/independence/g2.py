"""The likelihood-ratio test of codes at a significance level."""

from __future__ import annotations

import numpy as np
from scipy.special import gammaincc

from brainet_pl.structure.data import PreparedData, Weights
from brainet_pl.structure.independence.base import Floats, IndependenceTest, Ints
from brainet_pl.structure.independence.counts import (
    degrees_of_freedom,
    in_small_lists,
    information,
    table_information,
)
from brainet_pl.structure.statistics import CountSample


class GSquare(IndependenceTest):
    """The likelihood-ratio test: independent when G² = 2·N·CMI is unsurprising at significance level `threshold`.

    Degrees of freedom count only levels that occur in each configuration of the condition set. Without any, because the
    set determines one of the pair, the margin is 0: nothing was tested, so nothing is called independent.
    """

    name = "g2"
    kind = "discrete"
    unit = "significance level"
    default_threshold = 0.01
    default_score = "bdeu"

    def __init__(self, sample: CountSample, threshold: float) -> None:
        self.sample, self.threshold = sample, threshold

    @classmethod
    def on(cls, data: PreparedData, weights: Weights | None, threshold: float) -> GSquare:
        """The test on the codes of `data`, rows counted as often as `weights` (N,) says."""
        return cls(CountSample(data.table, weights), threshold)

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the significance level less the p-value, (L, R)."""
        joint = self.sample.joint(condition, left, right)
        return self._margin(information(joint, self.sample.n_log_n), degrees_of_freedom(joint), len(condition))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes the significance level less the p-value, (T,)."""
        return in_small_lists(self, x, y, conditions)

    def small_list(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes margins (T,) from dense tables of counts."""
        counts = self.sample.pair_tables(x, y, conditions)
        seen_x, seen_y = (counts.any(axis=3).sum(axis=2), counts.any(axis=2).sum(axis=2))  # (T, q)
        freedom = (np.maximum(seen_x - 1, 0) * np.maximum(seen_y - 1, 0)).sum(axis=1)
        return self._margin(
            table_information(counts, self.sample.n_log_n), freedom.astype(np.float64), conditions.shape[1]
        )

    def _margin(self, half_g: Floats, freedom: Floats, order: int) -> Floats:
        # Only given nothing is it an answer: a column that never varies depends on nothing.
        untested = self.threshold if order else 1.0
        p = np.where(freedom > 0, gammaincc(np.maximum(freedom, 1) / 2.0, half_g), untested)
        return np.asarray(self.threshold - p)
