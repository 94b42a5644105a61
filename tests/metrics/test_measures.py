"""Every metric against numpy, edge cases included."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss
from torchmetrics.classification import MulticlassRecall

from brainet_pl._utils.precision import measurable
from brainet_pl.metrics import measures
from brainet_pl.metrics.measures import (
    AbsoluteError,
    AreaUnderRiskCoverage,
    BoundCoverage,
    BoundWidth,
    IntervalCoverage,
    Measure,
    PassDisagreement,
    RiskAtCoverage,
    SetCoverage,
    SetSize,
    SquaredError,
    WorstClassCoverage,
    classification_measures,
    collect,
    regression_measures,
)


def expected_calibration_error(p, y, bins=15):
    confidence, hit = p.max(1), p.argmax(1) == y
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    return sum(
        abs(hit[place == b].mean() - confidence[place == b].mean()) * (place == b).mean() for b in np.unique(place)
    )


def adaptive_error(p, y, bins=15):
    order = np.argsort(p.max(1), kind="stable")
    gap = ((p.argmax(1) == y).astype(float) - p.max(1))[order]
    return sum(abs(part.sum()) for part in np.array_split(gap, bins)) / len(y)


def compute(p, y, batches=3):
    metrics = collect(classification_measures(p.shape[1]), "test/", "cls")
    for a, b in zip(torch.tensor(p).chunk(batches), torch.tensor(y).chunk(batches), strict=True):
        metrics.update(a, b)
    return {k: v.item() for k, v in metrics.compute().items()}


@pytest.mark.parametrize("concentration", [0.05, 0.5, 5.0])
def test_against_numpy_and_sklearn(concentration):
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(6, concentration), size=500).astype(np.float32)
    y = np.array([rng.choice(6, p=row / row.sum()) for row in p.astype(np.float64)])
    got = compute(p, y)
    assert got["test/cls/Acc"] == pytest.approx(accuracy_score(y, p.argmax(1)))
    clipped = np.clip(p.astype(np.float64), np.finfo(np.float32).tiny, 1)
    assert got["test/cls/NLL"] == pytest.approx(-np.log(clipped[np.arange(500), y]).mean(), rel=1e-5)
    assert got["test/cls/Brier"] == pytest.approx(((p - np.eye(6)[y]) ** 2).sum(1).mean(), rel=1e-5)
    assert got["test/cal/ECE"] == pytest.approx(expected_calibration_error(p, y), abs=1e-5)
    assert got["test/cal/aECE"] == pytest.approx(adaptive_error(p, y), abs=1e-5)
    if concentration > 1:
        assert got["test/cls/NLL"] == pytest.approx(log_loss(y, p.astype(np.float64), labels=range(6)), rel=1e-4)


def test_certain_predictions_share_the_last_bin():
    """Half with confidence 0.999, half with exactly 1.0, errors that cancel within one bin."""
    p = np.array([[0.999, 0.001]] * 50 + [[1.0, 0.0]] * 50, dtype=np.float32)
    y = np.array([0] * 50 + [0] * 49 + [1])
    got = compute(p, y)
    assert got["test/cal/ECE"] == pytest.approx(expected_calibration_error(p, y), abs=1e-5)
    assert np.isfinite(got["test/cls/NLL"])


def test_means_just_above_one_are_not_soft_maxed():
    p = np.array([[1.0000001, 0.0], [0.0, 1.0000001]], dtype=np.float32)
    got = compute(p, np.array([0, 1]), batches=1)
    assert got["test/cal/ECE"] == pytest.approx(0, abs=1e-5)
    assert got["test/cls/NLL"] == pytest.approx(0, abs=1e-5)


def test_one_sample_and_empty_bins():
    got = compute(np.array([[0.3, 0.7]], dtype=np.float32), np.array([0]), batches=1)
    assert got["test/cal/aECE"] == pytest.approx(0.7)
    assert got["test/cal/ECE"] == pytest.approx(0.7)
    assert got["test/cls/Brier"] == pytest.approx(2 * 0.49, rel=1e-5)


def test_selective_metrics_on_a_case_by_hand():
    preds = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    target = torch.tensor([0, 1, 1, 1])  # confidences 0.9 right, 0.8 wrong, 0.7 right, 0.6 wrong
    area, risk = AreaUnderRiskCoverage(), RiskAtCoverage(0.5)
    for metric in (area, risk):
        metric.update(preds, target)
    assert area.compute() == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)
    assert risk.compute() == pytest.approx(1 / 2)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e6, 1e8])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_errors_of_the_mean_against_their_definition(offset, kind):
    generator = torch.Generator().manual_seed(0)
    mean = (offset + 30 * torch.randn(200, generator=generator)).to(kind)
    target = (offset + 30 * torch.randn(200, generator=generator)).to(kind)
    preds = torch.stack([mean, torch.rand(200, generator=generator).to(kind)], dim=1)
    gap = (mean - target).double()
    for metric, expected in ((SquaredError(), (gap**2).mean().sqrt()), (AbsoluteError(), gap.abs().mean())):
        for a, b in zip(preds.split(64), target.split(64), strict=True):
            metric.update(a, b)
        assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-6)
        metric.reset()
        metric.update(preds[:1], target[:1])
        assert metric.compute().item() == pytest.approx(gap[0].abs().item(), rel=1e-6)


@pytest.mark.parametrize("make", [SquaredError, AbsoluteError])
def test_a_metric_of_inference_mode_can_be_updated_outside(make):
    """As it happens where a fit follows a validation."""
    metric, preds, target = make(), torch.tensor([[1.0, 1.0], [2.0, 1.0]]), torch.tensor([2.0, 3.0])
    with torch.inference_mode():
        metric.update(preds, target)
        metric.reset()
    metric.update(preds, target)
    metric.update(preds, target)
    assert metric.compute() == 1
    assert metric(preds, target + 1) == 2


def of_kind(measure, count, seed=0):
    """Predictions and targets that a measure takes."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, 2, generator=generator).cumsum(dim=1)
    labels = torch.randint(0, 3, (count,), generator=generator)
    probs = torch.rand(count, 3, generator=generator).mul(4).round().softmax(dim=1)  # many are tied
    kind = type(measure)
    if kind in (SetCoverage, SetSize, WorstClassCoverage):
        return probs > 0.3, labels
    if kind is PassDisagreement:
        return numbers[:, 0], labels
    return (numbers, labels.float()) if kind in NUMBERS else (probs, labels)


