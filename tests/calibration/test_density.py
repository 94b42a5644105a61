"""Predictions that fade by the density of their inputs."""

import csv
import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl.backbones.loading import Backbone
from brainet_pl.calibration import DensityScaling, TemperatureScaling
from brainet_pl.calibration.density import (
    LEAST_NLL,
    fade,
    faded_losses,
    fit_width,
    harmless_copies,
    is_harmless,
    largest_affordable,
    surprise_of_others,
    widened_losses,
)
from brainet_pl.calibration.perturb import perturbed_copies, swap_within_classes
from brainet_pl.calibration.temperature import HIGHEST, PRIOR, STEPS, best_temperature, fit_temperature, scale
from brainet_pl.callbacks import Evaluation, PredictionFile, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.export.graph import export_onnx, export_program
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.curves import calibration_error, calibration_sums
from brainet_pl.network import Linear, MCDropout, Tree
from brainet_pl.scores import KNN, Combined, Verdict
from brainet_pl.scores.reference import fit_surprise, p_values
from brainet_pl.tasks import Regression


def classes(n=2000, seed=0):
    """Over-confident probabilities (n, 4), labels, and a score that tells nothing about them."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 4, generator=rng)
    target = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
    return (2.5 * logits).softmax(1), target, torch.randn(n, generator=rng).square()


def finalized(calibrator, predicted, target, score):
    for rows in torch.arange(len(target)).split(300):
        calibrator.observe(predicted[rows], target[rows], {"generative": score[rows], "other": score[rows]})
    return calibrator.finalize()


# -- pure functions ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0.05, 20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_answer_never_changes(seed, c, tau, skewed):
    rng = torch.Generator().manual_seed(seed)
    probs = (torch.rand(()).item() * 10 * torch.randn(64, c, generator=rng)).softmax(1)
    prior = (5.0 * skewed * torch.randn(c, generator=rng)).softmax(0)
    factor = torch.cat([torch.ones(1), 10 ** (4 * torch.rand(63, generator=rng))])
    faded = fade(probs, prior, tau, factor)
    top = faded.gather(1, probs.argmax(1, keepdim=True))[:, 0]
    others = faded.scatter(1, probs.argmax(1, keepdim=True), -1.0).amax(1)
    assert (top > others).all()
    torch.testing.assert_close(faded.sum(1), torch.ones(64))


def test_fading_begins_as_temperature_scaling_and_ends_at_the_prior():
    probs, _, _ = classes(50)
    even = torch.full((4,), 0.25)
    torch.testing.assert_close(fade(probs, even, 1.7, torch.ones(50)), scale(probs, 1.7))
    torch.testing.assert_close(fade(probs, even, 1.0, torch.full((50,), 3.0)), scale(probs, 3.0))
    torch.testing.assert_close(fade(probs, even, 1.7, torch.full((50,), 1e6)), even.expand(50, 4), atol=1e-4, rtol=0)
    prior = torch.tensor([0.7, 0.1, 0.1, 0.1])
    far = fade(probs, prior, 1.0, torch.full((50,), 1e6))
    common = probs.argmax(1) == 0
    torch.testing.assert_close(far[common], prior.expand(int(common.sum()), 4), atol=1e-4, rtol=0)
    assert (far[~common].argmax(1) == probs[~common].argmax(1)).all()
    assert (far[~common, 0] > 0.4).all()  # the common class stays likely


def test_the_temperature_is_that_of_a_grid():
    probs, target, score = classes()
    factor = 1 + 0.3 * score
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1])
    tau = fit_temperature(probs, target)
    grid = torch.linspace(0.5, 5, 400)
    sums = [float(F.nll_loss(scale(probs.double(), float(t)).log(), target)) * 2000 for t in grid]
    posterior = [loss + math.log(t) ** 2 / (2 * PRIOR**2) for loss, t in zip(sums, grid, strict=True)]
    assert float(tau) == pytest.approx(float(grid[int(np.argmin(posterior))]), abs=0.02)
    faded = fade(probs.double(), prior, tau, factor)
    losses = faded_losses(probs, target, prior, tau, factor)
    torch.testing.assert_close(losses, F.nll_loss(faded.log(), target, reduction="none"))


def test_widening_is_that_of_a_grid():
    rng = torch.Generator().manual_seed(0)
    factor = 1 + torch.rand(500, generator=rng)
    predicted = torch.stack([torch.randn(500, generator=rng), torch.rand(500, generator=rng) + 0.1], dim=1)
    target = predicted[:, 0] + 1.7 * predicted[:, 1].sqrt() * torch.randn(500, generator=rng)
    tau = float(fit_width(predicted, target))
    assert tau == pytest.approx(1.7, rel=0.1)

    def posterior(t, factor):
        wide = torch.distributions.Normal(predicted[:, 0].double(), t * factor * predicted[:, 1].double().sqrt())
        return -wide.log_prob(target.double()), math.log(t) ** 2 / (2 * PRIOR**2)

    losses = widened_losses(predicted, target, tau, factor)
    torch.testing.assert_close(losses, posterior(tau, factor)[0], rtol=1e-5, atol=1e-6)
    least = float(posterior(tau, 1.0)[0].sum()) + posterior(tau, 1.0)[1]
    for t in (0.9 * tau, 0.98 * tau, 1.02 * tau, 1.1 * tau):
        assert float(posterior(t, 1.0)[0].sum()) + posterior(t, 1.0)[1] > least


def slow_temperature(slope, prior):
    """`best_temperature` in plain numbers: every step reads the device."""
    sign, edge = 1 if float(slope(1.0)) > 0 else -1, math.log(HIGHEST)

    def rises(u):
        beta = math.exp(sign * u)
        return sign * beta * float(slope(beta)) > (0.0 if prior is None else u / prior**2)

    high = next((u for u in (edge * i / STEPS for i in range(1, STEPS + 1)) if not rises(u)), edge)
    low = high - edge / STEPS
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rises(middle) else (low, middle)
    return math.exp(-sign * 0.5 * (low + high))


@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0.1, 30), st.sampled_from([None, PRIOR]))
@settings(max_examples=40, deadline=None)
def test_the_temperature_is_that_of_its_slow_twin(seed, n, sure, prior):
    rng = torch.Generator().manual_seed(seed)
    logs = (sure * torch.randn(n, 3, generator=rng)).log_softmax(1).double()
    target = torch.randint(3, (n, 1), generator=rng)

    def slope(beta):
        return (logs.gather(1, target)[:, 0] - ((beta * logs).softmax(1) * logs).sum(1)).sum()

    assert float(best_temperature(slope, prior)) == pytest.approx(slow_temperature(slope, prior), rel=1e-7)


@pytest.mark.parametrize("limit", [-1.0, 0.0, 0.003, 0.4, 0.99, 1.0, 5.0])
def test_the_largest_rate_is_that_of_a_search_in_plain_numbers(limit):
    low, high = 0.0, 1.0
    if limit >= 1.0:
        low = high
    for _ in range(20 if low < high else 0):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if middle <= limit else (low, middle)
    assert float(largest_affordable(lambda kappa: kappa <= limit, torch.tensor(1.0, dtype=torch.double))) == low


class Reads(torch.overrides.TorchFunctionMode):
    """Counts how often a value leaves its tensor, which waits for the device."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in {
            "__float__",
            "__bool__",
            "__int__",
            "item",
            "tolist",
            "__index__",
        }
        return func(*args, **(kwargs or {}))


