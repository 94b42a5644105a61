import copy
import json
import math
import pickle
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from brainet_pl.structure import GGT, Branch, Leaf, Node, SubNetwork, learn_structure


def leaf(variables, score):
    return Leaf(tuple(variables), tuple(() for _ in variables), score)


@st.composite
def trees(draw, variables=tuple(range(6)), depth=3):
    """Any tree: what the sampler and the counters must cope with."""
    if depth == 0 or draw(st.booleans()):
        return leaf(variables, draw(st.floats(-4, 0)))
    branches = []
    for _ in range(draw(st.integers(1, 3))):
        k = draw(st.integers(0, len(variables) - 1))
        cut = draw(st.integers(0, k)) if k else 0
        parts = [part for part in (variables[:cut], variables[cut:k]) if part]
        ancestors = tuple(draw(trees(part, depth - 1)) for part in parts)
        branches.append(Branch(ancestors, draw(trees(variables[k:], depth - 1))))
    return Node(tuple(variables), tuple(branches))


def small_ggt():
    inner = Node((0, 1), (Branch((), leaf((0, 1), -1.0)), Branch((leaf((0,), -0.2),), leaf((1,), -0.3))))
    first = Branch((inner,), leaf((2, 3), -2.0))
    second = Branch((leaf((0,), -0.5), leaf((2,), -0.1)), leaf((1, 3), -1.4))
    return GGT(Node((0, 1, 2, 3), (first, second)), 4, num_rows=10)


def pattern(ggt, subnetwork):
    """The nested sets of one sub-network, by walking it."""
    choices = iter(subnetwork.choices)

    def walk(node):
        if isinstance(node, Leaf):
            return ("leaf", frozenset(node.variables))
        branch = node.branches[next(choices)]
        ancestors = [walk(a) for a in branch.ancestors]
        return (frozenset(ancestors), walk(branch.descendant))

    return walk(ggt.root)


@settings(max_examples=150, deadline=None)
@given(trees())
def test_counts_agree_with_listing_everything(tree):
    ggt = GGT(tree, 6)
    if ggt.num_subnetworks > 3000:
        return
    everything = list(ggt.enumerate())
    assert len(everything) == len(set(everything)) == ggt.num_subnetworks
    assert len({pattern(ggt, g) for g in everything}) == ggt.num_unique_structures


@settings(max_examples=100, deadline=None)
@given(trees(), st.sampled_from([0.3, 1.0, 5.0, math.inf]))
def test_probabilities_are_proportional_to_exp_score(tree, temperature):
    ggt = GGT(tree, 6)
    if ggt.num_subnetworks > 500:
        return
    everything = list(ggt.enumerate())
    weights = np.exp([ggt.score(g) / temperature for g in everything])
    expected = weights / weights.sum()
    got = np.exp([ggt.log_prob(g, temperature) for g in everything])
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    entropy = -(expected * np.log(expected)).sum()
    assert ggt.perplexity(temperature) == pytest.approx(np.exp(entropy), rel=1e-9)
    assert ggt.score(ggt.map()) == pytest.approx(max(ggt.score(g) for g in everything))


def frequencies(draws, everything):
    counts = Counter(draws)
    return np.array([counts[g] for g in everything])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_exact_sampler_by_chi_square(temperature):
    ggt = small_ggt()
    everything = list(ggt.enumerate())
    expected = np.exp([ggt.log_prob(g, temperature) for g in everything]) * 20_000
    observed = frequencies(ggt.sample(20_000, temperature, rng=0), everything)
    assert chisquare(observed, expected).pvalue > 0.001


def bottom_up_probabilities(node, temperature):
    """{(choices, score): probability} of the paper's sampler, by summing over everything it may draw."""
    if isinstance(node, Leaf):
        return {((), node.score): 1.0}
    options = []
    for t, branch in enumerate(node.branches):
        parts = [bottom_up_probabilities(c, temperature) for c in branch.children]
        option = Counter()
        for combination in product(*(p.items() for p in parts)):
            choices = (t, *(c for (chosen, _), _ in combination for c in chosen))
            option[choices, sum(score for (_, score), _ in combination)] += math.prod(p for _, p in combination)
        options.append(option)
    result = Counter()
    for drawn in product(*(o.items() for o in options)):
        probability = math.prod(p for _, p in drawn)
        weights = np.exp([score / temperature for (_, score), _ in drawn])
        for (key, _), weight in zip(drawn, weights / weights.sum(), strict=True):
            result[key] += probability * weight
    return result


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_bottom_up_sampler_is_the_papers(temperature):
    ggt = small_ggt()
    expected = bottom_up_probabilities(ggt.root, temperature)
    counts = Counter(g.choices for g in ggt.sample_bottom_up(10_000, temperature, rng=0))
    observed = np.array([counts[choices] for choices, _ in expected])
    assert chisquare(observed, np.array(list(expected.values())) * 10_000).pvalue > 0.001


