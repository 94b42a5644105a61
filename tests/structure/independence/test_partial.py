"""The Gaussian tests, "gaussian" and "fisher_z", against a slow, obvious twin."""

from itertools import product

import numpy as np
import pytest

from brainet_pl.structure.independence import FisherZ, PartialCorrelation
from brainet_pl.structure.independence.partial import partial_correlation, partial_correlation_of_pairs
from brainet_pl.structure.statistics import correlation


def residual_correlation(z, x, y, condition):
    if condition:
        design = np.c_[np.ones(len(z)), z[:, list(condition)]]
        left = z[:, x] - design @ np.linalg.lstsq(design, z[:, x], rcond=None)[0]
        right = z[:, y] - design @ np.linalg.lstsq(design, z[:, y], rcond=None)[0]
    else:
        left, right = z[:, x], z[:, y]
    return np.corrcoef(left, right)[0, 1]


@pytest.mark.parametrize("condition", [(), (2,), (2, 3), (4, 2, 3)])
def test_partial_correlation_is_the_correlation_of_residuals(condition):
    rng = np.random.default_rng(0)
    z = (rng.normal(size=(300, 6)) @ rng.normal(size=(6, 6))).astype(np.float32)
    c = correlation(z)
    free = np.array([v for v in range(6) if v not in condition])
    block = partial_correlation(c, condition, free, free)
    for (i, x), (j, y) in product(enumerate(free), repeat=2):
        if x != y:
            expected = residual_correlation(z.astype(np.float64), x, y, condition)
            assert block[i, j] == pytest.approx(expected, abs=1e-4)
            sets = np.array([condition], dtype=int).reshape(1, -1)
            pair = partial_correlation_of_pairs(c, np.array([x]), np.array([y]), sets)
            assert pair[0] == pytest.approx(block[i, j], abs=1e-9)
    information = PartialCorrelation(c, 0.0).block(condition, free[:1], free[1:2])[0, 0]
    assert information == pytest.approx(-0.5 * np.log(1 - block[0, 1] ** 2))


def test_copied_columns_leave_nothing_to_correlate():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(100, 3)).astype(np.float32)
    c = correlation(np.c_[z, z[:, :1]])
    assert partial_correlation(c, (3,), np.array([0]), np.array([1]))[0, 0] == 0
    assert partial_correlation_of_pairs(c, np.array([0]), np.array([1]), np.array([[3, 0]]))[0] == 0


def test_fisher_z_keeps_its_level():
    rng = np.random.default_rng(0)
    rejected = [FisherZ(correlation(rng.normal(size=(100, 2)).astype(np.float32)), 0.1, 100) for _ in range(500)]
    rate = np.mean([t.block((), np.array([0]), np.array([1]))[0, 0] > 0 for t in rejected])
    assert 0.06 < rate < 0.14


@pytest.mark.parametrize("make", [lambda c: PartialCorrelation(c, 0.05), lambda c: FisherZ(c, 0.05, 40)])
def test_the_weakest_of_single_conditions_is_the_smallest_of_all(make):
    rng = np.random.default_rng(1)
    z = (rng.normal(size=(40, 4)) @ rng.normal(size=(4, 9)) + 0.5 * rng.normal(size=(40, 9))).astype(np.float32)
    z[:, 7] = z[:, 2]  # a copy, which explains the other wholly
    test = make(correlation(z))
    for x in range(9):
        others = np.array([v for v in range(9) if v != x])
        for y in (others, others[3:5], others[-1:]):  # many or few: two ways to read the matrix
            for given in (others, others[2:5], others[:1], y):
                margin, place = test.weakest(x, y, given)
                for k, other in enumerate(y):
                    every = [
                        test.block((int(c),), np.array([x]), np.array([other]))[0, 0] if c != other else np.inf
                        for c in given
                    ]
                    # From 10 nats on, rounding tells a copy from a near copy.
                    assert min(margin[k], 10) == pytest.approx(min(*every, 10), abs=1e-9)
                    if margin[k] < 10:
                        assert every[place[k]] == pytest.approx(min(every), abs=1e-9)
