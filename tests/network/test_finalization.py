"""What is settled on data without training: statistics of the simultaneous mode, temperature, dropout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import NaiveHead, fixed_ggt, randomise, trees
from torch.nn import functional as F

from brainet_pl.backbones import Backbone
from brainet_pl.fitting.settle import Settling
from brainet_pl.network import BRAINetHead, Tree, tree_head
from brainet_pl.network.base import HeadInputs
from brainet_pl.network.finalization import FACTORS, NETWORKS, best_value, choose_temperature, networks_for
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.structure import GGT, Branch, Leaf, Node
from brainet_pl.tasks import Classification


def nll(outputs, weights, target):
    """-log of the averaged probability of the label."""
    weights = torch.full((len(outputs),), 1 / len(outputs)) if weights is None else weights
    mean = torch.tensordot(weights.to(outputs.dtype), outputs.softmax(-1), dims=1)
    return -mean.gather(1, target[:, None]).squeeze(1).log()


def rows(n=200, d=12, classes=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return HeadInputs(torch.randn(n, d, generator=draw), torch.randint(classes, (n,), generator=draw))


# -- statistics of the simultaneous mode ------------------------------------------------------------------------------


def settle_naively(naive, x, temperature, depth):
    """Set every norm to the mean and variance of what it is given in the simultaneous mode, from the inputs up."""
    norms = [layer[1] for layer in naive.layers.values()]
    given = {}
    handles = [norm.register_forward_pre_hook(lambda m, args: given.update({m: args[0]})) for norm in norms]
    with torch.no_grad():
        for _ in range(depth):  # after h rounds the lowest h levels are settled
            naive.eval().simultaneous(x, temperature)
            for norm in norms:
                norm.running_mean.copy_(given[norm].mean(0))
                norm.running_var.copy_(given[norm].var(0))
    for handle in handles:
        handle.remove()


@settings(max_examples=25, deadline=None)
@given(tree=trees(tuple(range(7)), 3), activation=st.sampled_from(["relu", "gelu"]))
def test_statistics_equal_those_of_the_naive_tree(tree, activation):
    ggt = GGT(tree, 7, num_rows=5)
    head = randomise(BRAINetHead(ggt, 3, width=1.3, temperature=1.0, activation=activation)).eval()
    naive, x = NaiveHead(head).eval(), torch.randn(40, 7, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        drawn = head.enumerate(x[:5], limit=10**6).logits if ggt.num_subnetworks < 100 else None
        head.finalize(HeadInputs(x, torch.zeros(40)), None, nll)
        if any(isinstance(node, Node) and len(node.branches) > 1 for node in ggt.nodes[1:]):  # some layer reads a mean
            settle_naively(naive, x, 1.0, len(head.plan.levels))
        torch.testing.assert_close(head(x), naive.simultaneous(x, 1.0), rtol=1e-3, atol=1e-4)
        if drawn is not None:  # sub-networks keep the statistics of training
            torch.testing.assert_close(head.enumerate(x[:5], limit=10**6).logits, drawn)


def test_statistics_belong_to_a_temperature():
    head = randomise(BRAINetHead(fixed_ggt(), 3, temperature=4.0)).eval()
    x = torch.randn(30, 12)
    with torch.no_grad():
        before = head(x)
        head.finalize(rows(), None, nll)
        settled = head(x)
        assert not torch.allclose(before, settled)
        head.temperature = 0.0  # the statistics of training are those of a drawn sub-network
        torch.testing.assert_close(head(x), head.stochastic(x, 1).logits[0], rtol=1e-4, atol=1e-5)
        head.temperature = 4.0
        torch.testing.assert_close(head(x), settled)
        head.reset_parameters()
        assert not head.layers.mixed


def test_where_the_root_alone_branches_one_pass_is_the_exact_mean_of_all_outputs():
    """No layer reads an average, so there are no statistics to mend: four whole networks, averaged at the end."""
    torch.manual_seed(0)
    head = randomise(BRAINetHead(fixed_ggt(s=(4, 1)), 3, num_params=4000)).eval()
    assert head.ggt.num_subnetworks == 4
    x = torch.randn(50, 12)
    with torch.no_grad():
        for settled in (False, True):
            if settled:
                head.finalize(rows(), None, nll)
            logits, weights = head.enumerate(x)
            torch.testing.assert_close(head(x), torch.tensordot(weights, logits, dims=1))
    assert not head.layers.mixed


# -- temperature and dropout ------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(tree=trees(tuple(range(6)), 3), seed=st.integers(0, 5))
def test_weighted_draws_stand_for_every_posterior(tree, seed):
    """The mean of any function of a sub-network: exact where all are there, near it where they are drawn."""
    ggt = GGT(tree, 6, num_rows=5)
    if not 2 <= ggt.num_subnetworks <= 2000:
        return
    everything = list(ggt.enumerate(2000))
    value = dict(zip(everything, np.random.default_rng(seed).normal(size=len(everything)), strict=True))
    temperatures = [0.2, 1.0, 5.0]
    exact = {t: sum(np.exp(ggt.log_prob(g, t)) * value[g] for g in everything) for t in temperatures}
    for most, tolerance in ((2000, 1e-9), (min(1500, len(everything) - 1) if len(everything) > 1500 else 1, None)):
        if tolerance is None and len(everything) <= 1500:
            continue
        found, weights = networks_for(ggt, temperatures, most)
        for t in temperatures:
            assert weights[t].sum() == pytest.approx(1.0)
            assert sum(w * value[g] for w, g in zip(weights[t], found, strict=True)) == pytest.approx(
                exact[t], abs=tolerance or 0.3
            )


def wide(n=9):
    """A tree of 2^n sub-networks: the root's only branch has n ancestors of two branches each."""
    pair = [Node((i,), (Branch((), Leaf((i,), ((),), -1.0)), Branch((), Leaf((i,), ((),), 0.0)))) for i in range(n)]
    return GGT(Node(tuple(range(n + 1)), (Branch(tuple(pair), Leaf((n,), ((),), 0.0)),)), n + 1, 100)


