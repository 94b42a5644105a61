"""Calibration, selective prediction and separation as pure functions of arrays: each number is computed here alone.

A score is higher for an input more unlike the training data; out-of-distribution is the positive class throughout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

N_BINS = 15  # of every calibration error and reliability diagram
GRID = 1000  # intervals of confidence that smooth ECE looks at


# -- calibration ------------------------------------------------------------------------------------------------------


def _check_pair(values: Tensor, hits: Tensor, what: str) -> None:
    """Refuse samples that can't be ranked: none at all, NaN, or not one hit for each value."""
    if values.dim() != 1 or values.shape != hits.shape or not len(values) or values.isnan().any():
        raise ValueError(
            f"expected {what} and one 0 or 1 for each, (N,) both and without NaN, got {tuple(values.shape)} with "
            f"{int(values.isnan().sum())} NaN and {tuple(hits.shape)}: give both of the same samples"
        )


def calibration_sums(confidence: Tensor, correct: Tensor, n_bins: int = N_BINS, known: Tensor | None = None) -> Tensor:
    """Confidences and hits (…, N) → (…, n_bins, 3): count, sum of confidences and hits in equal bins, in 64 bits.

    A confidence of 1, or above it by rounding, belongs to the last bin. Sums of two batches simply add.
    Only those count that are `known` (…, N), where that is given.
    """
    if confidence.shape != correct.shape:
        raise ValueError(
            f"expected one hit for each confidence, got {tuple(correct.shape)} for {tuple(confidence.shape)}: give "
            "both of the same samples"
        )
    place = (confidence * n_bins).long().clamp(0, n_bins - 1)
    rows = torch.stack(
        [torch.ones_like(confidence), confidence.clamp(0.0, 1.0), correct.to(confidence)], dim=-1
    ).double()
    if known is not None:
        rows = torch.where(known.unsqueeze(-1), rows, 0.0)
    sums = torch.zeros(*confidence.shape[:-1], n_bins, 3, dtype=torch.float64, device=confidence.device)
    return sums.scatter_add(-2, place.unsqueeze(-1).expand(*place.shape, 3), rows)


def calibration_error(sums: Tensor) -> Tensor:
    """Computes the expected calibration error Σ_b |Σ confidence - Σ hits| / N from bins (…, n_bins, 3), of shape (…).

    >>> calibration_error(calibration_sums(torch.tensor([0.9, 0.9]), torch.tensor([1.0, 0.0]))).round(decimals=4)
    tensor(0.4000, dtype=torch.float64)
    """
    gaps = (sums[..., 1] - sums[..., 2]).abs().sum(dim=-1)
    return gaps / sums[..., 0].sum(dim=-1)


def maximum_calibration_error(sums: Tensor) -> Tensor:
    """Computes the largest gap between mean confidence and accuracy of a bin with samples, (…, n_bins, 3) → (…).

    >>> sums = calibration_sums(torch.tensor([0.9, 0.9, 0.4]), torch.tensor([1.0, 0.0, 1.0]))
    >>> maximum_calibration_error(sums).round(decimals=4)
    tensor(0.6000, dtype=torch.float64)
    """
    count = sums[..., 0]
    gaps = (sums[..., 1] - sums[..., 2]).abs() / count.clamp_min(1.0)
    return torch.where(count.sum(dim=-1) > 0, gaps.amax(dim=-1), torch.nan)


def residual_sums(confidence: Tensor, correct: Tensor) -> Tensor:
    """Confidences and hits (N,) → (GRID + 1,) sums of hit - confidence at the points of an even grid, in 64 bits.

    Each sample is shared out to the two points beside it. Sums of two batches simply add.
    """
    at = confidence.double().nan_to_num(0.0).clamp(0.0, 1.0) * GRID  # NaN has no place; its residual stays NaN
    left = at.floor().clamp_max(GRID - 1).long()
    share, residual = at - left, correct.double() - confidence.double()
    sums = torch.zeros(GRID + 1, dtype=torch.float64, device=confidence.device)
    return sums.index_add(0, left, (1 - share) * residual).index_add(0, left + 1, share * residual)


