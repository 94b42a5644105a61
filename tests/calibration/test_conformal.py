"""Sets and intervals: thresholds against a sorted list, sets against loops and MAPIE, coverage as promised."""

import csv
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from mapie.regression import SplitConformalRegressor
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from brainet_pl._utils.framework import ModelCheckpoint
from brainet_pl.calibration import Calibrator, Conformal, TemperatureScaling, conformal
from brainet_pl.callbacks import Evaluation, PredictionFile
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.measures import BoundCoverage, BoundWidth, SetCoverage, SetSize, WorstClassCoverage
from brainet_pl.network import Linear
from brainet_pl.tasks import Classification, Regression


def classes(n, seed=0, c=6, sure=2.0):
    """Labels drawn from softmax(z), and a model that is too sure of itself: softmax(sure·z + noise)."""
    rng = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(n, c, generator=rng)
    labels = torch.multinomial(z.softmax(1), 1, generator=rng).squeeze(1)
    return (sure * z + 0.5 * torch.randn(n, c, generator=rng)).softmax(1), labels


def numbers(n, seed=0):
    """Targets whose deviation depends on the input and is predicted half as large, and not quite Gaussian."""
    rng = torch.Generator().manual_seed(seed)
    mean, deviation = torch.randn(n, generator=rng), torch.rand(n, generator=rng) + 0.2
    noise = torch.randn(n, generator=rng)
    return torch.stack([mean, (deviation / 2) ** 2], dim=1), mean + deviation * (noise + 0.3 * noise**2)


def within(hits, n, level, deviations=4.0):
    """Whether a count is what n tries of that probability give."""
    return abs(hits - n * level) <= deviations * math.sqrt(n * level * (1 - level)) + 1


# -- thresholds -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60), st.integers(1, 99))
@settings(max_examples=100, deadline=None)
def test_threshold_is_the_least_value_that_covers_enough(values, percent):
    """The least q with #{values ≤ q} ≥ (n + 1)·level, in whole numbers; infinity where there is none."""
    found = float(conformal.threshold(torch.tensor(values), percent / 100))
    enough = [q for q in values if 100 * sum(v <= q for v in values) >= (len(values) + 1) * percent]
    assert found == (min(enough) if enough else math.inf)


