"""Linear layers that a head is compared with, against scikit-learn and leave-one-out by hand."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss

from brainet_pl.tasks import linear
from brainet_pl.tasks.linear import fit_ridge, fit_softmax


def test_logistic_regression_equals_that_of_scikit_learn(monkeypatch):
    """One penalty and one scaling, so that both solve the same problem: mean loss + λ·‖w‖²."""
    monkeypatch.setattr(linear, "PENALTIES", (1e-2,))
    monkeypatch.setattr(linear, "scalings", lambda x: [linear.Scaling(torch.zeros(5), torch.ones(5))])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5)).astype(np.float32)
    y = (x @ rng.normal(size=(5, 3)) + rng.normal(size=(400, 3))).argmax(1)
    theirs = LogisticRegression(C=1 / (2 * 1e-2 * 400), tol=1e-8, max_iter=1000).fit(x, y)
    ours = fit_softmax(torch.from_numpy(x), torch.from_numpy(y), 3)
    np.testing.assert_allclose(ours(torch.from_numpy(x)), theirs.predict_proba(x), atol=1e-3)


def test_digits_are_predicted_as_well_as_by_a_tuned_peer():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))  # writers come one after the other
    x, y = (x[order] / 16).astype(np.float32), y[order]
    train, test = slice(0, 1200), slice(1200, None)
    peer = min(
        log_loss(y[test], LogisticRegression(C=c, max_iter=500).fit(x[train], y[train]).predict_proba(x[test]))
        for c in (0.03, 0.3, 3.0)
    )
    found = fit_softmax(torch.from_numpy(x[train]), torch.from_numpy(y[train]), 10)(torch.from_numpy(x[test]))
    assert log_loss(y[test], found.double().numpy() / found.double().numpy().sum(1, keepdims=True)) < 1.15 * peer


def test_ridge_and_its_leave_one_out_errors(monkeypatch):
    monkeypatch.setattr(linear, "PENALTIES", (1e-2,))
    both = linear.scalings
    monkeypatch.setattr(linear, "scalings", lambda x: both(x)[:1])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)) * [1, 10, 0.1, 1]
    x[:, 3] = 5.0  # constant
    y = 3 + x[:, 0] - 0.2 * x[:, 1] + 0.3 * rng.normal(size=60)
    found = fit_ridge(torch.from_numpy(x), torch.from_numpy(y))
    z = (x - x.mean(0)) / np.where(x.std(0) > 1e-9, x.std(0), 1)

    def by_hand(penalty):
        """Each row by a ridge that never saw it, with the scale and mean of all rows."""
        errors = []
        for i in range(60):
            rest = np.arange(60) != i
            design = np.column_stack([z, np.ones(60)])[rest]
            shrink = 60 * penalty * np.diag([1, 1, 1, 1, 0])
            weight = np.linalg.solve(design.T @ design + shrink, design.T @ y[rest])
            errors.append(y[i] - np.append(z[i], 1) @ weight)
        return np.mean(np.square(errors))

    penalties = (1e-6, 1e-2, 1.0, 10.0)
    best = min(penalties, key=by_hand)
    mean, variance = found(torch.from_numpy(x)).T.numpy()
    assert variance == pytest.approx(by_hand(best), rel=1e-6)
    np.testing.assert_allclose(mean, Ridge(alpha=60 * best).fit(z, y).predict(z), rtol=1e-6)


def test_no_layer_where_none_can_be_fitted(monkeypatch):
    x = torch.randn(100, 6)
    assert fit_softmax(x, torch.arange(100) % 50, 50) is None
    assert fit_ridge(x[:2], torch.zeros(2)) is None
    state = torch.get_rng_state()
    fit_softmax(x, torch.arange(100) % 2, 2)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(linear, "MOST_WORK", 9 * 6 * 2)  # nine rows: it would take too long
    assert fit_softmax(x, torch.arange(100) % 2, 2) is None