def test_a_fit_reads_the_device_a_few_times():
    probs, target, score = classes()
    with Reads() as reads:
        fit_temperature(probs, target)
    assert reads.count < 12
    with Reads() as reads:
        finalized(DensityScaling(), probs, target, score)
    assert reads.count < 30


def test_few_rows_without_an_error_say_little_of_the_temperature():
    """The likelihood alone would make a model that was right 30 times as sure as can be."""
    target = torch.arange(30) % 3
    probs = 0.9 * F.one_hot(target, 3) + 0.1 / 3
    assert fit_temperature(probs, target, prior=None) < 0.1
    few, many = fit_temperature(probs, target), fit_temperature(probs.repeat(300, 1), target.repeat(300))
    assert 0.5 < few < 0.9
    assert many < 0.4  # nine thousand rows outweigh the prior
    wrong = (target + 1) % 3
    assert 1.5 < fit_temperature(probs[:4], wrong[:4]) < 4
    assert fit_temperature(probs, wrong) > fit_temperature(probs[:4], wrong[:4])


# -- the calibrator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [0.0, 0.01, 0.03])
def test_known_data_pay_what_was_agreed(cost):
    probs, target, score = classes()
    calibrator = DensityScaling(cost=cost)
    logged = finalized(calibrator, probs, target, score)
    least = float(F.nll_loss(scale(probs.double(), fit_temperature(probs, target)).log(), target))
    paid = float(F.nll_loss(calibrator(probs, {"generative": score}).double().log(), target)) - least
    assert paid <= cost * least + 1e-6
    assert float(logged["cost"]) == pytest.approx(paid, abs=2e-4 * least)
    if cost:  # it pays nearly all that it may: what is left is the noise of 2,000 samples
        assert paid > 0.4 * cost * least
        assert calibrator.kappa > 0
    assert set(logged) == {"temperature", "fading", "fading_beyond", "cost"}
    far = calibrator(probs, {"generative": torch.full((2000,), 1e6)})
    if cost:
        torch.testing.assert_close(far, torch.full((2000, 4), 0.25), atol=0.05, rtol=0)
    nan = calibrator(probs, {"generative": torch.full((2000,), math.nan)})
    torch.testing.assert_close(nan, far)


