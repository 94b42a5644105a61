"""Variational Bayesian last layer: its bound against the published formula and draws, its penalty, fits, bad input."""

import importlib
import math
import sys

import numpy as np
import pytest
import torch
from scipy.stats import invwishart
from torch.distributions import MultivariateNormal, kl_divergence

from brainet_pl.datamodules import Digits
from brainet_pl.tasks import Classification, Regression

D, C, N = 5, 4, 12
TASK = Classification(C)


@pytest.fixture(scope="module")
def rival(load):
    """The module of the head and its loss, imported once."""
    load("common/training")
    return importlib.import_module("rivals.vbll")


def made(rival, covariance, scale=1.0):
    """A head whose covariances are nothing special."""
    draw = torch.Generator().manual_seed(3)
    head = rival.VBLL(covariance, prior_scale=1.0).build(D, C).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
        head.log_scale += math.log(scale)
        head.log_noise += math.log(scale)
        if head.lower is not None:
            head.lower *= scale
    return head


def batch():
    draw = torch.Generator().manual_seed(4)
    return torch.randn(N, D, generator=draw).double(), torch.randint(C, (N,), generator=draw)


def bounded_loss(head, x, y, task=TASK):
    return sys.modules[type(head).__module__].training_loss(task, head, x, y)


def posterior(head, k):
    """The weights of class k, bias last."""
    scale = torch.diag(head.log_scale[k].exp())
    lower = scale if head.lower is None else scale + head.lower[k].tril(-1)
    return MultivariateNormal(head.mean[k], scale_tril=lower)


def expected_nll(head, x, y, draws=20_000):
    """-E log p(y), from draws of whole weights and noise, (N,)."""
    generator = torch.Generator().manual_seed(0)
    phi, logits = torch.cat([x, torch.ones(len(x), 1)], 1), []
    for k in range(C):
        noise = torch.randn(draws, D + 1, generator=generator).double()
        weights = posterior(head, k).loc + noise @ posterior(head, k).scale_tril.T
        epsilon = torch.randn(draws, len(x), generator=generator) * head.log_noise[k].exp()
        logits.append(weights @ phi.T + epsilon)
    log_p = torch.stack(logits, -1).log_softmax(-1)
    return -log_p[:, torch.arange(len(x)), y].mean(0)


# -- the bound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("covariance", ["dense", "diagonal"])
@torch.no_grad()
def test_the_loss_is_the_published_bound(rival, covariance, smoothing):
    """Theorem 2 of Harrison, Willes & Snoek: y·m - log Σ exp(m + ½ (φᵀSφ + σ²)), in numpy, sample by sample."""
    head, (x, y) = made(rival, covariance), batch()
    expected = []
    for f, label in zip(x.numpy(), y.numpy(), strict=True):
        phi, mean, inside = np.append(f, 1.0), [], []
        for k in range(C):
            s, noise = posterior(head, k).covariance_matrix.numpy(), math.exp(2 * head.log_noise[k])
            mean.append(head.mean[k].numpy() @ phi)
            inside.append(mean[k] + 0.5 * (phi @ s @ phi + noise))
        target = np.eye(C)[label] * (1 - smoothing) + smoothing / C
        expected.append(np.log(np.exp(inside).sum()) - target @ mean)
    task = Classification(C, label_smoothing=smoothing)
    assert float(bounded_loss(head, x, y, task)) == pytest.approx(np.mean(expected), rel=1e-9)


@pytest.mark.parametrize("covariance", ["dense", "diagonal"])
@torch.no_grad()
def test_the_bound_is_above_the_expected_loss_and_close_where_weights_are_sure(rival, covariance):
    x, y = batch()
    gaps = {}
    for scale in (1.0, 0.3, 0.1):
        head = made(rival, covariance, scale)
        each = torch.stack([bounded_loss(head, x[i : i + 1], y[i : i + 1]) for i in range(N)])
        difference = each - expected_nll(head, x, y)
        assert (difference > -0.03 * scale).all()
        gaps[scale] = float(difference.mean())
    assert gaps[1.0] > 0.05  # wide weights: a bound, not the value
    assert gaps[0.1] == pytest.approx(gaps[0.3] / 9, rel=0.2)  # in proportion to the variances
    assert abs(gaps[0.1]) < 0.02


@torch.no_grad()
def test_without_off_diagonals_dense_is_diagonal(rival):
    dense, diagonal, (x, _) = made(rival, "dense"), made(rival, "diagonal"), batch()
    dense.lower.zero_()
    diagonal.load_state_dict({k: v for k, v in dense.state_dict().items() if k != "lower"})
    torch.testing.assert_close(dense.output_variance(x), diagonal.output_variance(x))
    torch.testing.assert_close(dense.penalty(), diagonal.penalty())


