"""Metrics, on device and right under DDP, and the factories of their collections, one for each task.

Classification takes `preds` (B, C) probabilities and `target` (B,) labels. Averages of softmax outputs may exceed 1 by
rounding; they are clamped, never soft-maxed again. Regression takes `preds` (B, 2), mean and variance of a Gaussian in
the units of the target, and `target` (B,).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from brainet_pl._utils import checks
from brainet_pl._utils.precision import measurable
from brainet_pl.metrics import curves
from brainet_pl.metrics.catalogue import CATALOGUE, Better, direction, facts_of
from brainet_pl.metrics.labels import out_of_range
from brainet_pl.metrics.losses import gaussian_nll

_LEVELS = tuple(0.05 * i for i in range(1, 20))  # of the central intervals that QuantileCalibrationError looks at


class Measure(Metric):
    """A torchmetrics metric with a name, a unit and a direction. Derive your own metrics from this class.

    A subclass whose key is in the catalogue takes title, unit and direction from there.

    Attributes:
        key: Under which it is logged, behind the stage: `cls/NLL`. A measure given to a model without a key is logged
            as `<group of the task>/<class name>`.
        title: What a report calls it; the end of the key if empty.
        unit: "share", "nats", "target" for the units of the target, or "".
        higher_is_better: As in torchmetrics; None where neither direction is better.
        takes_empty: Whether `update` can do with a batch without samples, which a process has whose last samples are
            copies of those of others. Where it can't, as in torchmetrics, it is left out for such a batch.

    Whatever a model computes in, `update` gets numbers of at least 32 bits, and states keep the type they were added
    with; sums over samples want 64.
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    key: str = ""
    title: str = ""
    unit: str = ""
    takes_empty: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = CATALOGUE.get(vars(cls).get("key", ""))
        for name, value in known._asdict().items() if known else ():
            if name not in vars(cls):
                setattr(cls, name, value)
        if not hasattr(cls.update, "prepares_batch"):
            cls.update = _prepare_batch(cls.update)  # type: ignore[method-assign, assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        """Follow the model to its device, but keep the digits of sums when it is converted to 16 or 32 bits."""

        def move(state: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=state.device)).device
            return state if device.type == "mps" else state.to(device)  # see `measurable`

        return super()._apply(move, exclude_state)

    @property
    def better(self) -> Better:
        """Whether "higher" or "lower" values are better; None where neither is."""
        return direction(self.higher_is_better)


def _prepare_batch(update: Callable[[Any, Tensor, Tensor], None]) -> Callable[[Any, Tensor, Tensor], None]:
    """An `update` that is given numbers of at least 32 bits, and no empty batch where it can't take one."""

    @functools.wraps(update)
    def prepared(self: Any, preds: Tensor, target: Tensor) -> None:
        if len(target) or self.takes_empty:
            update(self, measurable(preds), measurable(target))

    prepared.prepares_batch = True  # type: ignore[attr-defined]
    return prepared


def check_classes(preds: Tensor, target: Tensor) -> None:
    """Refuse what is not probabilities (B, C) and labels (B,) from 0 to C - 1; torch would stop at it obscurely."""
    if preds.dim() != 2 or target.shape != preds.shape[:1] or not preds.is_floating_point():
        raise ValueError(
            f"expected probabilities (B, C) and labels (B,), got {tuple(preds.shape)} of {preds.dtype} and "
            f"{tuple(target.shape)}: give one row of probabilities and one label for each sample"
        )
    if target.is_floating_point() or target.is_complex():
        raise ValueError(f"expected integer labels, got {target.dtype}: give the number of each class, target.long()")
    wrong = out_of_range(target, preds.shape[1])
    if wrong is not None:
        raise ValueError(
            f"expected labels from 0 to {preds.shape[1] - 1}, got {wrong[0]} to {wrong[1]}: renumber the labels, or "
            "predict as many classes"
        )


def one_hot(target: Tensor, preds: Tensor) -> Tensor:
    """Labels (B,) as rows (B, C) of predictions that are certain; torch's own function looks at the labels again."""
    return torch.zeros_like(preds).scatter_(1, target.unsqueeze(1), 1.0)


def check_numbers(preds: Tensor, target: Tensor) -> None:
    """Refuse what is not a mean and a variance (B, 2) and one target (B,) for each sample."""
    fit = preds.dim() == 2 and preds.shape[1] == 2 and target.shape == preds.shape[:1]
    if not fit or not preds.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(
            f"expected means and variances (B, 2) and targets (B,), got {tuple(preds.shape)} of {preds.dtype} and "
            f"{tuple(target.shape)} of {target.dtype}: give one row and one target for each sample"
        )