def test_draws_of_a_large_posterior_have_its_means():
    ggt = wide()
    assert ggt.num_subnetworks == 512 > NETWORKS
    temperatures = [0.1, 1.0, 50.0]
    found, weights = networks_for(ggt, temperatures, most=30_000)
    assert len(found) == len(set(found)) <= 512
    for t in temperatures:  # how many of the nine take the better branch
        share = sum(w * sum(g.choices[1:]) for w, g in zip(weights[t], found, strict=True))
        assert share == pytest.approx(9 / (1 + np.exp(-1 / t)), abs=0.1)
    few, weights = networks_for(ggt, temperatures)
    assert len(few) <= NETWORKS
    assert max(w.max() for w in weights.values()) < 1


def test_the_usual_value_stays_within_noise():
    draw = torch.Generator().manual_seed(0)
    usual = torch.rand(400, generator=draw)
    noise = 0.2 * torch.randn(400, generator=draw)
    assert best_value({1.0: usual, 2.0: usual + noise - noise.mean() - 0.001}, 1.0).value == 1.0
    assert best_value({1.0: usual, 2.0: usual + noise - noise.mean() - 0.05}, 1.0).value == 2.0
    assert best_value({1.0: usual, 2.0: usual + 0.1}, 1.0).value == 1.0
    assert best_value({1.0: usual}, 1.0).value == 1.0


@pytest.mark.parametrize("good", ["best", "other", "none"])
def test_the_temperature_follows_what_predicts(good):
    """Two structures, of which the first has the better score: cold if it also predicts, warm if the other does."""
    ggt = GGT(Node((0, 1), tuple(Branch((), Leaf((0, 1), ((), ()), score)) for score in (0.0, -20.0))), 2, 100)
    target = torch.arange(300) % 2
    right = 4.0 * F.one_hot(target, 2).float()
    wrong = 0.3 * torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    outputs = {"best": [right, wrong], "other": [wrong, right], "none": [wrong, wrong]}[good]

    def of(subnetworks):
        return torch.stack([outputs[g.choices[0]] for g in subnetworks])

    found = choose_temperature(ggt, of, lambda values, weights: nll(values, weights, target))
    usual = ggt.auto_temperature
    assert set(found.nll) == {usual * factor for factor in FACTORS}
    assert found.value == {"best": usual * min(FACTORS), "other": usual * max(FACTORS), "none": usual}[good]
    for temperature, value in found.nll.items():
        p = [np.exp(ggt.log_prob(g, temperature)) for g in ggt.enumerate()]
        mean = sum(w * o.softmax(-1) for w, o in zip(p, outputs, strict=True))
        assert value == pytest.approx(F.nll_loss(mean.log(), target).item(), rel=1e-4)


