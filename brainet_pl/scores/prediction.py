"""Scores of the averaged probabilities alone: GEN (Liu et al. 2023) and KL matching (Hendrycks et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.distributed.epoch_buffer import EpochBuffer
from brainet_pl.scores.base import Score, check_name
from brainet_pl.tasks.passes import Passes

MIN_PROBABILITY = 1e-7  # a class with less counts as if it had that much


class _OfProbabilities(Score):
    """A score that needs the probabilities of classes, and nothing of the features."""

    needs_fit: ClassVar[bool] = False
    joins = "never"

    def check(self, has_classes: bool, raw: bool) -> None:
        """Refuse a task without classes."""
        if not has_classes:
            raise ValueError(
                f"expected a classification for the score {type(self).__name__}, got a task without logits of classes: "
                "leave it out"
            )


class GEN(_OfProbabilities):
    """Generalised entropy of the largest probabilities: `gen` = Σ_c p_c^γ·(1 - p_c)^γ.

    >>> round(float(GEN(gamma=1.0).score(torch.tensor([[0.5, 0.5]]))), 4)
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

    def score(self, probs: Tensor) -> Tensor:
        """Maps probabilities (B, C) to scores (B,)."""
        p = probs.topk(min(self.most, probs.shape[1]), dim=1).values.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        return (p * (1 - p)).pow(self.gamma).sum(dim=1)

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """Gives `gen` (B,), one number a sample."""
        return {"gen": self.score(passes.predicted)}


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
        self.name, self._seen = check_name(name), EpochBuffer()
        self._count = 0  # rows of `typical`, outside the tensor: an exported graph can't branch on one
        self.register_buffer("typical", torch.empty(0, 0))

    def observe(self, passes: Passes, scores: Mapping[str, Tensor]) -> None:
        """Keep the probabilities of a batch of validation data."""
        self._seen.append({"probs": passes.predicted.float()})

    def finalize(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average the probabilities of each predicted class; gives the score of these samples."""
        probs = self._seen.collect().get("probs")
        if probs is None:
            return {}
        known = probs[probs.isfinite().all(dim=1)]
        onehot = F.one_hot(known.argmax(dim=1), known.shape[1]).to(known)
        count = onehot.sum(dim=0)
        means = (onehot.t() @ known)[count > 0] / count[count > 0][:, None]
        self.typical, self._count = means.to(self.typical), len(means)
        return {"kl_matching": self.score(probs)} if self._count else {}

    def score(self, probs: Tensor) -> Tensor:
        """Maps probabilities (B, C) to scores (B,)."""
        p = probs.to(self.typical)
        own = torch.special.xlogy(p, p).sum(dim=1, keepdim=True)
        nearest: Tensor = (own - p @ self.typical.clamp_min(1e-30).log().t()).amin(dim=1)
        return nearest.clamp_min(0.0)

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """`kl_matching` (B,), once validation data were seen."""
        return {"kl_matching": self.score(passes.predicted)} if self._count else {}

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read whether there are typical predictions."""
        super().before_load(stored)
        self._count = len(stored.get("typical", ()))
