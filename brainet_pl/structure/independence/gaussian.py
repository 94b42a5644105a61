"""Gaussian mutual information of normal scores against a threshold in nats."""

from __future__ import annotations

import numpy as np

from brainet_pl.structure.data import PreparedData, Weights
from brainet_pl.structure.independence.base import Floats
from brainet_pl.structure.independence.partial import PartialCorrelationTest


class PartialCorrelation(PartialCorrelationTest):
    """Gaussian information -½·log(1-ρ²), in nats, against a threshold; ρ from a correlation matrix alone."""

    name = "gaussian"
    unit = "nats"
    default_threshold = 0.05

    def __init__(self, correlation: Floats, threshold: float) -> None:
        self.correlation, self.threshold = correlation, threshold
        self.keeps_all = threshold <= 0  # information is never negative

    @classmethod
    def on(cls, data: PreparedData, weights: Weights | None, threshold: float) -> PartialCorrelation:
        """The test on the normal scores of `data`, rows counted as often as `weights` (N,) says."""
        return cls(data.correlation(weights), threshold)

    def margin(self, rho: Floats, order: int) -> Floats:
        """Computes the information of a correlation less the threshold."""
        with np.errstate(divide="ignore"):  # ρ = 1 is infinite information
            return np.asarray(-0.5 * np.log1p(-(rho**2)) - self.threshold)