def smooth_calibration_error(sums: Tensor, count: Tensor | float) -> Tensor:
    """Computes the smooth ECE (Błasiok & Nakkiran 2024), which has no bins, from (GRID + 1,) of `residual_sums`.

    Residuals are smoothed by a Gaussian that is reflected at 0 and 1; the error is their absolute sum, at the width σ
    at which it equals σ.

    >>> sums = residual_sums(torch.full((100,), 0.9), torch.arange(100) < 60)
    >>> smooth_calibration_error(sums, 100).round(decimals=2)
    tensor(0.3000, dtype=torch.float64)
    """
    # A cosine series: reflection at the ends is what it does by itself, and a Gaussian only damps its terms. Half of
    # what lies at the ends is beyond them.
    mirrored = torch.cat([sums[:1] * 2, sums[1:-1], sums[-1:] * 2, sums[1:-1].flip(0)]) / 2
    terms = torch.fft.rfft(mirrored)
    order = torch.pi * torch.arange(GRID + 1, dtype=torch.float64, device=sums.device)

    def error(width: float) -> Tensor:
        smoothed = torch.fft.irfft(terms * torch.exp(-0.5 * (order * width) ** 2), n=2 * GRID)
        return torch.as_tensor(smoothed.abs().sum() / count)

    low, high = 0.0, 1.0
    for _ in range(30):
        width = 0.5 * (low + high)
        low, high = (width, high) if float(error(width)) > width else (low, width)
    return error(0.5 * (low + high))


def adaptive_calibration_error(confidence: Tensor, correct: Tensor, n_bins: int = N_BINS) -> Tensor:
    """Confidences and hits (N,) → the error in bins of equal counts; with fewer samples than bins, each is a bin.

    A bin may end among samples of equal confidence. Each of them counts with the mean of its group, so the error does
    not depend on the order of the data.

    >>> adaptive_calibration_error(torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1.0]))
    tensor(0.2500)
    """
    _check_pair(confidence, correct, "confidences")
    ties = _group_ties(confidence)
    gaps = ties.spread_means(correct.double() - confidence.double())
    bins = torch.tensor_split(gaps, min(n_bins, len(gaps)))
    return (torch.stack([part.sum().abs() for part in bins]).sum() / len(gaps)).float()


class _Ties(NamedTuple):
    """Samples (N,) that are ordered by a value, in groups of equal values."""

    group: Tensor  # (N,) the group of each sample, as the samples came; the least value has group 0
    size: Tensor  # of each group

    def spread_means(self, numbers: Tensor) -> Tensor:
        """Numbers (N,) in the order of the values, each replaced by the mean of its group, in 64 bits."""
        sums = torch.zeros(len(self.size), dtype=torch.float64, device=numbers.device)
        means = sums.index_add(0, self.group, numbers.double()) / self.size
        return means.repeat_interleave(self.size)


def _group_ties(values: Tensor) -> _Ties:
    _, group, size = torch.unique(values, return_inverse=True, return_counts=True)  # in ascending order
    return _Ties(group, size)


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> Tensor:
    """Computes the error rate (N,) when the k + 1 most certain samples are answered, from scores (N,) and errors (N,).

    Samples of equal uncertainty count as answered in random order: each gets the mean error of its group, so the curve
    does not depend on the order of the data.

    >>> risk_coverage(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.0, 1.0]))
    tensor([0.0000, 0.0000, 0.3333])
    """
    _check_pair(uncertainty, wrong, "uncertainties")
    expected = _group_ties(uncertainty).spread_means(wrong).cumsum(0)
    return torch.as_tensor(expected / torch.arange(1, len(wrong) + 1, device=wrong.device)).float()


class Accepted(NamedTuple):
    """What is answered at every distinct threshold, from the strictest to the laxest; index 0 answers nothing."""

    coverage: Tensor  # share of all samples that are answered
    failed: Tensor  # share of all samples that are answered wrongly


def accepted(uncertainty: Tensor, wrong: Tensor, weight: Tensor | None = None) -> Accepted:
    """Scores (N,), errors (N,) and weights (N,) of samples, all 1 without → the curve of selective prediction.

    An unknown input is an error whenever it is answered; weights make known and unknown inputs count as they should.
    """
    _check_pair(uncertainty, wrong, "uncertainties")
    w = torch.ones_like(wrong, dtype=torch.float64) if weight is None else weight.double()
    _, group = torch.unique(uncertainty, return_inverse=True)  # in ascending order
    sums = torch.zeros(2, int(group.max()) + 2, dtype=torch.float64, device=wrong.device)
    sums = sums.index_add(1, group + 1, torch.stack([w, w * wrong.double()])).cumsum(dim=1) / w.sum()
    return Accepted(sums[0], sums[1])


