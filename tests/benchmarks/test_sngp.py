"""`SNGP`: random features near their kernel, draws as the posterior has them, variance that grows outside."""

import math

import pytest
import torch
from torch.nn import functional as F

from brainet_pl.network.base import HeadInputs
from brainet_pl.network.training import TrainingSettings, fit_head
from brainet_pl.tasks import Classification


@pytest.fixture(scope="module")
def sngp(load):
    """The settings `SNGP`."""
    return load("rivals/sngp").SNGP


def nll(outputs, weights, target):
    task = Classification(3)
    return task.nll(task.predictive(outputs, weights), target)


def rows(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return torch.randn(n, 8, generator=generator) + 2 * F.one_hot(y, 8), y


@pytest.fixture(scope="module")
def fitted(sngp):
    torch.manual_seed(0)
    x, y = rows(300)
    head = sngp(num_random=512).build(8, 3)
    training = TrainingSettings(max_epochs=60, patience=9, batch_size=32, learning_rate=0.03)
    fit_head(head, HeadInputs(x, y), training, F.cross_entropy)
    held = rows(200, 1)
    head.eval().finalize(HeadInputs(x, y), HeadInputs(*held), nll)
    return head


def test_products_of_random_features_are_near_the_kernel(sngp):
    torch.manual_seed(0)
    x = torch.randn(20, 6)
    head = sngp(num_random=8000, length=0.7).build(6, 2)
    phi = head.map(x)
    normal = F.layer_norm(x, (6,))
    kernel = torch.exp(-torch.cdist(normal, normal).square() / (2 * 0.49 * 6))
    torch.testing.assert_close(phi @ phi.t(), kernel, atol=0.06, rtol=0)


def test_draws_have_the_mean_and_variance_of_the_posterior(fitted):
    x, _ = rows(5, 3)
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = fitted.passes(x, 4000).values
        mean = fitted(x)
        phi = F.pad(fitted.map(x), (0, 1), value=1.0)
    # The covariance of the outputs by the definition: Φ (H + δ)⁻¹ Φᵀ with H in its eigenvectors.
    covariance = (
        torch.einsum("oi,id,bd->obid", fitted.left, fitted.deviations, phi @ fitted.right).square().sum((2, 3)).t()
    )
    torch.testing.assert_close(drawn.mean(0), mean, atol=4 * float(drawn.std(0).max()) / math.sqrt(4000), rtol=0)
    torch.testing.assert_close(drawn.var(0), covariance, rtol=0.15, atol=0)


def test_it_learns_and_is_less_sure_far_from_what_it_saw(fitted):
    x, y = rows(300, 5)
    torch.manual_seed(0)
    with torch.no_grad():
        near, far = (
            fitted.passes(rows_, 200).values.var(0).sum(1).mean() for rows_ in (x, x[:, torch.arange(7, -1, -1)])
        )
        accuracy = (fitted.passes(x, 50).values.softmax(-1).mean(0).argmax(1) == y).float().mean()
    assert float(accuracy) > 0.8
    assert float(far) > 1.3 * float(near)


def test_a_state_loads_into_another_head_with_its_directions(fitted, sngp):
    other = sngp(num_random=512).build(8, 3).eval()
    x, _ = rows(4)
    assert not torch.equal(other(x), fitted(x))
    other.load_state_dict(fitted.state_dict())
    assert torch.equal(other(x), fitted(x))


@pytest.mark.parametrize("wrong", [{"num_random": 0}, {"length": 0}, {"prior_precision": -1}, {"num_random": 10**6}])
def test_wrong_settings(sngp, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sngp(**wrong)
