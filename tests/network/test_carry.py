"""Weights carried from one tree to another, against a plain description of what each layer reads."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl.callbacks.structure import exchange
from brainet_pl.network import Tree, TreeEnsemble
from brainet_pl.network.carry import carry, matching
from brainet_pl.network.plan import FIELDS
from brainet_pl.structure import GGT, Branch, Leaf, Node, learn_structure


def leaf(*variables, score=0.0):
    return Leaf(variables, tuple(() for _ in variables), score)


def node(*branches):
    """Each branch is (ancestors, descendant)."""
    first = branches[0]
    variables = tuple(sorted({v for part in (*first[0], first[1]) for v in part.variables}))
    return Node(variables, tuple(Branch(tuple(ancestors), descendant) for ancestors, descendant in branches))


def small(score=0.0, change=False):
    """Two branches over six variables; `change` moves a variable in the second."""
    left, right = ((leaf(0, 1), leaf(2, 3), leaf(4, 5)), (leaf(0, 2), leaf(1, 3), leaf(4, 5)))
    if change:
        right = (leaf(0, 3), leaf(1, 2), leaf(4, 5))
    first = node((left[:2], left[2]), (left[:1], leaf(2, 3, 4, 5, score=score)))
    second = node(
        (right[:2], right[2]), (right[:1], leaf(*sorted({1, 2, 3, 4, 5} - {right[0].variables[1]}), score=score))
    )
    return GGT(node(((), first), ((), second)), 6, 100)


def build(ggt, settings=None, seed=0):
    torch.manual_seed(seed)
    return (settings or Tree(num_params=600)).build(ggt.num_variables, 3, ggt)


def described(plan):
    """(node, branch, sources) of each layer → all that it stands for, in words, and whether it was found again."""
    ggt = plan.ggt

    def words(number):
        if number >= len(ggt.nodes):
            return f"input {number - len(ggt.nodes)}"
        part = ggt.nodes[number]
        if isinstance(part, Leaf) and not plan.has_fields:
            return f"inputs {part.variables}"
        inside = []  # whichever branch comes first
        for t in range(1 if isinstance(part, Leaf) else len(part.branches)):
            own = [x for x in layers if (x.node, x.branch) == (number, t)]
            if isinstance(part, Leaf):
                own = [x for x in layers if x.node == FIELDS and plan.inputs_of(x)[0] in part.variables]
                own = [x for x in own if x.branch == plan.leaf_sets[number]]
            inside.append(f"branch {[f'{[words(j) for j in x.sources]} to {x.width}' for x in own]}")
        return f"node {part.variables} of {sorted(inside)}"

    layers = [x for level in plan.levels for x in level.layers]
    found = {}
    for x in layers:
        over = f"fields {x.branch}" if x.node == FIELDS else ggt.nodes[x.node].variables
        found[x.node, x.branch, x.sources] = f"{over} reads {[words(j) for j in x.sources]} to {x.width}"
    return found


@pytest.mark.parametrize(
    "kind", [Tree(num_params=600), Tree(num_params=600, norm=None), TreeEnsemble(num_params=900, members=2)]
)
def test_an_equal_wiring_keeps_everything(kind):
    old, new = build(small(), kind), build(small(score=-3.0), kind, seed=1)
    found = carry(old, new)
    assert found.share == 1
    assert found.whole == {name for name, _ in new.named_parameters()}
    for name, value in new.state_dict().items():
        if name not in ("layers.layout", "_extra_state"):  # which tree it is, and what was settled on it
            torch.testing.assert_close(value, old.state_dict()[name])


def test_a_branch_that_stays_computes_what_it_did():
    """The first sub-networks of the root are the same in both trees, and so are their outputs."""
    old, new = build(small()), build(small(change=True), seed=1)
    for head in (old, new):
        torch.manual_seed(2)
        head.layers.running_mean.uniform_(-1, 1)
        head.layers.running_var.uniform_(0.5, 2)
    assert len(old.plan.root_rows) == len(new.plan.root_rows)
    fresh = copy.deepcopy(new)
    found = carry(old, new)
    assert 0 < found.share < 1
    assert "output.weight" not in found.whole
    assert "output.bias" in found.whole
    with torch.no_grad():
        for head in (old, new, fresh):  # the root's rows alone: of the output a part is fresh
            head.output.weight.copy_(torch.arange(head.output.weight.numel()).view_as(head.output.weight) / 10)
            head.output.bias.zero_()
            head.eval()
    x = torch.randn(20, 6)
    same = 0
    for i, subnetwork in enumerate(old.ggt.enumerate(100)):
        a, b, c = (head.enumerate(x).logits[i] for head in (old, new, fresh))
        if dict(old.ggt.path(subnetwork))[0] == 0:
            torch.testing.assert_close(a, b)
            assert not torch.allclose(a, c)
            same += 1
    assert same == 2


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 2]), st.sampled_from([None, 2]))
@settings(max_examples=15, deadline=None)
def test_what_is_carried_reads_the_same_and_all_of_it_is_found(one, other, order, fields):
    torch.manual_seed(3)
    table = torch.randn(300, 3) @ torch.randn(3, 8) + 0.7 * torch.randn(300, 8)
    trees = []
    for seed in (one, other):
        noise = torch.randn(300, 8, generator=torch.Generator().manual_seed(seed))
        trees.append(learn_structure(table + 0.3 * noise, threshold=0.1, max_order=order, seed=seed, progress=False))
    like = Tree(num_params=4000, fields=fields)
    old, new = build(trees[0], like), build(trees[1], like, seed=1)
    theirs, ours = described(old.plan), described(new.plan)
    pairs = matching(old.plan, new.plan).pairs
    for pair in pairs:
        a = theirs[pair.old.node, pair.old.branch, pair.old.sources]
        assert a == ours[pair.new.node, pair.new.branch, pair.new.sources]
    assert len({id(pair.old) for pair in pairs}) == len({id(pair.new) for pair in pairs}) == len(pairs)
    if one == other:
        assert len(pairs) == len(ours)
    before = copy.deepcopy(old.state_dict())
    carry(old, new)
    for name, value in old.state_dict().items():
        assert torch.equal(value, before[name])
    for pair in pairs:
        n = pair.new.fan_in * pair.new.width
        mine = new.layers.weight[0, pair.new.first_weight :][:n]
        torch.testing.assert_close(mine, old.layers.weight[0, pair.old.first_weight :][:n])
    new.train()(torch.randn(10, 8))


def test_an_optimizer_goes_on_with_the_new_head():
    alone = Tree(num_params=600, skip=None)  # beside another layer the outputs start at zero, and have no gradient
    old, new = build(small(), alone), build(small(change=True), alone, seed=1)
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([{"params": list(old.parameters()), "lr": 0.1}, {"params": [other], "lr": 0.2}])
    (old(torch.randn(10, 6)).square().sum() + other.sum()).backward()
    optimizer.step()
    found = carry(old, new)
    steps = {name: optimizer.state[p] for name, p in old.named_parameters()}
    exchange(optimizer, old, new, found.whole)
    assert [list(group["params"]) for group in optimizer.param_groups] == [list(new.parameters()), [other]]
    assert optimizer.state[other]["step"] == 1
    for name, p in new.named_parameters():
        assert (optimizer.state.get(p) is steps[name]) == (name in found.whole)
    new(torch.randn(10, 6)).square().sum().backward()
    before = new.layers.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, new.layers.weight)
    assert len(optimizer.state) == len(list(new.parameters())) + 1
