"""Streams give what tables give: the same tree where ranks are exact, and one within the stated tolerance elsewhere."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl.graphs import rai
from brainet_pl.structure import (
    FeatureStream,
    IndependenceTest,
    Leaf,
    PreparedData,
    learn_structure,
    statistics,
    stream,
)
from brainet_pl.structure.discretize import discretize, level_edges
from brainet_pl.structure.statistics import CodeTable, CountSample

TOLERANCE = 1e-4  # of a correlation, with 4,096 cells


def chain(n, d, seed=0):
    """Columns that depend on the one before, zero-inflated as behind a ReLU."""
    rng = np.random.default_rng(seed)
    x = np.empty((n, d))
    x[:, 0] = rng.normal(size=n)
    for j in range(1, d):
        x[:, j] = 0.7 * x[:, j - 1] + rng.normal(size=n)
    return np.maximum(x, -0.5).astype(np.float32)


def streamed(x, parts=7, **options):
    return FeatureStream(lambda: np.array_split(x, parts), **options)


def shape(node):
    """A tree without its scores."""
    if isinstance(node, Leaf):
        return node.variables, node.parents
    return node.variables, [([shape(a) for a in b.ancestors], shape(b.descendant)) for b in node.branches]


def same_tree(one, two):
    assert shape(one.root) == shape(two.root)
    scores = [[node.score for node in tree.nodes if isinstance(node, Leaf)] for tree in (one, two)]
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=0.1)
    assert one.settings["data"] == two.settings["data"]
    assert one.settings["tests"] == two.settings["tests"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many blocks even of little data."""
    monkeypatch.setattr(stream, "_BLOCK_ROWS", 500)
    monkeypatch.setattr(stream, "_BLOCK_VALUES", 1)


@pytest.fixture(scope="module")
def x():
    return chain(1500, 12)


class TestExactRanks:
    @pytest.mark.parametrize("test", ["gaussian", "fisher_z", "cmi", "g2"])
    def test_the_tree_is_that_of_the_table_however_rows_are_stored(self, x, test):
        expected = learn_structure(x, test=test, max_order=2, progress=False)
        order = np.random.default_rng(1).permutation(len(x))
        for rows, parts in ((slice(None), 1), (slice(None), 40), (order, 7), (order, 1500)):
            same_tree(expected, learn_structure(streamed(x[rows], parts), test=test, max_order=2, progress=False))

    @pytest.mark.parametrize("score", ["bdeu", "bge", "bic"])
    def test_scores_are_those_of_the_table(self, x, score):
        settings = {"test": "gaussian", "score": score, "progress": False}
        same_tree(learn_structure(x, **settings), learn_structure(streamed(x), **settings))

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: np.round(x * 3).astype(np.int64),  # categories
            lambda x: np.round(x * 40).astype(np.int32),  # counts: binned
            lambda x: x > 0,
            lambda x: x.astype(np.float64),
            lambda x: np.c_[x[:, :5], np.ones(len(x), np.float32), x[:, :2]],  # a constant, and copies
            lambda x: np.where(x == x, -0.0, x) + np.where(x > 0, 0.0, x),
        ],
    )
    @pytest.mark.parametrize("test", ["gaussian", "cmi"])
    def test_any_kind_of_column(self, x, make, test):
        values = make(x)
        expected = learn_structure(values, test=test, progress=False)
        found = learn_structure(streamed(values), test=test, progress=False)
        if test == "cmi":
            assert found.fingerprint == expected.fingerprint
        else:
            assert found.settings["data"] == expected.settings["data"]
            prepared = [PreparedData.prepare(v, 3).correlation() for v in (values, streamed(values))]
            np.testing.assert_allclose(*prepared, atol=1e-6)

    def test_a_sample_of_rows_is_the_same_sample(self, x):
        for test in ("gaussian", "cmi"):
            expected = learn_structure(x, test=test, max_rows=400, progress=False)
            same_tree(expected, learn_structure(streamed(x), test=test, max_rows=400, progress=False))

    def test_tensors_and_one_graph(self, x):
        tensors = FeatureStream(lambda: torch.from_numpy(x).split(100))
        assert rai(tensors, test="fisher_z", threshold=0.01) == rai(x, test="fisher_z", threshold=0.01)

    def test_rows_are_weighted_as_in_the_table(self, x):
        """Against numpy on copied rows, which knows nothing of weights."""
        data, table = (PreparedData.prepare(v, 3) for v in (streamed(x), x))
        weights = np.random.default_rng(0).integers(0, 4, size=len(x))
        expected = np.corrcoef(np.repeat(table.scores.astype(np.float64), weights, axis=0).T)
        np.testing.assert_allclose(data.correlation(weights), expected, atol=1e-6)