def test_a_model_without_an_error_still_fades():
    target = torch.arange(1000) % 4
    probs = 0.999 * F.one_hot(target, 4) + 0.001 / 4
    score = torch.randn(1000, generator=torch.Generator().manual_seed(0)).exp()
    calibrator = DensityScaling()
    logged = finalized(calibrator, probs, target, score)
    assert logged["cost"] <= 0.01 * LEAST_NLL
    assert calibrator(probs[:1], {"generative": torch.tensor([1e5])}).max() < 0.6


def test_what_is_stranger_than_any_known_sample_is_not_sure_where_known_ones_are_easy():
    """Easy data have next to no NLL to pay with, so that κ is small: thrice as strange as the strangest stayed sure."""
    draw = torch.Generator().manual_seed(0)
    target = torch.arange(400) % 4
    probs = (8 * F.one_hot(target, 4) + torch.randn(400, 4, generator=draw)).softmax(1)
    score = -torch.rand(400, generator=draw).log()
    calibrator = DensityScaling()
    logged = finalized(calibrator, probs, target, score)
    assert calibrator.kappa < 0.1
    assert 0 < float(logged["cost"]) <= 0.01 * LEAST_NLL
    usual = calibrator(probs, {"generative": score}).amax(1)
    strange = calibrator(probs, {"generative": torch.full((400,), 3 * float(score.max()))}).amax(1)
    assert usual.mean() > 0.99
    assert strange.mean() < 0.5
    assert (strange > 0.9).float().mean() < 0.01


