"""The likelihood-ratio test of codes at a significance level."""

from __future__ import annotations

import numpy as np
from scipy.special import gammaincc

from brainet_pl.structure.independence.base import Floats, Ints
from brainet_pl.structure.independence.counts import CountTest, degrees_of_freedom, information, table_information


class GSquare(CountTest):
    """The likelihood-ratio test: independent when G² = 2·N·CMI is unsurprising at significance level `threshold`.

    Degrees of freedom count only levels that occur in each configuration of the condition set. Without any, because the
    set determines one of the pair, the margin is 0: nothing was tested, so nothing is called independent.
    """

    name = "g2"
    unit = "significance level"
    default_threshold = 0.01

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the significance level less the p-value, (L, R)."""
        joint = self.sample.joint(condition, left, right)
        return self._margin(information(joint, self.sample.n_log_n), degrees_of_freedom(joint), len(condition))

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
