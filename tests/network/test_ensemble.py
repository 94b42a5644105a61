"""Batched members against the same networks one after the other."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from brainet_pl.network import BRAINetHead, EnsembleHead, MLPHead, stacked_tree
from brainet_pl.structure import Node, learn_structure

M, D = 3, 10


@pytest.fixture(scope="module")
def tree(features):
    """A MAP structure with several levels, and inputs that are read above the lowest."""
    ggt = learn_structure(features, test="gaussian", threshold=0.05, max_order=2, progress=False)
    single = ggt.only(ggt.map())
    assert single.depth > 1
    return ggt, single


def randomise(head):
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        if head.layers.norm:
            head.layers.running_mean.normal_()
            head.layers.running_var.uniform_(0.5, 2)
    return head


def as_single_heads(head):
    """Each member as a `BRAINetHead` of its own."""
    singles = []
    for m in range(head.members):
        single = BRAINetHead(
            head.plan.ggt,
            head.out_features,
            width=head.plan.width_factor,
            norm=head.layers.norm,
            skip=None,
            fields=None,
        )
        with torch.no_grad():
            single.layers.weight[0] = head.layers.weight[m]
            for level in head.plan.levels:
                own = slice(level.first_neuron, level.first_neuron + level.num_neurons)
                theirs = slice(head.members * own.start, head.members * own.stop)
                for name in ("bias",) + (("scale", "running_mean", "running_var") if head.layers.norm else ()):
                    getattr(single.layers, name)[own] = getattr(head.layers, name)[theirs].view(head.members, -1)[m]
            single.output.weight[0].copy_(head.out_weight[m])
            single.output.bias.copy_(head.out_bias[m].squeeze(1))
        singles.append(single)
    return singles


def test_only_keeps_one_branch_a_node(tree):
    ggt, single = tree
    assert all(len(node.branches) == 1 for node in single.nodes if isinstance(node, Node))
    assert single.num_subnetworks == 1
    assert single.score(single.map()) == pytest.approx(ggt.score(ggt.map()))
    np.testing.assert_array_equal(single.dag(single.map()), ggt.dag(ggt.map()))
    assert single.only(single.map()) == single


@pytest.mark.parametrize("norm", ["batch", None])
@pytest.mark.parametrize("training", [True, False])
def test_values_gradients_and_statistics_equal_the_loop(tree, norm, training):
    torch.manual_seed(0)
    head = randomise(EnsembleHead(tree[0], 2, M * 600, M, norm=norm)).double().train(training)
    singles = [single.double().train(training) for single in as_single_heads(head)]
    x, seed = torch.randn(16, D).double(), torch.randn(M, 16, 2).double()
    found = head(x)
    expected = torch.stack([single(x) for single in singles])
    torch.testing.assert_close(found, expected)
    (found * seed).sum().backward()
    (expected * seed).sum().backward()
    torch.testing.assert_close(head.layers.weight.grad, torch.cat([s.layers.weight.grad for s in singles]))
    torch.testing.assert_close(head.out_weight.grad, torch.cat([s.output.weight.grad for s in singles]))
    for level in head.plan.levels:
        own = slice(level.first_neuron, level.first_neuron + level.num_neurons)
        theirs = slice(M * own.start, M * own.stop)
        torch.testing.assert_close(
            head.layers.bias.grad[theirs].view(M, -1), torch.stack([s.layers.bias.grad[own] for s in singles])
        )
        if norm:
            mean = torch.stack([s.layers.running_mean[own] for s in singles])
            torch.testing.assert_close(head.layers.running_mean[theirs].view(M, -1), mean)


def test_stacked_trees_are_multilayer_perceptrons():
    head = randomise(EnsembleHead(stacked_tree(D, 2), 3, 2 * 700, 2, norm=None))
    x = torch.randn(7, D)
    width = head.plan.levels[0].width
    for m in range(2):
        mlp = MLPHead(D, 3, 700, hidden=2, norm=None)
        dense = [layer for layer in mlp.layers if isinstance(layer, nn.Linear)]
        assert dense[0].out_features == width
        with torch.no_grad():
            flat = head.layers.weight[m]
            dense[0].weight.copy_(flat[: D * width].view(width, D))
            dense[1].weight.copy_(flat[D * width :].view(width, width))
            dense[0].bias.copy_(head.layers.bias[: 2 * width].view(2, -1)[m])
            dense[1].bias.copy_(head.layers.bias[2 * width :].view(2, -1)[m])
            dense[2].weight.copy_(head.out_weight[m])
            dense[2].bias.copy_(head.out_bias[m].squeeze(1))
        torch.testing.assert_close(head(x)[m], mlp(x))


def test_members_start_differently_and_train_apart(tree):
    head = EnsembleHead(tree[0], 2, M * 600, M)
    assert not torch.equal(head.layers.weight[0], head.layers.weight[1])
    head.train()(torch.randn(8, D))[0].sum().backward()
    assert head.layers.weight.grad[0].abs().sum() > 0
    assert head.layers.weight.grad[1:].abs().sum() == 0
    assert abs(head.num_params - M * 600) < 0.1 * M * 600


def test_dropout_draws_masks_for_each_member(tree):
    head = EnsembleHead(tree[0], 2, M * 600, M, dropout=0.3).eval()
    x = torch.randn(4, D)
    with torch.no_grad():
        drawn = head.passes(x, 5).values
        assert drawn.shape == (15, 4, 2)
        assert len({tuple(row.flatten().tolist()) for row in drawn}) == 15
        torch.testing.assert_close(head(x), head(x))
        one = head.passes(x, 4000).values.view(M, 4000, 4, 2).std(dim=1)  # pass t of member m is row m·T + t
    assert (one > 0).all()


def test_passes_of_a_brainet_have_the_masks_of_its_training(tree):
    """Dropout on outputs of nodes, never on inputs, and one mask for all that read a node: equal moments."""
    torch.manual_seed(0)
    ggt = tree[1]
    head = BRAINetHead(ggt, 2, num_params=600, min_width=1, skip=None, norm=None, dropout=0.4)
    ensemble = EnsembleHead(ggt, 2, 600, 1, norm=None, dropout=0.4)
    x, n = torch.randn(1, D), 40_000
    with torch.no_grad():
        ensemble.layers.weight.copy_(head.layers.weight)
        ensemble.layers.bias.copy_(head.layers.bias)
        ensemble.out_weight[0], ensemble.out_bias[0, :, 0] = head.output.weight[0], head.output.bias
        trained = head.train()(x.expand(n, -1))
        drawn = head.eval().stochastic(x, n).logits[:, 0]
        members = ensemble.eval().passes(x, n).values[:, 0]
    for found in (drawn, members):
        assert ((found.mean(0) - trained.mean(0)).abs() < 5 * trained.std(0) * (2 / n) ** 0.5).all()
        torch.testing.assert_close(found.std(0), trained.std(0), rtol=0.03, atol=0)


def test_members_can_have_samples_of_their_own(tree):
    head = randomise(EnsembleHead(tree[0], 2, M * 600, M)).eval()
    x = torch.randn(M, 6, D)
    torch.testing.assert_close(head(x), torch.stack([head(x[m])[m] for m in range(M)]))
    torch.testing.assert_close(head(x[:1].expand(M, -1, -1)), head(x[0]))
    dropped = EnsembleHead(tree[0], 2, M * 600, M, dropout=0.2)
    assert dropped.passes(x, 4).values.shape == (4 * M, 6, 2)


def test_an_only_member_may_have_samples_of_its_own_too(tree):
    head = randomise(EnsembleHead(tree[0], 2, 600, 1, dropout=0.2))
    x = torch.randn(6, D)
    assert head.train()(x[None]).shape == (1, 6, 2)
    torch.testing.assert_close(head.eval()(x[None]), head(x))
    assert head.passes(x[None], 4).values.shape == (4, 6, 2)
    with pytest.raises(ValueError, match=r"expected features of shape \(batch, 10\)"):
        head(x.expand(2, -1, -1))


def test_copies_and_state_dicts(tree, tmp_path):
    head = randomise(EnsembleHead(tree[0], 2, M * 600, M)).eval()
    x = torch.randn(5, D)
    torch.testing.assert_close(copy.deepcopy(head)(x), head(x))
    torch.save(head.state_dict(), tmp_path / "head.pt")
    again = EnsembleHead(tree[1], 2, M * 600, M).eval()
    again.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True))
    torch.testing.assert_close(again(x), head(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 0}, "members of at least 1"),
        ({"activation": "sin"}, "one of 'relu'"),
        ({"norm": "layer"}, "'batch', None"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        EnsembleHead(stacked_tree(4, 1), 2, 500, **settings)


def test_bad_input_is_named():
    head = EnsembleHead(stacked_tree(4, 1), 2, 500)
    with pytest.raises(ValueError, match=r"shape \(batch, 4\) or \(5, batch, 4\), got \(3, 5\)"):
        head(torch.rand(3, 5))
    with pytest.raises(ValueError, match="at least 2 samples"):
        head.train()(torch.rand(1, 4))
    with pytest.raises(ValueError, match="hidden of at least 1"):
        stacked_tree(4, 0)