def test_an_average_that_a_temperature_would_sharpen_is_not_given_up():
    """Of two structures the sharper predicts better as it is than their mean, but no better once both are scaled."""
    ggt = GGT(Node((0, 1), tuple(Branch((), Leaf((0, 1), ((), ()), score)) for score in (0.0, -2.0))), 2, 100)
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(2, (2000,), generator=draw)
    outputs = []
    for sharpness in (1.0, 0.3):
        noise = 0.8 * torch.randn(2000, 2, generator=draw)
        outputs.append(sharpness * (noise + F.one_hot(target, 2)))

    def of(subnetworks):
        return torch.stack([outputs[g.choices[0]] for g in subnetworks])

    def chosen(calibration):
        predictor = Predictor(Backbone(None).build(), Classification(2), calibration=calibration)
        settling = Settling(predictor)
        return choose_temperature(ggt, of, lambda values, weights: settling._nll(values, weights, target)).value

    assert ggt.perplexity(chosen(None)) == pytest.approx(1.0)
    assert ggt.perplexity(chosen("TemperatureScaling")) > 1.9


def test_equal_sub_networks_are_one_pass():
    torch.manual_seed(0)
    head = randomise(BRAINetHead(fixed_ggt(), 3, num_params=2000)).eval()
    x = torch.randn(9, 12)
    with torch.no_grad():
        assert not head.averages_one
        head.temperature = 0
        assert head.averages_one
        values, weights = head.passes(x, 15)
        assert (values.shape, weights) == ((1, 9, 3), None)
        drawn = head.stochastic(x, 15).logits
        torch.testing.assert_close(values.expand(15, -1, -1), drawn)
        head.inference = "stochastic"
        assert len(head.passes(x, 15).values) == 15


def test_a_finalized_head_travels_and_a_given_temperature_stays(monkeypatch):
    torch.manual_seed(0)
    ggt, held = fixed_ggt(), rows()
    head = randomise(BRAINetHead(ggt, 3, num_params=2000, dropout=0.3)).eval()
    monkeypatch.setattr(tree_head, "_best_temperature", lambda head, held, nll: 7.5)
    monkeypatch.setattr(tree_head, "_best_dropout", lambda head, held, nll, passes: 0.0)
    found = head.finalize(held, held, nll)
    assert found == {"temperature": 7.5, "perplexity": ggt.perplexity(7.5), "dropout": 0.0}
    assert head.facts()["temperature"] == head.temperature == 7.5
    x = torch.randn(9, 12)
    with torch.no_grad():
        stored = {k: v.clone() for k, v in head.half().state_dict().items()}  # 16 bits hold no temperature
        head.float()
        again = BRAINetHead(ggt, 3, num_params=2000, dropout=0.3).eval()
        again.load_state_dict(stored)
        assert (again.temperature, again.prediction_dropout, again.layers.mixed) == (7.5, 0.0, True)
        torch.testing.assert_close(again(x), head(x))
        given = BRAINetHead(ggt, 3, num_params=2000, dropout=0.3, temperature=2.0).eval()
        given.load_state_dict(stored)
        assert (given.temperature, given.layers.mixed) == (2.0, False)
        given.finalize(held, held, nll)
        assert given.temperature == 2.0
        again.load_state_dict({k: v.clone() for k, v in given.state_dict().items()})
        assert again.temperature == 2.0  # it was given there
        head.temperature = "auto"
        assert head.temperature == ggt.auto_temperature


def test_dropout_is_left_out_where_it_harms():
    torch.manual_seed(0)
    held = rows(400)
    head = BRAINetHead(fixed_ggt(), 3, num_params=2000, dropout=0.5).eval()
    with torch.no_grad():  # labels by the head itself without masks, and it is sure of them
        head.output.reset_parameters()  # it starts at zero
        head.output.weight *= 2000
        logits, weights = head.enumerate(held.x, limit=10**5)
        target = torch.tensordot(weights, logits.softmax(-1), dims=1).argmax(1)
        head.finalize(held, HeadInputs(held.x, target), nll)
        assert head.prediction_dropout == 0.0
        assert head.dropout == 0.5
        a, b = head.stochastic(held.x, 2, temperature=0.0).logits
        torch.testing.assert_close(a, b)
        head.prediction_dropout = 0.5
        head.finalize(held, HeadInputs(held.x, torch.randint(3, (400,))), lambda outputs, *_: torch.zeros(400))
        assert head.prediction_dropout == 0.5  # nothing is better: as trained


def test_settling_draws_no_random_number_and_keeps_the_mode():
    head = BRAINetHead(fixed_ggt(), 3, num_params=2000, dropout=0.2).train()
    state = torch.get_rng_state()
    head.finalize(rows(), rows(seed=1), nll)
    assert torch.equal(torch.get_rng_state(), state)
    assert head.training
    assert all(p.grad is None for p in head.parameters())
    assert Tree().build(12, 3, head.ggt).needs_validation_data
    assert not Tree(temperature=3.0).build(12, 3, head.ggt).needs_validation_data
