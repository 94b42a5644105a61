"""Metrics, on device and right under DDP, and the factories of their collections, one for each task.

Classification takes `preds` (B, C) probabilities and `target` (B,) labels. Averages of softmax outputs may exceed 1 by
rounding; they are clamped, never soft-maxed again. Regression takes `preds` (B, 2), mean and variance of a Gaussian in
the units of the target, and `target` (B,).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError
from torchmetrics.utilities import dim_zero_cat

from brainet_pl.losses import gaussian_nll

_LEVELS = tuple(0.05 * i for i in range(1, 20))  # of the central intervals that QuantileCalibrationError looks at
_BELOW_ONE = 1.0 - 2**-24  # the largest float32 below 1


class _SampleMean(Metric):
    """The mean of a number for each sample; a subclass says which number."""

    full_state_update = False
    higher_is_better = False
    is_differentiable = True
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        # Never in place: a validation in inference mode leaves tensors that a later fit may not write to.
        self.total = self.total + self.values(preds, target).sum()
        self.count = self.count + len(target)

    def compute(self) -> Tensor:
        """The mean so far."""
        return self.total / self.count

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """(B,) the number of each sample."""
        raise NotImplementedError


class NegativeLogLikelihood(_SampleMean):
    """-1/N Σ_n log p_n,y(n); a probability of 0 counts as the smallest normal float."""

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """(B,)."""
        return -preds.gather(1, target[:, None]).clamp(torch.finfo(preds.dtype).tiny, 1.0).log().squeeze(1)


class BrierScore(_SampleMean):
    """1/N Σ_n Σ_c (p_nc - [y(n) = c])², between 0 and 2."""

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """(B,)."""
        return ((preds - torch.nn.functional.one_hot(target, preds.shape[1])) ** 2).sum(dim=1)


class CalibrationError(MulticlassCalibrationError):
    """Expected calibration error with equal bins; a confidence of exactly 1 belongs to the last bin."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        super().update(preds.float().clamp(0.0, _BELOW_ONE), target)


