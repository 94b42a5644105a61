"""Telling the unknown from the known: scores of single inputs, and how well a score separates two sets.

A score is higher for an input more unlike the training data; out-of-distribution is the positive class throughout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl import uncertainty


def predictive_scores(probs: Tensor, logits: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Probabilities and logits (T, B, C) of one set of passes → every predictive score, each (B,)."""
    return {
        "max_softmax": uncertainty.max_softmax(probs, weights),
        "max_logit": uncertainty.max_logit(logits, weights),
        "energy": uncertainty.energy(logits, weights),
        "entropy": uncertainty.predictive_entropy(probs, weights),
        "expected_entropy": uncertainty.expected_entropy(probs, weights),
        "mutual_information": uncertainty.mutual_information(probs, weights),
    }


class Curve(NamedTuple):
    """Rates at every distinct threshold, from the strictest to the laxest; index 0 flags nothing.

    Attributes:
        fpr: known inputs flagged. tpr: unknown inputs flagged. precision: unknown among the flagged.
    """

    fpr: Tensor
    tpr: Tensor
    precision: Tensor


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


def ood_metrics(known: Tensor, unknown: Tensor) -> dict[str, float]:
    """Scores of known (N,) and unknown (M,) inputs → the measures of the paper's Table 2, and both counts.

    FPR95 is the share of known inputs flagged when 95 % of the unknown are; DetErr the least mean of misses and false
    alarms over all thresholds; AUPR-out and AUPR-in take the unknown or the known as positive.
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
