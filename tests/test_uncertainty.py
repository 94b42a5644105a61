import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import xlogy

from brainet_pl import uncertainty as u


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(2, 5))
def test_against_numpy(seed, passes, classes):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(classes, 0.3), size=(passes, 4))
    w = rng.dirichlet(np.ones(passes))
    for weights in (None, w):
        share = np.full(passes, 1 / passes) if weights is None else w
        mean = (share[:, None, None] * p).sum(0)
        total = -xlogy(mean, mean).sum(-1)
        each = (share[:, None] * -xlogy(p, p).sum(-1)).sum(0)
        args = (torch.tensor(p), None if weights is None else torch.tensor(w))
        np.testing.assert_allclose(u.one_minus_max_p(*args), 1 - mean.max(-1), atol=1e-9)
        np.testing.assert_allclose(u.predictive_entropy(*args), total, atol=1e-9)
        np.testing.assert_allclose(u.expected_entropy(*args), each, atol=1e-9)
        np.testing.assert_allclose(u.mutual_information(*args), np.maximum(total - each, 0), atol=1e-9)
        assert (u.mutual_information(*args) >= 0).all()


def test_certain_predictions_are_safe():
    p = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert u.expected_entropy(p).item() == 0
    assert u.mutual_information(p).item() == pytest.approx(np.log(2))
    p.requires_grad_()
    u.predictive_entropy(p).sum().backward()
    assert torch.isfinite(p.grad).all()


def test_law_of_total_variance():
    means, variances = torch.randn(7, 3), torch.rand(7, 3)
    mean, aleatoric, epistemic = u.total_variance(means, variances)
    draws = means.repeat(20_000, 1, 1) + variances.sqrt() * torch.randn(20_000, 7, 3)
    torch.testing.assert_close(draws.mean((0, 1)), mean, rtol=0.05, atol=0.02)
    torch.testing.assert_close(draws.var((0, 1)), aleatoric + epistemic, rtol=0.05, atol=0.02)


def test_logit_scores():
    logits = torch.tensor([[[2.0, 0.0]], [[4.0, 0.0]]])
    assert u.max_logit(logits).item() == -3
    assert u.energy(logits).item() == pytest.approx(-np.log(np.exp(3) + 1))
