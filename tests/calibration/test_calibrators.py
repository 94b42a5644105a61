"""Vector, Dirichlet and isotonic calibration against scikit-learn and plain optimisation; smooth ECE against sums."""

import math

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression
from torchmetrics.classification import MulticlassCalibrationError

from brainet_pl.calibration import DirichletScaling, IsotonicScaling, VectorScaling
from brainet_pl.calibration.affine import OWN_SPREAD, fit_affine
from brainet_pl.calibration.isotonic import choose_weight, interpolate
from brainet_pl.calibration.temperature import fit_temperature
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.curves import residual_sums, smooth_calibration_error
from brainet_pl.metrics.measures import MaximumCalibrationError, SmoothCalibrationError
from brainet_pl.network import Linear, MCDropout
from brainet_pl.tasks import Classification
from brainet_pl.uncertainty import disagreement

KINDS = [VectorScaling, DirichletScaling, IsotonicScaling]


def skewed(n, seed=0, c=4):
    """Labels from softmax(z), and a model that is too sure, above all of one class."""
    rng = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(n, c, generator=rng)
    labels = torch.multinomial(z.softmax(1), 1, generator=rng).squeeze(1)
    logits = 1.7 * z
    logits[:, 1] += 1.0
    return logits.softmax(1), labels


def nll(probs, labels):
    return -float(probs.gather(1, labels[:, None]).clamp_min(1e-12).log().mean())


def finalized(part, probs, labels):
    part.check(Classification(probs.shape[1]))
    for p, y in zip(probs.split(70), labels.split(70), strict=True):
        part.observe(p, y, {})
    part.finalize()
    return part


def test_dirichlet_against_logistic_regression():
    """With no prior to speak of it is a multinomial logistic regression of the logarithms."""
    probs, labels = skewed(4000)
    weight, bias = fit_affine(probs, labels, spread=1e4, own_spread=1e4)
    theirs = LogisticRegression(C=1e8, max_iter=2000, tol=1e-8).fit(probs.log().double().numpy(), labels.numpy())
    ours = (probs.double().log() @ weight.T + bias).softmax(1)
    np.testing.assert_allclose(ours, theirs.predict_proba(probs.log().double().numpy()), atol=2e-3)


