"""Measures of uncertainty as pure functions of class probabilities (T, B, C), all from one set of T passes.

Every score is higher for a less certain input. Probabilities of exactly 0 and 1 are fine.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(probs: Tensor) -> Tensor:
    """Probabilities (…, C) → (…) Shannon entropy in nats; 0·log 0 = 0.

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.xlogy(-probs, probs).sum(dim=-1)  # special.entr is no ONNX with torch 2.10 and 2.11


def predictive(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Predictions (T, B, C) of T passes → (B, C) their mean, under weights (T,) where given.

    >>> passes = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> predictive(passes), predictive(passes, torch.tensor([0.75, 0.25]))
    (tensor([[0.5000, 0.5000]]), tensor([[0.7500, 0.2500]]))
    """
    if weights is None:
        return probs.mean(dim=0)
    # Not a matrix product, which mixed precision would compute in 16 bits.
    return (weights.to(probs.dtype).view(-1, *[1] * (probs.dim() - 1)) * probs).sum(dim=0)


def one_minus_max_p(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Probabilities (T, B, C) → (B,) 1 - max_c p̄_c, the probability that the answer is wrong.

    >>> one_minus_max_p(torch.tensor([[[0.9, 0.1]], [[0.7, 0.3]]]))
    tensor([0.2000])
    """
    return 1.0 - predictive(probs, weights).amax(dim=-1)


def predictive_entropy(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Probabilities (T, B, C) → (B,) H[p̄] in nats, the total uncertainty.

    >>> predictive_entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931])
    """
    return entropy(predictive(probs, weights))


def expected_entropy(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Probabilities (T, B, C) → (B,) E_t H[p_t] in nats, what every network is uncertain about (aleatoric).

    >>> expected_entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.])
    """
    return predictive(entropy(probs), weights)


def mutual_information(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Probabilities (T, B, C) → (B,) H[p̄] - E_t H[p_t] ≥ 0 in nats, what the networks disagree about (epistemic).

    >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931])
    """
    return (predictive_entropy(probs, weights) - expected_entropy(probs, weights)).clamp_min(0.0)


def disagreement(probs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Probabilities (T, B, C) → (B,) the chance that two passes, drawn independently, answer differently.

    It is 1 - Σ_c (share of passes that answer c)².

    >>> disagreement(torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]]))
    tensor([0.5000])
    """
    votes = torch.nn.functional.one_hot(probs.argmax(dim=-1), probs.shape[-1]).to(probs.dtype)
    return 1.0 - (predictive(votes, weights) ** 2).sum(dim=-1)


def total_variance(means: Tensor, variances: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Regression: means and variances (T, B) of T networks → mean, aleatoric and epistemic variance, each (B,).

    Law of total variance: Var[y] = E_t[σ_t²] + Var_t[μ_t].

    >>> total_variance(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.5], [0.7]]))
    (tensor([2.]), tensor([0.6000]), tensor([1.]))
    """
    mean = predictive(means, weights)
    return mean, predictive(variances, weights), predictive((means - mean) ** 2, weights)


def max_logit(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """Logits (T, B, C) → (B,) minus the largest mean logit.

    >>> max_logit(torch.tensor([[[2.0, -1.0]], [[4.0, 0.0]]]))
    tensor([-3.])
    """
    return -predictive(logits, weights).amax(dim=-1)


def energy(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """Logits (T, B, C) → (B,) minus log Σ_c exp of the mean logits (Liu et al. 2020).

    >>> energy(torch.zeros(1, 1, 2))
    tensor([-0.6931])
    """
    return -torch.logsumexp(predictive(logits, weights), dim=-1)
