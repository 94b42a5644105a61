"""The discrete tests, "cmi" and "g2", against a slow, obvious twin."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy.stats import chi2

from brainet_pl.structure import statistics
from brainet_pl.structure.discretize import Codes
from brainet_pl.structure.evidence import Budget, remove_separated
from brainet_pl.structure.independence import ConditionalMutualInformation, GSquare
from brainet_pl.structure.pdag import complete_graph
from brainet_pl.structure.statistics import CodeTable, CountSample, bootstrap_weights


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
            nothing_to_test = 0.05 if condition else 1.0  # given a set, no answer: a margin of 0
            expected = mi if name == "cmi" else 0.05 - (chi2.sf(2 * 60 * mi, freedom) if freedom else nothing_to_test)
            assert block[i, j] == pytest.approx(expected, abs=1e-9)
            pair = test.pairs(np.array([x]), np.array([y]), np.array([condition], dtype=int).reshape(1, -1))
            assert pair[0] == pytest.approx(expected, abs=1e-9)


def test_a_set_that_determines_one_of_a_pair_never_makes_it_independent():
    rng = np.random.default_rng(0)
    z = rng.integers(0, 4, size=500)
    x, other = z // 2, rng.integers(0, 2, size=500)
    y = np.where(rng.random(500) < 0.9, x, other)
    g2 = GSquare(CountSample(CodeTable(Codes(np.stack([x, y, z], axis=1).astype(np.uint8), np.array([2, 2, 4])))), 0.01)
    assert g2.block((2,), np.array([0]), np.array([1]))[0, 0] == 0
    assert g2.pairs(np.array([0]), np.array([1]), np.array([[2]]))[0] == 0


def test_lists_of_tests_with_tables_of_many_sizes_agree_with_blocks():
    rng = np.random.default_rng(1)
    arities = np.array([2, 11, 3, 2, 7, 1])
    codes = np.stack([rng.integers(0, r, size=300) for r in arities], axis=1).astype(np.uint8)
    sample = CountSample(CodeTable(Codes(codes, arities)))
    x, y = np.array([0, 1, 3, 4, 5]), np.array([1, 0, 0, 2, 0])
    conditions = np.array([[2, 3], [4, 5], [1, 4], [0, 3], [1, 2]])
    for bound in (GSquare(sample, 0.05), ConditionalMutualInformation(sample, 0.01)):
        listed = bound.pairs(x, y, conditions)
        for i, given in enumerate(conditions.tolist()):
            block = bound.block(tuple(given), x[i : i + 1], y[i : i + 1])[0, 0]
            assert listed[i] == pytest.approx(block, abs=1e-9)


@pytest.mark.parametrize("step", [1, 1 << 17])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_sums_of_sorted_rows_are_those_of_counts_row_by_row(bootstrap, step, monkeypatch):
    monkeypatch.setattr(statistics, "_SORTED_VALUES", step)
    rng = np.random.default_rng(3)
    arities = np.array([63, 11, 30, 2, 7, 1])
    codes = np.stack([rng.integers(0, r, size=150) // 2 for r in arities], axis=1).astype(np.uint8)
    weights = bootstrap_weights(150, 0, (1,)) if bootstrap else None
    table = CodeTable(Codes(codes, arities))
    x, y, given = np.array([0, 4, 2]), np.array([1, 0, 5]), np.array([[2, 3], [1, 5], [0, 1]])
    sums, freedom = CountSample(table, weights).pair_sums(x, y, given)
    for i, condition in enumerate(given.tolist()):
        times = np.ones(150, dtype=int) if weights is None else weights
        expected, levels = information_and_freedom(codes, times, x[i], y[i], condition)
        assert sums[i] / 150 == pytest.approx(expected, abs=1e-9)
        assert freedom[i] == levels


@pytest.mark.parametrize("bootstrap", [False, True])
def test_tables_by_bits_and_by_codes_are_the_same(bootstrap):
    rng = np.random.default_rng(2)
    arities = np.array([2, 4, 3, 2, 5, 1])
    codes = np.stack([rng.integers(0, r, size=333) for r in arities], axis=1).astype(np.uint8)
    sample = CountSample(CodeTable(Codes(codes, arities)), bootstrap_weights(333, 0, (1,)) if bootstrap else None)
    for conditions in ([[]], [[2]], [[1, 5]], [[3, 2]]):
        x, y, given = np.array([0]), np.array([4]), np.array(conditions, dtype=int)
        levels = arities[[*conditions[0], 0, 4]].tolist()
        by_bits = sample._packed_tables(levels, x, y, given)
        assert by_bits.sum() == 333
        np.testing.assert_array_equal(by_bits, sample._coded_tables(sample.table_shape(x, y, given), x, y, given))


@pytest.mark.parametrize("words", [1, 1000, 1 << 17])
def test_lists_of_tables_by_bits_are_cut_where_memory_ends(words, monkeypatch):
    monkeypatch.setattr(statistics, "_PACKED_WORDS", words)
    rng = np.random.default_rng(5)
    arities = np.array([2, 4, 3, 2, 5, 1])
    codes = np.stack([rng.integers(0, r, size=100) for r in arities], axis=1).astype(np.uint8)
    sample = CountSample(CodeTable(Codes(codes, arities)))
    x, y, z = np.array(list(permutations(range(6), 3))).T
    for i, (counts, a, b) in enumerate(zip(sample.pair_tables(x, y, z[:, None]), x, y, strict=True)):
        assert counts.sum() == 100
        joint = np.zeros_like(counts[0])
        np.add.at(joint, (sample.table.codes[:, a], sample.table.codes[:, b]), 1)
        np.testing.assert_array_equal(counts.sum(axis=0), joint, err_msg=str(i))


@pytest.mark.parametrize("arities", [[2, 2, 2, 2, 2], [2, 3, 4, 1, 3]])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_the_weakest_of_single_conditions_is_the_smallest_of_all(arities, bootstrap):
    rng = np.random.default_rng(3)
    common = rng.integers(0, 2, size=200)
    codes = np.stack([(common + rng.integers(0, r, size=200)) % r for r in arities], axis=1).astype(np.uint8)
    codes[:, 4] = codes[:, 0]  # a copy: ties
    sample = CountSample(
        CodeTable(Codes(codes, np.array(arities))), bootstrap_weights(200, 0, ()) if bootstrap else None
    )
    test = ConditionalMutualInformation(sample, 0.02)
    for x in range(5):
        others = np.array([v for v in range(5) if v != x])
        for y in (others, others[1:3]):
            for given in (others, others[2:], y):
                margin, place = test.weakest(x, y, given)
                for k, other in enumerate(y):
                    every = [
                        test.block((int(z),), np.array([x]), np.array([other]))[0, 0] if z != other else np.inf
                        for z in given
                    ]
                    assert margin[k] == pytest.approx(min(every), abs=1e-9)
                    assert place[k] == np.argmin(np.round(every, 9))


def test_the_recursion_finds_the_same_by_single_conditions_as_by_blocks():
    class ByBlocks:
        """The same test without the faster way."""

        def __init__(self, test):
            self.block, self.pairs = test.block, test.pairs

    rng = np.random.default_rng(4)
    causes = rng.integers(0, 2, size=(2000, 4))
    codes = ((causes @ rng.integers(0, 2, size=(4, 24)) + (rng.random((2000, 24)) < 0.2)) % 3).astype(np.uint8)
    test = ConditionalMutualInformation(CountSample(CodeTable(Codes(codes, np.full(24, 3)))), 0.01)
    every = complete_graph(24)
    found = [remove_separated(every, every, every, 1, way, Budget()) for way in (test, ByBlocks(test))]
    assert 0 < len(found[0][1].pairs) < every.sum() // 2
    for quick, slow in zip((found[0][0], *found[0][1]), (found[1][0], *found[1][1]), strict=True):
        np.testing.assert_array_equal(quick, slow)
