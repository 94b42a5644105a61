"""Validation data that can't teach much: every calibrator gives a result with a stated doubt, or a clear error."""

import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from brainet_pl.calibration import (
    Conformal,
    DensityScaling,
    DirichletScaling,
    IsotonicScaling,
    TemperatureScaling,
    VectorScaling,
)
from brainet_pl.calibration.isotonic import choose_weight
from brainet_pl.network.finalization import best_value
from brainet_pl.tasks import Classification

KINDS = [TemperatureScaling, VectorScaling, DirichletScaling, IsotonicScaling, DensityScaling]
SETS, INTERVALS = ["lac", "aps", "raps"], ["scaled", "quantile"]


def samples(n, c=3, seed=0):
    """Probabilities (n, c), labels drawn from them, and a score."""
    rng = torch.Generator().manual_seed(seed)
    probs = torch.randn(n, c, generator=rng).mul(2).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=rng)[:, 0], torch.randn(n, generator=rng).exp()


def fitted(kind, probs, labels, score):
    part = kind()
    part.check(Classification(probs.shape[1]))
    part.observe(probs, labels, {"generative": score})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part.finalize()
    return part, " / ".join(str(warning.message) for warning in caught)


def calibrated(part, seed=9):
    """New probabilities, and what the calibrator makes of them, strange ones included."""
    probs, _, score = samples(200, seed=seed)
    score[:50] = 1e6
    final = part(probs, {"generative": score})
    assert final.isfinite().all()
    torch.testing.assert_close(final.sum(1), torch.ones(200))
    return probs, final


def surer_by(probs, final):
    """How many times as large the log-odds of the first against the second class are on average; 1/τ of a scaling."""
    before, after = (x.double().clamp_min(1e-12).log().topk(2).values for x in (probs, final))
    return float((after[:, 0] - after[:, 1]).sum() / (before[:, 0] - before[:, 1]).sum())


