"""The posterior against listing every sub-network, and the samplers against their own probabilities."""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from brainet_pl.structure import GGT, Branch, Leaf, Node
from brainet_pl.structure.posterior import warm_temperature


@settings(max_examples=100, deadline=None)
@given(data=st.data(), temperature=st.sampled_from([0.3, 1.0, 5.0, math.inf]))
def test_probabilities_are_proportional_to_exp_score(any_tree, data, temperature):
    ggt = GGT(data.draw(any_tree), 6)
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
def test_exact_sampler_by_chi_square(temperature, small_ggt):
    ggt = small_ggt
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
def test_bottom_up_sampler_is_the_papers(temperature, small_ggt):
    ggt = small_ggt
    expected = bottom_up_probabilities(ggt.root, temperature)
    counts = Counter(g.choices for g in ggt.sample_bottom_up(10_000, temperature, rng=0))
    observed = np.array([counts[choices] for choices, _ in expected])
    assert chisquare(observed, np.array(list(expected.values())) * 10_000).pvalue > 0.001


def test_limits_of_the_temperature(small_ggt):
    ggt = small_ggt
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


def test_sampling_does_not_touch_branches_that_are_not_taken(monkeypatch, make_leaf):
    wide = Node((0, 1), tuple(Branch((make_leaf((0,), 0.0),), make_leaf((1,), -float(t))) for t in range(500)))
    ggt = GGT(wide, 2)
    ggt.branch_probabilities(1.0)  # the posterior itself is one pass over the tree, made once
    visited = []
    monkeypatch.setattr(
        Leaf, "__getattribute__", lambda self, name: visited.append(1) or object.__getattribute__(self, name)
    )
    ggt.sample(3, 1.0)
    assert len(visited) < 60


def test_auto_temperature_keeps_a_collapsed_posterior_alive(make_leaf):
    far = Node(
        (0, 1), (Branch((), make_leaf((0, 1), 0.0)), Branch((make_leaf((0,), -6000.0),), make_leaf((1,), -6000.0)))
    )
    ggt = GGT(far, 2)
    assert ggt.perplexity(1.0) == pytest.approx(1.0)
    assert 1.3 < ggt.perplexity() < 2
    near = Node((0, 1), (Branch((), make_leaf((0, 1), 0.0)), Branch((make_leaf((0,), -0.1),), make_leaf((1,), -0.1))))
    assert GGT(near, 2).auto_temperature == 1.0


@pytest.mark.parametrize("score", [-8028.47399141369, -1.2e7, -3e-9])
def test_auto_temperature_ends_when_all_scores_are_equal(score, make_leaf):
    alike = Node((0, 1), tuple(Branch((), make_leaf((0, 1), score + rounding)) for rounding in (0.0, 1e-9, 2e-9)))
    assert GGT(alike, 2).auto_temperature == 1.0


@pytest.mark.parametrize("score", [-math.inf, math.inf, math.nan])
def test_a_score_that_is_not_finite_is_refused_before_anything_can_hang(score, make_leaf):
    with pytest.raises(ValueError, match=r"finite score of every leaf, got .* check the score"):
        GGT(Node((0,), (Branch((), make_leaf((0,), score)), Branch((), make_leaf((0,), 0.0)))), 1)


@pytest.mark.parametrize("reached", [0.0, math.nan])
def test_the_search_for_a_temperature_ends_whatever_the_entropy(reached):
    assert warm_temperature(lambda temperature: reached, 8) > 0


def test_huge_scores_end(make_leaf):
    scores = (0.0, -1e300, -1.7e308)
    ggt = GGT(Node((0,), tuple(Branch((), make_leaf((0,), score)) for score in scores)), 1)
    assert 1 <= ggt.perplexity() <= 3
