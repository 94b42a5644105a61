"""`threshold="auto"`: modularity, the grid, what is chosen, and that a shifted test is the test itself."""

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.datasets import load_digits

from brainet_pl.callbacks import StructureLearning
from brainet_pl.structure import FeatureStream, PreparedData, find_test, learn_structure
from brainet_pl.structure import threshold as threshold_module
from brainet_pl.structure.brai import autonomous_sets
from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.independence import SingleMargins
from brainet_pl.structure.statistics import half_weights
from brainet_pl.structure.threshold import AtThreshold, choose_threshold, grid, modularity, strength_of


def pixels(noise=0.0):
    """(1797, 64) pixels of digits, blurred by noise."""
    x = load_digits().data
    return x + noise * np.random.default_rng(0).normal(size=x.shape)


def learn(x, **options):
    return learn_structure(x, progress=False, **options)


@pytest.fixture(scope="module")
def table():
    """(600, 20) pixels in the middle of digits."""
    return pixels()[:600, [8 * i + j for i in range(1, 6) for j in range(2, 6)]]


# -- modularity -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_modularity_is_that_of_networkx(data):
    d = data.draw(st.integers(2, 8))
    half = data.draw(hnp.arrays(int, (d, d), elements=st.integers(0, 100))) / 100
    strength = np.triu(half, 1) + np.triu(half, 1).T
    labels = data.draw(hnp.arrays(int, d, elements=st.integers(0, 2)))
    sets = [np.flatnonzero(labels == k) for k in np.unique(labels)]
    found = modularity(strength + np.eye(d), sets)  # what a variable has with itself does not count
    if not strength.any():
        assert found == 0
        return
    graph = networkx.from_numpy_array(strength)
    assert found == pytest.approx(networkx.community.modularity(graph, [set(s.tolist()) for s in sets]), abs=1e-9)
    new = data.draw(st.permutations(range(d)))
    place = np.argsort(new)
    assert modularity(strength[np.ix_(new, new)], [place[s] for s in sets]) == pytest.approx(found, abs=1e-9)


def test_nothing_depends_on_anything():
    assert modularity(np.zeros((4, 4)), [np.arange(2), np.arange(2, 4)]) == 0


# -- the grid ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(float, (7, 7), elements=st.floats(0, 3, allow_subnormal=False)))
def test_the_grid_goes_from_sparse_to_dense(half):
    information = np.triu(half, 1) + np.triu(half, 1).T
    np.fill_diagonal(information, np.inf)
    found = grid(information)
    assert found == sorted(found, reverse=True)
    kept = [int((information[np.triu_indices(7, 1)] > t).sum()) for t in found]
    assert kept == sorted(kept)
    assert all(k <= 16 for k in kept)  # three quarters of 21 pairs at the most


def test_columns_that_never_vary_do_not_count(table):
    data = PreparedData.prepare(table, 3)
    information = -0.5 * np.log1p(-np.minimum(data.correlation() ** 2, 1 - 1e-12))
    more = np.zeros((30, 30))
    more[:20, :20] = information
    assert grid(more) == grid(information)
    assert grid(np.zeros((5, 5))) == []
    assert grid(np.ones((2, 2))) == []


# -- the choice -------------------------------------------------------------------------------------------------------


def test_the_best_of_the_grid_is_chosen():
    rng = np.random.default_rng(0)
    half = np.triu(rng.random((12, 12)), 1)
    information = half + half.T
    sets = [np.arange(k, 12, 3) for k in range(3)]
    for s in sets:
        information[np.ix_(s, s)] += 2
    wanted = grid(information)[2]
    choice = choose_threshold(information, lambda t: [sets] if t == wanted else [sets, [np.arange(12)]])
    assert choice.threshold == wanted
    assert choice.modularity == modularity(strength_of(information), sets)
    assert len(choice.tried) <= len(grid(information))
    nothing = choose_threshold(information, lambda t: [[np.arange(12)]])
    assert (nothing.threshold, nothing.modularity) == (None, 0.0)
    assert len(nothing.tried) == len(grid(information))  # a sparse graph that does not fall apart says nothing
    assert choose_threshold(information, lambda t: [sets], lambda: True).tried == ()
    first = grid(information)[0]
    halves = choose_threshold(information, lambda t: [sets] if t == first else [sets, sets, sets, [np.arange(12)]])
    assert halves.threshold == grid(information)[3]  # three quarters are nearly as good, three in a row the last


@pytest.mark.parametrize("test", ["cmi", "gaussian"])
def test_a_shifted_test_is_the_test_at_the_other_threshold(table, test):
    data, kind = PreparedData.prepare(table, 3), find_test(test)
    one, other = kind.on(data, None, 0.02), kind.on(data, None, 0.3)
    shifted = AtThreshold(one, 0.02, 0.3)
    x, y = np.arange(6), np.arange(6, 14)
    for condition in ((), (16,), (16, 17)):
        np.testing.assert_allclose(shifted.block(condition, x, y), other.block(condition, x, y), atol=1e-12)
    given_one = np.array([[14], [15], [16]])
    np.testing.assert_allclose(shifted.pairs(x[:3], y[:3], given_one), other.pairs(x[:3], y[:3], given_one), atol=1e-12)
    assert isinstance(shifted, SingleMargins) == isinstance(other, SingleMargins)
    if isinstance(other, SingleMargins):
        found, expected = shifted.weakest(0, y, np.arange(14, 18)), other.weakest(0, y, np.arange(14, 18))
        np.testing.assert_allclose(found[0], expected[0], atol=1e-12)
        np.testing.assert_array_equal(found[1], expected[1])