@pytest.mark.parametrize("spread", [None, 0.1])
def test_weights_against_plain_descent(spread):
    """The same objective, by autograd: temperature scaling is the centre of the prior."""
    probs, labels = skewed(300)
    centre = torch.eye(4, dtype=torch.float64) / fit_temperature(probs, labels)
    logs, c = probs.double().log(), 4
    free = torch.eye(c, dtype=torch.bool) if spread is None else torch.ones(c, c, dtype=torch.bool)
    weight = torch.eye(c, dtype=torch.float64).requires_grad_()
    bias = torch.zeros(c, dtype=torch.float64).requires_grad_()
    scale = torch.where(torch.eye(c) > 0, OWN_SPREAD**-2, 1.0 if spread is None else spread**-2)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        used = torch.where(free, weight, 0.0)
        loss = torch.nn.functional.cross_entropy(logs @ used.T + bias, labels, reduction="sum")
        loss = loss + 0.5 * (scale * (used - centre) ** 2).sum() + 0.5 * OWN_SPREAD**-2 * (bias**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found, intercept = fit_affine(probs, labels, spread)
    torch.testing.assert_close(found, torch.where(free, weight, 0.0).detach(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(intercept, bias.detach(), atol=1e-3, rtol=1e-3)


class Given(ClassifierMixin, BaseEstimator):
    """A classifier of scikit-learn whose inputs are its probabilities."""

    def __init__(self, c=4):
        self.c = c
        self.classes_ = np.arange(c)

    def fit(self, x, y):
        return self

    def predict_proba(self, x):
        return x

    def predict(self, x):
        return x.argmax(1)

    def __sklearn_is_fitted__(self):
        return True


def test_isotonic_against_scikit_learn():
    frozen = pytest.importorskip("sklearn.frozen")  # since 1.6
    (probs, labels), (new, _) = skewed(600), skewed(400, seed=1)
    theirs = CalibratedClassifierCV(frozen.FrozenEstimator(Given()), method="isotonic", cv=3, ensemble=False)
    theirs.fit(probs.double().numpy(), labels.numpy())
    part = finalized(IsotonicScaling(), probs, labels)
    assert float(part.kept) == pytest.approx(1 - choose_weight(probs, labels) * 600 / 601)
    assert float(part.kept) <= 0.5
    part.kept.zero_()  # they let nothing of the prediction stay
    np.testing.assert_allclose(part(new, {}), theirs.predict_proba(new.double().numpy()), atol=1e-4)


def test_interpolation_against_numpy():
    rng = np.random.default_rng(0)
    knots, values = (np.sort(rng.random((3, 7)), axis=1).astype(np.float32) for _ in range(2))
    knots[1, 3:], values[1, 3:] = knots[1, 3], values[1, 3]  # a shorter curve
    x = rng.uniform(-0.2, 1.2, (50, 3)).astype(np.float32)
    expected = np.stack([np.interp(x[:, c], knots[c], values[c]) for c in range(3)], axis=1)
    ours = interpolate(torch.tensor(x), torch.tensor(knots), torch.tensor(values))
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    flat = interpolate(torch.tensor([[0.1], [0.9]]), torch.tensor([[0.5]]), torch.tensor([[0.3]]))
    assert flat.flatten().tolist() == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("kind", KINDS)
class TestAll:
    def test_helps_on_new_samples(self, kind):
        (probs, labels), (new, truth) = skewed(3000), skewed(3000, seed=1)
        final = finalized(kind(), probs, labels)(new, {})
        assert nll(final, truth) < nll(new, truth) - 0.05
        torch.testing.assert_close(final.sum(1), torch.ones(3000))
        assert (final > 0).all()

    def test_changes_nothing_before_it_was_fitted(self, kind):
        probs, _ = skewed(20)
        part = kind()
        part.check(Classification(4))
        assert part.finalize() == {}
        torch.testing.assert_close(part(probs, {}), probs)

    def test_few_samples_a_missing_class_zeros_and_nan(self, kind):
        probs, labels = skewed(12)
        labels[labels == 3] = 0
        probs[0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
        probs[1] = math.nan
        final = finalized(kind(), probs, labels)(skewed(50, seed=1)[0], {})
        assert final.isfinite().all()
        assert nll(final, skewed(50, seed=1)[1]) < 5

    def test_in_a_checkpoint(self, kind, tmp_path, quiet_trainer):
        model = BRAINet(8, head=Linear(), calibration=kind(), lr=0.05)
        trainer = quiet_trainer(tmp_path)
        trainer.fit(model, datamodule=Digits())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        again = BRAINet.load_from_checkpoint(tmp_path / "a.ckpt")
        x = torch.rand(5, 64)
        torch.testing.assert_close(again.eval()(x), model.eval()(x))
        assert not torch.equal(model(x), model.predictor.passes(x).predicted)


# -- metrics ----------------------------------------------------------------------------------------------------------


def smooth_by_sums(confidence, hit):
    """The definition: kernels with their mirror images at 0 and 1, and the width that equals the error."""
    t = (np.arange(3000) + 0.5) / 3000

    def error(width):
        mirrored = [image for m in range(-3, 4) for image in (2 * m + confidence, 2 * m - confidence)]
        kernel = sum(np.exp(-0.5 * ((t[:, None] - image) / width) ** 2) for image in mirrored)
        kernel /= width * math.sqrt(2 * math.pi)
        return np.abs((kernel * (hit - confidence)).mean(1)).mean()

    low, high = 1e-3, 1.0
    for _ in range(18):
        width = (low + high) / 2
        low, high = (width, high) if error(width) > width else (low, width)
    return error((low + high) / 2)


@pytest.mark.parametrize("gap", [0.0, 0.2])
def test_smooth_error_against_its_definition(gap):
    rng = np.random.default_rng(0)
    confidence = rng.beta(5, 1.5, 150)
    hit = (rng.random(150) < np.clip(confidence - gap, 0, 1)).astype(float)
    ours = smooth_calibration_error(residual_sums(torch.tensor(confidence), torch.tensor(hit)), 150)
    assert float(ours) == pytest.approx(smooth_by_sums(confidence, hit), abs=1e-4)


def test_worst_bin_and_batches():
    probs, labels = skewed(900)
    theirs = MulticlassCalibrationError(4, n_bins=15, norm="max")
    worst, smooth = MaximumCalibrationError(), SmoothCalibrationError()
    for p, y in zip(probs.split(100), labels.split(100), strict=True):
        theirs.update(p, y)
        worst.update(p, y)
        smooth.update(p, y)
    assert float(worst.compute()) == pytest.approx(float(theirs.compute()), abs=1e-5)
    whole = SmoothCalibrationError()
    whole.update(probs, labels)
    assert float(smooth.compute()) == pytest.approx(float(whole.compute()), abs=1e-6)
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert math.isnan(float(MaximumCalibrationError().compute()))


def test_disagreement_of_passes():
    """The chance that two passes, drawn with their weights, answer differently; against all pairs."""
    rng = torch.Generator().manual_seed(0)
    probs, weights = torch.rand(5, 30, 3, generator=rng), torch.rand(5, generator=rng)
    for share in (None, weights / weights.sum()):
        w = torch.full((5,), 0.2) if share is None else share
        answers = probs.argmax(-1)
        pairs = sum(w[i] * w[j] * (answers[i] != answers[j]) for i in range(5) for j in range(5))
        torch.testing.assert_close(disagreement(probs, share), pairs.float())


def test_disagreement_in_a_test(tmp_path, quiet_trainer):
    model = BRAINet(8, head=MCDropout(rate=0.5), passes=4)
    model.predictor.build_head(model.head_settings, 64)
    trainer = quiet_trainer(tmp_path)
    trainer.test(model, datamodule=Digits(), verbose=False)
    assert 0 < float(trainer.callback_metrics["test/ens/Disagreement"]) < 1
    single = BRAINet(8, head=Linear())
    single.predictor.build_head(single.head_settings, 64)
    trainer = quiet_trainer(tmp_path)
    trainer.test(single, datamodule=Digits(), verbose=False)
    assert "test/ens/Disagreement" not in trainer.callback_metrics
