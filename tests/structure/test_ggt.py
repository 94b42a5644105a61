import copy
import json
import math
import pickle
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl._utils.stored import FORMAT
from brainet_pl.structure import GGT, Branch, Leaf, Node, SubNetwork, learn_structure
from brainet_pl.structure.text import short


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
@given(data=st.data())
def test_counts_agree_with_listing_everything(any_tree, data):
    ggt = GGT(data.draw(any_tree), 6)
    if ggt.num_subnetworks > 3000:
        return
    everything = list(ggt.enumerate())
    assert len(everything) == len(set(everything)) == ggt.num_subnetworks
    assert len({pattern(ggt, g) for g in everything}) == ggt.num_unique_structures


def test_json_keeps_everything():
    ggt = learn_structure(np.random.default_rng(0).normal(size=(200, 5)), threshold=0.001, progress=False)
    again = GGT.from_json(ggt.to_json())
    assert again == ggt
    assert again.fingerprint == ggt.fingerprint
    assert again.settings == ggt.settings
    assert again.sample(5, rng=3) == ggt.sample(5, rng=3)
    json.loads(ggt.to_json())
    with pytest.raises(ValueError, match=f"JSON format {FORMAT}"):
        GGT.from_json('{"format": 99}')


def test_copies_and_pickles_work(small_ggt):
    ggt = small_ggt
    for again in (copy.deepcopy(ggt), pickle.loads(pickle.dumps(ggt))):
        assert again == ggt
        assert again.sample(5, 1.0) == ggt.sample(5, 1.0)
        assert again.path(again.map()) == ggt.path(ggt.map())


def test_immutable(small_ggt):
    ggt = small_ggt
    with pytest.raises(AttributeError):
        ggt.root = ggt.root
    with pytest.raises(AttributeError):
        ggt.root.branches = ()


def test_dag_of_a_subnetwork_and_errors(small_ggt):
    a = Leaf((0, 1), ((), (0,)), -1.0)
    ggt = GGT(Node((0, 1), (Branch((), a),)), 2)
    assert ggt.dag(ggt.map()).tolist() == [[False, True], [False, False]]
    for wrong in (SubNetwork(()), SubNetwork((5,)), SubNetwork((0, 0))):
        with pytest.raises(ValueError, match="does not belong to this tree"):
            ggt.leaves(wrong)
    with pytest.raises(ValueError, match="temperature of at least 0"):
        ggt.sample(1, -1.0)
    with pytest.raises(ValueError, match="at most 2 sub-networks"):
        small_ggt.enumerate(limit=2)


def test_one_object_in_two_places_is_two_nodes(make_leaf):
    shared = Node((0,), (Branch((), make_leaf((0,), -1.0)), Branch((), make_leaf((0,), -2.0))))
    ggt = GGT(Node((0, 1), tuple(Branch((shared,), make_leaf((1,), score)) for score in (0.0, -1.0))), 2)
    assert len(ggt.nodes) == 9
    assert [ggt.path(g)[1][0] for g in ggt.enumerate()] == [1, 1, 5, 5]
    assert GGT.from_dict(ggt.to_dict()) == ggt
    assert ggt.only(SubNetwork((1, 0))).num_subnetworks == 1


def test_a_dictionary_is_a_copy(small_ggt):
    data = small_ggt.to_dict()
    data["nodes"][0]["branches"][0].clear()
    assert small_ggt.to_dict()["nodes"][0]["branches"][0] == [1, 5]