class TestPasses:
    def count(self, x, monkeypatch, **settings):
        passes = []
        source = FeatureStream(lambda: passes.append(0) or np.array_split(x, 5))
        return learn_structure(source, progress=False, **settings), len(passes)

    def test_four_are_enough(self, x, monkeypatch):
        assert self.count(x, monkeypatch, test="gaussian")[1] == 4
        assert self.count(x, monkeypatch, test="cmi")[1] == 4

    def test_matrices_that_do_not_fit_are_summed_in_turn(self, x, monkeypatch):
        expected = learn_structure(x, test="gaussian", s=3, progress=False)
        one, few = self.count(x, monkeypatch, test="gaussian", s=3)
        monkeypatch.setattr(stream, "_GRAM_BYTES", 3 * 8 * x.shape[1] ** 2)
        two, more = self.count(x, monkeypatch, test="gaussian", s=3)
        same_tree(expected, one)
        same_tree(expected, two)
        assert few < more <= few + 8

    def test_features_are_never_held(self):
        n, d, part = 60_000, 40, 2000

        def batches():
            for i in range(0, n, part):
                yield np.random.default_rng(i).normal(size=(part, d)).astype(np.float32)

        learn_structure(FeatureStream(lambda: [np.eye(30)]), test="gaussian", progress=False)  # what imports cost
        tracemalloc.start()
        data = PreparedData.prepare(FeatureStream(batches, resolution=256), 3)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert held < 0.3 * n * d * 4
        assert data.n == n


class TestTolerance:
    kinds = (
        ("normal", lambda z: z),
        ("relu", lambda z: np.maximum(z, 0)),
        ("lognormal", lambda z: np.exp(3 * z)),
        ("far from zero", lambda z: 10_000 + z),
        ("an outlier", lambda z: np.where(np.arange(len(z))[:, None] == 0, 1e30, 2000 + 10 * z)),
        ("steps and tails", lambda z: np.where(z > 2, z * 1e6, np.round(z))),
    )

    @pytest.fixture
    def wide(self):
        rng = np.random.default_rng(0)
        common = rng.normal(size=(30_000, 1))
        columns = [make(0.8 * common + 0.6 * rng.normal(size=(len(common), 2))) for _, make in self.kinds]
        return np.concatenate(columns, axis=1).astype(np.float32)

    def test_correlations(self, wide):
        table, data = (PreparedData.prepare(v, 3) for v in (wide, streamed(wide)))
        error = np.abs(data.correlation() - table.correlation())
        assert 0 < error.max() < TOLERANCE
        assert not data.exact.all()

    def test_more_cells_bring_it_down_and_enough_of_them_to_nothing(self, wide):
        expected = PreparedData.prepare(wide, 3).correlation()
        errors = []
        for cells in (64, 1024, 40_000):
            data = PreparedData.prepare(streamed(wide, resolution=cells), 3)
            errors.append(np.abs(data.correlation() - expected).max())
        assert errors[0] > 3 * errors[1]
        assert errors[2] < 1e-6
        assert data.exact.all()

    def test_codes(self, wide):
        """A code is wrong for the rows between the true quantile and the edge of its cell."""
        data = PreparedData.prepare(streamed(wide), 4)
        values = PreparedData.prepare(wide, 4).values
        expected, found = discretize(values, 4), data.serve(("codes", None))
        np.testing.assert_array_equal(found.arities, expected.arities)
        assert (found.codes != expected.codes).mean(axis=0).max() < 4 * 3 / 4096

    def test_the_order_of_batches_does_not_matter(self, wide):
        order = np.random.default_rng(2).permutation(len(wide))
        one, two = (PreparedData.prepare(streamed(v, k), 3) for v, k in ((wide, 3), (wide[order], 11)))
        np.testing.assert_allclose(one.correlation(), two.correlation(), atol=1e-6)
        np.testing.assert_array_equal(one.table.codes, two.table.codes)


