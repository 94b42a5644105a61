"""How unlikely the features of an input are in each stage of a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.parts import primitive
from brainet_pl.scores.base import Score, ScoreContext, set_source
from brainet_pl.scores.cells import StageMaps
from brainet_pl.scores.density import reducer
from brainet_pl.scores.generative import Generative
from brainet_pl.structure.settings import MOST_SAMPLES
from brainet_pl.tasks.passes import Passes

MOST_ROWS = 5000  # training samples that tell mean and deviation of a density


class Stages(Score):
    """One density for each stage of a network: minus the log-densities of their features, standardised and summed.

    `stages` is Σ_l (-max_c log p_l(x | c) - μ_l) / σ_l: p_l is the density of layer l under the networks of a tree that
    is learned for it alone, as in `Generative`, μ_l and σ_l are mean and deviation over training samples. So an early
    stage with few channels, which sees noise and blur, counts as much as a late one with many, which sees what the
    network makes of them.

    Args:
        threshold: Threshold of the independence test that learns the trees, in nats; raised to 6/N for N samples. A
            density wants many edges.
        s: Bootstrap samples at every node of a tree.
        max_order: Largest condition set while a tree is learned.
        seed: Seed of the bootstrap samples.
        max_parents: Parents that a feature may have; the most correlated ones are kept.
        max_features: Features that are read of each layer, a random choice of them. null reads all.
        progress: Show progress bars while trees are learned.
        layers: Layers of the backbone, as in `Backbone`; "auto" is the ends of its stages.
        pool: How the maps and tokens of these layers become features, as in `Backbone`.
        name: Suffix of its score, `_<name>`, where a model has more than one Stages; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"stages": "deviations"}
    fits_shares = True  # means and covariances are sums
    _density: ClassVar[type[Generative]] = Generative
    widths: Tensor
    moments: Tensor

    def __init__(
        self,
        threshold: float = 0.001,
        s: int = 2,
        max_order: int = 1,
        seed: int = 0,
        max_parents: int = 16,
        max_features: int | None = 128,
        progress: bool = True,
        layers: str | list[str] = "auto",
        pool: str | list[str] = "mean_std",
        name: str | None = None,
    ) -> None:
        super().__init__()
        set_source(self, layers, pool, name)
        self.threshold = checks.at_least("threshold", threshold, 0, "such as 0.001")
        self.s, self.max_order = checks.whole("s", s, 1, MOST_SAMPLES), checks.whole("max_order", max_order, 0)
        self.seed = checks.whole("seed", seed, 0)
        self.max_parents = checks.whole("max_parents", max_parents, 0)
        self.max_features = checks.whole_or_none("max_features", max_features, 1, "None reads all features")
        self.progress = checks.flag("progress", progress)
        self.parts = nn.ModuleList()
        self.maps = StageMaps()  # where in an image it is strange; nothing of it enters the score
        self._split: list[int] = []  # the widths outside the tensor: an exported graph can't split by one
        self._context = ScoreContext(num_classes=1)
        self.register_buffer("widths", torch.empty(0, dtype=torch.long))
        self.register_buffer("moments", torch.empty(0, 2))

    def set_context(self, context: ScoreContext) -> None:
        """Take the number of classes and the widths of layers."""
        self._context = context

    def fit(self, features: Tensor, labels: Tensor, shared: bool = False) -> Stages:
        """Learn a tree and a density for each layer from training features (N, d) and labels (N,)."""
        self._build(list(self._context.widths or (features.shape[1],)))
        self.widths = torch.tensor(self._split, device=self.widths.device)
        few = slice(None, None, max(1, len(features) // MOST_ROWS))
        moments = []
        for part, x in zip(self._densities(), torch.split(features, self._split, dim=1), strict=True):
            part.set_context(self._context)
            part.fit(x, labels, shared)
            part.set_ready(True)
            moments.append(_moments(self._surprise(part, x[few]), shared))
        self.moments = torch.stack(moments).to(self.moments)
        return self

    def _build(self, widths: list[int]) -> None:
        names = ("threshold", "s", "max_order", "seed", "max_parents", "max_features", "progress")
        settings = {name: primitive(getattr(self, name)) for name in names}
        self._split = widths
        self.parts = nn.ModuleList(self._density(normalize=False, **settings) for _ in widths)
        self.parts.to(self.fitted.device)

    def _densities(self) -> list[Generative]:
        return list(self.parts)  # type: ignore[arg-type]

    @staticmethod
    def _surprise(part: Generative, x: Tensor) -> Tensor:
        """Features (B, d) of a layer → minus their log-density (B,)."""
        assert part.density is not None
        return part.density.scores(part.read(x).to(part.reference))["generative"]

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """Gives the score `stages` of a batch, (B,)."""
        if passes.features.shape[1] != sum(self._split):
            raise ValueError(
                f"expected {sum(self._split)} features of {self.taps} as in training, got {passes.features.shape[1]}"
            )
        layers = zip(self._densities(), torch.split(passes.features, self._split, dim=1), self.moments, strict=True)
        return {"stages": torch.stack([(self._surprise(part, x) - m[0]) / m[1] for part, x, m in layers]).sum(dim=0)}

    def without_classes(self, passes: Passes, hidden: Tensor) -> Tensor:
        """`stages` (K, B) by the densities of the other classes."""
        layers = zip(self._densities(), torch.split(passes.features, self._split, dim=1), self.moments, strict=True)
        found = []
        for part, x, (mean, deviation) in layers:
            values = part.without_classes(replace(passes, features=x.to(part.reference)), hidden)
            found.append((values - mean) / deviation)
        return torch.stack(found).sum(dim=0)

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Build the densities that the tensors belong to."""
        super().before_load(stored)
        self._build([int(width) for width in stored.get("widths", ())])


def _moments(values: Tensor, shared: bool) -> Tensor:
    """(n,) → mean and deviation (2,), over all processes where each has a share."""
    values = values.double()
    sums = torch.stack([values.new_tensor(len(values)), values.sum(), (values**2).sum()])
    count, first, second = reducer(shared)(sums)
    mean = first / count
    return torch.stack([mean, (second / count - mean**2).clamp_min(1e-12).sqrt()])