class _SampleMean(Measure):
    """The mean of a number, or of numbers of this shape, for each sample; a subclass says which."""

    is_differentiable = True
    takes_empty = True
    shape: tuple[int, ...] = ()
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros(self.shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        # Never in place: a validation in inference mode leaves tensors that a later fit may not write to.
        self.total = self.total + self.values(preds, target).double().sum(dim=0)
        self.count = self.count + len(target)

    def compute(self) -> Tensor:
        """The mean so far."""
        return self.of_mean(self.total / self.count).float()

    def of_mean(self, mean: Tensor) -> Tensor:
        """What is reported of the mean, in 64 bits; the mean itself."""
        return mean

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """(B, *shape) the numbers of each sample."""
        raise NotImplementedError


class Accuracy(_SampleMean):
    """The share of samples whose largest probability is that of their label; a prediction of NaN is wrong."""

    is_differentiable = False
    key = "cls/Acc"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes whether the answer of each sample is right, as zeros and ones (B,)."""
        return _confidence_and_hits(preds, target)[1]


class NegativeLogLikelihood(_SampleMean):
    """-1/N Σ_n log p_n,y(n); a probability of 0 counts as the smallest normal float."""

    key = "cls/NLL"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes -log p of the true class of each sample, (B,)."""
        check_classes(preds, target)
        return -preds.gather(1, target.long()[:, None]).clamp(torch.finfo(preds.dtype).tiny, 1.0).log().squeeze(1)


class BrierScore(_SampleMean):
    """The Brier score: 1/N Σ_n Σ_c (p_nc - [y(n) = c])², between 0 and 2."""

    key = "cls/Brier"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes the squared distance of each prediction from its label, (B,)."""
        check_classes(preds, target)
        return ((preds - one_hot(target.long(), preds)) ** 2).sum(dim=1)


def _confidence_and_hits(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (B, C) and labels (B,) → the largest probability (B,), and whether its class is the label."""
    check_classes(preds, target)
    confidence, label = preds.float().max(dim=1)
    return confidence, (label == target) & ~confidence.isnan()


class CalibrationError(Measure):
    """Expected calibration error with equal bins; a confidence of exactly 1 belongs to the last bin."""

    key = "cal/ECE"
    takes_empty = True
    sums_of: Any = staticmethod(curves.calibration_sums)
    sums: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", self.sums_of(torch.empty(0), torch.empty(0)), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities (B, C) and labels (B,)."""
        self.sums = self.sums + self.sums_of(*_confidence_and_hits(preds, target))
        self.count = self.count + len(target)

    def compute(self) -> Tensor:
        """The error of all batches so far, a scalar."""
        return curves.calibration_error(self.sums).float()


class PassDisagreement(_SampleMean):
    """How often two passes answer differently, from `uncertainty.disagreement` (B,); 0 for a single network."""

    is_differentiable = False
    key = "ens/Disagreement"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Takes what `uncertainty.disagreement` gives for each sample, (B,)."""
        return preds


class MaximumCalibrationError(CalibrationError):
    """MCE: the gap between confidence and accuracy in the worst of the equal bins; one sample can make it."""

    key = "cal/MCE"

    def compute(self) -> Tensor:
        """The largest gap so far."""
        return curves.maximum_calibration_error(self.sums).float()


class SmoothCalibrationError(CalibrationError):
    """Smooth ECE (Błasiok & Nakkiran 2024): without bins, by a kernel whose width the error itself chooses."""

    key = "cal/smECE"
    sums_of = staticmethod(curves.residual_sums)

    def compute(self) -> Tensor:
        """The error of all batches so far, a scalar."""
        return curves.smooth_calibration_error(self.sums, self.count).float()


class _Ranked(Measure):
    """A number of all confidences (N,) and hits (N,) together; a subclass says which number."""

    takes_empty = True
    confidence: list[Tensor]
    correct: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("correct", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities (B, C) and labels (B,)."""
        confidence, hits = _confidence_and_hits(preds, target)
        self.confidence.append(confidence.clamp(0.0, 1.0))
        self.correct.append(hits.float())

    def compute(self) -> Tensor:
        """The number over all samples so far; NaN without any, and where a confidence is NaN, which has no rank."""
        confidence = dim_zero_cat(self.confidence) if len(self.confidence) else torch.empty(0)
        if not len(confidence) or confidence.isnan().any():
            return confidence.new_tensor(math.nan)
        return self._measure(confidence, dim_zero_cat(self.correct))

    def _measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        """The number."""
        raise NotImplementedError


class AdaptiveCalibrationError(_Ranked):
    """Expected calibration error with bins of equal counts: Σ_b |acc_b - conf_b|·n_b/N over sorted confidences."""

    key = "cal/aECE"

    def _measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        return curves.adaptive_calibration_error(confidence, correct)


class AreaUnderRiskCoverage(_Ranked):
    """AURC: the error rate of the most confident share of samples, averaged over all shares."""

    key = "sc/AURC"

    def _measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        return torch.as_tensor(curves.risk_coverage(1.0 - confidence, 1.0 - correct).mean())


class AreaUnderGeneralizedRisk(_Ranked):
    """AUGRC: the share of all samples that is answered wrongly, averaged over how many of the most confident are."""

    key = "sc/AUGRC"

    def _measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        return confidence.new_tensor(curves.generalized_risk(1.0 - confidence, 1.0 - correct))


class RiskAtCoverage(_Ranked):
    """The error rate of the most confident `coverage` of the samples."""

    key = "sc/Risk@#Cov"

    def __init__(self, coverage: float = 0.8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 < coverage <= 1:
            raise ValueError(f"expected a coverage above 0 and at most 1, got {coverage}")
        self.coverage = coverage
        self.key = f"sc/Risk@{100 * coverage:g}Cov"
        self.title = facts_of(self.key).title

    def _measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        risk = curves.risk_coverage(1.0 - confidence, 1.0 - correct)
        return risk[max(0, math.ceil(self.coverage * len(risk)) - 1)]


def classification_measures(num_classes: int) -> list[Measure]:
    """Accuracy, NLL, Brier, four calibration errors, AURC, AUGRC and risk at 80 % coverage, fresh."""
    return [
        Accuracy(), NegativeLogLikelihood(), BrierScore(),
        CalibrationError(), AdaptiveCalibrationError(), MaximumCalibrationError(), SmoothCalibrationError(),
        AreaUnderRiskCoverage(), AreaUnderGeneralizedRisk(), RiskAtCoverage(0.8),
    ]  # fmt: skip


def collect(measures: list[Measure], prefix: str, group: str) -> MetricCollection:
    """Measures under the keys `<prefix><key>`; one without a key is `<prefix><group>/<class name>`."""
    named: dict[str, Metric] = {}
    for measure in measures:
        key = measure.key or f"{group}/{type(measure).__name__}"
        if key in named:
            raise ValueError(f"expected metrics of different names, got {key} twice: give one of them another key")
        named[key] = measure
    return MetricCollection(named, prefix=prefix, compute_groups=False)  # type: ignore[arg-type]


# -- regression -------------------------------------------------------------------------------------------------------


class SquaredError(_SampleMean):
    """The root of the mean squared error (RMSE): √(1/N Σ_n (μ_n - y_n)²)."""

    key = "reg/RMSE"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes the squared error of each mean, (B,)."""
        check_numbers(preds, target)
        return (preds[:, 0] - target) ** 2

    def of_mean(self, mean: Tensor) -> Tensor:
        """The root of the mean."""
        return mean.sqrt()


class AbsoluteError(_SampleMean):
    """The mean absolute error (MAE): 1/N Σ_n |μ_n - y_n|."""

    key = "reg/MAE"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes the absolute error of each mean, (B,)."""
        check_numbers(preds, target)
        return (preds[:, 0] - target).abs()


class GaussianNLL(_SampleMean):
    """-1/N Σ_n log N(y_n; μ_n, σ_n²), with the total variance of the prediction."""

    key = "reg/NLL"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes the negative log-density of each target under the predicted Gaussian, (B,)."""
        check_numbers(preds, target)
        return gaussian_nll(preds[:, 0], preds[:, 1], target)


class IntervalCoverage(_SampleMean):
    """The share of targets inside the central interval of probability `level`; calibrated where it equals `level`."""

    is_differentiable = False
    key = "cal/coverage#"

    def __init__(self, level: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        checks.share("level", level)
        self.level = level
        self.key = f"cal/coverage{100 * level:g}"
        self.title = facts_of(self.key).title

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes whether each target lies in its interval, (B,) of zeros and ones."""
        return (_central(preds, target) <= self.level).float()


class Sharpness(_SampleMean):
    """The mean width of the central 95 % interval, 2·1.96·σ_n, in the units of the target."""

    key = "cal/sharpness"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes the predicted standard deviation of each sample, (B,)."""
        check_numbers(preds, target)
        return 2 * math.sqrt(2) * float(torch.special.erfinv(torch.tensor(0.95))) * preds[:, 1].sqrt()


class QuantileCalibrationError(_SampleMean):
    """1/19 Σ_p |share of targets inside the central interval of probability p - p|, for p = 0.05, 0.10 … 0.95."""

    is_differentiable = False
    key = "cal/QCE"
    shape = (len(_LEVELS),)

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes whether each target lies in the interval of each level, (B, 19) of zeros and ones."""
        return (_central(preds, target)[:, None] <= torch.tensor(_LEVELS, device=preds.device)).float()

    def of_mean(self, mean: Tensor) -> Tensor:
        """The mean gap between the share inside and the probability, over all levels."""
        return (mean - torch.tensor(_LEVELS, dtype=mean.dtype, device=mean.device)).abs().mean()


def _central(preds: Tensor, target: Tensor) -> Tensor:
    """(B,) probability of the smallest central interval that holds the target: erf(|y - μ| / √(2σ²))."""
    check_numbers(preds, target)
    return torch.as_tensor(torch.special.erf((target - preds[:, 0]).abs() / (2 * preds[:, 1]).sqrt()))


def regression_measures() -> list[Measure]:
    """RMSE, MAE, NLL, coverage at 50, 80 and 95 %, sharpness and QCE, fresh."""
    intervals = [IntervalCoverage(level) for level in (0.5, 0.8, 0.95)]
    return [SquaredError(), AbsoluteError(), GaussianNLL(), *intervals, Sharpness(), QuantileCalibrationError()]


# -- sets and intervals -----------------------------------------------------------------------------------------------


def check_sets(preds: Tensor, target: Tensor) -> None:
    """Refuse what is not sets (B, C) as true and false, and labels (B,) from 0 to C - 1."""
    if preds.dtype != torch.bool:
        raise ValueError(f"expected sets of classes (B, C) as true and false, got {preds.dtype}: give predict's `set`")
    check_classes(preds.float(), target)


def _held(preds: Tensor, target: Tensor) -> Tensor:
    """(B,) whether each set (B, C) holds the label (B,)."""
    check_sets(preds, target)
    return preds.gather(1, target.long()[:, None]).squeeze(1)


class SetCoverage(_SampleMean):
    """The share of sets (B, C) that hold the label; meant to be the level they were made for."""

    is_differentiable = False
    key = "conformal/Coverage"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes whether each set (B, C) holds the label (B,), as zeros and ones (B,)."""
        return _held(preds, target).float()


class SetSize(_SampleMean):
    """The mean number of classes in a set."""

    is_differentiable = False
    key = "conformal/Size"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes the number of classes of each set (B, C), (B,)."""
        check_sets(preds, target)
        return preds.sum(dim=1).float()


class WorstClassCoverage(Measure):
    """The least share of sets that hold the label among the classes that have samples.

    The smallest of several noisy shares lies below the level even where every class has it: with few samples of a class
    it says little.
    """

    key = "conformal/WorstClassCoverage"
    takes_empty = True
    held: Tensor
    count: Tensor

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_classes = checks.whole("num_classes", num_classes, 1)
        for name in ("held", "count"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: sets (B, C) and labels (B,)."""
        inside = _held(preds, target)
        self.held = self.held + torch.bincount(target[inside], minlength=self.num_classes)
        self.count = self.count + torch.bincount(target, minlength=self.num_classes)

    def compute(self) -> Tensor:
        """The least share so far; NaN without a sample."""
        some = self.count > 0
        return (self.held[some] / self.count[some]).min() if some.any() else torch.tensor(math.nan)


class BoundCoverage(_SampleMean):
    """The share of intervals (B, 2), from lower to upper, that hold the target; meant to be the level."""

    is_differentiable = False
    key = "conformal/Coverage"
    title = "Intervals that hold the target"  # the catalogue's is that of sets

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes whether each target (B,) lies between its bounds (B, 2), as zeros and ones (B,)."""
        check_numbers(preds, target)
        return ((preds[:, 0] <= target) & (target <= preds[:, 1])).float()


class BoundWidth(_SampleMean):
    """The mean width of intervals (B, 2), in the units of the target."""

    is_differentiable = False
    key = "conformal/Width"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes the distance between the bounds (B, 2) of each sample, (B,)."""
        check_numbers(preds, target)
        return preds[:, 1] - preds[:, 0]
