"""Numbers as targets: loss and metrics against numpy and scipy, units, checkpoints, every head, bad input."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl.callbacks import Evaluation, FeatureCache, StructureLearning
from brainet_pl.datamodules.base import Samples, SplitData
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.measures import collect, regression_measures
from brainet_pl.network import MLP, Bayes, Ensemble, Laplace, Linear, MCDropout, Tree, TreeDropout, TreeEnsemble
from brainet_pl.tasks import Classification, Regression
from brainet_pl.tasks.passes import Passes


class Line(SplitData):
    """y = 1000 + 50·(x₀ + x₁ - x₂) with noise of 10, and inputs far away as the unknown."""

    def __init__(self, offset=1000.0, **settings):
        super().__init__(batch_size=32, **settings)
        self.offset = offset

    def setup(self, stage):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(400, 5))
        x[:, 3] += x[:, 0]
        y = self.offset + 50 * (x[:, 0] + x[:, 1] - x[:, 2]) + 10 * rng.normal(size=400)
        inputs, targets = torch.tensor(x).float(), torch.tensor(y).float()
        train = Samples(inputs[:300], targets[:300])
        self.take(train, train, 300)
        self.test_set = Samples(inputs[300:], targets[300:])
        self.ood_sets = {"far": Samples(10 + 3 * inputs[300:], targets[300:])}


def structure():
    return StructureLearning(threshold=0.05, progress=False)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, quiet_trainer):
    folder = tmp_path_factory.mktemp("regression")
    pl.seed_everything(0, verbose=False)
    model = BRAINet(task="Regression", head=Tree(num_params=600, norm=None), lr=0.01)
    checkpoint = ModelCheckpoint(folder, save_last=True)
    quiet_trainer(folder, structure(), checkpoint, epochs=25).fit(model, datamodule=Line())
    return model.eval(), checkpoint.last_model_path, folder


# -- task and metrics -------------------------------------------------------------------------------------------------


def test_samples_count_by_their_variance_where_asked_to():
    task, y = Regression(beta=0.5), torch.tensor([1.0, -2.0, 0.5])
    outputs = torch.tensor([[0.3, 1.0], [0.1, -1.0], [0.4, 2.0]], requires_grad=True)
    task.prepare(torch.tensor([-1.0, 1.0]))
    variance = torch.nn.functional.softplus(outputs[:, 1]) + task.min_variance
    each = -torch.distributions.Normal(outputs[:, 0], variance.sqrt()).log_prob(y)
    loss = task.loss(outputs, y)
    torch.testing.assert_close(loss, (each * variance.sqrt()).mean())
    # By the mean, the gradient is that of the likelihood times the deviation: (μ - y) / σ.
    found = torch.autograd.grad(loss, outputs)[0][:, 0]
    torch.testing.assert_close(found, (outputs[:, 0] - y) / variance.sqrt() / 3)
    with pytest.raises(ValueError, match="expected a beta of at least 0 and below 1"):
        Regression(beta=1.0)


def test_the_loss_is_the_likelihood_of_the_standardised_target():
    rng = np.random.default_rng(0)
    y = rng.normal(size=50) * 7 + 300
    task = Regression()
    task.prepare(torch.tensor(y))
    outputs = rng.normal(size=(3, 50, 2))
    z = (y - y.mean()) / y.std()
    sigma = np.sqrt(np.log1p(np.exp(outputs[..., 1])) + 1e-6)
    expected = -stats.norm.logpdf(z, outputs[..., 0], sigma).mean()
    assert task.loss(torch.tensor(outputs), torch.tensor(y)).item() == pytest.approx(expected, rel=1e-5)
    each = [task.loss(torch.tensor(member), torch.tensor(y)).item() for member in outputs]
    assert np.mean(each) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3]])
def test_predictions_are_moments_of_the_mixture_in_units_of_the_target(weights):
    rng = np.random.default_rng(1)
    task = Regression()
    task.prepare(torch.tensor(rng.normal(size=100) * 7 + 300))
    outputs = rng.normal(size=(3, 4, 2))
    center, scale = task.center.item(), task.scale.item()
    mu = center + scale * outputs[..., 0]
    var = scale**2 * (np.log1p(np.exp(outputs[..., 1])) + 1e-6)
    p = np.full(3, 1 / 3) if weights is None else np.array(weights)
    mean = p @ mu
    second = p @ (var + mu**2)  # E[y²] of the mixture
    w = None if weights is None else torch.tensor(weights)
    each = torch.tensor(outputs)
    passes = Passes(each, w, torch.empty(4, 0), task.predictive(each, w))
    found = task.predict(passes, passes.predicted)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(found["std"], np.sqrt(second - mean**2), rtol=1e-3)
    np.testing.assert_allclose(found["aleatoric_std"], np.sqrt(p @ var), rtol=1e-5)
    np.testing.assert_allclose(found["std"] ** 2, found["aleatoric_std"] ** 2 + found["epistemic_std"] ** 2, rtol=1e-5)
    predictive = task.predictive(torch.tensor(outputs), w)
    np.testing.assert_allclose(predictive[:, 1].sqrt(), found["std"], rtol=1e-5)
    assert set(task.scores(torch.tensor(outputs), w)) == {"std", "epistemic_std"}


def test_metrics_equal_scipy_in_batches():
    rng = np.random.default_rng(2)
    mu, sigma = rng.normal(size=500) * 3, rng.uniform(0.5, 2, 500)
    y = mu + 1.3 * sigma * rng.standard_t(5, 500)
    preds, target = torch.tensor(np.stack([mu, sigma**2], 1)).float(), torch.tensor(y).float()
    metrics = collect(regression_measures(), "test/", "reg")
    for rows in torch.arange(500).split(70):
        metrics.update(preds[rows], target[rows])
    found = {k: v.item() for k, v in metrics.compute().items()}

    def coverage(q):
        low, high = stats.norm.interval(q, mu, sigma)
        return np.mean((low <= y) & (y <= high))

    expected = {
        "test/reg/RMSE": np.sqrt(np.mean((y - mu) ** 2)),
        "test/reg/MAE": np.mean(np.abs(y - mu)),
        "test/reg/NLL": -stats.norm.logpdf(y, mu, sigma).mean(),
        "test/cal/coverage50": coverage(0.5),
        "test/cal/coverage80": coverage(0.8),
        "test/cal/coverage95": coverage(0.95),
        "test/cal/sharpness": np.mean(np.subtract(*stats.norm.interval(0.95, mu, sigma)[::-1])),
        "test/cal/QCE": np.mean([abs(coverage(q) - q) for q in np.arange(1, 20) * 0.05]),
    }
    assert found == pytest.approx(expected, rel=1e-4)


def test_extreme_outputs_stay_finite():
    task = Regression()
    for dtype, far in ((torch.float32, 1e6), (torch.float16, 100.0)):
        outputs = torch.tensor([[[0.0, -200.0], [1e4, 200.0], [0.0, 0.0]]]).to(dtype).requires_grad_()
        loss = task.loss(outputs, torch.tensor([0.0, 1.0, far]))
        loss.backward()
        assert loss.isfinite()
        assert outputs.grad.isfinite().all()
    constant = Regression()
    constant.prepare(torch.full((10,), 5.0))
    assert constant.scale == 1
    assert constant.center == 5


# -- fitting ----------------------------------------------------------------------------------------------------------


def test_predictions_metrics_and_intervals_are_in_units_of_the_target(fitted, quiet_trainer):
    model, _, folder = fitted
    results = {
        k: v for part in quiet_trainer(folder).test(model, datamodule=Line(), verbose=False) for k, v in part.items()
    }
    assert set(results) >= {f"test/reg/{m}" for m in ("RMSE", "MAE", "NLL")}
    assert 8 < results["test/reg/RMSE"] < 20  # noise has 10, the target 87
    assert results["test/reg/NLL"] < math.log(40 * math.sqrt(2 * math.pi * math.e))
    assert results["test/cal/coverage95"] > 0.8
    predicted = quiet_trainer(folder).predict(model, datamodule=Line())
    assert set(predicted[0]) == {"mean", "std", "epistemic_std", "aleatoric_std", "known", "known_p", "generative"}
    mean = torch.cat([batch["mean"] for batch in predicted])
    data = Line()
    data.setup("test")
    assert 900 < mean.mean() < 1100
    error = (mean - data.test_set.y).square().mean().sqrt().item()
    assert error == pytest.approx(results["test/reg/RMSE"], rel=0.1)  # other sub-networks are drawn


def test_a_checkpoint_knows_the_units(fitted):
    model, path, _ = fitted
    again = BRAINet.load_from_checkpoint(path, weights_only=True).eval()
    again.head.inference = model.head.inference = "simultaneous"
    x = torch.randn(6, 5)
    try:
        with torch.no_grad():
            torch.testing.assert_close(again(x), model(x))
    finally:
        model.head.inference = "stochastic"
    assert again.task.scale == model.task.scale > 50
    assert not again.task.needs_targets


def test_a_resumed_fit_keeps_the_scale_of_its_weights(fitted, quiet_trainer):
    model, path, folder = fitted
    loaded = BRAINet.load_from_checkpoint(path, weights_only=True)
    quiet_trainer(folder, epochs=1).fit(loaded, datamodule=Line(offset=0.0))
    resumed = BRAINet(task="Regression", head=Tree(num_params=600, norm=None), lr=0.01)
    quiet_trainer(folder, epochs=26).fit(resumed, datamodule=Line(offset=0.0), ckpt_path=path)
    assert loaded.task.center == resumed.task.center == model.task.center > 900


def test_far_inputs_are_less_certain(fitted, quiet_trainer):
    model, _, folder = fitted
    parts = quiet_trainer(folder, Evaluation(figures=False)).test(model, datamodule=Line(), verbose=False)
    results = {k: v for part in parts for k, v in part.items()}
    assert results["ood/far/epistemic_std/AUROC"] > 0.8
    assert "ood/far/std/FPR95" in results


SIZE = {"num_params": 1500}
HEADS = {  # settings → passes
    Tree(**SIZE): 4,
    TreeEnsemble(members=3, **SIZE): 3,
    TreeDropout(**SIZE): 4,
    Linear(): 1,
    MLP(**SIZE): 1,
    MCDropout(**SIZE): 4,
    Ensemble(members=3, **SIZE): 3,
    Bayes(**SIZE): 4,
    Laplace(): 4,
}


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_every_head_fits_and_reloads(head, tmp_path, quiet_trainer):
    pl.seed_everything(0, verbose=False)
    model = BRAINet(task="Regression", head=head, lr=0.02, passes=4)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    fit = quiet_trainer(tmp_path, structure(), checkpoint, epochs=8)
    fit.fit(model, datamodule=Line())
    with pytest.warns(UserWarning, match="not evaluated: far; metrics are those of the first test loader alone"):
        parts = fit.test(model, datamodule=Line(), verbose=False)
    results = {k: v for part in parts for k, v in part.items()}
    assert results["test/reg/RMSE"] < 60  # the target's own deviation is 87
    again = BRAINet.load_from_checkpoint(checkpoint.last_model_path, weights_only=True).eval()
    assert type(again.head) is type(model.head)
    assert again.ggt == model.ggt
    assert (again.ggt is not None) == head.needs_tree
    x = torch.randn(4, 5)
    with torch.no_grad():
        passes = again.predictor.passes(x).outputs
    assert passes.shape == (HEADS[head], 4, 2)
    if HEADS[head] == 3:
        with torch.no_grad():
            torch.testing.assert_close(again(x), model.eval()(x))


def test_cached_features_and_plain_loaders(tmp_path, quiet_trainer):
    model = BRAINet(task="Regression", head=Tree(num_params=600))
    quiet_trainer(tmp_path, FeatureCache(progress=False), structure(), epochs=1).fit(model, datamodule=Line())
    assert model.task.center > 900
    x, y = torch.randn(64, 4), torch.arange(64.0)[:, None]  # a column is as good as a vector
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    plain = BRAINet(task="Regression", head=Ensemble(num_params=600))
    quiet_trainer(tmp_path).fit(plain, loader, DataLoader(TensorDataset(x, y), batch_size=16))
    assert plain.task.center == 31.5


# -- bad input --------------------------------------------------------------------------------------------------------


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match=r"got num_classes=3 and Regression\(\)"):
        BRAINet(3, task="Regression")
    with pytest.raises(ValueError, match=r"expected settings of Regression .min_variance, beta., got label_smoothing"):
        BRAINet(task={"class_path": "Regression", "init_args": {"label_smoothing": 0.1}})
    with pytest.raises(
        ValueError, match="expected loss of a classification to be one of 'cross_entropy', 'confidence'"
    ):
        Classification(3, loss="gaussian")
    with pytest.raises(ValueError, match="expected min_variance to be a finite number above 0"):
        Regression(min_variance=0.0)


def test_bad_targets_are_refused(tmp_path, quiet_trainer):
    x = torch.randn(64, 4)
    y = torch.randn(64)
    y[[3, 5]] = torch.tensor([math.nan, math.inf])
    for target, message in (
        (y, "expected finite targets, got 2 NaN or infinite of 64"),
        (torch.randn(64, 2), r"expected one number as target of each sample, \(B,\) or \(B, 1\), got \(64, 2\)"),
    ):
        model = BRAINet(task="Regression", head=MLP(num_params=300))
        with pytest.raises(ValueError, match=message):
            quiet_trainer(tmp_path).fit(model, DataLoader(TensorDataset(x, target), batch_size=16))


def test_a_fit_may_follow_a_validation(tmp_path, quiet_trainer):
    """Validation alone runs in inference mode, whose tensors may not be changed in place by a later fit."""
    model = BRAINet(task="Regression", head=Tree(num_params=2000))
    quiet_trainer(tmp_path, structure()).fit(model, datamodule=Line())
    (before,) = quiet_trainer(tmp_path).validate(model, datamodule=Line(), verbose=False)
    quiet_trainer(tmp_path, structure()).fit(model, datamodule=Line())
    (after,) = quiet_trainer(tmp_path).validate(model, datamodule=Line(), verbose=False)
    assert after["val/reg/NLL"] < before["val/reg/NLL"]  # it went on to learn
    assert not any(tensor.is_inference() for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor))