def test_levels_are_read_as_written():
    for n in range(400):
        for percent in range(1, 100):
            exact = -(-(n + 1) * percent // 100)
            assert conformal.place_of_threshold(n, percent / 100) == exact
    assert math.ceil(100 * 0.07) == 8  # what floats would make of seven


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_least_samples(level):
    n = conformal.least_samples(level)
    assert conformal.threshold(torch.arange(float(n)), level) == n - 1
    assert conformal.threshold(torch.arange(float(n - 1)), level) == math.inf


# -- sets and intervals -----------------------------------------------------------------------------------------------


def brute_set(method, p, y, new, level, penalty=0.1, free=1):
    """Sets of classes for the rows of `new`, by loops over samples and classes, in 64 bits."""

    def badness(row, c):
        if method == "lac":
            return 1 - row[c]
        order = sorted(range(len(row)), key=lambda k: -row[k])
        place, u = order.index(c) + 1, 100 * math.log(row[order[0]] / row[order[1]]) % 1
        more = penalty * max(0, place - free) if method == "raps" else 0
        return sum(row[k] for k in order[:place]) - u * row[c] + more

    seen = sorted(badness(row, c) for row, c in zip(p, y, strict=True))
    k = math.ceil((len(y) + 1) * Fraction(str(level)))
    limit = seen[k - 1] if k <= len(seen) else math.inf
    return np.array([[badness(row, c) <= limit + 1e-7 or c == row.argmax() for c in range(len(row))] for row in new])


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("level", [0.6, 0.9])
def test_sets_against_loops(method, level):
    (p, y), (new, _) = classes(157), classes(80, seed=1)
    sets = Conformal(method, level).fit(p, y)(new)["set"]
    expected = brute_set(method, p.double().numpy(), y.numpy(), new.double().numpy(), level)
    assert (sets.numpy() != expected).mean() <= (0 if method == "lac" else 0.003)  # u has five digits in 32 bits


class Given(ClassifierMixin, BaseEstimator):
    """A classifier of scikit-learn whose inputs are its probabilities."""

    def __init__(self, c=6):
        self.classes_, self.is_fitted_ = np.arange(c), True

    def fit(self, x, y):
        return self

    def predict_proba(self, x):
        return x

    def predict(self, x):
        return x.argmax(1)


@pytest.mark.parametrize("level", [0.7, 0.9])
def test_sets_against_mapie(level):
    (p, y), (new, _) = classes(200), classes(150, seed=1)
    theirs = SplitConformalClassifier(Given(), confidence_level=level, conformity_score="lac", prefit=True)
    p, new = (x.double() / x.double().sum(1, keepdim=True) for x in (p, new))  # sums are checked there in 64 bits
    theirs.conformalize(p.numpy(), y.numpy())
    expected = theirs.predict_set(new.numpy())[1][:, :, 0]
    expected[np.arange(len(new)), new.argmax(1)] = True  # ours always holds the answer
    ours = Conformal("lac", level).fit(p, y)(new)["set"].numpy()
    assert (ours != expected).mean() < 1e-3  # ours is in 32 bits


@pytest.mark.parametrize("sure", [1.0, 3.0])
def test_adaptive_sets_are_as_large_as_those_of_mapie(sure):
    """It draws u at random, so only coverage and sizes can agree."""
    (p, y), (new, labels) = classes(3000, sure=sure), classes(3000, seed=1, sure=sure)
    p, new = (x.double() / x.double().sum(1, keepdim=True) for x in (p, new))
    theirs = SplitConformalClassifier(Given(), confidence_level=0.9, conformity_score="aps", prefit=True)
    theirs.conformalize(p.numpy(), y.numpy())
    options = {"conformity_score_params": {"include_last_label": "randomized"}}
    expected = theirs.predict_set(new.numpy(), **options)[1][:, :, 0]
    expected[np.arange(len(new)), new.argmax(1)] = True
    ours = Conformal("aps").fit(p, y)(new)["set"].numpy()
    assert ours.sum(1).mean() == pytest.approx(expected.sum(1).mean(), rel=0.04)
    rows = np.arange(len(labels))
    assert ours[rows, labels].mean() == pytest.approx(expected[rows, labels].mean(), abs=0.015)


class Zero(RegressorMixin, BaseEstimator):
    def __init__(self):
        self.is_fitted_ = self.fitted_ = True

    def fit(self, x, y):
        return self

    def predict(self, x):
        return np.zeros(len(x))


def test_scaled_intervals_against_mapie():
    """Residuals in units of the predicted deviation are absolute residuals of a model that always says 0."""
    (p, y), (new, _) = numbers(200), numbers(150, seed=1)
    theirs = SplitConformalRegressor(Zero(), confidence_level=0.9, conformity_score="absolute", prefit=True)
    theirs.conformalize(np.zeros((200, 1)), ((y - p[:, 0]) / p[:, 1].sqrt()).double().numpy())
    limit = theirs.predict_interval(np.zeros((1, 1)))[1][0, 1, 0]
    found = Conformal("scaled").fit(p, y)(new)
    half = limit * new[:, 1].double().sqrt()
    np.testing.assert_allclose(found["lower"], new[:, 0].double() - half, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["upper"], new[:, 0].double() + half, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_quantile_intervals_against_loops(level):
    """Romano et al. 2019: E = max(q_low - y, y - q_high), the interval is [q_low - Q, q_high + Q]."""
    from scipy.stats import norm

    (p, y), (new, _) = numbers(123), numbers(60, seed=1)
    low, high = (norm.ppf(q, p[:, 0], p[:, 1].sqrt()) for q in ((1 - level) / 2, (1 + level) / 2))
    limit = sorted(np.maximum(low - y.numpy(), y.numpy() - high))[math.ceil(124 * Fraction(str(level))) - 1]
    low, high = (norm.ppf(q, new[:, 0], new[:, 1].sqrt()) for q in ((1 - level) / 2, (1 + level) / 2))
    found = Conformal("quantile", level).fit(p, y)(new)
    np.testing.assert_allclose(found["lower"], np.minimum(low - limit, new[:, 0].numpy()), atol=1e-4)
    np.testing.assert_allclose(found["upper"], np.maximum(high + limit, new[:, 0].numpy()), atol=1e-4)


# -- coverage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lac", "aps", "raps", "scaled", "quantile"])
@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (40, 0.8)])
def test_the_next_sample_is_covered_as_often_as_promised(method, n, level):
    """Over draws of n + 1 samples the chance is ⌈(n + 1)·level⌉ / (n + 1), to the last digit, where nothing is tied.

    Where the answer is always in the set, it can only be more.
    """
    tries, hits, forced = 600, 0, 0
    make = numbers if method in conformal.INTERVALS else classes
    p, y = make(tries * (n + 1), seed=3)
    part = Conformal(method, level)
    for p_i, y_i in zip(p.split(n + 1), y.split(n + 1), strict=True):
        limit = float(conformal.threshold(part.nonconformity(p_i[:-1], y_i[:-1]), level))
        new = float(part.nonconformity(p_i[-1:], y_i[-1:]))
        hits += new <= limit
        found = part.fit(p_i[:-1], y_i[:-1])(p_i[-1:])
        held = found["set"][0, y_i[-1]] if "set" in found else found["lower"] <= y_i[-1] <= found["upper"]
        assert bool(held) >= (new < limit)
        forced += bool(held) and new > limit
    exact = conformal.place_of_threshold(n, level) / (n + 1)
    assert within(hits, tries, exact)
    if method in conformal.INTERVALS:
        assert not forced


