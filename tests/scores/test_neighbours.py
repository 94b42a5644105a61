"""Distances to the k-th neighbour against a slow twin and scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from brainet_pl.scores import KNN, ScoreContext, neighbours
from brainet_pl.scores.fitting import fit_score
from brainet_pl.tasks.passes import Passes


def fitted(x, **settings):
    score = KNN(**settings)
    fit_score(score, torch.as_tensor(x, dtype=torch.float32), torch.zeros(len(x), dtype=torch.long))
    return score


def units(seed, n, d):
    """(n, d) features, some of them close to each other."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    x[1::3] = 3 * x[::3][: len(x[1::3])] + 0.01 * rng.normal(size=x[1::3].shape)
    return x


def twin(bank, new, k):
    """Sort all distances, one sample at a time, in 64 bits."""
    bank, new = (np.array([row / np.sqrt((row**2).sum()) for row in v.astype(np.float64)]) for v in (bank, new))
    return [sorted(((row - other) ** 2).sum() for other in bank)[min(k, len(bank)) - 1] for row in new]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 25), st.integers(1, 12), st.integers(1, 30))
def test_against_a_twin_with_fewer_rows_than_k_too(seed, n, d, k):
    bank, new = units(seed, n, d), units(seed + 1, 9, d)
    found = fitted(bank, k=k).distances(torch.tensor(new))
    np.testing.assert_allclose(found, twin(bank, new, k), atol=2e-6)


@pytest.mark.parametrize("k", [1, 7, 50])
def test_against_sklearn(k):
    bank, new = units(0, 300, 16), units(1, 40, 16)
    unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (bank, new)]
    expected = NearestNeighbors(n_neighbors=k).fit(unit[0]).kneighbors(unit[1])[0][:, -1] ** 2
    found = fitted(bank, k=k).distances(torch.tensor(new))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert found.max() <= 4


@pytest.mark.parametrize(
    ("settings", "context", "as_they_are"),
    [
        ({"normalize": False}, {}, True),
        ({}, {"raw": True}, True),
        ({}, {"scaled": True}, True),
        ({}, {}, False),
        ({"normalize": True}, {"raw": True}, False),
    ],
)
def test_inputs_and_standardised_taps_are_read_as_they_are(settings, context, as_they_are):
    bank, new = units(0, 90, 6), units(1, 20, 6)
    unit = [v if as_they_are else v / np.linalg.norm(v, axis=1, keepdims=True) for v in (bank, new)]
    expected = NearestNeighbors(n_neighbors=4).fit(unit[0]).kneighbors(unit[1])[0][:, -1] ** 2
    score = KNN(k=4, **settings)
    score.set_context(ScoreContext(1, **context))
    fit_score(score, torch.tensor(bank), torch.zeros(90, dtype=torch.long))
    loaded = KNN(k=4, **settings)
    loaded.load_state_dict(score.state_dict())
    for one in (score, loaded):
        np.testing.assert_allclose(one.distances(torch.tensor(new)), expected, atol=1e-4)


def test_unlike_inputs_are_further_away():
    generator = torch.Generator().manual_seed(0)
    known = 1 + 0.1 * torch.randn(200, 8, generator=generator)
    score = fitted(known, k=5)
    near = score.distances(1 + 0.1 * torch.randn(50, 8, generator=generator))
    far = score.distances(torch.randn(50, 8, generator=generator))
    assert near.max() < far.min()


def test_lengths_do_not_matter():
    bank, new = units(0, 60, 5), torch.tensor(units(1, 10, 5))
    a, b = fitted(bank, k=3), fitted(1000 * bank, k=3)
    torch.testing.assert_close(a.distances(new), b.distances(0.001 * new), atol=1e-5, rtol=1e-5)


def test_memory_is_bounded_by_max_rows():
    bank = units(0, 500, 6)
    a, b, other = (fitted(bank, k=2, max_rows=40, seed=seed) for seed in (0, 0, 1))
    assert a.bank.shape == (40, 6)
    assert torch.equal(a.bank, b.bank)
    assert not torch.equal(a.bank, other.bank)
    rows = torch.nn.functional.normalize(torch.tensor(bank), dim=1)
    chosen = [int((rows - row).abs().sum(dim=1).argmin()) for row in a.bank]
    assert len(set(chosen)) == 40  # rows of the training data, none of them twice
    assert max(chosen) > 400  # and not the first ones
    assert fitted(bank, max_rows=500).bank.shape == (500, 6)


def test_a_large_batch_is_taken_in_parts(monkeypatch):
    bank, new = units(0, 50, 6), torch.tensor(units(1, 33, 6))
    score = fitted(bank, k=4)
    whole = score.distances(new)
    seen = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(neighbours, "ROOM", 50 * 5)
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda t, *args, **kwargs: (seen.append(t.numel()), topk(t, *args, **kwargs))[1]
    )
    torch.testing.assert_close(score.distances(new), whole)
    assert len(seen) == 7
    assert max(seen) <= 50 * 5
    assert score.distances(new[:0]).shape == (0,)


def test_bad_features_and_settings_are_refused():
    x = units(0, 10, 3)
    x[4, 1] = np.nan
    with pytest.raises(ValueError, match="expected finite features to fit a score to, got 1 of 10 rows with NaN"):
        fitted(x)
    with pytest.raises(
        ValueError, match=r"expected features of shape \(batch, 3\) as k-NN was fitted to, got \(2, 4\)"
    ):
        fitted(units(0, 10, 3)).distances(torch.rand(2, 4))
    with pytest.raises(ValueError, match="k of at least 1"):
        KNN(k=0)
    with pytest.raises(ValueError, match="max_rows of at least 1"):
        KNN(max_rows=0)


def test_sixteen_bits_around_it_do_not_reach_it():
    score, new = fitted(units(0, 60, 5), k=3), torch.tensor(units(1, 10, 5)).to(torch.bfloat16)
    expected = score.distances(new.float())
    score.to(torch.bfloat16)
    assert score.bank.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = score.distances(new)
    torch.testing.assert_close(found, expected)
    again = KNN(k=3).to(torch.bfloat16)
    fit_score(again, torch.tensor(units(0, 60, 5)).to(torch.bfloat16), torch.zeros(60))
    assert again.bank.dtype == torch.float32


def test_the_score_by_name():
    score, features = fitted(units(0, 60, 5), k=3), torch.tensor(units(1, 10, 5))
    found = score(Passes(torch.zeros(1, 10, 3), None, features, torch.zeros(10, 3)))
    assert list(found) == list(score.units) == ["knn"]
    assert torch.equal(found["knn"], score.distances(features))
