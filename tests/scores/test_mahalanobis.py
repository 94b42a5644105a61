"""Mahalanobis distances against numpy's inverse and scikit-learn's covariance, and where no inverse exists."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import EmpiricalCovariance

from brainet_pl.scores import Mahalanobis, ScoreContext
from brainet_pl.scores.fitting import fit_score
from brainet_pl.tasks.passes import Passes


def fitted(x, y, classes=None, **settings):
    score = Mahalanobis(**settings)
    if classes is not None:
        score.set_context(ScoreContext(classes))
    fit_score(score, torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y))
    return score


def twin(x, y, new, normalize):
    """The definition, one sample and one class at a time, in 64 bits."""
    x, new = (np.float64(np.float32(v)) for v in (x, new))
    if normalize:
        x, new = (np.array([row / max(np.sqrt((row**2).sum()), 1e-12) for row in v]) for v in (x, new))
    means = {c: x[y == c].mean(0) for c in set(y.tolist())}
    within = np.linalg.inv(
        sum(np.outer(a - means[c], a - means[c]) for a, c in zip(x, y.tolist(), strict=True)) / len(x)
    )
    overall = np.linalg.inv(sum(np.outer(a - x.mean(0), a - x.mean(0)) for a in x) / len(x))
    plain = np.array([min((a - m) @ within @ (a - m) for m in means.values()) for a in new])
    return plain, plain - np.array([(a - x.mean(0)) @ overall @ (a - x.mean(0)) for a in new])


def some(seed, n=80, d=4, classes=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + 2 * rng.normal(size=(classes, d))[y]
    return x, y, 3 * rng.normal(size=(12, d))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_against_a_twin(seed, d, classes, normalize):
    if normalize and d < 3:
        d += 2  # on a circle one direction is all there is within a class of few
    x, y, new = some(seed, 80, d, classes)
    plain, relative = fitted(x, y, classes, normalize=normalize).distances(torch.tensor(new, dtype=torch.float32))
    expected = twin(x, y, new, normalize)
    size = np.abs(expected[0]) + np.abs(expected[0] - expected[1]) + 1
    np.testing.assert_allclose(plain.numpy() / size, expected[0] / size, atol=2e-3)
    np.testing.assert_allclose(relative.numpy() / size, expected[1] / size, atol=2e-3)


def test_against_sklearn():
    x, _, new = some(0)
    plain, relative = fitted(x, np.zeros(80, int), normalize=False).distances(torch.tensor(new, dtype=torch.float32))
    expected = EmpiricalCovariance().fit(np.float32(x).astype(float)).mahalanobis(np.float32(new).astype(float))
    np.testing.assert_allclose(plain, expected, rtol=1e-4)
    np.testing.assert_allclose(relative, 0, atol=1e-3)  # with one class both are the same


@pytest.mark.parametrize("d", [3, 10, 64])
def test_features_that_add_up_to_one(d):
    """As those behind a softmax: their covariance has no inverse; without one of them it has, and tells the same."""
    rng = np.random.default_rng(d)
    x, new = (np.exp(0.3 * rng.normal(size=(n, d))) for n in (500, 20))
    x, new = (torch.tensor(v / v.sum(1, keepdims=True), dtype=torch.float32) for v in (x, new))
    y = rng.integers(0, 3, 500)
    found = fitted(x, y, normalize=False).distances(new)
    for got, expected in zip(found, twin(x[:, 1:].numpy(), y, new[:, 1:].numpy(), False), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.02 * d)
    assert found[0].min() >= 0


def test_features_of_very_different_sizes_all_count():
    """A distance does not depend on the units of a feature."""
    x, y, new = some(1)
    units = np.array([1e6, 1.0, 1e-6, 100.0])
    a = fitted(x, y, normalize=False).distances(torch.tensor(new, dtype=torch.float32))
    b = fitted(x * units, y, normalize=False).distances(torch.tensor(new * units, dtype=torch.float32))
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_features_far_from_zero():
    x, y, new = some(2)
    a = fitted(x, y, normalize=False).distances(torch.tensor(new, dtype=torch.float32))
    b = fitted(x + 1000, y, normalize=False).distances(torch.tensor(new + 1000, dtype=torch.float32))
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.05)


def test_constant_and_repeated_features_change_nothing():
    x, y, new = some(3)
    wide = [np.c_[v, np.full(len(v), 7.0), np.zeros(len(v)), v[:, 0]] for v in (x, new)]
    a = fitted(x, y, normalize=False).distances(torch.tensor(new, dtype=torch.float32))
    b = fitted(wide[0], y, normalize=False).distances(torch.tensor(wide[1], dtype=torch.float32))
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_fewer_samples_than_features():
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(6, 20)), dtype=torch.float32)
    plain, relative = fitted(x, [0, 0, 0, 1, 1, 1]).distances(x)
    assert plain.isfinite().all()
    assert relative.isfinite().all()
    assert plain.min() >= 0
    alone = fitted(x[:1], [0]).distances(x)  # one sample has no spread at all
    assert alone[0].tolist() == [0.0] * 6


def test_a_class_without_a_sample_is_left_out():
    """An empty class must not be a mean at the origin."""
    x, y, _ = some(4, classes=2)
    x, y = x + 50, np.where(y == 1, 2, 0)
    origin = torch.zeros(1, 4)
    full, gap = fitted(x, y // 2, 2, normalize=False), fitted(x, y, 5, normalize=False)
    assert gap.means.shape == (2, 4)
    torch.testing.assert_close(full.distances(origin), gap.distances(origin))
    assert gap.distances(origin)[0] > 10


def test_bad_features_are_refused():
    x, y, _ = some(5)
    x[3, 1], x[7, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match="expected finite features to fit a score to, got 2 of 80 rows"):
        fitted(x, y)
    with pytest.raises(ValueError, match=r"expected features .* and as many labels .*, got"):
        fitted(np.empty((0, 4)), [])
    score = fitted(*some(5)[:2])
    with pytest.raises(ValueError, match=r"expected features of shape \(batch, 4\) .*, got \(2, 3\)"):
        score.distances(torch.rand(2, 3))


def test_sixteen_bits_around_it_do_not_reach_it():
    x, y, new = some(6)
    score = fitted(x, y)
    new = torch.tensor(new, dtype=torch.bfloat16)
    expected = score.distances(new.float())
    score.to(torch.bfloat16)
    assert all(
        buffer.dtype == torch.float32 for name, buffer in score.named_buffers() if name not in ("fitted", "unit")
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = score.distances(new)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_scores_by_name():
    x, y, new = some(7)
    score, features = fitted(x, y), torch.tensor(new, dtype=torch.float32)
    found = score(Passes(torch.zeros(1, 12, 3), None, features, torch.zeros(12, 3)))
    assert list(found) == list(score.units) == ["mahalanobis", "mahalanobis_relative"]
    torch.testing.assert_close(tuple(found.values()), score.distances(features))
