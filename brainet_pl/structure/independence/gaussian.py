"""Gaussian mutual information of normal scores against a threshold in nats."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from brainet_pl.structure.data import PreparedData, Weights
from brainet_pl.structure.independence.base import Floats, IndependenceTest, Ints
from brainet_pl.structure.independence.partial import (
    inverse_rest,
    partial_correlation,
    partial_correlation_of_pairs,
    weakest_of_singles,
)


class PartialCorrelation(IndependenceTest):
    """Gaussian information -½·log(1-ρ²), in nats, against a threshold; ρ from a correlation matrix alone."""

    name = "gaussian"
    kind = "gaussian"
    unit = "nats"
    default_threshold = 0.05
    default_score = "bge"
    list_length = 8192  # pairs that are tested together; a few numbers each

    def __init__(self, correlation: Floats, threshold: float) -> None:
        self.correlation, self.threshold = correlation, threshold
        self.keeps_all = threshold <= 0  # information is never negative

    @classmethod
    def on(cls, data: PreparedData, weights: Weights | None, threshold: float) -> PartialCorrelation:
        """The test on the normal scores of `data`, rows counted as often as `weights` (N,) says."""
        return cls(data.correlation(weights), threshold)

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """(L, R) information less the threshold."""
        return self._margin(partial_correlation(self.correlation, condition, left, right))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """(T,) information less the threshold."""
        return self._margin(partial_correlation_of_pairs(self.correlation, x, y, conditions))

    def weakest(self, x: int, y: Ints, z: Ints) -> tuple[Floats, Ints]:
        """(Y,) the smallest margin of `x` and each of `y` (Y,) given one of `z` (Z,), and which of them gives it."""
        rho, place = weakest_of_singles(self.correlation, self._inverse, x, y, z)
        return np.where(np.isnan(rho), np.inf, self._margin(rho)), place

    @cached_property
    def _inverse(self) -> Floats:
        return inverse_rest(self.correlation)

    @cached_property
    def strength(self) -> Floats:
        """(d, d) absolute correlations."""
        return np.abs(self.correlation)

    def _margin(self, rho: Floats) -> Floats:
        with np.errstate(divide="ignore"):  # ρ = 1 is infinite information
            return np.asarray(-0.5 * np.log1p(-(rho**2)) - self.threshold)