def generalized_risk(uncertainty: Tensor, wrong: Tensor, weight: Tensor | None = None) -> float:
    """Area under the generalised risk (AUGRC, Traub et al. 2024): the share answered wrongly, mean over coverages.

    With unknown inputs among the wrong ones it is a measure of selective prediction and detection in one (SCOD).

    >>> round(generalized_risk(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.0, 1.0])), 4)
    0.0556
    """
    curve = accepted(uncertainty, wrong, weight)
    return float(torch.trapezoid(curve.failed, curve.coverage))


def detection_risk(known: Tensor, wrong: Tensor, unknown: Tensor) -> float:
    """SCOD: `generalized_risk` of known inputs with their errors (N,) and unknown ones, each group half of all inputs.

    >>> detection_risk(torch.tensor([0.1, 0.2]), torch.tensor([0.0, 0.0]), torch.tensor([0.8, 0.9]))
    0.125
    """
    errors = torch.cat([wrong.double(), torch.ones(len(unknown), dtype=torch.float64, device=wrong.device)])
    shares = [torch.full((len(part),), 0.5 / len(part), dtype=torch.float64) for part in (known, unknown)]
    return generalized_risk(torch.cat([known, unknown]), errors, torch.cat(shares).to(wrong.device))


def coverage_at_risk(uncertainty: Tensor, wrong: Tensor, risk: float = 0.05, weight: Tensor | None = None) -> float:
    """The largest share of samples that can be answered with at most a share `risk` of the answers wrong.

    >>> round(coverage_at_risk(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.0, 1.0])), 4)
    0.6667
    """
    curve = accepted(uncertainty, wrong, weight)
    return float(curve.coverage[curve.failed <= risk * curve.coverage + 1e-12].max())


# -- separation -------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """Rates at every distinct threshold, from the strictest to the laxest; index 0 flags nothing."""

    fpr: Tensor  # known inputs flagged
    tpr: Tensor  # unknown inputs flagged
    precision: Tensor  # unknown among the flagged


def roc_curve(known: Tensor, unknown: Tensor) -> Curve:
    """Scores (N,) and (M,) → the curve. Ties are one threshold; infinite scores are as good as any."""
    for name, scores in (("known", known), ("unknown", unknown)):
        if not scores.numel():
            raise ValueError(f"expected scores of {name} inputs, got none: check the loader")
        if scores.isnan().any():
            raise ValueError(
                f"expected scores that can be ordered, got {int(scores.isnan().sum())} NaN of {name} inputs"
            )
    scores = torch.cat([known, unknown]).double()
    positive = torch.cat([torch.zeros_like(known), torch.ones_like(unknown)]).double()
    order = torch.argsort(scores, descending=True, stable=True)
    scores, positive = scores[order], positive[order]
    last = torch.ones_like(scores, dtype=torch.bool)  # of each run of equal scores
    last[:-1] = scores[1:] != scores[:-1]
    hits = positive.cumsum(0)[last]
    flagged = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)[last]
    start = hits.new_zeros(1)
    tpr, fpr = hits / len(unknown), (flagged - hits) / len(known)
    return Curve(torch.cat([start, fpr]), torch.cat([start, tpr]), torch.cat([start + 1, hits / flagged]))


def roc_area(known: Tensor, unknown: Tensor) -> float:
    """The area under the curve: how often an unknown input has a higher score than a known one.

    >>> roc_area(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 0.9]))
    0.75
    """
    curve = roc_curve(known, unknown)
    return float(torch.trapezoid(curve.tpr, curve.fpr))


def separation(known: Tensor, unknown: Tensor) -> dict[str, float]:
    """Scores of known (N,) and unknown (M,) inputs → the measures of the paper's Table 2, and both counts.

    FPR95 is the share of known inputs flagged when 95 % of the unknown are; DetErr the least mean of misses and false
    alarms over all thresholds; AUPR-out and AUPR-in take the unknown or the known as positive.

    >>> separation(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 0.9]))["AUROC"]
    0.75
    """
    out, inside = roc_curve(known, unknown), roc_curve(-unknown, -known)
    return {
        "AUROC": torch.trapezoid(out.tpr, out.fpr).item(),
        "AUPR_out": _average_precision(out),
        "AUPR_in": _average_precision(inside),
        "FPR95": out.fpr[out.tpr >= 0.95].min().item(),
        "DetErr": (0.5 * (out.fpr + 1.0 - out.tpr)).min().item(),
        "n_id": float(len(known)),
        "n_ood": float(len(unknown)),
    }


def _average_precision(curve: Curve) -> float:
    """Σ (recall step) · precision."""
    return float((curve.tpr.diff() * curve.precision[1:]).sum())
