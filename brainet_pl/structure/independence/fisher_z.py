"""Fisher's z test of normal scores at a significance level."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from brainet_pl.structure.data import PreparedData, Weights
from brainet_pl.structure.independence.base import Floats
from brainet_pl.structure.independence.partial import PartialCorrelationTest


class FisherZ(PartialCorrelationTest):
    """Fisher's z test of a vanishing partial correlation at significance level `threshold`, for `n` rows.

    The level falls with the number of pairs: of d = 100 variables there are 4,950, and a fixed one would join dozens of
    independent ones.
    """

    name = "fisher_z"
    unit = "significance level"
    default_threshold = 0.01

    def __init__(self, correlation: Floats, threshold: float, n: int) -> None:
        self.correlation, self.threshold, self.n = correlation, threshold, n

    @classmethod
    def default_for(cls, d: int) -> float:
        """0.01, or the level at which one pair of `d` independent variables is joined on average if that is lower.

        Example:
            >>> FisherZ.default_for(10), round(FisherZ.default_for(100), 6)
            (0.01, 0.000202)
        """
        return min(cls.default_threshold, 2.0 / max(1, d * (d - 1)))

    @classmethod
    def on(cls, data: PreparedData, weights: Weights | None, threshold: float) -> FisherZ:
        """The test on the normal scores of `data`, rows counted as often as `weights` (N,) says."""
        return cls(data.correlation(weights), threshold, data.n if weights is None else int(weights.sum()))

    def margin(self, rho: Floats, order: int) -> Floats:
        """Significance level less the p-value."""
        with np.errstate(divide="ignore"):
            z = np.abs(np.arctanh(rho)) * np.sqrt(max(self.n - order - 3, 1))
        return np.asarray(self.threshold - 2.0 * ndtr(-z))
