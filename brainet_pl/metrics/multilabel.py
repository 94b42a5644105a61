"""Metrics of several labels at once: probabilities (B, L) and targets (B, L) of 0, 1 and NaN, which is not known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision
from torchmetrics.utilities import dim_zero_cat

from brainet_pl.metrics import curves
from brainet_pl.metrics.measures import Measure


def check_labels(preds: Tensor, target: Tensor) -> None:
    """Refuse what is not probabilities (B, L) and targets (B, L)."""
    if preds.dim() != 2 or target.shape != preds.shape or not preds.is_floating_point():
        raise ValueError(
            f"expected probabilities (B, L) and targets (B, L), got {tuple(preds.shape)} of {preds.dtype} and "
            f"{tuple(target.shape)}: give a column for each label"
        )


def binary_nll(preds: Tensor, target: Tensor) -> Tensor:
    """-log of the probability of each target, and 0 where it is NaN; all of one shape.

    >>> binary_nll(torch.tensor([[0.5, 0.75, 0.9]]), torch.tensor([[1.0, 0.0, torch.nan]]))
    tensor([[0.6931, 1.3863, 0.0000]])
    """
    chosen = torch.where(target == 1, preds, 1 - preds)
    losses = -chosen.clamp_min(torch.finfo(torch.float32).tiny).log()
    return torch.where(target.isnan(), torch.zeros_like(losses), losses)


def share_found(sets: Tensor, target: Tensor) -> Tensor:
    """Sets and targets (B, L) → (B,) the share of a sample's labels that are in its set; NaN where it has none.

    >>> share_found(torch.tensor([[True, False], [True, True]]), torch.tensor([[1.0, 1.0], [0.0, torch.nan]]))
    tensor([0.5000,    nan])
    """
    has = target == 1
    return (sets & has).sum(dim=1) / has.sum(dim=1)


def mean_of_known(values: Tensor, target: Tensor) -> Tensor:
    """The mean of values (…) that are 0 where the target is NaN, over the others."""
    return values.sum() / (~target.isnan()).sum().clamp_min(1)


class _LabelMean(Measure):
    """The mean of a number over all known labels of all samples; a subclass says which number."""

    takes_empty = True
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        check_labels(preds, target)
        known = ~target.isnan()
        # Never in place: a validation in inference mode leaves tensors that a later fit may not write to.
        self.total = self.total + self.values(preds, target)[known].double().sum()
        self.count = self.count + known.sum()

    def compute(self) -> Tensor:
        """The mean so far."""
        return (self.total / self.count).float()

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """(B, L) the numbers of each label."""
        raise NotImplementedError


class LabelAccuracy(_LabelMean):
    """The share of labels that are rightly said to be there or not, at a probability of a half."""

    key = "ml/Acc"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes whether each label is right, as zeros and ones."""
        return ((preds >= 0.5) == (target == 1)).float()


class LabelNLL(_LabelMean):
    """The mean of -log p over all known labels."""

    key = "ml/NLL"
    is_differentiable = True

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes -log p of each target."""
        return binary_nll(preds, target)


class LabelBrier(_LabelMean):
    """The mean of (p - y)² over all known labels."""

    key = "ml/Brier"
    is_differentiable = True

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """Computes the squared distance of each probability from its target."""
        return (preds - target) ** 2


class LabelsFound(_LabelMean):
    """The share of a sample's labels that are in its set (B, L), the mean over samples that have some."""

    key = "conformal/LabelsFound"

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of sets and targets (B, L)."""
        values = self.values(preds, target)
        there = ~values.isnan()
        self.total = self.total + values[there].double().sum()
        self.count = self.count + there.sum()

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """The value of each sample (B,), NaN where it does not count."""
        return share_found(preds, target)


class LabelsInSet(LabelsFound):
    """The mean number of labels in a set (B, L)."""

    key = "conformal/Size"

    def values(self, preds: Tensor, target: Tensor) -> Tensor:
        """The number of labels of each set, (B,)."""
        return preds.sum(dim=1).float()


class LabelCalibrationError(Measure):
    """Expected calibration error of the probabilities that labels are there: over all labels, and label by label.

    Args:
        num_labels: number of labels.
        by_label: whether it is the mean of the errors of all labels that have samples; else all share the same bins.
    """

    takes_empty = True
    sums: Tensor

    def __init__(self, num_labels: int, by_label: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by_label = by_label
        self.key = "ml/ECE_by_label" if by_label else "ml/ECE"
        self.title = "Calibration error, mean over labels" if by_label else "Calibration error"
        self.unit = "share"
        empty = curves.calibration_sums(torch.empty(0), torch.empty(0))
        self.add_state("sums", torch.stack([empty] * (num_labels if by_label else 1)), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities and targets (B, L)."""
        check_labels(preds, target)
        known = ~target.isnan()
        if not self.by_label:
            self.sums = self.sums + curves.calibration_sums(preds[known], target[known])
            return
        self.sums = self.sums + curves.calibration_sums(preds.T, target.T, known=known.T)

    def compute(self) -> Tensor:
        """The error of all batches so far."""
        errors = torch.stack([curves.calibration_error(sums) for sums in self.sums])
        return errors[self.sums[:, :, 0].sum(dim=1) > 0].mean().float()


class _RankedLabels(Measure):
    """The mean over labels of a number of all probabilities of a label; labels without both targets are left out."""

    takes_empty = True
    higher_is_better = True
    unit = "share"
    preds: list[Tensor]
    target: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("preds", [], dist_reduce_fx="cat")
        self.add_state("target", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities and targets (B, L)."""
        check_labels(preds, target)
        self.preds.append(preds.float().clamp(0.0, 1.0))
        self.target.append(target)

    def compute(self) -> Tensor:
        """The mean over labels that somebody has and somebody has not; NaN where there is none."""
        if not len(self.preds):
            return torch.tensor(torch.nan)
        preds, target = dim_zero_cat(self.preds), dim_zero_cat(self.target)
        values = []
        for scores, truth in zip(preds.T, target.T, strict=True):
            known = ~truth.isnan()
            labels = truth[known].long()
            if len(labels) and 0 < int(labels.sum()) < len(labels):
                values.append(self._of_label(scores[known], labels))
        return torch.stack(values).mean() if values else preds.new_tensor(torch.nan)

    def _of_label(self, scores: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError


class MeanAveragePrecision(_RankedLabels):
    """mAP: the average precision of each label, averaged over labels."""

    key = "ml/mAP"
    title = "Mean average precision"

    def _of_label(self, scores: Tensor, labels: Tensor) -> Tensor:
        return torch.as_tensor(binary_average_precision(scores, labels, validate_args=False))


class MeanLabelAUROC(_RankedLabels):
    """The area under the ROC curve of each label, averaged over labels."""

    key = "ml/AUROC"
    title = "AUROC, mean over labels"

    def _of_label(self, scores: Tensor, labels: Tensor) -> Tensor:
        return torch.as_tensor(binary_auroc(scores, labels, validate_args=False))


def multilabel_measures(num_labels: int) -> list[Measure]:
    """Right labels, NLL, Brier, two calibration errors, mAP and AUROC, fresh."""
    return [
        LabelAccuracy(), LabelNLL(), LabelBrier(),
        LabelCalibrationError(num_labels), LabelCalibrationError(num_labels, by_label=True),
        MeanAveragePrecision(), MeanLabelAUROC(),
    ]  # fmt: skip
