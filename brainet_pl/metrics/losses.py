"""Losses that torch does not have."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_EPS = 1e-12


def confidence_loss(
    logits: Tensor, confidence: Tensor, target: Tensor, hinted: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Learned confidence (DeVries & Taylor 2018): the network may buy a hint about the label, at a price.

    p' = c·p + (1 - c)·onehot(y) where `hinted`, else p; the first part is -log p'_y, the second -log c.

    Args:
        logits: (B, C). confidence: (B,) logits of c. target: (B,).
        hinted: (B,) which samples may use the hint; half of them, so that the others train the classifier alone.
        smoothing: mixes the uniform distribution into the label.

    Returns:
        Both parts, each a scalar; the loss is their sum with a weight on the second.
    """
    c = torch.sigmoid(confidence.float()).clamp(_EPS, 1.0 - 1e-7)
    share = torch.where(hinted, c, torch.ones_like(c)).unsqueeze(1)
    label = F.one_hot(target, logits.shape[1]).to(c.dtype)
    mixed = logits.float().softmax(dim=1) * share + label * (1.0 - share)
    label = label * (1.0 - smoothing) + smoothing / logits.shape[1]
    task = -(label * mixed.clamp_min(_EPS).log()).sum(dim=1).mean()
    return task, -c.log().mean()


def gaussian_nll(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    """-log N(target; mean, variance) = ½·(log 2πσ² + (y - μ)²/σ²), for each element.

    >>> gaussian_nll(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0))
    tensor(2.9189)
    """
    return 0.5 * (math.log(2 * math.pi) + variance.log() + (target - mean) ** 2 / variance)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """The mean of values (…, B) that count by weights (B,) or (…, B); 0 where all weights are 0."""
    weights = weights.to(values.dtype).expand_as(values)
    return (weights * values).sum() / weights.sum().clamp_min(torch.finfo(values.dtype).tiny)