@pytest.mark.parametrize("kind", KINDS)
class TestCalibrators:
    def test_five_rows_hardly_change_anything_and_it_is_said(self, kind):
        probs, labels, score = samples(5)
        labels = probs.argmax(1)  # without an error
        labels[0] = (labels[0] + 1) % 3 if (labels == labels[0]).all() else labels[0]
        part, said = fitted(kind, probs, labels, score)
        assert "calibrated on 5 validation samples: expected at least 20" in said
        assert surer_by(*calibrated(part)) < 1.3

    def test_two_samples_of_each_of_three_classes(self, kind):
        probs, _, score = samples(6)
        part, said = fitted(kind, probs, torch.arange(6) % 3, score)
        assert "calibrated on 6 validation samples" in said
        assert surer_by(*calibrated(part)) < 1.3

    def test_one_class_only_changes_nothing_and_it_is_said(self, kind):
        probs, _, score = samples(300)
        part, said = fitted(kind, probs, torch.ones(300, dtype=torch.long), score)
        assert "are not calibrated: got validation samples of one class only (300 of class 1)" in said
        assert torch.equal(*calibrated(part)) or torch.allclose(*calibrated(part))

    def test_equal_rows_change_nothing_and_it_is_said(self, kind):
        probs, labels, score = samples(300)
        part, said = fitted(kind, probs[:1].expand(300, 3), labels, score)
        assert "are not calibrated: got 300 validation samples with the same prediction" in said
        assert torch.allclose(*calibrated(part))

    def test_nan_predictions_are_left_out_and_it_is_said(self, kind):
        probs, labels, score = samples(300)
        alone, _ = fitted(kind, probs[:250], labels[:250], score[:250])
        probs[250:] = math.nan
        part, said = fitted(kind, probs, labels, score)
        assert "left out 50 of 300 validation samples with NaN in their predictions" in said
        torch.testing.assert_close(calibrated(part)[1], calibrated(alone)[1])

    def test_nothing_but_nan_changes_nothing_and_it_is_said(self, kind):
        probs, labels, score = samples(40)
        part, said = fitted(kind, probs * math.nan, labels, score)
        assert "got no validation sample with finite predictions" in said
        assert torch.allclose(*calibrated(part))

    def test_columns_that_are_constant(self, kind):
        """One class is never predicted, and never met."""
        probs, labels, score = samples(300, c=2)
        part, _ = fitted(kind, torch.cat([probs, torch.zeros(300, 1)], dim=1), labels, score)
        calibrated(part)
        assert surer_by(*calibrated(part)) < 1.3

    def test_doubts_are_said_once(self, kind):
        part, said = fitted(kind, *samples(6, seed=2))
        assert said
        part.observe(*samples(6, seed=2)[:2], {"generative": samples(6, seed=2)[2]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            part.finalize()


# -- scores -----------------------------------------------------------------------------------------------------------


def test_samples_with_nan_scores_say_nothing_about_fading():
    probs, labels, score = samples(600)
    score[::3] = math.nan
    part, said = fitted(DensityScaling, probs, labels, score)
    assert "left out 200 of 600 validation samples with NaN in generative" in said
    fine = score.isfinite()
    alone, _ = fitted(DensityScaling, probs[fine], labels[fine], score[fine])
    assert 0 < part.kappa == pytest.approx(float(alone.kappa), rel=0.2)
    torch.testing.assert_close(part.knots, alone.knots)
    with pytest.raises(ValueError, match="at least two finite scores of validation data, got 0"):
        fitted(DensityScaling, probs, labels, score * math.nan)


def test_equal_scores_fade_nothing_and_it_is_said():
    probs, labels, _ = samples(300)
    part, said = fitted(DensityScaling, probs, labels, torch.full((300,), 2.0))
    assert "nothing fades: generative is the same for all 300 validation samples" in said
    assert part.kappa == 0
    plain, _ = fitted(TemperatureScaling, probs, labels, torch.zeros(300))
    torch.testing.assert_close(calibrated(part)[1], calibrated(plain)[1])


@pytest.mark.parametrize("seed", range(5))
def test_fewer_validation_samples_fade_less(seed):
    kappas = [float(fitted(DensityScaling, *samples(n, seed=seed))[0].kappa) for n in (10, 200, 5000)]
    assert kappas[0] < 0.05 * 1.0 or kappas[0] < kappas[1]
    assert kappas[0] < kappas[2]


def test_few_samples_leave_isotonic_out():
    for seed in range(10):
        assert choose_weight(*samples(50, seed=seed)[:2]) <= 0.2
    assert choose_weight(*samples(4)[:2]) == 0
    probs, labels, _ = samples(4000)
    assert choose_weight(probs.square() / probs.square().sum(1, keepdim=True), labels) > 0.6  # too sure, by a square


# -- sets and intervals -----------------------------------------------------------------------------------------------


def conformal(method, final, target, level=0.9):
    part = Conformal(method, level)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part.fit(final, target)
    return part, " / ".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("method", SETS)
def test_sets_of_bad_data(method):
    new = samples(50, seed=9)[0]
    probs, labels, _ = samples(5)
    part, said = conformal(method, probs, labels)
    assert "expected at least 9 validation samples" in said
    assert part(new)["set"].all()
    part, said = conformal(method, samples(6)[0], torch.arange(6) % 3)
    assert "got 6" in said
    assert part(new)["set"].all()
    probs, labels, _ = samples(100)
    part, said = conformal(method, probs, torch.ones(100, dtype=torch.long))
    assert "got 100 of class 1 only: the level is promised for that class alone" in said
    probs[:50] = math.nan
    part, said = conformal(method, probs, labels)
    assert "with finite predictions for a level of 0.9, got 50" in said
    assert part(new)["set"].all()
    probs, labels, _ = samples(100)
    part, _ = conformal(method, probs[:1].expand(100, 3), labels)
    held = part(probs[:1])["set"][0]
    assert labels.bincount(minlength=3)[held].sum() >= 90  # the classes that these samples have nine times of ten


@pytest.mark.parametrize("method", SETS)
def test_sets_for_each_class_of_one_class_hold_all_others(method):
    part = Conformal(method, per_class=True)
    with pytest.warns(UserWarning, match="all hold the 2 classes without a threshold"):
        part.fit(samples(100)[0], torch.ones(100, dtype=torch.long))
    assert part(samples(50, seed=9)[0])["set"][:, [0, 2]].all()


@pytest.mark.parametrize("method", INTERVALS)
def test_intervals_of_bad_data(method):
    rng = torch.Generator().manual_seed(0)
    predicted = torch.stack([torch.randn(100, generator=rng), torch.ones(100)], dim=1)
    target = predicted[:, 0] + torch.randn(100, generator=rng)
    for rows in (5, 8):
        part, said = conformal(method, predicted[:rows], target[:rows])
        assert f"got {rows}: sets or intervals have no end" in said
        assert part(predicted)["upper"].isposinf().all()
    predicted[:20] = math.nan
    part, said = conformal(method, predicted, target)
    assert "got 80" in said
    assert part(predicted[20:])["upper"].isposinf().all()
    part, _ = conformal(method, torch.tensor([[0.0, 1.0]]).expand(100, 2), torch.zeros(100))
    assert part(torch.tensor([[3.0, 1.0]]))["lower"] <= 3.0
    part, _ = conformal(method, torch.tensor([[0.0, 0.0]]).expand(100, 2), torch.zeros(100))  # 0 of 0 deviations
    assert not part(torch.tensor([[3.0, 1.0]]))["upper"].isnan()


def test_a_calibrator_and_sets_on_five_rows():
    """Folds of one sample each: the calibrator of a fold has seen four."""
    probs, labels, score = samples(5)
    calibrator, part = DensityScaling(), Conformal("lac")
    calibrator.observe(probs, labels, {"generative": score})
    part.observe(probs, labels, {"generative": score}, torch.arange(5))
    with pytest.warns(UserWarning, match="calibrated on 5 validation samples"):
        calibrator.finalize()
    with pytest.warns(UserWarning, match="expected at least 9 validation samples"):
        part.finalize(calibrator)
    assert part(samples(50, seed=9)[0])["set"].all()


# -- the temperature of the posterior ---------------------------------------------------------------------------------


def test_few_rows_without_an_error_keep_the_usual_value():
    """A colder posterior is surer: it gains a little on every row that is right."""
    rng = torch.Generator().manual_seed(0)
    usual = 0.3 * torch.rand(400, generator=rng)
    surer = 0.8 * usual
    assert best_value({1.0: usual[:1], 2.0: surer[:1]}, 1.0).value == 1.0
    assert best_value({1.0: usual[:5], 2.0: surer[:5]}, 1.0).value == 1.0
    assert best_value({1.0: usual, 2.0: surer}, 1.0).value == 2.0
    assert best_value({1.0: usual[:0], 2.0: surer[:0]}, 1.0).value == 1.0
    usual[3] = math.nan
    assert best_value({1.0: usual, 2.0: surer}, 1.0).value == 1.0
    assert best_value({1.0: surer, 2.0: usual}, 1.0).value == 1.0


def test_equal_rows_do_not_divide_by_nothing():
    loss = F.softplus(torch.zeros(40))
    assert best_value({1.0: loss, 2.0: loss}, 1.0).value == 1.0
