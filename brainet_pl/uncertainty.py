"""Measures of uncertainty as pure functions of class probabilities (T, B, C), all from one set of T passes.

Every score is higher for a less certain input. Probabilities of exactly 0 and 1 are fine.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(probs: Tensor) -> Tensor:
    """(…, C) → (…) Shannon entropy in nats; 0·log 0 = 0."""
    return torch.as_tensor(torch.special.entr(probs).sum(dim=-1))


def predictive(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """(T, B, C) → (B, C) mean prediction, under weights (T,) where given."""
    if weights is None:
        return probs.mean(dim=0)
    return torch.as_tensor(torch.tensordot(weights.to(probs.dtype), probs, dims=1))


def max_softmax(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B,) 1 - max_c p̄_c."""
    return 1.0 - predictive(probs, weights).amax(dim=-1)


def predictive_entropy(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B,) H[p̄]: total uncertainty."""
    return entropy(predictive(probs, weights))


def expected_entropy(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B,) E_t H[p_t]: what every network is uncertain about (aleatoric)."""
    each = entropy(probs)
    return each.mean(dim=0) if weights is None else torch.tensordot(weights.to(probs.dtype), each, dims=1)


def mutual_information(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B,) H[p̄] - E_t H[p_t] ≥ 0: what the networks disagree about (epistemic)."""
    return (predictive_entropy(probs, weights) - expected_entropy(probs, weights)).clamp_min(0.0)


def total_variance(means: Tensor, variances: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Regression: means and variances (T, B) of T networks → mean, aleatoric and epistemic variance, each (B,).

    Law of total variance: Var[y] = E_t[σ_t²] + Var_t[μ_t].
    """
    mean = predictive(means, weights)
    return mean, predictive(variances, weights), predictive((means - mean) ** 2, weights)


def max_logit(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """(T, B, C) → (B,) minus the largest mean logit."""
    return -predictive(logits, weights).amax(dim=-1)


def energy(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """(T, B, C) → (B,) minus log Σ_c exp of the mean logits (Liu et al. 2020)."""
    return -torch.logsumexp(predictive(logits, weights), dim=-1)