# -- in learn_structure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", ["cmi", "gaussian"])
def test_order_does_not_matter_and_the_choice_is_kept(table, test):
    ggt = learn(table, test=test)
    assert ggt.settings["threshold_by"] == "auto"
    assert ggt.settings["thresholds_tried"] >= 4
    assert 0 < ggt.settings["modularity"] < 1
    again = learn(table, test=test, threshold=ggt.settings["threshold"])
    assert again.fingerprint == ggt.fingerprint
    assert "threshold_by" not in again.settings
    rng = np.random.default_rng(0)
    columns = rng.permutation(table.shape[1])
    moved = learn(table[rng.permutation(len(table))][:, columns], test=test)
    assert moved.settings["threshold"] == ggt.settings["threshold"]
    line = f"{test} at threshold {ggt.settings['threshold']:.4g}: the best of {ggt.settings['thresholds_tried']}"
    assert line in ggt.summary()


def test_weaker_dependence_gets_a_smaller_threshold():
    clear, blurred = (learn(pixels(noise), s=1).settings["threshold"] for noise in (0.0, 12.0))
    assert 0 < 3 * blurred < clear  # a fixed number of nats can't serve both


def test_sets_of_the_choice_hold_more_dependence_than_those_of_other_thresholds():
    x = pixels()
    with np.errstate(invalid="ignore"):
        strength = np.nan_to_num(np.corrcoef(x.T)) ** 2

    def sets(node):
        if not hasattr(node, "branches"):
            return [np.array(node.variables)]
        return [s for child in node.branches[0].children for s in sets(child)]

    def worth(**options):
        return np.mean([modularity(strength, sets(learn(x, s=1, seed=seed, **options).root)) for seed in range(3)])

    assert worth() > 0.05 + max(worth(threshold=0.003), worth(threshold=0.5))


def test_independent_columns_have_the_tests_own_threshold():
    x = np.random.default_rng(0).normal(size=(4000, 5))
    ggt = learn(x, max_order=0)
    if ggt.settings["modularity"] == 0:
        assert ggt.settings["threshold"] == 0.05
        assert "the test's own" in ggt.summary()
    tiny = learn(x[:, :2])
    assert (tiny.settings["threshold"], tiny.settings["modularity"]) == (0.05, 0.0)
    assert "the test's own, because none of 0 others" in tiny.summary()


def test_copies_have_no_infinite_dependence(table):
    ggt = learn(np.concatenate([table, table[:, :5]], axis=1))
    assert np.isfinite(ggt.settings["threshold"])
    assert 0 < ggt.settings["modularity"] < 0.5


@pytest.mark.parametrize("test", ["g2", "fisher_z"])
def test_significance_tests_keep_their_level(table, test):
    x = (table > 0).astype(int) if test == "g2" else table
    assert learn(x, test=test).settings["threshold"] == find_test(test).default_for(20)
    assert "threshold_by" not in learn(x, test=test).settings


def test_a_stream_finds_the_threshold_of_the_table(table):
    stream = FeatureStream(lambda: np.array_split(table, 5))
    assert learn(stream).settings["threshold"] == pytest.approx(learn(table).settings["threshold"], rel=1e-3)


def test_a_spent_budget_takes_what_there_is(table):
    with pytest.warns(UserWarning, match="the budget was spent"):
        ggt = learn(table, max_tests=10)
    assert ggt.settings["cut_short"]
    assert ggt.settings["threshold"] == 0.05


@pytest.mark.parametrize("wrong", ["best", -1, float("nan"), [0.1]])
def test_no_other_word_is_a_threshold(table, wrong):
    with pytest.raises(ValueError, match="threshold"):
        learn(table, threshold=wrong)
    with pytest.raises(ValueError, match="threshold"):
        StructureLearning(threshold=wrong)


def test_of_many_variables_some_are_looked_at_and_their_choice_is_near_that_of_all(monkeypatch):
    rng = np.random.default_rng(0)
    groups = rng.normal(size=(600, 24))
    x = np.repeat(groups, 5, axis=1) + 0.8 * rng.normal(size=(600, 120))
    every = learn_structure(x, test="gaussian", progress=False)
    monkeypatch.setattr(threshold_module, "SEARCHED", 60)
    looked = []
    original = threshold_module.grid
    monkeypatch.setattr(threshold_module, "grid", lambda found: looked.append(found.shape) or original(found))
    some = learn_structure(x, test="gaussian", progress=False)
    assert looked == [(60, 60)]
    assert some.num_variables == 120
    assert 0.3 < some.settings["threshold"] / every.settings["threshold"] < 3


@pytest.mark.parametrize("test", ["gaussian", "cmi"])
def test_some_variables_fall_apart_as_they_do_among_all_columns(test):
    """A graph of a few variables alone, and the same within the graph of all columns: the same sets, faster."""
    rng = np.random.default_rng(1)
    data, X = PreparedData.prepare(pixels(), 3), np.sort(rng.permutation(64)[:40])
    on_half = {path: find_test(test).on(data, half_weights(data.n, 0, path), 0.05) for path in [(0,), (0, 0)]}
    sizes = []
    for threshold in (0.02, 0.1, 0.3, 0.5):

        def within(path, threshold=threshold):
            return AtThreshold(on_half[path], 0.05, threshold)

        def alone(path, threshold=threshold):
            return AtThreshold(on_half[path], 0.05, threshold, X)

        slow = autonomous_sets(64, X, 1, within, Budget(), 0)
        fast = autonomous_sets(40, np.arange(40), 1, alone, Budget(), 0)
        assert [part.tolist() for part in slow] == [X[part].tolist() for part in fast]
        sizes.append(len(slow))
    assert max(sizes) > 1
