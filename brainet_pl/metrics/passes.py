"""What another pass buys: the prediction averaged over the first t passes, reduced batch by batch to sums.

A batch of probabilities (T, B, C) becomes a few numbers for each t, so that a whole test set fits into memory whatever
T and C are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl import uncertainty
from brainet_pl._utils.precision import measurable
from brainet_pl.metrics.curves import calibration_error, calibration_sums


def chosen_steps(passes: int, most: int = 16) -> list[int]:
    """Numbers of passes t to look at: all up to `most`, else as many spread evenly on a logarithmic scale."""
    if passes <= most:
        return list(range(1, passes + 1))
    return sorted({round(passes ** (i / (most - 1))) for i in range(most)})


def running_mean(probs: Tensor, weights: Tensor | None, steps: list[int]) -> Tensor:
    """Averages the first t passes (T, B, C) for each t of steps, (len(steps), B, C), under weights (T,) where given."""
    share = probs.new_ones(len(probs)) if weights is None else weights.to(probs)
    total = (probs * share[:, None, None]).cumsum(dim=0)
    norm = share.cumsum(dim=0).clamp_min(torch.finfo(probs.dtype).tiny)
    index = torch.tensor(steps, device=probs.device) - 1
    return total[index] / norm[index][:, None, None]


def running_scores(probs: Tensor, weights: Tensor | None, steps: list[int]) -> dict[str, Tensor]:
    """Computes `entropy` and `mutual_information` of the first t passes (T, B, C), each (len(steps), B)."""
    total = uncertainty.entropy(running_mean(probs, weights, steps))
    each = uncertainty.entropy(probs).unsqueeze(-1)
    expected = running_mean(each, weights, steps).squeeze(-1)
    return {"entropy": total, "mutual_information": (total - expected).clamp_min(0.0)}


class PassSums(NamedTuple):
    """Sums over samples for each of S numbers of passes; sums of two batches, or two processes, simply add."""

    nll: Tensor  # (S,) sum of -log probability of the label
    wrong: Tensor  # (S,) errors
    bins: Tensor  # (S, bins, 3) what `calibration_sums` gives
    samples: Tensor  # () how many

    def __add__(self, other: PassSums) -> PassSums:  # type: ignore[override]
        return PassSums(*(a + b for a, b in zip(self, other, strict=True)))


def pass_sums(means: Tensor, target: Tensor) -> PassSums:
    """Averaged predictions (S, B, C) and labels (B,) → their sums, as float64 on the CPU."""
    means, target = measurable(means), measurable(target)
    chosen = means.gather(-1, target.expand(len(means), -1).unsqueeze(-1)).squeeze(-1)
    confidence, label = means.max(dim=-1)
    hit = ((label == target) & ~confidence.isnan()).double()
    bins = calibration_sums(confidence, hit)
    nll = -chosen.clamp(torch.finfo(means.dtype).tiny, 1.0).double().log().sum(dim=1)
    return PassSums(nll.cpu(), (1.0 - hit).sum(dim=1).cpu(), bins.cpu(), torch.tensor(float(len(target))).double())


def pass_metrics(sums: PassSums) -> dict[str, list[float]]:
    """`NLL`, `error` and `ECE`, a value for each number of passes."""
    return {
        "NLL": (sums.nll / sums.samples).tolist(),
        "error": (sums.wrong / sums.samples).tolist(),
        "ECE": calibration_error(sums.bins).tolist(),
    }


class PassTrace(NamedTuple):
    """Scores and sums of the mean of the first t passes of a batch, for S numbers t."""

    steps: list[int]  # the S numbers of passes
    scores: dict[str, Tensor]  # name → (S, B)
    sums: PassSums | None  # sums over the samples, or None where labels are not known


def trace_passes(probs: Tensor, weights: Tensor | None, target: Tensor | None) -> PassTrace | None:
    """Probabilities (T, B, C) and labels (B,) or None → their trace; None where there is only one pass."""
    steps = chosen_steps(len(probs))
    if len(steps) < 2:
        return None
    sums = None if target is None else pass_sums(running_mean(probs, weights, steps), target)
    return PassTrace(steps, running_scores(probs, weights, steps), sums)