def quantile_edges(ordered, bins):
    """The slow, obvious twin of `level_edges`: a sorted column with all its copies."""
    n, edges, start = len(ordered), [], 0
    last = np.searchsorted(ordered, ordered[-1], side="left")
    for remaining in range(bins, 1, -1):
        end = int(np.searchsorted(ordered, ordered[start + max(0, (n - start) // remaining - 1)], side="right"))
        end = min(end, int(last))
        if end <= start:
            break
        edges.append(ordered[end - 1])
        start = end
    return edges


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=80), st.integers(2, 8))
def test_edges_from_counts_are_those_of_the_sorted_column(column, bins):
    levels, count = np.unique(np.array(column, dtype=np.float64), return_counts=True)
    expected = levels[:-1] if len(levels) <= bins else quantile_edges(np.sort(column), bins)
    assert level_edges(levels, count, bins, integer=False).tolist() == list(expected)


def test_counts_do_not_depend_on_how_many_rows_are_worked_on_at_a_time(x, monkeypatch):
    table = CodeTable(discretize(x, 3))
    weights = np.random.default_rng(0).integers(0, 4, size=len(x))
    few, some = np.array([0, 3]), np.arange(12)

    def counts():
        sample = CountSample(table, weights)
        pairs = sample.pair_tables(some[:6], some[6:], some[:6, None][::-1])
        wide = [sample.joint(c, some, some).counts for c in ((), (1,), (4, 7))]
        return [sample.gram, pairs, *wide, sample.joint((5, 6), few, few + 1).counts]

    expected = counts()
    for values in (1, 600, 20_000):
        monkeypatch.setattr(statistics, "_GRAM_VALUES", values)
        for one, two in zip(expected, counts(), strict=True):
            np.testing.assert_array_equal(one, two)


class TestErrors:
    def learn(self, source, message, **options):
        with pytest.raises((ValueError, RuntimeError), match=message):
            learn_structure(FeatureStream(source, **options), test="gaussian", progress=False)

    def test_an_iterator_that_is_used_up(self, x):
        once = iter(np.array_split(x, 3))
        self.learn(lambda: once, "expected 1,500 rows in every pass, got 0")

    def test_another_order_in_every_pass(self, x):
        rng = np.random.default_rng(0)
        self.learn(lambda: [x[rng.permutation(len(x))]], "same batches in the same order")

    def test_rows_that_come_and_go(self, x):
        sizes = iter([1500, 1500, 1400, 1500])
        self.learn(lambda: [x[: next(sizes)]], "expected 1,500 rows in every pass, got 1,400")

    def test_batches_that_differ(self, x):
        self.learn(lambda: [x, x[:, :5]], "12 columns of float32 like the first, got 5")
        self.learn(lambda: [x, x.astype(np.float64)], "got 12 of float64")

    def test_what_no_structure_can_be_learned_from(self, x):
        self.learn(lambda: [], "a stream without rows")
        self.learn(lambda: [x[:1]], "at least 2 rows, got 1")
        self.learn(lambda: [x, np.full((1, 12), np.nan, dtype=np.float32)], "expected finite features")
        self.learn(lambda: [x[:, 0]], r"expected features of shape \(rows, columns\)")

    def test_a_list_is_no_function(self, x):
        with pytest.raises(ValueError, match="lambda: loader"):
            FeatureStream([x])

    def test_a_test_that_reads_rows(self, x):
        class Reader(IndependenceTest):
            kind = "gaussian"
            unit = "nats"
            default_threshold = 0.1
            default_score = "bge"
            name = "reads_rows"

            @classmethod
            def on(cls, data, weights, threshold):
                return data.scores

            def block(self, condition, left, right): ...

            def pairs(self, x, y, conditions): ...

        with pytest.raises(RuntimeError, match=r"asks for data.correlation\(weights\)"):
            learn_structure(streamed(x), test=Reader, progress=False)
