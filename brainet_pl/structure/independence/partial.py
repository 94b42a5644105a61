"""The Gaussian tests, "gaussian" and "fisher_z": partial correlations from a correlation matrix alone."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from brainet_pl.structure.data import PreparedData, Weights
from brainet_pl.structure.independence.base import Floats, IndependenceTest, Ints


class PartialCorrelationTest(IndependenceTest):
    """The base of tests that look at a partial correlation ρ alone: a subclass says how far ρ is from none."""

    kind = "gaussian"
    default_score = "bge"
    list_length = 8192  # pairs that are tested together; a few numbers each
    correlation: Floats

    @abstractmethod
    def margin(self, rho: Floats, order: int) -> Floats:
        """The margins of partial correlations of any shape, given `order` variables each."""

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the margins (L, R) of left × right given `condition`."""
        return self.margin(partial_correlation(self.correlation, condition, left, right), len(condition))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes the margins (T,) of x (T,) and y (T,) given conditions (T, n)."""
        rho = partial_correlation_of_pairs(self.correlation, x, y, conditions)
        return self.margin(rho, conditions.shape[1])

    def weakest(self, x: int, y: Ints, z: Ints) -> tuple[Floats, Ints]:
        """Finds the smallest margin of `x` and each of `y` (Y,) given one of `z` (Z,), and which of them gives it."""
        rho, place = weakest_of_singles(self.correlation, self._inverse, x, y, z)
        return np.where(np.isnan(rho), np.inf, self.margin(rho, 1)), place

    @cached_property
    def strength(self) -> Floats:
        """(d, d) absolute correlations."""
        return np.abs(self.correlation)

    @cached_property
    def _inverse(self) -> Floats:
        return inverse_rest(self.correlation)


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


class FisherZ(PartialCorrelationTest):
    """Fisher's z test of a vanishing partial correlation at significance level `threshold`, for `n` rows.

    The level falls with the number of pairs: of d = 100 variables there are 4,950, and a fixed one would join dozens of
    independent ones.
    """

    name = "fisher_z"
    version = 2
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

    def dependence(self, left: Ints, right: Ints) -> Floats:
        """Computes the size of the correlations (L, R)."""
        return np.abs(self.correlation[np.ix_(left, right)])

    def margin(self, rho: Floats, order: int) -> Floats:
        """Significance level less the p-value."""
        with np.errstate(divide="ignore"):
            z = np.abs(np.arctanh(rho)) * np.sqrt(max(self.n - order - 3, 1))
        return np.asarray(self.threshold - 2.0 * ndtr(-z))


def partial_correlation(correlation: Floats, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
    """Computes the correlation (L, R) of what a linear fit on `condition` leaves of left and right.

    A variable that the condition set explains wholly has nothing left to correlate: 0.
    """
    rho = correlation[left[:, None], right]
    if len(condition) == 1:  # most tests by far, with few numbers each: every call of numpy counts
        to_left, to_right = correlation[condition[0], left], correlation[condition[0], right]
        rest_left, rest_right = 1.0 - to_left * to_left, 1.0 - to_right * to_right
        rho -= to_left[:, None] * to_right
        rho *= _scale(rest_left)[:, None]
        rho *= _scale(rest_right)
    elif condition:
        z = np.asarray(condition)
        inner = correlation[z[:, None], z]
        to_left, to_right = correlation[z[:, None], left], correlation[z[:, None], right]
        # Least squares, because copied columns make the inner matrix singular.
        weights = np.linalg.lstsq(inner, to_right, rcond=1e-10)[0]
        left_weights = np.linalg.lstsq(inner, to_left, rcond=1e-10)[0]
        rest_left = 1.0 - (to_left * left_weights).sum(axis=0)
        rest_right = 1.0 - (to_right * weights).sum(axis=0)
        rho = (rho - to_left.T @ weights) * _scale(rest_left)[:, None] * _scale(rest_right)
    return np.asarray(np.minimum(np.maximum(rho, -1.0), 1.0))  # `np.clip` takes longer than all of this


def _scale(rest: Floats) -> Floats:
    """One over the deviation of what a condition leaves, of a variance of `rest` (L,); 0 where it leaves nothing."""
    return np.where(rest > 1e-6, 1.0 / np.sqrt(np.maximum(rest, 1e-6)), 0.0)


def inverse_rest(correlation: Floats) -> Floats:
    """Computes 1/(1-ρ²), one over the share of a variable that the other does not explain, (d, d); 0 for nothing.

    What is explained wholly has nothing left to correlate, so a partial correlation times 0 is what it should be.
    """
    rest = correlation * correlation
    np.subtract(1.0, rest, out=rest)
    nothing = rest <= 1e-6
    np.divide(1.0, rest, out=rest, where=~nothing)
    rest[nothing] = 0.0
    return rest


def weakest_of_singles(correlation: Floats, inverse: Floats, x: int, y: Ints, z: Ints) -> tuple[Floats, Ints]:
    """Finds the partial correlation of `x` with each of `y` (Y,) nearest to 0 given one of `z`, and its place in z.

    `inverse` is that of `inverse_rest`; y and z are sorted. NaN where z holds nothing but y itself. Ties, up to
    rounding, go to the first.
    """
    few = 4 * len(y) < len(correlation)  # else whole rows are read faster than chosen columns
    to_y, itself = correlation[x], z
    square, rest = correlation[z], inverse[z]  # (Z, d)
    if few:
        to_y, square, rest = to_y[y], square[:, y], rest[:, y]
        itself = np.searchsorted(y, z)
    square *= correlation[x, z][:, None]
    np.subtract(to_y, square, out=square)
    square *= square
    square *= rest
    square *= inverse[x, z][:, None]
    inside = itself < square.shape[1]
    if few:
        inside[inside] = y[itself[inside]] == z[inside]
    square[np.flatnonzero(inside), itself[inside]] = np.inf
    least = square.min(axis=0)
    place = (square <= least * (1 + 1e-12) + 1e-15).argmax(axis=0)
    rho = np.where(np.isfinite(least), np.sqrt(np.minimum(least, 1.0)), np.nan)
    return (rho, place) if few else (rho[y], place[y])


def partial_correlation_of_pairs(correlation: Floats, x: Ints, y: Ints, conditions: Ints) -> Floats:
    """Computes partial correlations (T,) of pairs, each given its own condition set (T, n)."""
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
