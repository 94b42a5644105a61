"""`num_params="auto"`: one size for all heads, and never less than a tree needs."""

import pytest
import torch
from torch.nn import functional as F

from brainet_pl.network import (
    MLP,
    Bayes,
    Ensemble,
    Linear,
    MCDropout,
    Tree,
    TreeDropout,
    TreeEnsemble,
    smallest_budget,
    stacked_tree,
)
from brainet_pl.network.base import resolve_budget
from brainet_pl.structure import GGT, Branch, Leaf, Node, learn_structure

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


@pytest.mark.parametrize("kind", [TreeEnsemble, TreeDropout])
def test_nobody_gets_fewer_parameters_than_the_tree_needs(kind):
    ggt = crowded(300)
    members = 5 if kind is TreeEnsemble else 1
    needed = members * smallest_budget(ggt.only(ggt.map()), 10)
    with pytest.raises(ValueError, match="expected a budget of at least"):
        kind(num_params=needed // 2).build(300, 10, ggt)
    head = kind().build(300, 10, ggt)
    assert head.num_params == pytest.approx(max(75_000, 2 * needed), rel=0.1)
    assert kind is TreeDropout or 2 * needed > 75_000


def test_small_sets_are_joined_where_a_layer_for_each_is_too_much():
    ggt = crowded(300)
    needed = smallest_budget(ggt, 10)
    assert 2 * needed > 75_000
    head = Tree().build(300, 10, ggt)
    assert head.num_params == pytest.approx(75_000, rel=0.02)
    assert 1 < head.ggt.most_ancestors < ggt.most_ancestors
    again = Tree().build(300, 10, head.ggt)  # as from a checkpoint
    assert again.ggt == head.ggt
    assert again.num_params == head.num_params
    assert Tree(num_params=needed).build(300, 10, ggt).ggt == ggt  # a budget that allows for all has all
    small = Tree(num_params=needed // 2).build(300, 10, ggt)
    assert small.num_params <= 0.51 * needed
    assert Tree().build(40, 10, crowded(40)).ggt == crowded(40)
    with pytest.raises(ValueError, match="expected a budget of at least"):
        Tree(num_params=100, skip=None).build(300, 10, ggt)


SIZES = {  # parameters for 1, 2, 8, 10, 11 and 16 outputs, as they were before budgets knew the number of outputs
    ("stacked", Tree): (29887, 30129, 30101, 29845, 30081, 30160),
    ("stacked", MLP): (30135, 29889, 29877, 30117, 29865, 30085),
    ("stacked", MCDropout): (30135, 29889, 29877, 30117, 29865, 30085),
    ("stacked", Ensemble): (29975, 30165, 30280, 29625, 29805, 29660),
    ("stacked", Bayes): (29851, 30002, 29792, 30086, 29675, 29836),
    ("stacked", TreeEnsemble): (29975, 30165, 30280, 29625, 29805, 29660),
    ("stacked", TreeDropout): (30135, 29889, 29877, 30117, 29865, 30085),
    ("crowded", Tree): (15977, 15982, 16014, 15986, 16023, 16022),
    ("crowded", MLP): (16007, 16114, 15973, 15922, 16025, 16016),
    ("crowded", MCDropout): (16007, 16114, 15973, 15922, 16025, 16016),
    ("crowded", Ensemble): (15775, 15970, 15880, 16250, 15805, 16060),
    ("crowded", Bayes): (15961, 15734, 15820, 15718, 15851, 15760),
    ("crowded", TreeEnsemble): (15965, 16010, 16005, 16055, 16035, 16070),
    ("crowded", TreeDropout): (16009, 16002, 16004, 16015, 15991, 16006),
}


@pytest.mark.parametrize(("tree", "kind"), SIZES)
@pytest.mark.filterwarnings("ignore:expected .* parameters within")
def test_few_outputs_change_no_size(tree, kind):
    ggt = {"stacked": stacked_tree(120, 2), "crowded": crowded(40)}[tree]
    heads = [kind().build(ggt.num_variables, outputs, ggt) for outputs in (1, 2, 8, 10, 11, 16)]
    assert tuple(head.num_params for head in heads) == SIZES[tree, kind]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.filterwarnings("ignore:expected .* parameters within")
@pytest.mark.parametrize("d", [64, 512])
def test_many_outputs_have_room(kind, d):
    head = kind().build(d, 1000, stacked_tree(d, 2))
    assert head.num_params == pytest.approx(resolve_budget("auto", d, out_features=1000), rel=0.1)
    assert head.num_params > 2 * d * 1000
    assert kind(num_params=40_000).build(d, 1000, stacked_tree(d, 2)).num_params < 70_000  # a number is a number


@pytest.mark.parametrize("outputs", [17, 100, 1000])
@pytest.mark.parametrize("d", [2, 64, 512])
def test_a_tree_of_any_outputs_keeps_its_skip(d, outputs):
    assert Tree().build(d, outputs, stacked_tree(d, 2)).skip is not None


def test_a_thousand_classes():
    """Gaussian classes in 64 dimensions, which a linear layer tells apart."""
    torch.manual_seed(0)
    means = 1.5 * torch.randn(1000, 64)
    train, test = torch.arange(20_000) % 1000, torch.arange(4_000) % 1000
    x, z = (means[y] + torch.randn(len(y), 64) for y in (train, test))
    ggt = learn_structure(x, max_rows=2000, progress=False)
    found = {}
    for head in (Linear().build(64, 1000), Tree().build(64, 1000, ggt)):
        optimizer = torch.optim.Adam(head.parameters(), 3e-3)
        for _ in range(3):
            for rows in torch.randperm(len(x)).split(200):
                outputs = head(x[rows])
                draws = outputs.flatten(0, -2)
                loss = F.cross_entropy(draws, train[rows].repeat(len(draws) // len(rows)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            outputs = head.eval().passes(z, 5).values
            found[type(head).__name__] = float((outputs.softmax(-1).mean(0).argmax(-1) == test).float().mean())
    assert found["BRAINetHead"] >= found["LinearHead"]
    assert found["BRAINetHead"] > 0.95
