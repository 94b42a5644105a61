"""Scores of calibrated probabilities alone: GEN (Liu et al. 2023) and KL matching (Hendrycks et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.scores.base import AnswerScore, check_name

MIN_PROBABILITY = 1e-7  # a class with less counts as if it had that much


class _OfProbabilities(AnswerScore):
    """A score that needs the probabilities of classes, and nothing of the features."""

    def check(self, has_classes: bool, raw: bool) -> None:
        """Refuse a task without classes."""
        if not has_classes:
            raise ValueError(
                f"expected a classification for the score {type(self).__name__}, got a task without logits of classes: "
                "leave it out"
            )


class GEN(_OfProbabilities):
    """Generalised entropy of the largest probabilities: `gen` = Σ_c p_c^γ·(1 - p_c)^γ.

    >>> round(float(GEN(gamma=1.0).score(torch.tensor([[0.5, 0.5]]))["gen"]), 4)
    0.5

    Args:
        gamma: γ; a small one lets small probabilities count.
        most: Probabilities that are added up, the largest ones; all where there are fewer.
        name: Suffix of its score, `_<name>`, where a model has more than one GEN; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"gen": ""}

    def __init__(self, gamma: float = 0.1, most: int = 100, name: str | None = None) -> None:
        super().__init__()
        self.gamma, self.most = checks.at_least("gamma", gamma, 0, "such as 0.1"), checks.whole("most", most, 1)
        self.name = check_name(name)

    def score(self, final: Tensor) -> dict[str, Tensor]:
        """Gives `gen` (B,) of probabilities (B, C)."""
        p = final.topk(min(self.most, final.shape[1]), dim=1).values.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        return {"gen": (p * (1 - p)).pow(self.gamma).sum(dim=1)}


class KLMatching(_OfProbabilities):
    """Divergence to the nearest typical prediction: `kl_matching` = min_k KL(p ‖ d_k), in nats.

    d_k is the mean of the probabilities of validation samples that are predicted as class k. Before validation data
    were seen there is no such score.

    Args:
        name: Suffix of its score, `_<name>`, where a model has more than one KLMatching; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"kl_matching": "nats"}
    typical: Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = check_name(name)
        self._count = 0  # rows of `typical`, outside the tensor: an exported graph can't branch on one
        self.register_buffer("typical", torch.empty(0, 0))

    def learn(self, final: Tensor) -> dict[str, Tensor]:
        """Average the probabilities (N, C) of each predicted class; gives the score of these samples."""
        known = final[final.isfinite().all(dim=1)].float()
        onehot = F.one_hot(known.argmax(dim=1), known.shape[1]).to(known)
        count = onehot.sum(dim=0)
        means = (onehot.t() @ known)[count > 0] / count[count > 0][:, None]
        self.typical, self._count = means.to(self.typical), len(means)
        return self.score(final)

    def score(self, final: Tensor) -> dict[str, Tensor]:
        """Gives `kl_matching` (B,) of probabilities (B, C), once held-out data were seen."""
        if not self._count:
            return {}
        p = final.to(self.typical)
        own = torch.special.xlogy(p, p).sum(dim=1, keepdim=True)
        nearest: Tensor = (own - p @ self.typical.clamp_min(1e-30).log().t()).amin(dim=1)
        return {"kl_matching": nearest.clamp_min(0.0)}

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read whether there are typical predictions."""
        super().before_load(stored)
        self._count = len(stored.get("typical", ()))