def test_summary_needs_no_matplotlib(small_ggt, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "brainet_pl.structure.draw"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it is an error now
    assert "3 sub-networks, 3 of them different" in small_ggt.summary()


def test_more_subnetworks_than_floats_can_count(make_leaf):
    halves = [Node((v,), (Branch((), make_leaf((v,), 0.0)), Branch((), make_leaf((v,), 0.0)))) for v in range(1100)]
    ggt = GGT(Node(tuple(range(1101)), (Branch(tuple(halves), make_leaf((1100,), 0.0)),)), 1101)
    assert ggt.num_subnetworks == 2**1100
    assert ggt.perplexity() == math.inf
    assert "about 10^331 sub-networks" in ggt.summary()
    assert short(2**20_000) == "about 10^6020"  # more digits than Python prints


@pytest.mark.parametrize("temperature", [1.0, 30.0, 1e9])
def test_edges_and_distinct_structures_against_every_subnetwork(features, temperature):
    ggt = learn_structure(features[:, :6], s=3, max_order=2, threshold=0.05, progress=False)
    every = list(ggt.enumerate())
    assert len(every) > 10
    edges = sum(math.exp(ggt.log_prob(way, temperature)) * ggt.dag(way) for way in every)
    np.testing.assert_allclose(ggt.edge_probabilities(temperature), edges, atol=1e-12)

    scores, ways = {}, Counter()
    for way in every:
        name = ggt.dag(way).tobytes()
        scores[name], ways[name] = ggt.score(way), ways[name] + 1
    most = max(scores.values())
    weight = {name: math.exp((score - most) / temperature) for name, score in scores.items()}
    found = ggt.structures(temperature)
    assert len(found) == len(scores) < len(every)  # several ways lead to one network
    for structure in found:
        dag = np.zeros((6, 6), dtype=bool)
        for x, parents in enumerate(structure.parents):
            dag[list(parents), x] = True
        name = dag.tobytes()
        assert structure.probability == pytest.approx(weight[name] / sum(weight.values()), abs=1e-12)
        assert structure.subnetworks == ways[name]
    assert [s.probability for s in found] == sorted((s.probability for s in found), reverse=True)


def test_at_temperature_zero_the_best_structures_share_everything(small_ggt):
    found = small_ggt.structures(0.0)
    best = max(structure.score for structure in found)
    assert sum(s.probability for s in found if s.score == best) == pytest.approx(1)
    with pytest.raises(ValueError, match="at most 2 sub-networks"):
        small_ggt.structures(limit=2)


def test_names_are_shown_and_travel_and_change_nothing_else():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4))
    x[:, 1] += x[:, 0]
    ggt = learn_structure(x, test="gaussian", progress=False)
    named = ggt.named(["a", "b", "c", "d"])
    assert named == ggt
    assert named.fingerprint == ggt.fingerprint
    assert "variables: a, b, c, d" in named.summary()
    assert "(c)" in named.summary() or "c, d" in named.summary()
    again = GGT.from_json(named.to_json())
    assert again.names == ("a", "b", "c", "d")
    assert "names" not in ggt.to_dict()
    for wrong in (["a"], [1, 2, 3, 4], "abcd"):
        with pytest.raises(ValueError, match="expected names of its 4 variables"):
            GGT.from_dict(ggt.to_dict() | {"names": wrong})
    with pytest.raises(ValueError, match="expected a name for each of 4 variables, got 2"):
        ggt.named(["a", "b"])


def many_leaves(count, score):
    leaves = tuple(Leaf((v,), ((v + 1,),), score * v, ((v + 1, 0),)) for v in range(count))
    rest = Node(
        (count, count + 1), tuple(Branch((), Leaf((count, count + 1), ((), ()), s, ((), ()))) for s in (0.0, -1))
    )
    return GGT(Node(tuple(range(count + 2)), (Branch(leaves, rest), Branch((), rest))), count + 2)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), most=st.integers(1, 4))
def test_joined_ancestors_keep_the_posterior_and_all_variables(any_tree, data, most):
    ggt = GGT(data.draw(any_tree), 6)
    if ggt.num_subnetworks > 300:
        return
    joined = ggt.join_ancestors(most)
    assert joined.num_subnetworks == ggt.num_subnetworks
    for subnetwork in ggt.enumerate():
        assert joined.log_prob(subnetwork, 0.7) == pytest.approx(ggt.log_prob(subnetwork, 0.7), abs=1e-9)
    for node in joined.nodes:
        if isinstance(node, Node):
            for branch in node.branches:
                assert sorted(v for child in branch.children for v in child.variables) == sorted(node.variables)
                assert len(branch.ancestors) <= max(most, 1 + sum(isinstance(a, Node) for a in branch.ancestors))
    assert GGT.from_json(joined.to_json()) == joined


@pytest.mark.parametrize("most", [1, 3, 10, 40])
def test_joined_leaves_are_even_and_know_parents_and_neighbours(most):
    ggt = many_leaves(40, -0.1)
    joined = ggt.join_ancestors(most)
    leaves = joined.root.branches[0].ancestors
    assert len(leaves) == most == joined.most_ancestors
    sizes = [len(leaf.variables) for leaf in leaves]
    assert sum(sizes) == 40
    assert max(sizes) - min(sizes) <= 1
    for leaf in leaves:
        assert leaf.score == pytest.approx(-0.1 * sum(leaf.variables))
        assert [p for (p,) in leaf.parents] == [v + 1 for v in leaf.variables]
        assert list(leaf.neighbours) == [(v + 1, 0) for v in leaf.variables]
