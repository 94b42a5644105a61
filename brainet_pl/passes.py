"""What another pass buys: the prediction averaged over the first t passes, reduced batch by batch to sums.

A batch of probabilities (T, B, C) becomes a few numbers for each t, so that a whole test set fits into memory whatever
T and C are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl import uncertainty

N_BINS = 15  # of the expected calibration error, as in `brainet_pl.metrics`


def chosen_steps(passes: int, most: int = 16) -> list[int]:
    """Numbers of passes t to look at: all up to `most`, else as many spread evenly on a logarithmic scale."""
    if passes <= most:
        return list(range(1, passes + 1))
    return sorted({round(passes ** (i / (most - 1))) for i in range(most)})


def running_mean(probs: Tensor, weights: Tensor | None, steps: list[int]) -> Tensor:
    """(T, B, C) → (len(steps), B, C): the mean of the first t passes for each t, under weights (T,) where given."""
    share = probs.new_ones(len(probs)) if weights is None else weights.to(probs)
    total = (probs * share[:, None, None]).cumsum(dim=0)
    norm = share.cumsum(dim=0).clamp_min(torch.finfo(probs.dtype).tiny)
    index = torch.tensor(steps, device=probs.device) - 1
    return total[index] / norm[index][:, None, None]


def running_scores(probs: Tensor, weights: Tensor | None, steps: list[int]) -> dict[str, Tensor]:
    """(T, B, C) → `entropy` and `mutual_information` of the first t passes, each (len(steps), B)."""
    total = uncertainty.entropy(running_mean(probs, weights, steps))
    each = uncertainty.entropy(probs).unsqueeze(-1)
    expected = running_mean(each, weights, steps).squeeze(-1)
    return {"entropy": total, "mutual_information": (total - expected).clamp_min(0.0)}


class PassSums(NamedTuple):
    """Sums over samples for each of S numbers of passes; sums of two batches, or two processes, simply add.

    Attributes:
        nll, wrong: (S,). bins: (S, N_BINS, 3) count, sum of confidences and hits by confidence. samples: ().
    """

    nll: Tensor
    wrong: Tensor
    bins: Tensor
    samples: Tensor

    def __add__(self, other: PassSums) -> PassSums:  # type: ignore[override]
        return PassSums(*(a + b for a, b in zip(self, other, strict=True)))


def pass_sums(means: Tensor, target: Tensor) -> PassSums:
    """Averaged predictions (S, B, C) and labels (B,) → their sums, as float64 on the CPU."""
    chosen = means.gather(-1, target.expand(len(means), -1).unsqueeze(-1)).squeeze(-1)
    confidence, label = means.max(dim=-1)
    hit = (label == target).double()
    place = (confidence * N_BINS).long().clamp(0, N_BINS - 1)
    rows = torch.stack([torch.ones_like(hit), confidence.double(), hit], dim=-1)  # (S, B, 3)
    bins = torch.zeros(len(means), N_BINS, 3, dtype=torch.float64, device=means.device)
    bins.scatter_add_(1, place.unsqueeze(-1).expand(-1, -1, 3), rows)
    nll = -chosen.clamp(torch.finfo(means.dtype).tiny, 1.0).double().log().sum(dim=1)
    return PassSums(nll.cpu(), (1.0 - hit).sum(dim=1).cpu(), bins.cpu(), torch.tensor(float(len(target))).double())


def pass_metrics(sums: PassSums) -> dict[str, list[float]]:
    """`NLL`, `error` and `ECE` = Σ_b |Σ confidence - Σ hits| / N, a value for each number of passes."""
    gaps = (sums.bins[..., 1] - sums.bins[..., 2]).abs().sum(dim=1)
    return {
        "NLL": (sums.nll / sums.samples).tolist(),
        "error": (sums.wrong / sums.samples).tolist(),
        "ECE": (gaps / sums.samples).tolist(),
    }