def test_errors_among_the_strangest_alone_do_not_make_all_others_certain():
    """300 samples of a good classifier whose four errors happen to be strange: τ at its floor would fit them best."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 4, generator=rng)
    probs = (logits + 6.0 * F.one_hot(logits.argmax(1), 4)).softmax(1)
    score = torch.randn(300, generator=rng)
    target, strangest = probs.argmax(1), score.argsort()[-4:]
    target[strangest] = (target[strangest] + 1) % 4
    calibrator = DensityScaling()
    finalized(calibrator, probs, target, score)
    usual = calibrator(probs, {"generative": torch.full((300,), float(score.median()))})
    dearest = -usual.log().amin()  # what an error among usual samples costs at the most
    plain = -scale(probs, fit_temperature(probs, target)).log().amin()
    assert dearest < 5 * plain  # without doubt about labels it is infinite
    assert calibrator.kappa > 0.04
    assert calibrator(probs, {"generative": torch.full((300,), 1e5)}).max() < 0.4  # far inputs fade all the same


def test_before_validation_nothing_changes():
    calibrator = DensityScaling()
    probs, _, score = classes(10)
    assert calibrator.finalize() == {}
    assert torch.equal(calibrator(probs, {"generative": score}), probs)


def test_few_validation_samples_are_said_once():
    calibrator = DensityScaling()
    with pytest.warns(UserWarning, match="strangest of 100 validation samples: expected at least 200"):
        finalized(calibrator, *classes(100))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finalized(calibrator, *classes(100))
    assert calibrator.kappa > 0


def test_a_single_validation_sample_is_too_few():
    with pytest.raises(ValueError, match="at least two finite scores of validation data, got 1"):
        finalized(DensityScaling(), torch.tensor([[0.0, 1.0]]), torch.tensor([0.3]), torch.tensor([1.0]))
    calibrator, (probs, target, score) = DensityScaling(), classes(1)
    with pytest.warns(UserWarning, match=r"are not calibrated: got validation samples of one class only \(1 of class"):
        assert finalized(calibrator, probs, target, score) == {}
    assert torch.equal(calibrator(probs, {"generative": score}), probs)


def test_variances_widen_and_means_stay():
    rng = torch.Generator().manual_seed(0)
    predicted = torch.stack([torch.randn(1000, generator=rng), torch.full((1000,), 0.04)], dim=1)
    target, score = predicted[:, 0] + 0.4 * torch.randn(1000, generator=rng), torch.randn(1000, generator=rng).exp()
    calibrator = DensityScaling(cost=0.02)
    logged = finalized(calibrator, predicted, target, score)
    assert 0.005 < float(logged["cost"]) < 0.02  # with the noise of 1,000 samples it would be 0.02
    found = calibrator(predicted, {"generative": torch.linspace(0, 1000, 1000)})
    assert torch.equal(found[:, 0], predicted[:, 0])
    assert (found[:, 1].diff() >= 0).all()
    assert found[-1, 1] > 100 * found[0, 1] > 0.04
    assert calibrator.prior.numel() == 0


def test_it_travels_in_weights():
    probs, target, score = classes()
    calibrator, again = DensityScaling(), DensityScaling()
    finalized(calibrator, probs, target, score)
    again.load_state_dict(calibrator.state_dict())
    torch.testing.assert_close(again(probs, {"generative": score}), calibrator(probs, {"generative": score}))
    fresh = DensityScaling()
    again.load_state_dict(fresh.state_dict())
    assert torch.equal(again(probs, {"generative": score}), probs)


@pytest.mark.parametrize("wrong", [{"cost": -0.1}, {"cost": math.nan}, {"cost": "1%"}, {"score": 3}])
def test_settings_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match=r"expected (cost|score)"):
        DensityScaling(**wrong)


# -- perturbed copies -------------------------------------------------------------------------------------------------


def test_copies_have_the_noise_that_they_are_said_to_have():
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(800, 6, generator=rng) * torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 1.0])
    labels = torch.randint(3, (800,), generator=rng)
    first, *copies = perturbed_copies(features, labels)
    assert torch.equal(first, features)
    assert len(copies) == 8
    for copy, sigma in zip(copies[:3], (0.1, 0.2, 0.4), strict=True):
        torch.testing.assert_close((copy - features).std(0), sigma * features.std(0), rtol=0.1, atol=1e-6)
    for copy, sigma in zip(copies[3:7], (0.05, 0.1, 0.2, 0.4), strict=True):
        common = sigma * features.std(0).square().mean().sqrt()
        torch.testing.assert_close((copy - features).std(0), common.expand(6), rtol=0.1, atol=0)
    again = list(perturbed_copies(features, labels))
    assert all(torch.equal(one, two) for one, two in zip(copies, again[1:], strict=True))
    assert len(list(perturbed_copies(features, features[:, 0]))) == 8  # numbers have no classes to swap within


def test_swapped_values_come_from_the_same_class():
    labels = torch.arange(300) % 4
    features = labels[:, None] + torch.rand(300, 5) / 2
    found = swap_within_classes(features, labels, torch.Generator().manual_seed(0))
    assert torch.equal(found.floor().long(), labels[:, None].expand(300, 5))
    assert 0.15 < (found != features).float().mean() < 0.25
    for row, label in zip(found, labels, strict=True):
        assert all(value in features[labels == label][:, i] for i, value in enumerate(row))


def test_a_copy_is_harmless_where_its_errors_are_those_of_the_samples():
    right = torch.zeros(1000, dtype=torch.long)
    for errors, harmless in ((0, True), (10, True), (40, False)):
        worse = right.clone()
        worse[:errors] = 1
        assert bool(is_harmless(right, worse)) == harmless
    few = torch.zeros(20, dtype=torch.long)
    few[0] = 1
    assert is_harmless(torch.zeros_like(few), few)  # one of 20 may be chance
    squares = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert is_harmless(squares, 1.005 * squares)
    assert not is_harmless(squares, 1.2 * squares)


def observed_copies(calibrator, probs, target, score, stranger, wrong=()):
    """The samples as they are, then a copy for each number by which their score rises; `wrong` ones answer wrongly."""
    calibrator.observe_copy(0, probs, target, {"generative": score})
    for i, rise in enumerate(stranger):
        predicted = probs.roll(1, dims=1) if i in wrong else probs
        calibrator.observe_copy(i + 1, predicted, target, {"generative": score + rise})


def test_harmless_noise_fades_next_to_nothing_and_what_is_stranger_fades():
    probs, target, score = classes()
    alone, informed = DensityScaling(), DensityScaling()
    finalized(alone, probs, target, score)
    observed_copies(informed, probs, target, score, (5.0, 20.0, 60.0), wrong=(2,))
    logged = finalized(informed, probs, target, score)
    plain = scale(probs, fit_temperature(probs, target))
    for rise in (0.0, 5.0, 20.0):  # the third copy is predicted worse: it may fade
        faded = informed(probs, {"generative": score + rise})
        assert F.nll_loss(faded.log(), target) <= 1.01 * F.nll_loss(plain.log(), target)
    harmless, far = score + 20.0, torch.full_like(score, 1e4)
    assert (
        alone(probs, {"generative": harmless}).amax(1).mean()
        < 0.5
        < informed(probs, {"generative": harmless}).amax(1).mean()
    )
    assert informed(probs, {"generative": far}).amax(1).mean() < 0.3
    assert float(logged["cost"]) <= 0.01 * float(F.nll_loss(plain.log(), target))


def test_copies_with_nan_are_left_out_and_samples_as_they_are_alone_tell_nothing():
    probs, target, score = classes(100)
    assert harmless_copies({}) == []
    columns = {"predicted": probs, "target": target, "score": score, "copy": torch.zeros(100, dtype=torch.long)}
    assert harmless_copies(columns) == []
    twice = {name: torch.cat([values, values]) for name, values in columns.items()}
    twice["copy"][100:] = 1
    twice["score"][150:] = math.nan
    (copy,) = harmless_copies(twice)
    assert torch.equal(copy.score, score[:50])


def test_surprise_of_others_is_that_of_new_samples():
    """Where each sample is among those that it is compared with, the strangest seem less strange than new ones."""
    rng = torch.Generator().manual_seed(0)
    means = {}
    for name in ("others", "itself", "new"):
        tops = []
        for _ in range(100):
            score, new = torch.randn(30, generator=rng).exp(), torch.randn(1000, generator=rng).exp()
            surprise = fit_surprise(score)
            values = {"others": surprise_of_others(score, 0.0), "itself": surprise(score), "new": surprise(new)}[name]
            tops.append(float(values.clamp_max(20).mean()))
        means[name] = float(np.mean(tops))
    assert means["itself"] < means["new"]
    assert means["others"] == pytest.approx(means["new"], abs=0.15)


# -- in a model -------------------------------------------------------------------------------------------------------


def structure():
    return StructureLearning(threshold=0.1, progress=False)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, quiet_trainer):
    """A fitted model with the calibrator, its checkpoint and its folder."""
    folder = tmp_path_factory.mktemp("density")
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Tree(num_params=6000), lr=0.01, calibration="DensityScaling", scores=[KNN(), Combined()])
    checkpoint = ModelCheckpoint(folder, save_last=True)
    with pytest.warns(UserWarning, match="validation samples"):
        quiet_trainer(folder, structure(), checkpoint, epochs=3).fit(model, datamodule=Digits())
    return model, checkpoint.last_model_path, folder


def test_the_model_brings_the_density_and_a_checkpoint_alone_predicts_the_same(fitted):
    model, path, _ = fitted
    assert "Generative" in model.scores
    again = BRAINet.load_from_checkpoint(path)
    assert again.hparams["calibration"] == {"class_path": "DensityScaling", "init_args": {"cost": 0.01, "score": None}}
    assert again.calibration.kappa == model.calibration.kappa > 0
    x = torch.rand(20, 64)
    for one in (model, again):
        one.eval().head.inference = "simultaneous"
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x))
        plain = again.predictor.passes(x).predicted
        assert torch.equal(again(x).argmax(1), plain.argmax(1))
        assert again(100 * x).max() < 0.5


def test_thresholds_of_every_score_travel_in_the_checkpoint(fitted):
    model, path, _ = fitted
    again = BRAINet.load_from_checkpoint(path)
    with torch.no_grad():
        scores = again.scores(again.eval().predictor.passes(torch.rand(4, 64)))
    assert set(again.scores.reference.names) == set(scores) >= {"generative", "knn", "joint", "energy", "combined"}
    for name in scores:
        assert torch.equal(again.scores.reference[name], model.scores.reference[name])
        values = again.scores.reference[name]
        assert values[len(values) - int(0.05 * (len(values) + 1))].isfinite()  # what 5 % of them reach


def test_the_verdict_is_in_predictions_and_in_their_file(fitted, quiet_trainer):
    _, path, folder = fitted
    again = BRAINet.load_from_checkpoint(path)
    x = torch.cat([known_inputs(), 50 * torch.rand(30, 64), torch.full((1, 64), math.nan)])
    trainer = quiet_trainer(folder, PredictionFile())
    found = trainer.predict(again, DataLoader(TensorDataset(x), batch_size=100))
    known = torch.cat([part["known"] for part in found])
    p = torch.cat([part["known_p"] for part in found])
    assert torch.equal(known, p > 0.05)
    n = len(x) - 31
    assert known[:n].float().mean() > 0.85
    assert not known[n:].any()
    assert p[-1] == 0
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["known"] for row in rows] == [str(bool(k)) for k in known]
    assert float(rows[0]["known_p"]) == pytest.approx(p[0].item(), abs=1e-6)


def test_harmless_noise_fades_nothing_in_a_model(fitted):
    """The first epochs are few: what counts is that fading costs next to nothing wherever the answers stay right."""
    model = fitted[0].eval()
    data = Digits()
    data.setup("test")
    labels = torch.tensor([int(label) for _, label in data.test_set])
    x, plain = known_inputs(), TemperatureScaling()
    plain.tau.copy_(model.calibration.tau)
    assert len(model.calibration._copies["copy"].unique()) == 9
    clean = None
    for sigma in (0.0, 0.02, 0.05, 0.1):
        noisy = x + sigma * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            passes = model.predictor.passes(noisy)
            scores = model.scores(passes)
            before, after = plain(passes.predicted, {}), model.calibration(passes.predicted, scores)
        right = float((before.argmax(1) == labels).float().mean())
        clean = right if clean is None else clean
        if right > clean - 0.01:
            errors = [
                float(calibration_error(calibration_sums(p.amax(1), (p.argmax(1) == labels).float())))
                for p in (before, after)
            ]
            assert errors[1] < errors[0] + 0.05
            assert F.nll_loss(after.log(), labels) < 1.03 * F.nll_loss(before.log(), labels)


def known_inputs():
    data = Digits()
    data.setup("test")
    return torch.stack([x for x, _ in data.test_set])


@pytest.mark.parametrize(
    ("verdict", "by"), [({"score": "knn"}, "knn"), (Verdict("energy", 0.2), "energy"), (None, "generative")]
)
def test_the_verdict_goes_by_the_score_that_was_chosen(fitted, verdict, by):
    again = BRAINet.load_from_checkpoint(fitted[1], verdict=verdict).eval()
    x = torch.rand(50, 64)
    with torch.no_grad():
        scores = again.scores(again.predictor.passes(x))
        found = again.predictor.judge(scores)
    assert torch.equal(found["known_p"], p_values(scores[by], again.scores.reference[by]))
    assert torch.equal(found["known"], found["known_p"] > (0.2 if by == "energy" else 0.05))


def test_without_a_calibrator_the_verdict_goes_by_the_joint_score(fitted):
    model = fitted[0]
    wanted = BRAINet(8, scores=[KNN(), Combined()])
    assert wanted.scores.for_verdict == ["joint", "knn", "energy"]
    assert BRAINet(8).predictor.judge({"energy": torch.zeros(3)}) == {}
    assert model.verdict == Verdict()
    with pytest.raises(ValueError, match="expected score of the verdict to be one of one_minus_max_p"):
        BRAINet(8, verdict=Verdict("knn"))


@pytest.mark.parametrize("head", [Linear(), MCDropout(num_params=4000)], ids=repr)
def test_other_heads_and_regression(head, tmp_path, quiet_trainer):
    pl.seed_everything(0, verbose=False)
    x = torch.randn(600, 5)
    y = x[:, 0] + 0.1 * torch.randn(600)
    loaders = [DataLoader(TensorDataset(x[part], y[part]), batch_size=50) for part in (slice(0, 300), slice(300, None))]
    model = BRAINet(task=Regression(), head=head, calibration=DensityScaling(), lr=0.01)
    trainer = quiet_trainer(tmp_path, epochs=2)
    trainer.fit(model, *loaders)
    assert trainer.callback_metrics["val/cal/cost"] <= 0.01
    assert model.calibration.kappa > 0
    near, far = (model.eval().predict_step((scale * x[:20],), 0) for scale in (1, 100))
    assert (far["std"] > 2 * near["std"].mean()).all()
    assert not far["known"].any()
    assert near["known"].float().mean() > 0.8
    assert {"test/scaled/reg/NLL", "test/reg/NLL"} <= set(trainer.test(model, loaders[1], verbose=False)[0])


def test_the_stages_of_a_network_of_maps_are_read(tmp_path, quiet_trainer):
    pl.seed_everything(0, verbose=False)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(8, 8),
    )  # fmt: skip
    x, y = torch.rand(400, 1, 8, 8), torch.arange(400) % 8
    model = BRAINet(8, backbone=Backbone(net), head=Linear(), calibration=DensityScaling())
    assert list(model.scores.members) == ["Stages", "Combined"]
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    quiet_trainer(tmp_path).fit(model, loader, loader)
    assert model.calibration.score_name == "stages"
    assert model.calibration._copies == {}  # the score reads other layers: no copies
    found = model.eval().predict_step((torch.cat([x[:9], 9 * x[:9], x[:1] * math.nan]),), 0)
    assert found["known"][:9].sum() > 6
    assert not found["known"][9:].any()


def test_without_validation_data_it_says_what_it_needs(tmp_path, quiet_trainer):
    x = DataLoader(TensorDataset(torch.rand(60, 4), torch.arange(60) % 3), batch_size=20)
    model = BRAINet(3, head=Linear(), calibration=DensityScaling())
    with pytest.raises(ValueError, match=r"expected validation data for DensityScaling, got none: give the datamodule"):
        quiet_trainer(tmp_path).fit(model, x)
    with pytest.raises(ValueError, match="expected validation data for DensityScaling"):
        quiet_trainer(tmp_path, limit_val_batches=0).fit(model, x, x)
    quiet_trainer(tmp_path).fit(BRAINet(3, head=Linear(), calibration=TemperatureScaling()), x)


def test_a_score_that_the_model_does_not_have():
    with pytest.raises(ValueError, match=r"expected score of DensityScaling to be one of one_minus_max_p.*got 'knn'"):
        BRAINet(3, calibration=DensityScaling(score="knn"))
    model = BRAINet(3, calibration=DensityScaling(score="knn"), scores=[KNN()])
    assert list(model.scores.members) == ["KNN", "Combined"]


def test_what_a_test_leaves_has_the_faded_confidence(fitted, tmp_path, quiet_trainer):
    again = BRAINet.load_from_checkpoint(fitted[1])
    again.head.inference = "simultaneous"
    results = quiet_trainer(tmp_path, Evaluation(figures=False)).test(again, datamodule=Digits(), verbose=False)
    assert results[0]["test/scaled/cls/Acc"] == results[0]["test/cls/Acc"]
    assert results[0]["test/scaled/cls/NLL"] != results[0]["test/cls/NLL"]


def test_the_verdict_is_in_the_record_and_on_the_page_of_a_test(fitted, tmp_path, quiet_trainer):
    again = BRAINet.load_from_checkpoint(fitted[1])
    again.head.inference = "simultaneous"
    trainer = quiet_trainer(tmp_path, Evaluation(figures=False))
    results = trainer.test(again, datamodule=Digits(), verbose=False)
    predicted = torch.cat([part["known"] for part in trainer.predict(again, datamodule=Digits())])
    (path,) = tmp_path.rglob("record.json")
    record = json.loads(path.read_text())
    sets = {part["name"]: part for part in record["sets"]}
    assert record["level"] == 0.05
    assert sets["test"]["unknown"] == int((~predicted).sum())
    assert 0 < sets["held_out"]["unknown"] < sets["held_out"]["samples"]
    assert results[0]["verdict/test/Unknown"] == pytest.approx(sets["test"]["unknown"] / sets["test"]["samples"])
    (chart,) = (chart for chart in record["charts"] if chart["name"] == "test/known")
    assert [series["name"] for series in chart["panels"][0]["series"]] == ["as promised", "test set", "held out"]
    page = path.with_name("report.html").read_text()
    assert "of the known test samples are called unknown, where at most 5" in page
    assert "share that looks unknown" in page


def test_it_exports_with_the_model_and_its_verdict(fitted):
    again = BRAINet.load_from_checkpoint(fitted[1]).eval()
    again.head.inference = "simultaneous"
    x = torch.cat([torch.rand(6, 64), 50 * torch.rand(3, 64), torch.full((1, 64), math.nan)])
    found = export_program(again, x)
    with torch.no_grad():
        expected = again.predict_step((x,), 0)
        exported = dict(zip(found.outputs, found.program.module()(x), strict=True))
    assert {"probabilities", "known_p", "known", "joint"} <= set(exported)
    for name in ("probabilities", "known_p", "known"):
        torch.testing.assert_close(exported[name], expected[name], equal_nan=True)


@pytest.mark.slow
def test_onnx_runtime_gives_the_same_verdict(fitted, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    again = BRAINet.load_from_checkpoint(fitted[1]).eval()
    again.head.inference = "simultaneous"
    x = torch.cat([torch.rand(6, 64), 50 * torch.rand(3, 64)])
    names = export_onnx(again, tmp_path / "model.onnx", x)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    got = dict(zip(names, session.run(None, {"input": x.numpy()}), strict=True))
    with torch.no_grad():
        expected = again.predict_step((x,), 0)
    for name in ("probabilities", "known_p", "known"):
        np.testing.assert_allclose(got[name], expected[name].numpy(), atol=1e-5)