def test_saturated_probabilities():
    """A model that says 1.0 to almost everything: ties are no reason to lose or to swell."""
    rng = torch.Generator().manual_seed(0)
    z = 60 * torch.randn(4000, 10, generator=rng)
    labels = torch.where(torch.rand(4000, generator=rng) < 0.93, z.argmax(1), torch.randint(10, (4000,), generator=rng))
    p = z.softmax(1)
    assert (p.max(1).values == 1).float().mean() > 0.5
    for method in ("lac", "aps", "raps"):
        sets = Conformal(method, 0.9).fit(p[:2000], labels[:2000])(p[2000:])["set"]
        held = sets.gather(1, labels[2000:, None]).float().mean()
        assert held >= 0.9 - 4 * math.sqrt(0.09 / 2000) * math.sqrt(2)
        assert sets.sum(1).float().mean() < 3


def test_a_threshold_for_each_class_covers_every_class():
    """One class is harder than the others: one threshold for all leaves it out, its own does not."""

    def draw(n, seed):
        p, y = classes(n, seed, sure=1.0)
        p[:, 2] *= 0.3
        return p / p.sum(1, keepdim=True), y

    (p, y), (new, labels) = draw(6000, 0), draw(6000, 1)
    worst = {}
    for per_class in (False, True):
        metric = WorstClassCoverage(6)
        metric.update(Conformal("lac", per_class=per_class).fit(p, y)(new)["set"], labels)
        worst[per_class] = float(metric.compute())
    count = int(torch.bincount(labels).min())
    assert worst[False] < 0.85
    assert worst[True] > 0.9 - 4 * math.sqrt(2 * 0.09 / count)


# -- edges ------------------------------------------------------------------------------------------------------------


def test_few_samples_give_all_classes_and_a_warning():
    p, y = classes(8)
    part = Conformal("lac", 0.9)
    with pytest.warns(UserWarning, match=r"expected at least 9 validation samples .* got 8: .* hold all classes"):
        part.fit(p, y)
    assert part(p)["set"].all()
    with pytest.warns(UserWarning, match="have no end"):
        found = Conformal("scaled").fit(*numbers(8))(numbers(3)[0])
    assert found["lower"].isneginf().all()
    assert found["upper"].isposinf().all()


def test_one_sample():
    with pytest.warns(UserWarning, match="got 1"):
        assert Conformal("raps").fit(*classes(1))(classes(3)[0])["set"].all()
    assert not Conformal("lac", 0.5).fit(*classes(1))(classes(30)[0])["set"].all()


def test_a_class_with_few_samples_is_in_every_set():
    p, y = classes(400)
    keep = (y != 1) | (torch.arange(400) < 20)
    with pytest.warns(UserWarning, match="at least 9 validation samples of each class .*all hold the 1 classes"):
        part = Conformal("lac", per_class=True).fit(p[keep], y[keep])
    sets = part(p)["set"]
    assert sets[:, 1].all()
    assert not sets.all(dim=0)[0]


def test_without_validation_data_sets_are_whole_and_it_is_said():
    part = Conformal("aps")
    with pytest.warns(UserWarning, match=r"to have seen validation data, got none.*call Conformal\.fit"):
        assert part(classes(3)[0])["set"].all()


def test_what_is_not_a_number_may_be_anything():
    p, y = classes(50)
    part = Conformal("lac").fit(p, y)
    odd = p[:2].clone()
    odd[0, 3] = math.nan
    assert part(odd)["set"][0, 3]
    assert part(torch.full((1, 6), math.nan))["set"].all()
    found = Conformal("scaled").fit(*numbers(50))(torch.tensor([[math.nan, 1.0], [0.0, math.nan], [0.0, 1.0]]))
    assert found["lower"][:2].isneginf().all()
    assert found["upper"][:2].isposinf().all()
    assert found["upper"].isfinite()[2]