def test_limits_of_the_temperature():
    ggt = small_ggt()
    best = ggt.map()
    assert set(ggt.sample(20, 0.0)) == set(ggt.sample(20, 1e-6)) == {best}
    assert set(ggt.sample_bottom_up(20, 0.0)) == {best}
    assert ggt.log_prob(best, 0.0) == 0
    everything = list(ggt.enumerate())
    # exact: alike over sub-networks (2 below the first branch, 1 below the second) …
    assert np.exp([ggt.log_prob(g, math.inf) for g in everything]) == pytest.approx([1 / 3] * 3)
    # … the paper's sampler and the one for training: alike over the branches of a node
    for draws in (ggt.sample_bottom_up(8000, math.inf, rng=0), ggt.sample_uniform(8000, rng=0)):
        assert chisquare(frequencies(draws, everything), np.array([0.25, 0.25, 0.5]) * 8000).pvalue > 0.001


def test_sampling_does_not_touch_branches_that_are_not_taken(monkeypatch):
    wide = Node((0, 1), tuple(Branch((leaf((0,), 0.0),), leaf((1,), -float(t))) for t in range(500)))
    ggt = GGT(wide, 2)
    ggt.branch_probabilities(1.0)  # the posterior itself is one pass over the tree, made once
    visited = []
    monkeypatch.setattr(
        Leaf, "__getattribute__", lambda self, name: visited.append(1) or object.__getattribute__(self, name)
    )
    ggt.sample(3, 1.0)
    assert len(visited) < 60


def test_auto_temperature_keeps_a_collapsed_posterior_alive():
    far = Node((0, 1), (Branch((), leaf((0, 1), 0.0)), Branch((leaf((0,), -6000.0),), leaf((1,), -6000.0))))
    ggt = GGT(far, 2)
    assert ggt.perplexity(1.0) == pytest.approx(1.0)
    assert 1.3 < ggt.perplexity() < 2
    near = Node((0, 1), (Branch((), leaf((0, 1), 0.0)), Branch((leaf((0,), -0.1),), leaf((1,), -0.1))))
    assert GGT(near, 2).auto_temperature == 1.0


@pytest.mark.parametrize("score", [-8028.47399141369, -1.2e7, -3e-9])
def test_auto_temperature_ends_when_all_scores_are_equal(score):
    alike = Node((0, 1), tuple(Branch((), leaf((0, 1), score + rounding)) for rounding in (0.0, 1e-9, 2e-9)))
    assert GGT(alike, 2).auto_temperature == 1.0


def test_json_keeps_everything():
    ggt = learn_structure(np.random.default_rng(0).normal(size=(200, 5)), threshold=0.001, progress=False)
    again = GGT.from_json(ggt.to_json())
    assert again == ggt
    assert again.fingerprint == ggt.fingerprint
    assert again.settings == ggt.settings
    assert again.sample(5, rng=3) == ggt.sample(5, rng=3)
    json.loads(ggt.to_json())
    with pytest.raises(ValueError, match="JSON format 1"):
        GGT.from_json('{"format": 99}')


def test_copies_and_pickles_work():
    ggt = small_ggt()
    for again in (copy.deepcopy(ggt), pickle.loads(pickle.dumps(ggt))):
        assert again == ggt
        assert again.sample(5, 1.0) == ggt.sample(5, 1.0)
        assert again.path(again.map()) == ggt.path(ggt.map())


def test_immutable():
    ggt = small_ggt()
    with pytest.raises(AttributeError):
        ggt.root = ggt.root
    with pytest.raises(AttributeError):
        ggt.root.branches = ()


def test_dag_of_a_subnetwork_and_errors():
    a = Leaf((0, 1), ((), (0,)), -1.0)
    ggt = GGT(Node((0, 1), (Branch((), a),)), 2)
    assert ggt.dag(ggt.map()).tolist() == [[False, True], [False, False]]
    for wrong in (SubNetwork(()), SubNetwork((5,)), SubNetwork((0, 0))):
        with pytest.raises(ValueError, match="does not belong to this tree"):
            ggt.leaves(wrong)
    with pytest.raises(ValueError, match="temperature of at least 0"):
        ggt.sample(1, -1.0)
    with pytest.raises(ValueError, match="at most 2 sub-networks"):
        small_ggt().enumerate(limit=2)
