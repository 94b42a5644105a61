"""Mahalanobis distance (Lee et al. 2018) and its relative form (Ren et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl.passes import Passes
from brainet_pl.scores.base import Score, Surroundings


class Mahalanobis(Score):
    """Distance to the nearest class mean under one covariance, and the same relative to one Gaussian of all data.

    `mahalanobis` is min_c (x - μ_c)ᵀ Σ⁻¹ (x - μ_c), Σ the covariance within classes; `mahalanobis_relative` subtracts
    (x - μ)ᵀ Σ₀⁻¹ (x - μ) with mean and covariance of all training data.

    Args:
        normalize: bring the features of every sample to length 1 first.
    """

    units: ClassVar[Mapping[str, str]] = {"mahalanobis": "", "mahalanobis_relative": ""}
    means: Tensor
    precision: Tensor
    center: Tensor
    overall: Tensor

    def __init__(self, normalize: bool = True) -> None:
        super().__init__()
        self.normalize, self._classes = normalize, None
        for name in ("means", "precision", "center", "overall"):
            self.register_buffer(name, torch.empty(0))

    def surround(self, surroundings: Surroundings) -> None:
        """Hear how many classes there are."""
        self._classes = surroundings.num_classes  # type: ignore[assignment]

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor) -> Mahalanobis:
        """Means and covariances of training features (N, d); a class without a sample is left out."""
        x, labels = self._prepare(features).double(), labels.long()
        onehot = F.one_hot(labels, self._classes or -1).double()
        count = onehot.sum(dim=0)
        means = onehot.t() @ x / count.clamp_min(1)[:, None]
        residual, whole = x - means[labels], x - x.mean(dim=0)
        self.means = means[count > 0].to(self.means)
        self.precision = torch.linalg.pinv(residual.t() @ residual / len(x), hermitian=True).to(self.precision)
        self.center = x.mean(dim=0).to(self.center)
        self.overall = torch.linalg.pinv(whole.t() @ whole / len(x), hermitian=True).to(self.overall)
        return self

    @torch.no_grad()
    def distances(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(B, d) → plain and relative distance, each (B,)."""
        if features.dim() != 2 or features.shape[1] != len(self.center):
            raise ValueError(
                f"expected features of shape (batch, {len(self.center)}) as the distance was fitted to, got "
                f"{tuple(features.shape)}"
            )
        with torch.autocast(features.device.type, enabled=False):
            x = self._prepare(features)
            nearest = torch.stack([_squared(x - mean, self.precision) for mean in self.means]).amin(dim=0)
            return nearest, nearest - _squared(x - self.center, self.overall)

    def _prepare(self, features: Tensor) -> Tensor:
        x = features.to(self.means.dtype)
        return F.normalize(x, dim=1) if self.normalize else x

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """`mahalanobis` and `mahalanobis_relative`, each (B,)."""
        plain, relative = self.distances(passes.features)
        return {"mahalanobis": plain, "mahalanobis_relative": relative}


def _squared(gap: Tensor, precision: Tensor) -> Tensor:
    """(B, d) → (B,) gapᵀ · precision · gap."""
    return ((gap @ precision) * gap).sum(dim=1)
