"""The compiled head against a tree of `nn.Linear`s written straight from lines 13–15 of Algorithm 1."""

import copy
import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import NaiveHead, alone, fixed_ggt, flat_gradient, flat_of, randomise, trees

from brainet_pl.network import BRAINetHead, Tree, smallest_budget
from brainet_pl.network import plan as planning
from brainet_pl.network.base import resolve_budget
from brainet_pl.structure import GGT, Branch, Leaf, Node, learn_structure


@settings(max_examples=40, deadline=None)
@given(
    tree=trees(tuple(range(7)), 3),
    factor=st.sampled_from([0.4, 1.0, 2.3]),
    skip=st.sampled_from(["auto", "linear", None]),
    fields=st.sampled_from(["auto", None, 2]),
)
def test_every_mode_equals_the_naive_tree(tree, factor, skip, fields):
    ggt = GGT(tree, 7, num_rows=5)
    head = randomise(BRAINetHead(ggt, 3, width=factor, temperature=1.0, skip=skip, fields=fields)).eval()
    naive = NaiveHead(head).eval()
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))

    a, b = head(x), naive.simultaneous(x, 1.0)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    a.square().sum().backward()
    b.square().sum().backward()
    for got, expected in zip(flat_of(head), flat_gradient(naive, head), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)

    if ggt.num_subnetworks <= 64:
        with torch.no_grad():
            logits, weights = head.enumerate(x)
            for i, subnetwork in enumerate(ggt.enumerate()):
                torch.testing.assert_close(logits[i], naive.subnetwork(x, subnetwork), rtol=1e-4, atol=1e-5)
                assert weights[i].item() == pytest.approx(math.exp(ggt.log_prob(subnetwork, 1.0)), rel=1e-5)
            assert weights.sum().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_every_subnetwork_equal_the_naive_tree(seed):
    head = randomise(BRAINetHead(fixed_ggt(seed=seed), 3, width=0.8)).eval()
    x = torch.randn(6, 12)
    for subnetwork in head.ggt.sample_uniform(6, rng=seed):
        naive = NaiveHead(head).eval()
        head.zero_grad()
        out = alone(head, x, subnetwork)
        expected = naive.subnetwork(x, subnetwork)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        out.logsumexp(1).sum().backward()
        expected.logsumexp(1).sum().backward()
        for got, want in zip(flat_of(head), flat_gradient(naive, head), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


class Drawn:
    """The choices of a training step, read as `Executor.draw` says, one sample and one draw at a time.

    Version v of a node takes its branch choice[node, v, sample] in column v mod C; column c of a layer reads version
    c mod V of a node that emits V.
    """

    def __init__(self, head, choices):
        self.number = {id(node): i for i, node in enumerate(head.ggt.nodes)}
        self.versions = head.layers.versions(head.draws)
        self.choices, self.level_of = choices, head.plan.level_of

    def counts(self, node):
        """(C, V) of a node."""
        return self.versions[self.level_of[self.number[id(node)]][0]]

    def branch(self, node, version, sample):
        h, place = self.level_of[self.number[id(node)]]
        choice = self.choices[h][place, version]
        return int(choice[sample if len(choice) > 1 else 0])

    def path(self, node, version, sample):
        """Node number → branch, of all nodes that a version of a node's output depends on."""
        if isinstance(node, Leaf):
            return {}
        t, (columns, _) = self.branch(node, version, sample), self.counts(node)
        found = {self.number[id(node)]: t}
        for child in node.branches[t].children:
            if isinstance(child, Node):
                found |= self.path(child, version % columns % self.counts(child).emitted, sample)
        return found

    def order(self, root, sample):
        """Where the head puts version 0, 1, … of the root: as they are, or by branch if each column has each branch."""
        if isinstance(root, Leaf):
            return [0]
        columns, emitted = self.counts(root)
        if emitted != columns * len(root.branches):
            return list(range(emitted))
        return [self.branch(root, v, sample) * columns + v % columns for v in range(emitted)]


def run_naively(naive, x, drawn):
    """Draws (M, B, O) of a training step: every version of every node in a loop, norm over all columns of a layer."""
    batch, lowest = torch.arange(len(x)), naive.lowest(x)

    def versions(node):
        if isinstance(node, Leaf):
            rows = naive.leaf(node, lowest)
            return [naive.emit(0, rows) if node is naive.ggt.root else rows]
        i, (columns, emitted) = naive.number[id(node)], drawn.counts(node)
        branches = []  # of (C, B, w)
        for t, branch in enumerate(node.branches):
            below = versions(branch.descendant)
            parts = []
            for source in branch.ancestors or [branch.descendant]:
                own = versions(source) if branch.ancestors else []
                read = [
                    torch.cat([*([own[c % len(own)]] if own else []), below[c % len(below)]], dim=1)
                    for c in range(columns)
                ]
                parts.append(naive.layers[f"{i}_{t}_{naive.number[id(source)]}"](torch.cat(read)))
            given = torch.cat(parts, dim=1)
            given = naive.emit(t, given) if node is naive.ggt.root else given
            branches.append(given.unflatten(0, (columns, len(x))))
        taken = [torch.tensor([drawn.branch(node, v, b) for b in range(len(x))]) for v in range(emitted)]
        return [torch.stack(branches)[t, v % columns, batch] for v, t in enumerate(taken)]

    past = 0.0 if naive.skip is None else naive.skip(x)  # once: its statistics are of these samples
    return torch.stack([version + past for version in versions(naive.ggt.root)])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tree=trees(tuple(range(7)), 3),
    draws=st.integers(1, 9),
    sampling=st.sampled_from(["batch", "sample"]),
    seed=st.integers(0, 99),
    skip=st.sampled_from(["linear", None]),
    fields=st.sampled_from([None, 2]),
)
def test_training_pass_equals_the_naive_tree(tree, draws, sampling, seed, skip, fields):
    """The same draws, replayed: values, gradients and statistics agree."""
    torch.manual_seed(0)  # the same weights in every run: where 6 samples are nearly equal, rounding shows
    ggt = GGT(tree, 7, num_rows=5)
    head = BRAINetHead(ggt, 3, width=0.8, sampling=sampling, draws=draws, skip=skip, fields=fields)
    head = randomise(head).train()
    naive, batch = NaiveHead(head).train(), 6
    x = torch.randn(batch, 7, generator=torch.Generator().manual_seed(1))
    out = head(x, torch.Generator().manual_seed(seed))
    choices = head.layers.draw(head.draws, batch if sampling == "sample" else 1, torch.Generator().manual_seed(seed))
    drawn = Drawn(head, choices)
    expected = run_naively(naive, x, drawn)
    assert len(expected) == head.draws
    out = out if out.dim() == 3 else out[None]
    order = torch.tensor([drawn.order(ggt.root, b) for b in range(batch)]).t()  # (M, B)
    torch.testing.assert_close(out[order, torch.arange(batch)], expected, rtol=1e-4, atol=1e-5)
    out.logsumexp(-1).sum().backward()
    expected.logsumexp(-1).sum().backward()
    for got, want in zip(flat_of(head), flat_gradient(naive, head), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    for level in head.plan.levels:  # batch-norm statistics of every layer moved
        for layer in level.layers:
            first = level.first_neuron + layer.first_neuron
            base_logits = slice(first, first + layer.width)
            norm = naive.layers[f"{layer.node}_{layer.branch}_{layer.sources[0]}"][1]
            torch.testing.assert_close(head.layers.running_mean[base_logits], norm.running_mean, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(head.layers.running_var[base_logits], norm.running_var, rtol=1e-3, atol=1e-5)
    if skip:
        torch.testing.assert_close(head.skip.running_mean, naive.skip[0].mean)
        torch.testing.assert_close(head.skip.running_var, naive.skip[0].var)


@settings(max_examples=30, deadline=None)
@given(tree=trees(tuple(range(7)), 3), draws=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_draw_is_a_sub_network(tree, draws, seed):
    """Without a norm a sample's outputs are those of the sub-networks that it drew, whatever the others drew."""
    ggt = GGT(tree, 7, num_rows=5)
    head = BRAINetHead(ggt, 3, width=1.5, draws=draws, norm=None)
    naive, x = NaiveHead(head), torch.randn(3, 7)
    with torch.no_grad():
        choices = head.layers.draw(head.draws, 3, torch.Generator().manual_seed(seed))
        out, drawn = head.train_on(x, choices).view(-1, 3, 3), Drawn(head, choices)
        for b in range(3):
            for v, place in enumerate(drawn.order(ggt.root, b)):
                path = drawn.path(ggt.root, v, b)
                expected = naive.run(x[b : b + 1], lambda i, node, branch, path=path: branch(path[i]))
                torch.testing.assert_close(out[place, b], expected[0], rtol=1e-4, atol=1e-5)


def test_draws_are_balanced_and_uniform():
    leaves = [Leaf((i,), ((),), 0.0) for i in range(4)]

    def pair(a, b, n):
        return Node((a, b), tuple(Branch((leaves[a],), leaves[b]) for _ in range(n)))

    root = Node((0, 1, 2, 3), tuple(Branch((pair(0, 1, 2),), pair(2, 3, 3)) for _ in range(3)))
    ggt = GGT(root, 4)
    assert ggt.num_subnetworks == 3 * 2 * 3
    for draws in (1, 2, 3, 4, 9, 100):
        head = BRAINetHead(ggt, 2, draws=draws)
        assert head.draws == min(draws, 9)
        n = 4000
        drawn = Drawn(head, head.layers.draw(head.draws, n, torch.Generator().manual_seed(0)))
        paths = [[tuple(sorted(drawn.path(root, v, b).items())) for v in range(head.draws)] for b in range(n)]
        for v in range(head.draws):  # each of the draws alone is uniform over sub-networks
            counts = np.array(list(Counter(sample[v] for sample in paths).values()))
            assert len(counts) == 18
            assert ((counts - n / 18) ** 2 / (n / 18)).sum() < 45  # χ² of 17 degrees: less than 1 in 5,000
        for sample in paths[:50]:  # and each sample uses the branches in balance
            at_root = Counter(dict(path)[0] for path in sample)
            assert set(at_root.values()) <= {head.draws // 3, -(-head.draws // 3)}
            assert len(at_root) == min(head.draws, 3)
            if draws >= 9:
                used = {step for path in sample for step in path}
                assert len(used) == 3 + 3 * (2 + 3)  # every branch of every node


def test_by_default_every_branch_of_the_root_is_trained_by_every_sample():
    head = BRAINetHead(fixed_ggt(s=3), 3)
    assert head.draws == Tree().build(12, 3, head.ggt).draws == 3
    assert head.train()(torch.randn(8, 12)).shape == (3, 8, 3)
    assert head.eval()(torch.randn(8, 12)).shape == (8, 3)
    assert BRAINetHead(fixed_ggt(s=1), 3).train()(torch.randn(8, 12)).shape == (8, 3)


def test_layers_that_no_draw_takes_get_no_gradient():
    head = randomise(BRAINetHead(fixed_ggt(), 3, width=0.8, sampling="batch", draws=1)).train()
    choices = head.layers.draw(1, 1, torch.Generator().manual_seed(3))
    path = Drawn(head, choices).path(head.ggt.root, 0, 0)
    head.train_on(torch.randn(8, 12), choices).logsumexp(1).sum().backward()
    off = 0
    for level in head.plan.levels:
        for layer in level.layers:
            grad = head.layers.weight.grad[0, layer.first_weight :][: layer.fan_in * layer.width]
            assert bool(grad.any()) == (path.get(layer.node) == layer.branch)
            off += not grad.any()
    assert off


def test_with_one_branch_all_modes_agree():
    head = randomise(BRAINetHead(fixed_ggt(s=1), 4, width=1.0)).eval()
    x = torch.randn(5, 12)
    with torch.no_grad():
        simultaneous = head(x)
        stochastic, drawn = head.stochastic(x, 3)
        enumerated, weights = head.enumerate(x)
    assert len(set(drawn)) == len(weights) == 1
    for logits in (*stochastic, *enumerated):
        torch.testing.assert_close(logits, simultaneous, rtol=1e-4, atol=1e-5)


def test_stochastic_average_tends_to_the_enumerated_one():
    head = randomise(BRAINetHead(fixed_ggt(), 4, width=1.0)).eval()
    x = torch.randn(5, 12)
    with torch.no_grad():
        logits, weights = head.enumerate(x, limit=10**5)
        exact = torch.tensordot(weights, logits.softmax(-1), dims=1)
        errors = []
        for passes in (10, 1000, 30_000):
            drawn = head.stochastic(x, passes, generator=torch.Generator().manual_seed(0))
            errors.append((drawn.logits.softmax(-1).mean(0) - exact).abs().max().item())
    assert errors[2] < errors[0]
    assert errors[2] < 0.01


def test_draws_repeat_with_a_generator_and_name_their_subnetwork():
    head = randomise(BRAINetHead(fixed_ggt(), 4)).eval()
    x = torch.randn(5, 12)
    with torch.no_grad():
        a = head.stochastic(x, 8, generator=torch.Generator().manual_seed(1))
        b = head.stochastic(x, 8, generator=torch.Generator().manual_seed(1))
        c = head.stochastic(x, 8, generator=torch.Generator().manual_seed(2))
        assert a.subnetworks == b.subnetworks != c.subnetworks
        torch.testing.assert_close(a.logits, b.logits)
        base_logits = alone(head, x, a.subnetworks[3])
    torch.testing.assert_close(a.logits[3], base_logits, rtol=1e-5, atol=1e-6)


def test_temperature_changes_a_trained_head():
    head = randomise(BRAINetHead(fixed_ggt(), 4)).eval()
    x = torch.randn(5, 12)
    assert head.perplexity > 1.2
    with torch.no_grad():
        warm = head(x)
        head.temperature = 0.0
        assert head.perplexity == pytest.approx(1.0)
        assert len(set(head.stochastic(x, 6).subnetworks)) == 1
        torch.testing.assert_close(head(x), head.stochastic(x, 1).logits[0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(head(x), warm)
        head.temperature = "auto"
        torch.testing.assert_close(head(x), warm)


def test_folded_weights_follow_the_parameters():
    head = randomise(BRAINetHead(fixed_ggt(), 4)).eval()
    x = torch.randn(5, 12)
    with torch.no_grad():
        before, drawn = head(x), head.stochastic(x, 2, generator=torch.Generator().manual_seed(0)).logits
        head.layers.weight.mul_(2.0)
        assert not torch.allclose(head(x), before)
        assert not torch.allclose(head.stochastic(x, 2, generator=torch.Generator().manual_seed(0)).logits, drawn)
    head.train()(torch.randn(9, 12))  # statistics move
    after = head.eval()(x)
    with torch.no_grad():
        torch.testing.assert_close(head(x), after)


def test_copies_pickles_and_writes_through_data(tmp_path):
    head = randomise(BRAINetHead(fixed_ggt(), 4)).eval()
    x = torch.randn(5, 12)
    with torch.no_grad():
        expected = head.stochastic(x, 4, generator=torch.Generator().manual_seed(0)).logits
        for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
            torch.testing.assert_close(
                again.stochastic(x, 4, generator=torch.Generator().manual_seed(0)).logits, expected
            )
        before = head(x)
        head.layers.weight.data.mul_(2.0)  # leaves no trace in the version counter
        head.eval()
        assert not torch.allclose(head(x), before)


@pytest.mark.parametrize("budget", [8_000, 16_000, 240_000])
@pytest.mark.parametrize("norm", ["batch", None])
def test_budget_is_met_within_two_percent(budget, norm):
    head = BRAINetHead(fixed_ggt(d=30), 10, num_params=budget, norm=norm)
    assert abs(head.num_params - budget) <= 0.02 * budget


def test_a_budget_that_cannot_be_met_closely_is_said():
    with pytest.warns(UserWarning, match="within 2 %, got 2,152"):
        BRAINetHead(fixed_ggt(d=30), 10, num_params=2_200, min_width=1, skip=None)


def test_a_head_starts_at_the_networks_own_answer_and_learns_beside_it():
    torch.manual_seed(0)
    head = BRAINetHead(fixed_ggt(), 3, width=1.0, skip="base_logits")
    x, base_logits = torch.randn(8, 12), torch.randn(8, 3)
    assert head.skip is None
    for outputs in (
        head.train()(x, base_logits=base_logits),
        head.eval()(x, base_logits=base_logits)[None],
        head.passes(x, 4, base_logits=base_logits).values,
    ):
        torch.testing.assert_close(outputs, base_logits.expand_as(outputs))
    with torch.no_grad():
        head.output.weight.normal_()
        plain = copy.deepcopy(head)
        plain.adds_base_logits = False
        drawn = [torch.Generator().manual_seed(0) for _ in range(2)]
        found = head.stochastic(x, 4, base_logits=base_logits, generator=drawn[0]).logits
        torch.testing.assert_close(found, plain.stochastic(x, 4, generator=drawn[1]).logits + base_logits)
        torch.testing.assert_close(
            head.enumerate(x, base_logits=base_logits).logits, plain.enumerate(x).logits + base_logits
        )
        torch.testing.assert_close(head(x, base_logits=base_logits), plain(x) + base_logits)
    for wrong, message in (
        (lambda: head(x), "expected the outputs of the network, got none"),
        (lambda: plain(x, base_logits=base_logits), "expected features alone, got its outputs too"),
        (lambda: head(x, base_logits=base_logits[:, :2]), r"base logits of shape \(8, 3\), got \(8, 2\)"),
        (
            lambda: BRAINetHead(fixed_ggt(), 3, skip="identity"),
            "'auto', 'linear', 'base_logits', 'base_logits_or_linear', None",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_a_layer_past_the_tree_is_in_the_budget_and_does_not_mind_scale():
    for skip in ("linear", None):
        head = BRAINetHead(fixed_ggt(d=30), 10, num_params=8_000, skip=skip)
        assert abs(head.num_params - 8_000) <= 160
        assert (head.skip is not None) == (skip is not None)
    past = randomise(BRAINetHead(fixed_ggt(), 3, width=1.0, skip="linear")).skip.train()
    x = torch.randn(50, 12)
    torch.testing.assert_close(past(x), past(1000 * x + 5000), rtol=1e-2, atol=1e-2)


def test_widths_that_nobody_chose():
    ggt = fixed_ggt(d=30, max_order=2)
    narrow = BRAINetHead(ggt, 10, num_params=8_000, min_width=1)
    usual = BRAINetHead(ggt, 10, num_params=8_000)
    least = [min(x.width for level in head.plan.levels for x in level.layers) for head in (narrow, usual)]
    assert least[0] <= least[1] == 2
    assert BRAINetHead(ggt, 10).num_params == pytest.approx(16_000, rel=0.02)
    assert Tree().build(30, 10, ggt).num_params == BRAINetHead(ggt, 10).num_params
    smallest = BRAINetHead(ggt, 10, num_params=smallest_budget(ggt, 10))  # nothing is left for what is only wanted
    assert smallest.skip is None
    assert smallest.num_params == smallest_budget(ggt, 10)


@pytest.mark.parametrize("out", [100, 1000])
def test_a_budget_that_nobody_chose_is_enough_for_any_tree(out):
    """Very many small sets: one neuron a layer takes more than 16,000."""
    d = 300
    leaves = [Leaf((i,), ((),), 0.0) for i in range(d)]
    rest = Leaf(tuple(range(150, d)), tuple(() for _ in range(150, d)), 0.0)
    ggt = GGT(Node(tuple(range(d)), tuple(Branch(tuple(leaves[:150]), rest) for _ in range(2))), d)
    least = smallest_budget(ggt, out)
    assert least > 16_000
    head = BRAINetHead(ggt, out)
    assert head.num_params == pytest.approx(resolve_budget("auto", d, out_features=out), rel=0.05)
    assert head.skip is not None
    wide = BRAINetHead(ggt, out, min_width=3)
    assert wide.num_params == pytest.approx(head.num_params, rel=0.05)
    assert wide.ggt.most_ancestors <= head.ggt.most_ancestors < 150


def test_without_norm_and_with_other_activations():
    for activation in ("gelu", "silu", "tanh", "elu"):
        head = BRAINetHead(fixed_ggt(), 3, norm=None, activation=activation)
        head.train()(torch.randn(1, 12)).sum().backward()
        assert torch.isfinite(head.layers.weight.grad).all()
        x = torch.randn(4, 12)
        with torch.no_grad():
            head.eval().temperature = 0.0
            torch.testing.assert_close(head(x), head.stochastic(x, 1).logits[0], rtol=1e-4, atol=1e-5)


def test_dropout_makes_equal_draws_differ_but_not_the_simultaneous_pass():
    # One level: dropout stands before the linear output alone, so its mean is exactly the pass without it.
    head = randomise(BRAINetHead(fixed_ggt(max_order=0), 3, dropout=0.5, temperature=0.0)).eval()
    x = torch.randn(4, 12)
    with torch.no_grad():
        logits = head.stochastic(x, 4).logits
        assert not torch.allclose(logits[0], logits[1])
        torch.testing.assert_close(head(x), head(x))
        drawn = head.stochastic(x, 20_000).logits
        plain, weights = head.enumerate(x, temperature=0.0)
        error = (drawn.mean(0) - torch.tensordot(weights, plain, dims=1)).abs()
        assert (error < 5 * drawn.std(0) / 20_000**0.5).all()


def test_state_dict_round_trip_and_foreign_weights(tmp_path):
    ggt = fixed_ggt()
    head = randomise(BRAINetHead(ggt, 3, num_params=3000)).eval()
    torch.save({"ggt": ggt.to_json(), "state": head.state_dict()}, tmp_path / "head.pt")
    stored = torch.load(tmp_path / "head.pt", weights_only=True)
    again = BRAINetHead(GGT.from_json(stored["ggt"]), 3, num_params=3000).eval()
    again.load_state_dict(stored["state"])
    x = torch.randn(5, 12)
    with torch.no_grad():
        torch.testing.assert_close(again(x), head(x))
    other = BRAINetHead(fixed_ggt(seed=5), 3, num_params=3000)
    theirs = rf"layout {other.plan.layout} of the tree {other.ggt.fingerprint}.*got the layout {head.plan.layout}"
    with pytest.raises(ValueError, match=theirs):
        other.load_state_dict(stored["state"])


def test_weights_in_another_order_are_refused(monkeypatch):
    """With nodes in another order all shapes agree, and the outputs would be others without a word."""
    ggt = fixed_ggt()
    stored = BRAINetHead(ggt, 3, width=1.0).state_dict()
    at = planning.nodes_at
    monkeypatch.setattr(planning, "nodes_at", lambda tree, height: at(tree, height)[::-1])
    other = BRAINetHead(ggt, 3, width=1.0)
    assert {k: v.shape for k, v in other.state_dict().items()} == {k: v.shape for k, v in stored.items()}
    with pytest.raises(ValueError, match="expected weights in the layout"):
        other.load_state_dict(stored)


def test_a_single_leaf_is_a_linear_head():
    ggt = GGT(Leaf((0, 1, 2), ((), (), ()), 0.0), 3)
    head = BRAINetHead(ggt, 2, width=1.0, skip=None).eval()
    x = torch.randn(4, 3)
    expected = x @ head.output.weight[0].t() + head.output.bias
    torch.testing.assert_close(head(x), expected)
    torch.testing.assert_close(head.train()(x), expected)
    torch.testing.assert_close(head.stochastic(x, 2).logits[1], expected)


def test_a_sampled_network_is_smaller_than_the_whole():
    head = BRAINetHead(fixed_ggt(d=20, max_order=2), 10, num_params=16_000)
    sampled = [head.plan.multiply_adds(dict(head.ggt.path(g))) for g in head.ggt.sample_uniform(50)]
    assert np.mean(sampled) < 0.6 * head.plan.multiply_adds()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: h(torch.randn(4, 5)), r"shape \(batch, 12\), got \(4, 5\).*learn a structure"),
        (lambda h: h(torch.randn(4, 12, 2)), "expected features of shape"),
        (lambda h: h.train()(torch.randn(1, 12)), "at least 2 samples.*drop_last"),
        (lambda h: h.stochastic(torch.randn(4, 12), 0), "passes of at least 1"),
        (lambda h: h.stochastic(torch.randn(4, 12), 2, temperature=-1.0), "temperature of at least 0"),
        (lambda h: setattr(h, "temperature", -2.0), "temperature of at least 0"),
        (lambda h: h.enumerate(torch.randn(4, 12), limit=1), r"at most 1 sub-networks.*use stochastic"),
        (lambda h: BRAINetHead(h.ggt, 3, num_params=10), "budget of at least"),
        (lambda h: BRAINetHead(h.ggt, 3, num_params=10, width=1.0), "got both"),
        (lambda h: BRAINetHead(h.ggt, 3, activation="sin"), "one of 'relu'"),
        (lambda h: BRAINetHead(h.ggt, 3, norm="layer"), "'batch', None"),
        (lambda h: BRAINetHead(h.ggt, 3, dropout=1.0), "dropout"),
        (lambda h: setattr(h, "inference", "typo"), "'stochastic', 'simultaneous', 'enumerated', got 'typo'"),
        (lambda h: Tree(inference="typo"), "'stochastic', 'simultaneous', 'enumerated', got 'typo'"),
        (lambda h: BRAINetHead(h.ggt, 3, sampling="never"), "'batch', 'sample'"),
    ],
)
def test_bad_input_is_named(call, message):
    head = BRAINetHead(fixed_ggt(), 3).eval()
    with pytest.raises(ValueError, match=message):
        call(head)


def test_smallest_budget_works():
    ggt = fixed_ggt()
    least = smallest_budget(ggt, 3)
    assert BRAINetHead(ggt, 3, num_params=least).num_params == least


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_are_kept(dtype):
    head = BRAINetHead(fixed_ggt(), 3).eval().to(dtype)
    x = torch.randn(4, 12, dtype=dtype)
    if dtype is torch.float64:
        assert head(x).dtype is dtype
        assert head.stochastic(x, 2).logits.dtype is dtype
        head.train()(x).sum().backward()
    else:
        assert head.layers.weight.dtype is dtype
        assert head.layers.layout.dtype is torch.uint8


def known(d=20, s=(4, 1)):
    """A tree whose leaves know neighbours."""
    x = np.random.default_rng(0).normal(size=(400, d)).cumsum(axis=1)
    return learn_structure(x, s=s, progress=False)


def test_fields_read_a_feature_and_its_strongest_neighbours():
    ggt = known()
    head = BRAINetHead(ggt, 3, fields=4)
    lowest, inputs = head.plan.levels[0], len(ggt.nodes)
    near = [{}, {}, {}, {}]  # of each structure, as its leaves know them
    for i, t in head.plan.leaf_sets.items():
        near[t] |= dict(zip(ggt.nodes[i].variables, ggt.nodes[i].neighbours, strict=True))
    wanted = [[v, *own[v][:4]] for own in near for v in range(20)]
    assert [[source - inputs for source in layer.sources] for layer in lowest.layers] == wanted
    assert {layer.width for layer in lowest.layers} == {4}  # of 20 features, so that a structure has 64 neurons or more
    x, moved = torch.randn(1, 20), torch.zeros(20)
    head.eval()
    parts = head.layers._evaluate(x)[0]
    for j in range(20):  # a neuron moves with what it reads, and with nothing else
        moved.zero_()[j] = 3.0
        change = (head.layers._evaluate(x + moved)[0][1] != parts[1])[0, :, 0]
        reads = torch.tensor([inputs + j in layer.sources for layer in lowest.layers for _ in range(layer.width)])
        assert not change[~reads].any()
        assert change[reads].any()


def test_each_structure_reads_its_fields_in_place():
    """Their rows lie side by side, so that the level above them is one product for each structure, without a copy."""
    ggt = known(d=64)
    head = randomise(BRAINetHead(ggt, 3, num_params=16_000))
    lowest, above = head.layers.ordered[:2]
    assert lowest.level.num_neurons == 4 * 64
    (bucket,) = above.ordered
    assert bucket.slice.rows == 4 * 64
    assert bucket.shape[0] == 4
    naive, x = NaiveHead(head.eval()).eval(), torch.randn(5, 64)
    for subnetwork in ggt.enumerate():
        torch.testing.assert_close(alone(head, x, subnetwork), naive.subnetwork(x, subnetwork), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["batch", None])
@pytest.mark.parametrize("fields", [None, 3, "auto"])
def test_fields_are_part_of_the_budget(norm, fields):
    head = BRAINetHead(known(), 5, num_params=20_000, norm=norm, fields=fields)
    assert head.num_params == pytest.approx(20_000, rel=0.02)
    assert (len(head.plan.levels) > head.ggt.depth) == (fields is not None)


def test_fields_that_would_take_most_of_the_budget_are_left_out_unless_asked_for():
    ggt = known()
    taken = 4 * 20 * 4 * (17 + 2)  # structures, features, neurons of each, parameters of a neuron
    assert len(BRAINetHead(ggt, 5, num_params=2 * taken - 100).plan.levels) == ggt.depth
    assert len(BRAINetHead(ggt, 5, num_params=2 * taken + 100).plan.levels) == ggt.depth + 1
    assert len(BRAINetHead(ggt, 5, num_params=2 * taken - 100, fields=16).plan.levels) == ggt.depth + 1
    with pytest.raises(ValueError, match="expected a budget of at least"):
        BRAINetHead(ggt, 5, num_params=taken // 2, fields=16)


@pytest.mark.parametrize("fields", [0, -1, 33, 1.5, "many", True])
def test_fields_that_are_no_number_are_refused(fields):
    for make in (lambda: Tree(fields=fields), lambda: BRAINetHead(known(), 3, fields=fields)):
        with pytest.raises(ValueError, match="expected fields"):
            make()


def test_a_tree_without_neighbours_has_no_fields():
    ggt = fixed_ggt()
    assert len(BRAINetHead(ggt, 3).plan.levels) == len(BRAINetHead(ggt, 3, fields=4).plan.levels) == ggt.depth


def test_a_head_begins_as_the_layer_that_goes_past_it():
    ggt, x = known(), torch.randn(6, 20)
    head = BRAINetHead(ggt, 3)
    with torch.no_grad():
        head.skip.weight.normal_()
        for mode in (head.train(), head.eval()):
            outputs, past = mode(x), head.skip(x)
            torch.testing.assert_close(outputs, past.expand_as(outputs))
    assert BRAINetHead(ggt, 3, skip=None).output.weight.any()  # with nothing beside it, nothing would begin


def test_fields_of_unequal_sizes_equal_the_naive_tree():
    """Neighbours of a learned tree are equally many; a tree may have others, and takes another way to the same."""

    def cut(node):
        if isinstance(node, Leaf):
            near = tuple(found[: 1 + v % 3] for v, found in zip(node.variables, node.neighbours, strict=True))
            return Leaf(node.variables, node.parents, node.score, near)
        return Node(
            node.variables, tuple(Branch(tuple(map(cut, b.ancestors)), cut(b.descendant)) for b in node.branches)
        )

    ggt = GGT(cut(known().root), 20, 400)
    head = randomise(BRAINetHead(ggt, 3, width=0.5)).eval()
    naive, x = NaiveHead(head).eval(), torch.randn(5, 20)
    assert len({layer.fan_in for layer in head.plan.levels[0].layers}) > 1
    for subnetwork in ggt.enumerate():
        torch.testing.assert_close(alone(head, x, subnetwork), naive.subnetwork(x, subnetwork), rtol=1e-4, atol=1e-5)
