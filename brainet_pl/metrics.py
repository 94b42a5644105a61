"""Metrics on class probabilities, on device and right under DDP, and the one factory of their collections.

All take `preds` (B, C) probabilities and `target` (B,) labels. Averages of softmax outputs may exceed 1 by rounding;
they are clamped, never soft-maxed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError
from torchmetrics.utilities import dim_zero_cat

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
        self.total += self.values(preds, target).sum()
        self.count += len(target)

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


class AdaptiveCalibrationError(Metric):
    """Expected calibration error with bins of equal counts: Σ_b |acc_b - conf_b|·n_b/N over sorted confidences."""

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    confidence: list[Tensor]
    correct: list[Tensor]

    def __init__(self, n_bins: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.n_bins = n_bins
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("correct", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        confidence, label = preds.float().max(dim=1)
        self.confidence.append(confidence.clamp(0.0, 1.0))
        self.correct.append((label == target).float())

    def compute(self) -> Tensor:
        """The error over all samples so far."""
        confidence, correct = dim_zero_cat(self.confidence), dim_zero_cat(self.correct)
        return adaptive_calibration_error(confidence, correct, self.n_bins)


def adaptive_calibration_error(confidence: Tensor, correct: Tensor, n_bins: int) -> Tensor:
    """Confidences and hits (N,) → the error; with fewer samples than bins, each sample is a bin."""
    order = torch.argsort(confidence, stable=True)
    gaps = torch.tensor_split((correct - confidence)[order], min(n_bins, len(order)))
    return torch.stack([gap.sum().abs() for gap in gaps]).sum() / len(order)


def classification_metrics(num_classes: int, prefix: str) -> MetricCollection:
    """Accuracy, NLL, Brier, ECE and adaptive ECE under `<prefix>cls/…` and `<prefix>cal/…`."""
    metrics: dict[str, Metric] = {
        "cls/Acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
        "cls/NLL": NegativeLogLikelihood(),
        "cls/Brier": BrierScore(),
        "cal/ECE": CalibrationError(num_classes, n_bins=15, norm="l1", validate_args=False),
        "cal/aECE": AdaptiveCalibrationError(n_bins=15),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)  # type: ignore[arg-type]