class _Ranked(Metric):
    """A number of all confidences (N,) and hits (N,) together; a subclass says which number."""

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    confidence: list[Tensor]
    correct: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("correct", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        confidence, label = preds.float().max(dim=1)
        self.confidence.append(confidence.clamp(0.0, 1.0))
        self.correct.append((label == target).float())

    def compute(self) -> Tensor:
        """The number over all samples so far."""
        return self.measure(dim_zero_cat(self.confidence), dim_zero_cat(self.correct))

    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        """The number."""
        raise NotImplementedError


class AdaptiveCalibrationError(_Ranked):
    """Expected calibration error with bins of equal counts: Σ_b |acc_b - conf_b|·n_b/N over sorted confidences."""

    def __init__(self, n_bins: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.n_bins = n_bins

    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        """The error."""
        return adaptive_calibration_error(confidence, correct, self.n_bins)


class AreaUnderRiskCoverage(_Ranked):
    """AURC: the error rate of the most confident share of samples, averaged over all shares."""

    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        """The area."""
        return torch.as_tensor(risk_coverage(1.0 - confidence, 1.0 - correct).mean())


class RiskAtCoverage(_Ranked):
    """The error rate of the most confident `coverage` of the samples."""

    def __init__(self, coverage: float = 0.8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.coverage = coverage

    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        """The rate."""
        risk = risk_coverage(1.0 - confidence, 1.0 - correct)
        return risk[max(0, math.ceil(self.coverage * len(risk)) - 1)]


def adaptive_calibration_error(confidence: Tensor, correct: Tensor, n_bins: int) -> Tensor:
    """Confidences and hits (N,) → the error; with fewer samples than bins, each sample is a bin."""
    order = torch.argsort(confidence, stable=True)
    gaps = torch.tensor_split((correct - confidence)[order], min(n_bins, len(order)))
    return torch.stack([gap.sum().abs() for gap in gaps]).sum() / len(order)


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> Tensor:
    """(N,) scores and errors → (N,) error rate when the k + 1 most certain samples are answered.

    Samples of equal uncertainty count as answered in random order: each gets the mean error of its group, so the curve
    does not depend on the order of the data.
    """
    _, group, size = torch.unique(uncertainty, return_inverse=True, return_counts=True)  # in ascending order
    errors = torch.zeros(len(size), dtype=torch.float64, device=wrong.device).index_add(0, group, wrong.double())
    expected = (errors / size).repeat_interleave(size).cumsum(0)
    return torch.as_tensor(expected / torch.arange(1, len(wrong) + 1, device=wrong.device)).float()


def classification_metrics(num_classes: int, prefix: str) -> MetricCollection:
    """Accuracy, NLL, Brier, ECE, adaptive ECE and AURC under `<prefix>cls/…`, `<prefix>cal/…`, `<prefix>sc/…`."""
    metrics: dict[str, Metric] = {
        "cls/Acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
        "cls/NLL": NegativeLogLikelihood(),
        "cls/Brier": BrierScore(),
        "cal/ECE": CalibrationError(num_classes, n_bins=15, norm="l1", validate_args=False),
        "cal/aECE": AdaptiveCalibrationError(n_bins=15),
        "sc/AURC": AreaUnderRiskCoverage(),
        "sc/Risk@80Cov": RiskAtCoverage(0.8),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)  # type: ignore[arg-type]


# -- regression -------------------------------------------------------------------------------------------------------


class SquaredError(MeanSquaredError):
    """RMSE: √(1/N Σ_n (μ_n - y_n)²)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(squared=False, **kwargs)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: `preds` (B, 2), of which the mean counts, and `target` (B,)."""
        # torchmetrics adds in place: a validation in inference mode leaves tensors that a later fit may not write to.
        self.sum_squared_error, self.total = self.sum_squared_error.clone(), self.total.clone()
        super().update(preds[:, 0], target)


class AbsoluteError(MeanAbsoluteError):
    """MAE: 1/N Σ_n |μ_n - y_n|."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: `preds` (B, 2), of which the mean counts, and `target` (B,)."""
        # torchmetrics adds in place: a validation in inference mode leaves tensors that a later fit may not write to.
        self.sum_abs_error, self.total = self.sum_abs_error.clone(), self.total.clone()
        super().update(preds[:, 0], target)


class GaussianNLL(_SampleMean):
    """-1/N Σ_n log N(y_n; μ_n, σ_n²), with the total variance of the prediction."""

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """(B,)."""
        return gaussian_nll(preds[:, 0], preds[:, 1], target)


class IntervalCoverage(_SampleMean):
    """The share of targets inside the central interval of probability `level`; calibrated where it equals `level`."""

    higher_is_better = None  # type: ignore[assignment]
    is_differentiable = False

    def __init__(self, level: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.level = level

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """(B,)."""
        return (_central(preds, target) <= self.level).float()


class Sharpness(_SampleMean):
    """The mean width of the central 95 % interval, 2·1.96·σ_n, in the units of the target."""

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """(B,)."""
        return 2 * math.sqrt(2) * float(torch.special.erfinv(torch.tensor(0.95))) * preds[:, 1].sqrt()


class QuantileCalibrationError(Metric):
    """1/19 Σ_p |share of targets inside the central interval of probability p - p|, for p = 0.05, 0.10 … 0.95."""

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    inside: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("inside", torch.zeros(len(_LEVELS)), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        levels = torch.tensor(_LEVELS, device=preds.device)
        self.inside = self.inside + (_central(preds, target)[:, None] <= levels).sum(dim=0)
        self.count = self.count + len(target)

    def compute(self) -> Tensor:
        """The mean gap so far."""
        levels = torch.tensor(_LEVELS, device=self.inside.device)
        return torch.as_tensor((self.inside / self.count - levels).abs().mean())


def _central(preds: Tensor, target: Tensor) -> Tensor:
    """(B,) probability of the smallest central interval that holds the target: erf(|y - μ| / √(2σ²))."""
    return torch.as_tensor(torch.special.erf((target - preds[:, 0]).abs() / (2 * preds[:, 1]).sqrt()))


def regression_metrics(prefix: str) -> MetricCollection:
    """RMSE, MAE and NLL under `<prefix>reg/…`; coverage, sharpness and QCE under `<prefix>cal/…`."""
    metrics: dict[str, Metric] = {
        "reg/RMSE": SquaredError(),
        "reg/MAE": AbsoluteError(),
        "reg/NLL": GaussianNLL(),
        "cal/coverage50": IntervalCoverage(0.5),
        "cal/coverage80": IntervalCoverage(0.8),
        "cal/coverage95": IntervalCoverage(0.95),
        "cal/sharpness": Sharpness(),
        "cal/QCE": QuantileCalibrationError(),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)  # type: ignore[arg-type]
