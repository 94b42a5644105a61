"""`num_params="auto"`: one size for all heads, and never less than a tree needs."""

import pytest

from brainet_pl.network import (
    MLP,
    Bayes,
    Ensemble,
    MCDropout,
    Tree,
    TreeDropout,
    TreeEnsemble,
    smallest_budget,
    stacked_tree,
)
from brainet_pl.structure import GGT, Branch, Leaf, Node

HEADS = [Tree, MLP, MCDropout, Ensemble, Bayes, TreeEnsemble, TreeDropout]


def crowded(d):
    """A tree whose every layer is one of many: half of the variables are ancestor sets of their own."""
    alone = tuple(Leaf((v,), ((),), 0.0) for v in range(d // 2))
    rest = tuple(range(d // 2, d))
    branch = Branch(alone, Leaf(rest, tuple(() for _ in rest), 0.0))
    return GGT(Node(tuple(range(d)), (branch, branch)), d)


@pytest.mark.parametrize("kind", HEADS)
def test_heads_that_nobody_sized_have_one_size(kind):
    for d, expected in ((20, 16_000), (120, 30_000)):
        head = kind().build(d, 10, stacked_tree(d, 2))
        assert head.num_params == pytest.approx(expected, rel=0.05)
    assert kind().settings()["num_params"] == "auto"
    assert kind(num_params=5000).build(20, 10, stacked_tree(20, 2)).num_params == pytest.approx(5000, rel=0.05)
    for wrong in ("all", 0, None, 2.5):
        with pytest.raises(ValueError, match="num_params"):
            kind(num_params=wrong)


@pytest.mark.parametrize("kind", [Tree, TreeEnsemble, TreeDropout])
def test_nobody_gets_fewer_parameters_than_the_tree_needs(kind):
    ggt = crowded(300)
    members = 5 if kind is TreeEnsemble else 1
    wiring = ggt if kind is Tree else ggt.only(ggt.map())
    needed = members * smallest_budget(wiring, 10)
    with pytest.raises(ValueError, match="expected a budget of at least"):
        kind(num_params=needed // 2).build(300, 10, ggt)
    head = kind().build(300, 10, ggt)
    assert head.num_params == pytest.approx(max(75_000, 2 * needed), rel=0.1)
    assert kind is TreeDropout or 2 * needed > 75_000
