"""fDBD (Liu and Qin 2024): how far features are from the decision boundaries of the last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from brainet_pl.scores.last_layer import LastLayerScore


class FDBD(LastLayerScore):
    """Minus the mean distance to the boundaries of the predicted class, in distances to the mean of the training data.

    `fdbd` is -1/(C - 1) Σ_{c ≠ ĉ} |l_ĉ - l_c| / (|w_ĉ - w_c|·|z - μ|): the fast decision boundary detector, which has
    nothing to choose.

    Args:
        name: Suffix of its score, `_<name>`, where a model has more than one FDBD; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"fdbd": ""}
    mean: Tensor
    gaps: Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.register_buffer("mean", torch.empty(0))
        self.register_buffer("gaps", torch.empty(0, 0))

    def learn(self, z: Tensor, labels: Tensor) -> None:
        """Keep the mean of z (N, d), and the distances between the rows of the layer."""
        self.mean = z.double().mean(dim=0).to(self.weight)
        gaps = torch.cdist(self.weight.double(), self.weight.double(), compute_mode="donot_use_mm_for_euclid_dist")
        self.gaps = gaps.fill_diagonal_(1.0).clamp_min(1e-12).to(self.weight)

    def score(self, z: Tensor) -> dict[str, Tensor]:
        """Gives `fdbd` (B,), one number a sample."""
        logits = self.logits(z)
        largest, predicted = logits.max(dim=1)
        distances = ((largest[:, None] - logits) / self.gaps[predicted]).sum(dim=1) / (len(self.gaps) - 1)
        return {"fdbd": -distances / (z - self.mean).norm(dim=1).clamp_min(1e-8)}
