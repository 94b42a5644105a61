"""Every test statistic against a slow, obvious twin."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import chi2

from brainet_pl.structure.discretize import Codes
from brainet_pl.structure.independence import (
    ConditionalMutualInformation,
    DSeparation,
    FisherZ,
    GSquare,
    PartialCorrelation,
    partial_correlation,
    partial_correlation_of_pairs,
)
from brainet_pl.structure.statistics import CodeTable, CountSample, bootstrap_weights, correlation


def counted(codes, weights, x, y, condition):
    """{(z…): {(a, b): count}} row by row."""
    tables = {}
    for row, w in zip(codes, weights, strict=True):
        cell = tables.setdefault(tuple(row[list(condition)]), {})
        key = (row[x], row[y])
        cell[key] = cell.get(key, 0) + w
    return {z: t for z, t in tables.items() if sum(t.values())}


def information_and_freedom(codes, weights, x, y, condition):
    total, freedom, n = 0.0, 0, sum(weights)
    for table in counted(codes, weights, x, y, condition).values():
        a_sum, b_sum, size = {}, {}, sum(table.values())
        for (a, b), c in table.items():
            a_sum[a] = a_sum.get(a, 0) + c
            b_sum[b] = b_sum.get(b, 0) + c
        total += sum(c / n * np.log(c * size / (a_sum[a] * b_sum[b])) for (a, b), c in table.items() if c)
        freedom += (sum(v > 0 for v in a_sum.values()) - 1) * (sum(v > 0 for v in b_sum.values()) - 1)
    return total, freedom


@pytest.mark.parametrize("arities", [[2, 2, 2, 2, 2], [2, 3, 4, 1, 3]])
@pytest.mark.parametrize("condition", [(), (2,), (2, 3), (4, 2, 3)])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_counts_give_the_textbook_information(arities, condition, bootstrap):
    rng = np.random.default_rng(len(condition))
    codes = np.stack([rng.integers(0, r, size=60) for r in arities], axis=1).astype(np.uint8)
    codes[:, 1] = np.where(rng.random(60) < 0.6, codes[:, 0] % arities[1], codes[:, 1])
    weights = bootstrap_weights(60, 0, (1,)) if bootstrap else np.ones(60, dtype=int)
    sample = CountSample(CodeTable(Codes(codes, np.array(arities))), weights if bootstrap else None)
    cmi, g2 = ConditionalMutualInformation(sample, 0.0), GSquare(sample, 0.05)
    free = np.array([v for v in range(5) if v not in condition])
    for test, name in ((cmi, "cmi"), (g2, "g2")):
        block = test.block(condition, free, free)
        for (i, x), (j, y) in product(enumerate(free), repeat=2):
            if x == y:
                continue
            mi, freedom = information_and_freedom(codes, weights, x, y, condition)
            expected = mi if name == "cmi" else 0.05 - (chi2.sf(2 * 60 * mi, freedom) if freedom else 1.0)
            assert block[i, j] == pytest.approx(expected, abs=1e-9)
            pair = test.pairs(np.array([x]), np.array([y]), np.array([condition], dtype=int).reshape(1, -1))
            assert pair[0] == pytest.approx(expected, abs=1e-9)


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


def test_weighted_correlation_equals_that_of_copied_rows():
    z = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    w = bootstrap_weights(200, 3, (0, 1))
    np.testing.assert_allclose(correlation(z, w), np.corrcoef(np.repeat(z, w, axis=0).T), atol=1e-5)


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


def test_bootstrap_draws_as_many_rows_as_there_are_and_paths_differ():
    a, b = bootstrap_weights(1000, 0, (0,)), bootstrap_weights(1000, 0, (1,))
    assert a.sum() == b.sum() == 1000
    assert (a != b).any()
    assert (bootstrap_weights(1000, 0, (0,)) == a).all()
    assert (bootstrap_weights(1000, 0, (0, 0)) != a).any()


def test_oracle_knows_chain_fork_and_collider():
    dag = np.zeros((4, 4), dtype=bool)
    dag[0, 1] = dag[1, 2] = dag[3, 2] = True  # 0 → 1 → 2 ← 3
    oracle = DSeparation(dag)

    def separated(x, y, *condition):
        return oracle.pairs(np.array([x]), np.array([y]), np.array([condition], dtype=int).reshape(1, -1))[0] < 0

    assert not separated(0, 2)
    assert separated(0, 2, 1)
    assert separated(0, 3)
    assert not separated(0, 3, 2)
    assert separated(0, 3, 2, 1)
