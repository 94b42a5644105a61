"""Losses and temperature scaling against the obvious way."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from brainet_pl.calibration.temperature import PRIOR, TemperatureScaling, fit_temperature, scale
from brainet_pl.metrics.losses import confidence_loss


def test_confidence_loss_by_hand():
    logits, doubt = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    target, hinted = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([True, False, True, False, True, False])
    task, price = confidence_loss(logits, doubt, target, hinted)
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    c = 1 / (1 + np.exp(-doubt.numpy()))
    mixed = [p[i, y] if not hinted[i] else c[i] * p[i, y] + 1 - c[i] for i, y in enumerate(target)]
    assert task.item() == pytest.approx(-np.log(mixed).mean(), rel=1e-5)
    assert price.item() == pytest.approx(-np.log(c).mean(), rel=1e-5)


def test_confidence_loss_stays_finite_with_finite_gradients():
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    doubt = torch.tensor([1e4, -1e4], requires_grad=True)
    task, price = confidence_loss(logits, doubt, torch.tensor([1, 0]), torch.tensor([True, False]))
    (task + price).backward()
    for tensor in (task, price, logits.grad, doubt.grad):
        assert tensor.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 4.0))
def test_temperature_is_the_best_one(seed, sharpness):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(300, 5)) * 2
    true = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.array([rng.choice(5, p=p) for p in true])
    probs = np.exp(logits * sharpness) / np.exp(logits * sharpness).sum(1, keepdims=True)
    found = fit_temperature(torch.tensor(probs), torch.tensor(y), prior=None).item()

    def nll(t):
        q = probs ** (1 / t)
        return -np.log(q[np.arange(300), y] / q.sum(1)).mean()

    best = minimize_scalar(nll, bounds=(0.05, 20), method="bounded").x
    assert nll(found) <= nll(best) + 1e-6
    if 0.06 < best < 19:
        assert found == pytest.approx(best, rel=0.02)

    def posterior(log_t):
        return 300 * nll(math.exp(log_t)) + log_t**2 / (2 * PRIOR**2)

    likeliest = minimize_scalar(posterior, bounds=(math.log(0.05), math.log(20)), method="bounded").x
    held = math.log(fit_temperature(torch.tensor(probs), torch.tensor(y)).item())
    assert posterior(held) <= posterior(likeliest) + 1e-4


def test_temperature_of_a_faultless_validation_set_is_bounded_and_zeros_are_fine():
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert fit_temperature(probs, torch.tensor([0, 1])).isfinite()
    assert fit_temperature(probs, torch.tensor([1, 0]), prior=None) == pytest.approx(20, rel=1e-3)
    torch.testing.assert_close(scale(torch.tensor([[0.5, 0.5, 0.0]]), 2.0).sum(), torch.tensor(1.0))
    scaling = TemperatureScaling()
    for i in range(2):
        scaling.observe(torch.tensor([[0.9 - 0.001 * i, 0.1 + 0.001 * i]]), torch.tensor([i]), {})
    assert 1 < scaling.finalize()["temperature"] < 2  # right as often as wrong, but only twice
