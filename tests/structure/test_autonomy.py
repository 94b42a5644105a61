"""Fast ways of the recursion against slow ones: single conditions, and caps on very many of them."""

import numpy as np
import pytest

from brainet_pl.structure import PreparedData, find_test, learn_structure
from brainet_pl.structure import evidence as evidence_module
from brainet_pl.structure.evidence import Budget, Evidence, strongest
from brainet_pl.structure.independence import SingleMargins
from brainet_pl.structure.pdag import complete_graph


class OnlyBlocks:
    """A test without its fast way."""

    def __init__(self, test):
        self.block, self.pairs = test.block, test.pairs


@pytest.mark.parametrize("name", ["gaussian", "fisher_z"])
@pytest.mark.parametrize("ends", [64, 3])
def test_single_conditions_in_one_go_or_one_by_one(features, name, ends, monkeypatch):
    monkeypatch.setattr(evidence_module, "ENDS", ends)
    data = PreparedData.prepare(features, 3)
    test = find_test(name).on(data, None, 0.05)
    assert isinstance(test, SingleMargins)
    assert not isinstance(OnlyBlocks(test), SingleMargins)
    rng = np.random.default_rng(0)
    pairs = rng.random((10, 10)) < 0.6
    pairs = (pairs | pairs.T) & complete_graph(10)
    potential = (rng.random((10, 10)) < 0.5) & complete_graph(10)
    found = []
    for tester in (test, OnlyBlocks(test)):
        evidence = Evidence.none(10)
        evidence.collect(pairs, pairs, 0, tester, Budget())
        evidence.collect(pairs, potential, 1, tester, Budget())
        found.append(evidence)
    fast, slow = found
    np.testing.assert_allclose(fast.best, slow.best, atol=1e-9)
    apart = slow.best < -1e-9
    assert apart.any()
    x, y = np.nonzero(apart)
    sets = [[e.conditions[i] for i in e.witness[x, y]] for e in (fast, slow)]
    assert sets[0] == sets[1]
    assert {len(members) for members in sets[0]} == {0, 1}
    for ours, theirs in zip(fast.separations(apart), slow.separations(apart), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_budget_of_tests_stops_at_the_same_place_each_time(features):
    trees = set()
    for _ in range(3):
        with pytest.warns(UserWarning, match="budget was spent"):
            trees.add(learn_structure(features, test="gaussian", max_order=2, max_tests=70, progress=False).fingerprint)
    assert len(trees) == 1


def test_of_very_many_conditions_the_strongest_count(features, monkeypatch):
    test = find_test("gaussian").on(PreparedData.prepare(features, 3), None, 0.05)
    potential = complete_graph(10)
    assert strongest(potential, test) is potential  # nothing to leave out
    monkeypatch.setattr(evidence_module, "MOST_CONDITIONS", 3)
    kept = strongest(potential, test)
    for x in range(10):
        others = np.delete(np.arange(10), x)
        expected = others[np.argsort(-np.abs(test.correlation[x, others]), kind="stable")][:3]
        assert sorted(np.flatnonzero(kept[x])) == sorted(expected)
    assert strongest(potential, OnlyBlocks(test)) is potential  # nobody can say which are stronger


def test_the_cap_keeps_trees_independent_of_the_order_of_columns(features, monkeypatch):
    monkeypatch.setattr(evidence_module, "MOST_CONDITIONS", 2)
    columns = np.random.default_rng(0).permutation(10)
    one = learn_structure(features, test="gaussian", threshold=0.02, progress=False)
    other = learn_structure(features[:, columns], test="gaussian", threshold=0.02, progress=False)
    assert [leaf_sets(one, range(10))] == [leaf_sets(other, columns)]


def leaf_sets(ggt, names):
    return sorted(sorted(int(names[v]) for v in node.variables) for node in ggt.nodes)


def test_the_paper_s_samples_meet_no_cap(features, monkeypatch):
    settings = {"test": "gaussian", "threshold": 0.02, "progress": False}
    before = {b: learn_structure(features, bootstrap=b, **settings).fingerprint for b in ("paper", "half")}
    monkeypatch.setattr(evidence_module, "MOST_CONDITIONS", 1)
    after = {b: learn_structure(features, bootstrap=b, **settings).fingerprint for b in ("paper", "half")}
    assert after["paper"] == before["paper"]
    assert after["half"] != before["half"]
