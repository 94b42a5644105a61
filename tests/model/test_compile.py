"""torch.compile of heads and models with the default, stochastic inference: one graph, draws as they should be."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from brainet_pl import GGT, BRAINet, learn_structure, swap_layer
from brainet_pl._utils.framework import ModelCheckpoint
from brainet_pl.callbacks import StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.network import BRAINetHead, Tree


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def learned(features):
    return learn_structure(features, test="gaussian", max_order=2, threshold=0.02, progress=False)


@pytest.fixture
def ggt(learned):
    """A tree that nobody has asked anything yet: a graph can't compute what is kept at the first call."""
    return GGT.from_dict(learned.to_dict())


def make(ggt, **settings):
    torch.manual_seed(0)
    head = BRAINetHead(ggt, 3, width=2.0, **settings)
    for _ in range(3):
        head(torch.randn(32, 10))
    head.output.reset_parameters()  # beside a linear layer it starts at zero
    return head.eval()


# -- choices as tensors, against the walk through each sub-network ----------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"activation": "tanh"}, {"norm": None}, {"min_width": 3}])
def test_choices_give_what_their_subnetworks_give(ggt, settings):
    head, x = make(ggt, **settings), torch.randn(5, 10, requires_grad=True)
    everything = list(ggt.enumerate())
    walked, chosen = head.at(x, everything), head.on_choices(x, head.layers.choices(everything))
    torch.testing.assert_close(chosen, walked)
    weight = torch.randn_like(walked)
    wanted = [x, *head.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), wanted) for y in (chosen, walked)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_tree_that_is_a_leaf_has_choices_too():
    ggt = learn_structure(torch.randn(50, 3).numpy(), test="gaussian", threshold=10.0, max_order=0, progress=False)
    head, x = make_leaf(ggt), torch.randn(4, 3)
    everything = list(ggt.enumerate())
    torch.testing.assert_close(head.on_choices(x, head.layers.choices(everything)), head.at(x, everything))


def make_leaf(ggt):
    return BRAINetHead(ggt, 2, width=2.0).eval()


@pytest.mark.parametrize("temperature", [0.0, 5.0, "auto", 1000.0])
def test_draws_follow_the_posterior(ggt, temperature):
    head, n = make(ggt, temperature=temperature), 20_000
    torch.manual_seed(1)
    drawn = head.layers.draw_posterior(n)
    probabilities = ggt.branch_probabilities(head.temperature)
    for level, choice in zip(head.layers.ordered, drawn, strict=True):
        for i, node in enumerate(level.level.nodes):
            p = torch.tensor(probabilities[node] if len(probabilities[node]) else [1.0])  # a leaf has one way
            found = torch.bincount(choice[i, :, 0], minlength=len(p)).double() / n
            assert len(found) == len(p)
            assert (found - p).abs().max() < 5 * (p * (1 - p) / n).sqrt().max() + 1e-6


def test_held_draws_stay(ggt):
    head, x = make(ggt), torch.randn(4, 10)
    head.inference = "stochastic"
    assert not torch.equal(head.passes(x, 30).values, head.passes(x, 30).values)
    held = ggt.sample(30, head.temperature, 7)
    head.hold(held)
    torch.testing.assert_close(head.passes(x, 30).values, head.at(x, held))
    compiled = torch.compile(lambda x: head.passes(x, 30).values, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), head.at(x, held))
    head.hold(None)
    assert not torch.equal(head.passes(x, 30).values, head.passes(x, 30).values)


# -- one graph --------------------------------------------------------------------------------------------------------

BACKENDS = [
    "eager",
    pytest.param(
        "inductor",
        marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")],
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_trains_and_predicts_in_one_graph(ggt, backend):
    head, plain = make(ggt), make(ggt)
    trained = torch.compile(head.train(), fullgraph=True, backend=backend)
    plain.train()
    for size in (8, 9, 10):
        x = torch.randn(size, 10)
        torch.manual_seed(size)
        ours = trained(x)
        torch.manual_seed(size)
        theirs = plain(x)
        assert ours.shape == theirs.shape
        if backend == "eager":  # inductor draws other numbers from the same seed
            torch.testing.assert_close(ours, theirs)
        ours.sum().backward()
    assert all(p.grad is not None for p in head.parameters())
    head.eval().inference = "stochastic"
    predicted = torch.compile(lambda x: head.passes(x, 2000).values, fullgraph=True, backend=backend)
    with torch.no_grad():
        for size in (4, 1, 7):
            x = torch.randn(size, 10)
            first, second = predicted(x), predicted(x)
            assert first.shape == (2000, size, 3)
            assert not torch.equal(first, second)
            exact, weights = head.enumerate(x)
            mean = torch.tensordot(weights.to(exact.dtype), exact, dims=1)
            spread = torch.tensordot(weights.to(exact.dtype), (exact - mean) ** 2, dims=1).sqrt()
            assert ((first.mean(dim=0) - mean).abs() < 5 * spread / 2000**0.5 + 1e-5).all()
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exact_average_is_exact_in_a_graph_too(ggt, backend):
    head, x = make(ggt, temperature=5.0), torch.randn(6, 10)
    compiled = torch.compile(lambda x: head.passes(x, 15), fullgraph=True, backend=backend)
    with torch.no_grad():
        (values, weights), (eager, exact) = compiled(x), head.passes(x, 15)
    torch.testing.assert_close(torch.tensordot(weights, values, 1), torch.tensordot(exact, eager, 1))
    assert torch.equal(values, compiled(x).values)
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_fits_tests_and_predicts_without_a_break(tmp_path, quiet_trainer, backend):
    data, model = Digits(), BRAINet(8, head=Tree(num_params=4000), passes=5, lr=0.01)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    keep = ModelCheckpoint(tmp_path, filename="model")
    trainer = quiet_trainer(tmp_path, StructureLearning(threshold=0.1, progress=False), keep, epochs=2)
    trainer.fit(compiled, datamodule=data)
    (metrics, *_) = trainer.test(compiled, datamodule=data, verbose=False)
    assert metrics["test/cls/Acc"] > 0.5
    assert trainer.predict(compiled, datamodule=data)[0]["probabilities"].shape[1] == 8
    assert not counters["graph_break"]
    assert 3 <= counters["stats"]["unique_graphs"] <= 12  # training, passes and those of other batch sizes

    stored = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
    again = BRAINet.load_from_checkpoint(keep.best_model_path).eval()
    assert list(stored) == list(again.state_dict())  # no prefix of the compiler
    answer = torch.compile(again, fullgraph=True, backend=backend)(torch.rand(3, 64))
    torch.testing.assert_close(answer.exp().sum(dim=1), torch.ones(3))


@pytest.mark.slow
def test_predict_is_one_graph():
    """All that is said of an input, scores of the features included."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
    data = torch.randn(100, 6), torch.arange(100) % 3
    predictor = swap_layer(model, data, "2", progress=False, scores=["KNN"]).predictor.eval()
    x = torch.rand(8, 12)
    with torch.no_grad():
        wanted = predictor.predict(x)
        found = torch.compile(predictor.predict, fullgraph=True, backend="aot_eager")(x)
    assert list(found) == list(wanted)
    assert "knn" in found
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, atol=1e-5, rtol=1e-5, equal_nan=True)