@pytest.mark.parametrize("covariance", ["dense", "diagonal"])
@torch.no_grad()
def test_draws_have_the_mean_and_variance_of_the_logits(rival, covariance):
    head, (x, _) = made(rival, covariance), batch()
    values = head.passes(x, 40_000).values
    assert values.shape == (40_000, N, C)
    torch.testing.assert_close(values.mean(0), head(x), rtol=0, atol=0.1)
    torch.testing.assert_close(values.var(0), head.output_variance(x), rtol=0.05, atol=0)


@pytest.mark.parametrize("covariance", ["dense", "diagonal"])
@torch.no_grad()
def test_the_penalty_is_the_divergence_and_the_prior_of_the_noise(rival, covariance):
    def by_hand(head):
        variance = torch.eye(D + 1, dtype=torch.float64) * 2.0 / (D + 1)
        prior = MultivariateNormal(torch.zeros(D + 1, dtype=torch.float64), variance)
        divergence = sum(float(kl_divergence(posterior(head, k), prior)) for k in range(C))
        noise = np.diag(head.log_noise.mul(2).exp().numpy())
        return divergence - invwishart(df=C, scale=np.eye(C)).logpdf(noise)

    one, other = made(rival, covariance), made(rival, covariance, 0.2)
    # SciPy's density with df degrees of freedom has the power (df + C + 1) / 2; the authors' have dof = 1.
    shift = [-0.5 * (1.0 - C) * 2 * float(head.log_noise.sum()) for head in (one, other)]
    expected = by_hand(one) - shift[0] - by_hand(other) + shift[1]
    assert float(one.penalty() - other.penalty()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("covariance", ["dense", "diagonal"])
@torch.no_grad()
def test_the_prior_of_its_own_has_the_least_penalty(rival, covariance):
    head = made(rival, covariance)
    head.prior_variance = None
    found = head.penalty()
    penalties = []
    for k in range(-200, 201):
        head.prior_variance = 1.02**k
        penalties.append(float(head.penalty()))
    assert 0 < penalties.index(min(penalties)) < 400
    assert float(found) <= min(penalties)
    assert float(found) == pytest.approx(min(penalties), abs=0.01)


def test_the_divergence_is_zero_at_the_prior(rival):
    head = rival.VBLL("dense", prior_scale=0.7).build(D, C).double()
    with torch.no_grad():
        head.mean.zero_()
        head.lower.zero_()
        head.log_scale.fill_(0.5 * math.log(0.7 * 2 / (D + 1)))
        head.log_noise.zero_()
    assert head.penalty().item() == pytest.approx(0.5 * C)  # of the noise alone, of variance 1
    head.penalty().backward()
    assert head.mean.grad.abs().max() < 1e-9
    assert head.log_scale.grad.abs().max() < 1e-9


# -- as a head --------------------------------------------------------------------------------------------------------


def test_all_of_it_learns_and_other_digits_are_less_certain(rival, load):
    torch.manual_seed(0)
    sample = load("common/tasks").digits(0)
    head = rival.VBLL().build(64, 8)
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    assert set(before) == {"mean", "log_scale", "lower", "log_noise"}
    load("common/training").fit_best(head, sample, epochs=8, patience=8, lr=0.05)
    for name, parameter in head.named_parameters():
        assert (parameter - before[name]).abs().max() > 1e-3, name
    data = Digits()
    data.setup("test")
    with torch.no_grad():
        known, unknown = (
            torch.cat([sample.task.scores(*head.passes(x, 15))["entropy"] for x, _ in loader]).mean()
            for loader in (data.predict_dataloader(), data.ood_dataloaders()["held_out"])
        )
    assert unknown > 1.5 * known


def test_small_heads_are_dense(rival):
    assert rival.VBLL().build(64, 10).lower.shape == (10, 65, 65)
    assert rival.VBLL().build(512, 10).lower is None
    assert rival.VBLL("dense").build(160, 10).lower is not None


# -- bad input --------------------------------------------------------------------------------------------------------


def test_what_cant_be_meant_is_said(rival):
    with pytest.raises(ValueError, match="expected covariance to be one of 'auto', 'dense', 'diagonal'"):
        rival.VBLL(covariance="full")
    with pytest.raises(ValueError, match="expected prior_scale to be a finite number above 0"):
        rival.VBLL(prior_scale=0)
    with pytest.raises(ValueError, match=r"at most 100,000,000 numbers .* use covariance='diagonal'"):
        rival.VBLL("dense").build(10_000, 10)
    for task in (Regression(), Classification(C, loss="confidence")):
        head = rival.VBLL().build(D, task.out_features)
        x = torch.randn(3, D)
        with pytest.raises(ValueError, match=r"expected the task Classification .* use the head Laplace or Bayes"):
            rival.training_loss(task, head, x, torch.zeros(3))
