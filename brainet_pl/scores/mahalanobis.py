"""Mahalanobis distance (Lee et al. 2018) and its relative form (Ren et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.scores.base import Score, ScoreContext, set_source
from brainet_pl.scores.density import reducer
from brainet_pl.tasks.passes import Passes


class Mahalanobis(Score):
    """Distance to the nearest class mean under one covariance, and that distance relative to one Gaussian of all data.

    `mahalanobis` is min_c (x - μ_c)ᵀ Σ⁻¹ (x - μ_c), Σ the covariance within classes; `mahalanobis_relative` subtracts
    (x - μ)ᵀ Σ₀⁻¹ (x - μ) with mean and covariance of all training data. Directions in which training features do not
    vary, up to rounding, are left out of both. With one class alone, as in a regression, both Gaussians are the same,
    and there is no `mahalanobis_relative`.

    >>> x = torch.tensor([[0.0], [2.0], [10.0], [12.0]])  # two classes, variance 1 within each
    >>> score = Mahalanobis(normalize=False).fit(x, torch.tensor([0, 0, 1, 1]))
    >>> score.distances(torch.tensor([[1.0], [4.0]]))[0].round()
    tensor([0., 9.])

    Args:
        normalize: Bring the features of every sample to length 1 first; null does so for the last layer of a backbone
            only: inputs, and taps, which have been standardised, are read as they are.
        layers: Layers of the backbone whose features are read, as in `Backbone`; null is what the head reads.
        pool: How the maps and tokens of these layers become features, as in `Backbone`.
        name: Suffix of its scores, `_<name>`, where a model has more than one Mahalanobis; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"mahalanobis": "", "mahalanobis_relative": ""}
    fits_shares = True  # means and covariances are sums
    joins = "never"
    means: Tensor
    within: Tensor
    unit: Tensor
    center: Tensor
    overall: Tensor

    def __init__(
        self,
        normalize: bool | None = None,
        layers: str | list[str] | None = None,
        pool: str | list[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        set_source(self, layers, pool, name)
        self.normalize, self._classes = None if normalize is None else checks.flag("normalize", normalize), 0
        self._unit = self.normalize is not False  # outside the tensor: an exported graph can't branch on one
        self.register_buffer("unit", torch.tensor(self._unit))
        for name in ("means", "within", "center", "overall"):
            self.register_buffer(name, torch.empty(0))

    def set_context(self, context: ScoreContext) -> None:
        """Take the number of classes, and whether features are inputs or standardised taps, read as they are."""
        self._classes = context.num_classes
        if self.normalize is None:
            self._unit = not (context.raw or context.scaled)
            self.unit.fill_(self._unit)

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor, shared: bool = False) -> Mahalanobis:
        """Means and covariances of training features (N, d); a class without a sample is left out."""
        total = reducer(shared)
        x, labels = self._prepare(features).double(), labels.long()
        seen = int(labels.max()) + 1 if len(labels) else 0  # a share may be empty
        onehot = F.one_hot(labels, max(self._classes, seen)).double()
        count = total(onehot.sum(dim=0))
        n, sums = count.sum(), total(onehot.t() @ x)
        means, center = sums / count.clamp_min(1)[:, None], sums.sum(dim=0) / n
        rounding = torch.finfo(self.means.dtype).eps * (total(x.square().sum(dim=0)) / n).sqrt()
        for name, gap in (("within", x - means[labels]), ("overall", x - center)):
            setattr(self, name, _whitening(total(gap.t() @ gap) / n, rounding).to(self.means))
        self.means, self.center = means[count > 0].to(self.means), center.to(self.center)
        return self

    @torch.no_grad()
    def distances(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Maps features (B, d) to the plain and the relative distance, each (B,)."""
        if features.dim() != 2 or features.shape[1] != len(self.center):
            raise ValueError(
                f"expected features of shape (batch, {len(self.center)}) as the distance was fitted to, got "
                f"{tuple(features.shape)}"
            )
        with torch.autocast(features.device.type, enabled=False):
            # In 64 bits: the relative distance is a small difference of two large ones.
            x, within, overall = self._prepare(features).double(), self.within.double(), self.overall.double()
            nearest = torch.stack([_squared(x - mean, within) for mean in self.means]).amin(dim=0)
            relative = nearest - _squared(x - self.center, overall)
            return nearest.to(self.means.dtype), relative.to(self.means.dtype)

    def _prepare(self, features: Tensor) -> Tensor:
        x = features.to(self.means.dtype)
        return F.normalize(x, dim=1) if self._unit else x

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """`mahalanobis` and, with more than one class, `mahalanobis_relative`, each (B,)."""
        plain, relative = self.distances(passes.features)
        return {"mahalanobis": plain} | ({"mahalanobis_relative": relative} if len(self.means) > 1 else {})

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read whether features are brought to length 1."""
        super().before_load(stored)
        self._unit = bool(stored.get("unit", self._unit))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):  # a checkpoint of before had its settings alone
            state_dict.setdefault(f"{prefix}unit", torch.tensor(self.normalize is not False))
        super()._load_from_state_dict(state_dict, prefix, *args)


class RMDS(Mahalanobis):
    """The relative Mahalanobis distance as its authors have it (Ren et al. 2021): `rmds`, of features as they are.

    It is what `Mahalanobis(normalize=False)` calls `mahalanobis_relative`.

    Args:
        layers: Layers of the backbone whose features are read, as in `Backbone`; null is what the head reads.
        pool: How the maps and tokens of these layers become features, as in `Backbone`.
        name: Suffix of its score, `_<name>`, where a model has more than one RMDS; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"rmds": ""}

    def __init__(
        self, layers: str | list[str] | None = None, pool: str | list[str] | None = None, name: str | None = None
    ) -> None:
        super().__init__(False, layers, pool, name)

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor, shared: bool = False) -> RMDS:
        """Means and covariances of training features (N, d) of at least two classes."""
        super().fit(features, labels, shared)
        if len(self.means) < 2:
            raise ValueError(
                "expected training samples of at least two classes for the score RMDS, got one: a distance relative to "
                "all data says nothing then; leave it out, or take Mahalanobis"
            )
        return self

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """Gives `rmds` (B,), one number a sample."""
        return {"rmds": self.distances(passes.features)[1]}


def _squared(gap: Tensor, whitening: Tensor) -> Tensor:
    """(B, d) → (B,) the squared length of gap · W: gapᵀ Σ⁻¹ gap, and never below 0 by rounding."""
    return (gap @ whitening).square().sum(dim=1)


def _whitening(covariance: Tensor, rounding: Tensor) -> Tensor:
    """Covariance (d, d) in 64 bits → W (d, d) with W·Wᵀ = Σ⁻¹ where Σ has an inverse.

    `rounding` (d,) is the error that features have anyway. A direction that varies by less than a hundred times of it
    gets no weight: divided by next to nothing, the error would be all that a distance shows. Features are scaled by
    their own deviation first, so that their units do not matter.
    """
    spread = covariance.diagonal().sqrt()
    scale = torch.where(spread > 100 * rounding, 1 / spread, 0.0)
    values, vectors = torch.linalg.eigh(scale[:, None] * covariance * scale)
    least = vectors.square().t() @ (100 * rounding * scale).square()
    exact = len(values) * torch.finfo(values.dtype).eps * values.max()
    weight = torch.where(values > torch.maximum(least, exact), values.rsqrt(), 0.0)
    return torch.as_tensor(scale[:, None] * vectors * weight)