NUMBERS = {type(measure) for measure in regression_measures()} | {BoundCoverage, BoundWidth}
ALL = [
    *classification_measures(3), *regression_measures(), PassDisagreement(), SetCoverage(), SetSize(),
    WorstClassCoverage(3), BoundCoverage(), BoundWidth(),
]  # fmt: skip


class Recall(MulticlassRecall, Measure):
    """A measure of torchmetrics, which stops at an empty batch."""


def test_every_measure_is_looked_at():
    """Those that measures share a base with say nothing themselves."""
    made = {kind for kind in vars(measures).values() if isinstance(kind, type) and issubclass(kind, Measure)}
    assert {kind for kind in made if kind is not Measure and kind.__name__[0] != "_"} == {type(m) for m in ALL}


@pytest.mark.parametrize("measure", [*ALL, Recall(3)], ids=lambda measure: type(measure).__name__)
def test_a_batch_without_samples_changes_nothing(measure):
    """A process has one whose last samples are copies of those of others."""
    measure = copy.deepcopy(measure)
    preds, target = of_kind(measure, 7)
    measure.update(preds, target)
    expected = measure.compute()
    measure.reset()
    for rows in (slice(0), slice(4), slice(0), slice(4, 7), slice(0)):
        measure.update(preds[rows], target[rows])
    assert float(measure.compute()) == pytest.approx(float(expected), rel=1e-6)
    assert measure.update_called


