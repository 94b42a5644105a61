"""Last-layer Laplace: covariance against an explicit Hessian and laplace-torch, the prior, draws, fits, bad input."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl.cli import main
from brainet_pl.datamodules import Digits
from brainet_pl.export.graph import export_program
from brainet_pl.lightning import steps
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Laplace, LaplaceHead, Linear
from brainet_pl.network.base import HeadInputs
from brainet_pl.network.laplace import evidence_precision
from brainet_pl.swap.model import swap_head
from brainet_pl.tasks import Classification, Regression

D, C, N = 4, 3, 90


def nll_of(task):
    return lambda outputs, weights, target: task.nll(task.predictive(outputs, weights), target)


NLL = nll_of(Classification(C))


@pytest.fixture(scope="module")
def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=draw) * torch.tensor([1.0, 3.0, 0.3, 1.0])
    y = (x @ torch.randn(D, C, generator=draw) + torch.randn(N, C, generator=draw)).argmax(1)
    return HeadInputs(x, y)


def trained(data, settings=None, out=C, loss=nn.functional.cross_entropy, steps=300):
    torch.manual_seed(0)
    head = (settings or Laplace()).build(D, out)
    optimizer = torch.optim.Adam(head.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (loss(head(data.x), data.target) + 0.001 * head.layers.weight.square().sum()).backward()
        optimizer.step()
    return head


def map_weights(head):
    """(O, D + 1) weights and biases."""
    return torch.cat([head.layers.weight, head.layers.bias[:, None]], 1).detach().double()


def with_ones(x):
    return torch.cat([x, torch.ones(len(x), 1)], 1)


def covariance(head):
    """(P, P), of the weights of all outputs one after the other, each with its bias last."""
    basis = torch.kron(head.left, head.right).double()
    return (basis * head.deviations.double().flatten() ** 2) @ basis.T


def twin(head, data, structure, precision):
    """The covariance from the Hessian, sample by sample, in numpy."""
    phi, w = with_ones(data.x).double().numpy(), map_weights(head).numpy()
    hessian, of_outputs, of_features = 0.0, 0.0, 0.0
    for f in phi:
        z = w @ f
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        inner = np.diag(p) - np.outer(p, p)
        hessian = hessian + np.kron(inner, np.outer(f, f))
        of_outputs, of_features = of_outputs + inner / len(phi), of_features + np.outer(f, f) / len(phi)
    if structure == "kron":
        hessian = len(phi) * np.kron(of_outputs, of_features)
    return np.linalg.inv(data.represents * hessian + precision * np.eye(w.size))


# -- the Gaussian -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("represents", [1.0, 7.5])
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_covariance_is_that_of_an_explicit_hessian(data, structure, represents):
    data = data._replace(represents=represents)
    head = trained(data, Laplace(structure, prior_precision=0.7))
    assert head.finalize(data, None, NLL) == {"prior_precision": pytest.approx(0.7)}
    np.testing.assert_allclose(covariance(head), twin(head, data, structure, 0.7), rtol=1e-3, atol=1e-5)


def test_a_sample_counts_as_often_as_it_represents(data):
    head = trained(data, Laplace("full"))
    twice = HeadInputs(data.x.repeat(2, 1), data.target.repeat(2))
    head.finalize(twice, None, NLL)
    expected, precision = covariance(head), float(head.precision)
    head.finalize(data._replace(represents=2.0), None, NLL)
    torch.testing.assert_close(covariance(head), expected, rtol=1e-4, atol=1e-6)
    assert float(head.precision) == pytest.approx(precision, rel=1e-4)
    narrowest = float(head.deviations.min())
    head.finalize(data, None, NLL)
    assert (float(head.deviations.min()) / narrowest) ** 2 == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.filterwarnings("ignore")
def test_laplace_torch_agrees(data, structure):
    oracle = pytest.importorskip("laplace")
    head = trained(data, Laplace(structure, prior_precision=0.5))
    head.finalize(data, None, NLL)
    phi = with_ones(data.x)  # as a feature, so that the bias has its part in the Kronecker factors
    net = nn.Sequential(nn.Identity(), nn.Linear(D + 1, C, bias=False))
    net[1].weight.data = map_weights(head).float()
    other = oracle.Laplace(
        net, "classification", subset_of_weights="last_layer", hessian_structure=structure, prior_precision=0.5
    )
    other.fit(DataLoader(TensorDataset(phi, data.target), batch_size=N))
    theirs = (
        other.posterior_covariance if structure == "full" else other.posterior_precision.to_matrix().double().inverse()
    )
    torch.testing.assert_close(covariance(head), theirs.double(), rtol=2e-3, atol=1e-4)
    probabilities = other(phi[:8], pred_type="glm", link_approx="mc", n_samples=20_000)
    with torch.no_grad():
        drawn = head.passes(data.x[:8], 20_000).values.softmax(-1).mean(0)
    torch.testing.assert_close(drawn, probabilities, rtol=0, atol=0.012)
    assert (drawn - head(data.x[:8]).softmax(-1)).abs().max() > 0.03  # the trained weights alone say something else
    free = trained(data, Laplace(structure))
    best = free.finalize(data, None, NLL)["prior_precision"]
    evidence = [float(other.log_marginal_likelihood(torch.tensor(best * f))) for f in (0.8, 1.0, 1.25)]
    assert evidence[1] > max(evidence[0], evidence[2])


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_draws_have_the_covariance_of_the_outputs(data, structure):
    head = trained(data, Laplace(structure))
    head.finalize(data, None, NLL)
    with torch.no_grad():
        values = head.passes(data.x[:5], 40_000).values.double()
        torch.testing.assert_close(values.mean(0), head(data.x[:5]).double(), rtol=0, atol=0.05)
    for i, f in enumerate(with_ones(data.x[:5]).double()):
        jacobian = torch.kron(torch.eye(C, dtype=torch.float64), f[None])
        expected = jacobian @ covariance(head) @ jacobian.T
        torch.testing.assert_close(values[:, i].T.cov(), expected, rtol=0.06, atol=0.01)


def test_numbers_have_the_exact_hessian_of_their_loss(data):
    task = Regression()
    target = data.x[:, 0] * 2 + 0.3 * torch.randn(N, generator=torch.Generator().manual_seed(0)) + 50
    numbers = HeadInputs(data.x, target)
    task.prepare(target)
    head = trained(numbers, Laplace("full", prior_precision=0.5), 2, task.loss, steps=600)
    head.finalize(numbers, None, nll_of(task))
    phi, y = with_ones(data.x).double(), target.double()

    def total(w):
        return N * task.double().loss(phi @ w.view(2, D + 1).T, y)

    hessian = torch.autograd.functional.hessian(total, map_weights(head).flatten())
    expected = (hessian + 0.5 * torch.eye(2 * (D + 1), dtype=torch.float64)).inverse()
    torch.testing.assert_close(covariance(head), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_directions_in_which_the_loss_bends_down_have_the_prior(data, structure):
    """Far from a minimum the Hessian by a raw variance has negative eigenvalues."""
    task = Regression()
    numbers = HeadInputs(data.x, torch.randn(N) * 1e-3)
    head = Laplace(structure, prior_precision=4.0).build(D, 2)
    with torch.no_grad():
        head.layers.weight.zero_()  # a mean that is right, and a variance that is too large
        head.layers.bias.zero_()
    head.finalize(numbers, None, nll_of(task))
    assert head.deviations.isfinite().all()
    assert head.deviations.max() == pytest.approx(0.5)


# -- the prior --------------------------------------------------------------------------------------------------------


def test_the_precision_has_the_largest_marginal_likelihood():
    draw = torch.Generator().manual_seed(2)
    values, weights = torch.rand(30, generator=draw).double() * 50, torch.randn(30, generator=draw).double()
    best = evidence_precision(values, weights)

    def evidence(d):
        return -0.5 * (d * weights.square().sum() + (values + d).log().sum() - 30 * math.log(d))

    grid = [best * 1.02**k for k in range(-60, 61)]
    assert max(grid, key=evidence) == best
    assert evidence_precision(values, 0 * weights) == pytest.approx(1e6)
    assert evidence_precision(0 * values, weights) == pytest.approx(1e-6)


def test_held_out_samples_say_how_sure_the_weights_may_be(data):
    head = trained(data, Laplace("full"))
    usual = head.finalize(data, None, NLL)["prior_precision"]
    assert head.finalize(data, data, NLL)["prior_precision"] > usual  # the samples that it was trained on
    draw = torch.Generator().manual_seed(0)
    random = HeadInputs(data.x.repeat(3, 1), torch.randint(C, (3 * N,), generator=draw))
    chosen = head.finalize(data, random, NLL)["prior_precision"]
    assert chosen < usual
    with torch.no_grad():
        wide = NLL(head.passes(random.x, 500).values, None, random.target).mean()
        head.finalize(data, None, NLL)
        narrow = NLL(head.passes(random.x, 500).values, None, random.target).mean()
    assert wide < narrow - 0.05
    fixed = trained(data, Laplace("full", prior_precision=3.0))
    assert fixed.finalize(data, random, NLL)["prior_precision"] == pytest.approx(3.0)


# -- as a head --------------------------------------------------------------------------------------------------------


def test_until_it_is_finalized_it_is_a_linear_layer(data):
    torch.manual_seed(0)
    linear = Linear().build(D, C)
    torch.manual_seed(0)
    head = Laplace().build(D, C)
    assert torch.equal(linear(data.x), head(data.x))
    torch.testing.assert_close(head.passes(data.x, 3).values, linear(data.x).expand(3, N, C))
    assert head.facts() == {"structure": "full"}
    head.finalize(data, None, NLL)
    assert head.facts() == {"structure": "full", "prior_precision": float(head.precision)}
    assert head.num_params == linear.num_params


def test_small_heads_keep_everything_and_large_ones_factors():
    assert Laplace().build(64, 10).structure == "full"
    large = Laplace().build(512, 10)
    assert large.structure == "kron"
    assert (large.left.shape, large.right.shape) == ((10, 10), (513, 513))
    assert Laplace("full").build(512, 4).left.shape == (2052, 2052)


def test_it_can_be_finalized_in_inference_mode_and_in_other_types(data):
    head = trained(data, Laplace("full", prior_precision=1.0))
    head.finalize(data, data, NLL)
    expected = covariance(head)
    with torch.inference_mode():
        head.finalize(HeadInputs(data.x + 0, data.target + 0), None, NLL)
    torch.testing.assert_close(covariance(head), expected)
    head.double().finalize(data, data, NLL)
    torch.testing.assert_close(covariance(head), expected, rtol=1e-3, atol=1e-5)
    assert head.passes(data.x, 2).values.dtype == torch.float64


def test_a_fit_finalizes_it_and_the_checkpoint_carries_it(tmp_path, quiet_trainer, monkeypatch):
    monkeypatch.setattr(steps, "SAMPLE_ROWS", 100)
    seen = []
    finalize = LaplaceHead.finalize

    def observed(self, samples, *rest):
        seen.append(len(samples.x) * samples.represents)
        return finalize(self, samples, *rest)

    monkeypatch.setattr(LaplaceHead, "finalize", observed)
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Laplace(), lr=0.01, calibration=None)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    fit = quiet_trainer(tmp_path, checkpoint, epochs=2)
    fit.fit(model, datamodule=Digits())
    assert seen == pytest.approx([steps.train_size(fit)] * 2)
    assert fit.callback_metrics["val/head/prior_precision"] == model.head.precision
    again = BRAINet.load_from_checkpoint(checkpoint.last_model_path, weights_only=True).eval()
    x, found = torch.rand(6, 64), []
    for one in (model.eval(), again):
        torch.manual_seed(0)
        with torch.no_grad():
            found.append(one.predictor.predict(x))
    torch.testing.assert_close(found[0]["probabilities"], found[1]["probabilities"])
    assert (found[1]["mutual_information"] > 1e-4).all()  # of a head that does not draw it is 0
    with pytest.raises(RuntimeError, match="one whose head draws dropout masks or weights differs each time"):
        export_program(again, x)


def test_averaged_weights_keep_directions_that_are_directions(tmp_path, quiet_trainer):
    kind = getattr(pl.callbacks, "EMAWeightAveraging", None) or pytest.skip("this Lightning has no EMAWeightAveraging")
    model = BRAINet(8, head=Laplace(), lr=0.01)
    quiet_trainer(tmp_path, kind(decay=0.9), epochs=2).fit(model, datamodule=Digits())
    identity = torch.eye(len(model.head.left))
    torch.testing.assert_close(model.head.left @ model.head.left.T, identity, rtol=0, atol=1e-4)
    assert model.head.precision > 0


class Stream(IterableDataset):
    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        for _ in range(64):
            x = torch.randn(D, generator=draw)
            yield x, x[:C].argmax()


def test_samples_of_a_stream_stand_for_themselves(tmp_path, quiet_trainer):
    model = BRAINet(C, head=Laplace())
    quiet_trainer(tmp_path).fit(model, DataLoader(Stream(), batch_size=16))
    assert model.head.precision > 0
    assert model.teacher.head_facts == {"prior_precision": float(model.head.precision)}


def test_a_swapped_head_is_finalized_by_calibrate(data):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, C))
    swapped = swap_head(network, data.x, C, head=Laplace(), progress=False).eval()
    assert "mutual_information" not in swapped.predict(data.x)  # all draws are the trained weights
    learned = swapped.calibrate((data.x, data.target), (data.x, data.target), progress=False)
    assert "head/prior_precision" in learned
    assert swapped.predict(data.x)["mutual_information"].mean() > 1e-3


def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    head = ["--model.head=Laplace", "--model.head.structure=kron"]
    command = main(["fit", "--data=Digits", "--model.num_classes=8", *head, *quick])
    assert command.model.head_settings == Laplace("kron")


# -- bad input --------------------------------------------------------------------------------------------------------


def test_what_cant_be_meant_is_said(data):
    with pytest.raises(ValueError, match="expected structure to be one of 'auto', 'full', 'kron'"):
        Laplace(structure="diag")
    with pytest.raises(ValueError, match="expected prior_precision to be a finite number above 0"):
        Laplace(prior_precision=0.0)
    with pytest.raises(ValueError, match=r"at most 5,000 weights .* got 10,010: .*structure='kron'"):
        Laplace("full").build(1000, 10)
    with pytest.raises(ValueError, match=r"at most 8,192 features or outputs .* got 100,001: .*the head Linear"):
        Laplace().build(100_000, 10)
    head = Laplace().build(D, C)
    with pytest.raises(ValueError, match="expected a task with a likelihood for the head Laplace"):
        head.finalize(data, None, lambda outputs, weights, target: torch.zeros(len(target)))
    doubtful = Laplace().build(D, C + 1)
    with pytest.raises(ValueError, match=r"that every output has a part in .*got none for output 3 of 4"):
        doubtful.finalize(data, None, nll_of(Classification(C, loss="confidence")))
