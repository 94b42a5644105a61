"""Fisher's z test of normal scores at a significance level."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from scipy.special import ndtr

from brainet_pl.structure.data import PreparedData, Weights
from brainet_pl.structure.independence.base import Floats, IndependenceTest, Ints
from brainet_pl.structure.independence.partial import (
    inverse_rest,
    partial_correlation,
    partial_correlation_of_pairs,
    weakest_of_singles,
)


class FisherZ(IndependenceTest):
    """Fisher's z test of a vanishing partial correlation at significance level `threshold`, for `n` rows.

    The level falls with the number of pairs: of d = 100 variables there are 4,950, and a fixed one would join dozens of
    independent ones.
    """

    name = "fisher_z"
    kind = "gaussian"
    unit = "significance level"
    default_threshold = 0.01
    default_score = "bge"
    list_length = 8192  # pairs that are tested together; a few numbers each

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

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """(L, R) significance level less the p-value."""
        return self._margin(partial_correlation(self.correlation, condition, left, right), len(condition))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) significance level less the p-value."""
        rho = partial_correlation_of_pairs(self.correlation, x, y, conditions)
        return self._margin(rho, conditions.shape[1])

    def weakest(self, x: int, y: Ints, z: Ints) -> tuple[Floats, Ints]:
        """(Y,) the smallest margin of `x` and each of `y` (Y,) given one of `z` (Z,), and which of them gives it."""
        rho, place = weakest_of_singles(self.correlation, self._inverse, x, y, z)
        return np.where(np.isnan(rho), np.inf, self._margin(rho, 1)), place

    @cached_property
    def _inverse(self) -> Floats:
        return inverse_rest(self.correlation)

    @cached_property
    def strength(self) -> Floats:
        """(d, d) absolute correlations."""
        return np.abs(self.correlation)

    def _margin(self, rho: Floats, order: int) -> Floats:
        with np.errstate(divide="ignore"):
            z = np.abs(np.arctanh(rho)) * np.sqrt(max(self.n - order - 3, 1))
        return np.asarray(self.threshold - 2.0 * ndtr(-z))