def test_nan_in_validation_data_counts_as_the_worst():
    p, y = classes(19)
    p[:3] = math.nan
    with pytest.warns(UserWarning, match="with finite predictions"):
        assert Conformal("lac", 0.9).fit(p, y)(p[5:])["set"].all()


def test_refusals():
    with pytest.raises(ValueError, match="expected a level above 0 and below 1, got 0"):
        Conformal(level=0)
    with pytest.raises(ValueError, match="level of at least 0 and below 1, got 1"):
        Conformal(level=1.0)
    with pytest.raises(ValueError, match=r"method of Conformal for Regression \(scaled, quantile\), got 'aps'"):
        BRAINet(task="Regression", conformal=Conformal("aps"))
    with pytest.raises(ValueError, match=r"for Classification \(lac, aps, raps\), got 'scaled'"):
        BRAINet(3, conformal=Conformal("scaled"))
    with pytest.raises(ValueError, match="per_class of Conformal for a classification"):
        BRAINet(task=Regression(), conformal={"class_path": "Conformal", "init_args": {"per_class": True}})
    with pytest.raises(ValueError, match="got 'auto' outside a model"):
        Conformal().fit(*classes(20))
    with pytest.raises(ValueError, match="expected conformal to be one of Conformal, got 'Typo'"):
        BRAINet(3, conformal="Typo")
    with pytest.raises(ValueError, match="expected sets of classes"):
        SetSize().update(torch.rand(2, 3), torch.tensor([0, 1]))


def test_half_a_model_keeps_its_threshold():
    p, y = classes(100)
    part = Conformal("lac").fit(p, y)
    limit = part.limits.clone()
    assert part.half().limits.dtype == torch.float32
    assert torch.equal(part.limits, limit)
    assert part.double().limits == limit.double()


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_against_numpy():
    rng = np.random.default_rng(0)
    sets, y = rng.random((300, 5)) < 0.6, rng.integers(0, 4, 300)  # no sample of the last class
    held = sets[np.arange(300), y]
    expected = {
        SetCoverage: held.mean(),
        SetSize: sets.sum(1).mean(),
        WorstClassCoverage: min(held[y == c].mean() for c in range(4)),
    }
    for kind, value in expected.items():
        metric = kind(5) if kind is WorstClassCoverage else kind()
        for part in np.array_split(np.arange(300), 4):
            metric.update(torch.tensor(sets[part]), torch.tensor(y[part]))
        assert float(metric.compute()) == pytest.approx(value), kind
    bounds, target = np.sort(rng.normal(size=(200, 2)), axis=1).astype(np.float32), rng.normal(size=200)
    inside = (bounds[:, 0] <= target) & (target <= bounds[:, 1])
    for metric, value in ((BoundCoverage(), inside.mean()), (BoundWidth(), np.diff(bounds).mean())):
        metric.update(torch.tensor(bounds), torch.tensor(target))
        assert float(metric.compute()) == pytest.approx(value, rel=1e-5)


# -- after calibration ------------------------------------------------------------------------------------------------


class Memory(Calibrator):
    """Remembers every sample that it saw, and its label: as wrong as a calibrator that learns too much can be."""

    def __init__(self):
        super().__init__()
        self.seen, self.known = [], None

    def observe(self, predicted, target, scores):
        self.seen.append((predicted, target))

    def finalize(self):
        self.known = tuple(torch.cat(part) for part in zip(*self.seen, strict=True))
        self.seen = []
        return {}

    def forward(self, predicted, scores):
        distance, place = torch.cdist(predicted, self.known[0]).min(dim=1)
        known = torch.nn.functional.one_hot(self.known[1][place], predicted.shape[1]).float()
        return torch.where((distance < 1e-3)[:, None], 0.99 * known + 0.01 * predicted, predicted)


def finalized(calibration, p, y, level=0.9, method="lac"):
    part = Conformal(method, level)
    for places in torch.arange(len(y)).split(64):
        calibration.observe(p[places], y[places], {})
        part.observe(p[places], y[places], {}, places)
    calibration.finalize()
    part.finalize(calibration)
    return part


def test_a_calibrator_that_learned_the_validation_data_does_not_spoil_coverage():
    (p, y), (new, labels) = classes(800), classes(2000, seed=1)
    memory = Memory()
    part = finalized(memory, p, y)
    held = part(memory(new, {}))["set"].gather(1, labels[:, None]).sum()
    assert abs(float(held) / 2000 - 0.9) < 4 * math.sqrt(0.09 * (1 / 2000 + 1 / 800))
    spoilt = Conformal("lac").fit(memory(p, {}), y)
    assert spoilt(memory(new, {}))["set"].gather(1, labels[:, None]).float().mean() < 0.8