@pytest.mark.parametrize("measure", ALL, ids=lambda measure: type(measure).__name__)
@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**16), processes=st.integers(1, 3))
def test_any_order_and_any_number_of_processes(measure, count, seed, processes):
    """Samples are shuffled, dealt to processes and batched; many of them are tied."""
    whole, parts = copy.deepcopy(measure), [copy.deepcopy(measure) for _ in range(processes)]
    preds, target = of_kind(measure, count, seed)
    whole.update(preds, target)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for rank, part in enumerate(parts):
        for rows in order[rank::processes].split(7) or [order[:0]]:
            part.update(preds[rows], target[rows])
    for part in parts[1:]:
        parts[0].merge_state(part)
    assert float(parts[0].compute()) == pytest.approx(float(whole.compute()), abs=1e-6)


def test_sums_keep_their_digits_however_many_samples():
    """32 bits stop counting at 2²⁴."""
    measure = PassDisagreement()
    measure.update(torch.full((2**24,), 0.5), torch.empty(2**24))
    for _ in range(300):
        measure.update(torch.full((2**14,), 0.3), torch.empty(2**14))
    expected = (0.5 * 2**24 + 0.3 * 300 * 2**14) / (2**24 + 300 * 2**14)
    assert float(measure.compute()) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("measure", ALL, ids=lambda measure: type(measure).__name__)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bits_is_measured_in_32(measure, kind):
    """By a measure that is converted with it, as Lightning does for precision="16-true"."""
    exact, measure = copy.deepcopy(measure), copy.deepcopy(measure).to(kind)
    preds, target = of_kind(measure, 50)
    preds = preds if preds.dtype == torch.bool else preds.to(kind)
    for _ in range(20):
        measure.update(preds, target)
        exact.update(preds if preds.dtype == torch.bool else preds.float(), target)
    assert float(measure.compute()) == pytest.approx(float(exact.compute()), rel=1e-6)


def test_sums_stay_on_the_cpu_where_the_device_has_no_64_bits():
    measure = PassDisagreement()
    measure._apply(lambda tensor: SimpleNamespace(device=torch.device("mps")))
    assert (measure.total.device.type, measure.total.dtype) == ("cpu", torch.float64)
    held = SimpleNamespace(device=torch.device("mps"), cpu=lambda: torch.ones(3, dtype=torch.float16))
    assert measurable(held).dtype == torch.float32


class Doubt(Measure):
    """A measure without a key, as a user may write one."""

    def update(self, preds, target):
        pass

    def compute(self):
        return torch.zeros(())


def test_keys_of_a_collection():
    keys = list(collect([*classification_measures(3), Doubt()], "val/", "cls"))
    names = ["cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE", "cal/aECE", "cal/MCE", "cal/smECE", "sc/AURC"]
    names += ["sc/AUGRC", "sc/Risk@80Cov", "cls/Doubt"]
    assert sorted(keys) == sorted(f"val/{name}" for name in names)
    with pytest.raises(ValueError, match="got cls/Doubt twice: give one of them another key"):
        collect([Doubt(), Doubt()], "val/", "cls")


def test_a_measure_says_how_it_is_read():
    for measure in [*classification_measures(3), *regression_measures()]:
        assert measure.title
        assert measure.unit in ("share", "nats", "target", "")
        assert measure.better in ("higher", "lower", None)
    assert IntervalCoverage(0.8).better is None
    assert (RiskAtCoverage(0.5).better, RiskAtCoverage(0.5).key) == ("lower", "sc/Risk@50Cov")
    assert classification_measures(3)[0].better == "higher"


@pytest.mark.parametrize("measure", regression_measures(), ids=lambda measure: measure.key)
def test_truth_values_are_no_numbers_to_predict(measure):
    with pytest.raises(ValueError, match=r"targets .B,., got .* of torch.bool"):
        measure.update(torch.rand(3, 2), torch.ones(3, dtype=torch.bool))
