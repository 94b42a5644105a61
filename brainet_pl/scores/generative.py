"""The generative score: how unlikely an input's features are under the networks of a learned tree, for any head."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.parts import primitive
from brainet_pl.scores.base import Score, ScoreContext, set_source
from brainet_pl.scores.density import Kind, TreeDensity, check_density, density_threshold, reducer
from brainet_pl.scores.moved import Moved, moved_features
from brainet_pl.scores.robust import within_quantiles
from brainet_pl.structure import GGT, FeatureStream, learn_structure
from brainet_pl.structure.settings import MOST_SAMPLES
from brainet_pl.tasks.passes import Passes


class Generative(Score):
    """Minus the log-density of the features, averaged exactly over the networks of a tree learned for it.

    `generative` is -max_c log p(x | c), `generative_weighted` is -Σ_c p̄_c·log p(x | c). `combined` adds the first and
    the energy, each standardised by its mean and deviation on validation data: both are negative logarithms of
    unnormalised densities, one of the features and one of the classifier, and adding them needs no unknown data. A
    regression has `generative` alone.

    Args:
        kind: "gaussian", linear regressions on the parents, or "discrete", tables of quantile codes with BDeu's counts.
        threshold: Threshold of the independence test that learns the density's tree, in nats; a density wants more
            edges than a network of dense layers. It is raised to 6/N for N samples, where noise alone would make edges.
            null takes the tree of the head.
        s: Bootstrap samples at every node of that tree.
        max_order: Largest condition set while that tree is learned.
        seed: Seed of the bootstrap samples.
        normalize: Bring the features of every sample to length 1 first; null does so for the last layer of a backbone
            only: inputs, and taps, which have been standardised, are read as they are.
        prior: Weight, in rows, of what all classes have in common when a class's own parameters are estimated. null is
            16 for each variable (gaussian) or 5 (discrete).
        bins: Levels of a feature, for "discrete".
        max_parents: Parents that a feature may have. null keeps the 64 most correlated ones (gaussian) or the 2 best by
            score (discrete).
        max_features: Features that are read, a random choice of them: it detects unknown inputs as well, and a tree of
            thousands takes long to learn. null reads all.
        progress: Show a progress bar while the tree is learned.
        layers: Layers of the backbone whose features are read, as in `Backbone`; null is what the head reads.
        pool: How the maps and tokens of these layers become features, as in `Backbone`.
        name: Suffix of its scores, `_<name>`, where a model has more than one Generative; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"generative": "nats", "generative_weighted": "nats", "combined": "deviations"}
    blueprint: Tensor
    chosen: Tensor
    reference: Tensor

    def __init__(
        self,
        kind: Kind = "gaussian",
        threshold: float | None = 0.02,
        s: int = 2,
        max_order: int = 1,
        seed: int = 0,
        normalize: bool | None = None,
        prior: float | None = None,
        bins: int = 8,
        max_parents: int | None = None,
        max_features: int | None = None,
        progress: bool = True,
        layers: str | list[str] | None = None,
        pool: str | list[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        set_source(self, layers, pool, name)
        self.kind = kind
        self.fits_shares = kind == "gaussian"  # means and covariances are sums; quantiles are not
        self.prior, self.bins, self.max_parents = check_density(kind, prior, bins, max_parents)
        self.threshold = checks.number_or_none("threshold", threshold, 0, "None takes the tree of the head")
        self.s, self.max_order = checks.whole("s", s, 1, MOST_SAMPLES), checks.whole("max_order", max_order, 0)
        self.seed = checks.whole("seed", seed, 0)
        self.max_features = checks.whole_or_none("max_features", max_features, 1, "None reads all features")
        self.normalize = None if normalize is None else checks.flag("normalize", normalize)
        self.progress = checks.flag("progress", progress)
        self.density: TreeDensity | None = None
        self._context = ScoreContext(num_classes=1)
        self.register_buffer("chosen", torch.empty(0, dtype=torch.long))  # columns that are read; none is all
        self.register_buffer("reference", torch.full((2, 2), math.nan))
        self._refers = False  # whether the reference is known, outside the tensor for the sake of exported graphs
        self.register_buffer("blueprint", torch.empty(0, dtype=torch.uint8))  # what rebuilds the density, as JSON

    def set_context(self, context: ScoreContext) -> None:
        """Take the number of classes, the head's tree and whether features are raw."""
        self._context = context

    def fit(self, features: Tensor, labels: Tensor, shared: bool = False) -> Generative:
        """Learn the tree from training features (N, d), then its parameters for each class of labels (N,)."""
        features = features[:, self._choose(features.shape[1])]
        as_they_are = self._context.raw or self._context.scaled
        normalize = not as_they_are if self.normalize is None else self.normalize
        settings = {"kind": self.kind, "prior": self.prior, "bins": self.bins, "max_parents": self.max_parents}
        classes = self._context.num_classes
        if not shared:  # a share need not hold the last class
            classes = max(classes, int(labels.max()) + 1)
        density = TreeDensity(self._tree(features, shared), classes, normalize=normalize, **settings)  # type: ignore[arg-type]
        self.density = density.fit(features, labels, shared).to(self.reference.device)
        text = json.dumps(primitive(self.density.to_dict()), separators=(",", ":"))
        self.blueprint = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.reference.device)
        return self

    @property
    def densities(self) -> tuple[Generative, ...]:
        """Itself: it is a density of columns."""
        return (self,)

    def moved(self, features: Tensor, classes: Tensor, most: int = 5) -> list[Moved]:
        """Features (B, d) of new inputs and predicted classes (B,) → the features that moved most since the fit."""
        assert self.density is not None
        found = moved_features(self.density, self.read(features), classes, most)
        if not len(self.chosen):
            return found
        number = self.chosen.tolist()
        return [Moved(number[one.feature], tuple(number[p] for p in one.parents), one.excess) for one in found]

    def read(self, features: Tensor) -> Tensor:
        """All features (B, d) → those that are read."""
        return features.index_select(1, self.chosen.to(features.device)) if len(self.chosen) else features

    def _choose(self, width: int) -> Tensor:
        """(d,) which of the features are read."""
        every = torch.arange(width)
        few = self.max_features is not None and width > self.max_features and self.threshold is not None
        if few:
            every = torch.randperm(width, generator=torch.Generator().manual_seed(self.seed))[: self.max_features]
        self.chosen = every.sort().values.to(self.reference.device) if few else self.chosen.new_empty(0)
        return every.sort().values

    def _tree(self, features: Tensor, shared: bool) -> GGT:
        if self.threshold is not None:
            rows = int(reducer(shared)(torch.tensor(len(features))))
            return learn_structure(
                FeatureStream.share(features) if shared else features,
                test="gaussian" if self.kind == "gaussian" else "cmi",
                threshold=density_threshold(self.threshold, rows),
                bins=4,
                s=self.s,
                max_order=self.max_order,
                seed=self.seed,
                progress=self.progress,
            )
        if self.taps is not None:
            raise RuntimeError(
                f"expected a threshold to learn a tree of {self.taps} with, got none: the tree of the head is one of "
                "other features; give Generative a threshold"
            )
        if self._context.ggt is None:
            raise RuntimeError(
                "expected a learned tree to take for the generative score, got a head without one: give Generative a "
                "threshold, so that it learns its own"
            )
        return self._context.ggt

    def finalize(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take mean and deviation of the validation epoch as the reference of `combined`; NaN in one gives none.

        The strangest and the least strange fiftieth count as the samples next to them.
        """
        if "energy" not in columns:
            return {}
        both = torch.stack([columns["generative"], columns["energy"]], dim=1).double()
        both = within_quantiles(both)
        mean, square = both.mean(dim=0), (both**2).mean(dim=0)
        self.reference.copy_(torch.stack([mean, (square - mean**2).clamp_min(1e-12).sqrt()]).float())
        self._refers = bool(self.reference.isfinite().all())
        return {"combined": self._combined(columns["generative"], columns["energy"])} if self._refers else {}

    def _combined(self, generative: Tensor, energy: Tensor) -> Tensor:
        both = torch.stack([generative, energy.to(generative.dtype)], dim=1)
        return ((both - self.reference[0]) / self.reference[1]).sum(dim=1)

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """Gives the scores of a batch by name, each (B,)."""
        assert self.density is not None
        energy = passes.scores.get("energy")
        found = self.density.scores(self.read(passes.features), None if energy is None else passes.predicted)
        if energy is not None and self._refers:
            found["combined"] = self._combined(found["generative"], energy)
        return found

    def without_classes(self, passes: Passes, hidden: Tensor) -> Tensor:
        """`generative` (K, B) by the densities of the other classes."""
        assert self.density is not None
        return self.density.without_classes(self.read(passes.features), hidden)

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Build the density that the tensors belong to."""
        super().before_load(stored)
        blueprint = stored.get("blueprint", self.blueprint[:0])
        self.density = None
        if len(blueprint):
            data = json.loads(bytes(blueprint.tolist()).decode())
            self.density = TreeDensity.from_dict(data).to(self.reference.device)
        self._refers = "reference" in stored and bool(stored["reference"].isfinite().all())