@pytest.mark.parametrize("method", ["lac", "raps"])
def test_after_temperature_scaling(method):
    (p, y), (new, labels) = classes(1500), classes(4000, seed=1)
    scaling = TemperatureScaling()
    part = finalized(scaling, p, y, method=method)
    assert scaling.tau > 1.2
    final = scaling(new, {})
    held = part(final)["set"].gather(1, labels[:, None]).sum()
    assert abs(float(held) / 4000 - 0.9) < 4 * math.sqrt(0.09 * (1 / 4000 + 1 / 1500)) + 0.02 * (method == "raps")
    alone = Conformal(method).fit(scaling(p, {}), y)
    assert float(part.limits) == pytest.approx(float(alone.limits), abs=0.02)


def test_folds_are_even_and_follow_no_pattern():
    for step in (1, 2, 5, 10):
        counts = torch.bincount(conformal.fold_of(torch.arange(0, 10_000 * step, step)), minlength=conformal.FOLDS)
        assert len(counts) == conformal.FOLDS
        assert (counts - 2000).abs().max() < 40


# -- in a model -------------------------------------------------------------------------------------------------------


def test_through_fit_checkpoint_test_and_predict(tmp_path, quiet_trainer):
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    model = BRAINet(8, head=Linear(), calibration="TemperatureScaling", conformal=Conformal("aps", 0.8), lr=0.05)
    trainer = quiet_trainer(tmp_path, checkpoint, epochs=2)
    trainer.fit(model, datamodule=Digits())
    assert trainer.callback_metrics["val/conformal/samples"] == 152
    assert trainer.callback_metrics["val/conformal/threshold"] == model.conformal.limits[0]
    again = BRAINet.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.conformal.settings() == model.conformal.settings()
    assert torch.equal(again.conformal.limits, model.conformal.limits)
    assert model.conformal.limits.isfinite()
    evaluation = Evaluation(figures=False)
    trainer = quiet_trainer(tmp_path, evaluation, PredictionFile())
    trainer.test(again, datamodule=Digits(), verbose=False)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.predict(again, datamodule=Digits(), return_predictions=False)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    data = Digits()
    data.setup("test")
    labels = [label for _, label in data.test_set]
    sets = [set(map(int, row["set"].split())) for row in rows]
    assert all(int(row["class"]) in one for row, one in zip(rows, sets, strict=True))
    held = np.array([label in one for label, one in zip(labels, sets, strict=True)])
    assert found["test/conformal/Coverage"] == pytest.approx(held.mean())
    assert found["test/conformal/Size"] == pytest.approx(np.mean([len(one) for one in sets]))
    by_class = [held[np.array(labels) == c].mean() for c in range(8)]
    assert found["test/conformal/WorstClassCoverage"] == pytest.approx(min(by_class))
    record = (tmp_path / "record.json").read_text()
    assert "test/conformal/WorstClassCoverage" in record


def test_a_regression_through_fit(tmp_path, quiet_trainer):
    class Numbers(Digits):
        def setup(self, stage):
            super().setup(stage)
            for name in ("train_set", "val_set", "test_set"):
                x, y = zip(*getattr(self, name), strict=True)
                pairs = torch.utils.data.TensorDataset(torch.stack(x), torch.tensor(y).float())
                setattr(self, name, pairs)
            self.structure_set = self.train_set

    model = BRAINet(task="Regression", head=Linear(), conformal="Conformal", lr=0.05)
    trainer = quiet_trainer(tmp_path, epochs=2)
    trainer.fit(model, datamodule=Numbers())
    trainer.test(model, datamodule=Numbers(), verbose=False)
    found = trainer.callback_metrics
    assert float(found["test/conformal/Coverage"]) == pytest.approx(0.9, abs=4 * math.sqrt(0.09 * (1 / 152 + 1 / 433)))
    answer = model.predict_step(next(iter(trainer.test_dataloaders["test"])), 0)
    assert (answer["lower"] < answer["mean"]).all()
    assert float(found["test/conformal/Width"]) > 0


def test_a_model_of_a_checkpoint_can_be_given_one(tmp_path, quiet_trainer):
    model = BRAINet(8, head=Linear())
    trainer = quiet_trainer(tmp_path)
    trainer.fit(model, datamodule=Digits())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    again = BRAINet.load_from_checkpoint(tmp_path / "plain.ckpt", conformal=Conformal(per_class=True))
    assert not int(again.conformal.samples)
    assert again.conformal.limits.shape == (8,)
    assert isinstance(again.task, Classification)
