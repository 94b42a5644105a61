"""k nearest neighbours (Sun et al. 2022): how far an input's features are from those of the training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.scores.base import Score, ScoreContext, set_source
from brainet_pl.scores.density import in_parts
from brainet_pl.tasks.passes import Passes

ROOM = 2**23  # similarities held at a time, so that memory does not grow with the batch


class KNN(Score):
    """The squared distance to the k-th nearest training sample: `knn`; from 0 to 4 between features of length 1.

    >>> score = KNN(k=1).fit(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    >>> score.distances(torch.tensor([[2.0, 0.0], [-1.0, 0.0]]))  # the direction of a training sample, and a far one
    tensor([0., 2.])

    Args:
        k: Which neighbour's distance is the score; the last one where there are fewer training samples.
        max_rows: Most training samples that are kept, a random choice of them; they travel in the checkpoint.
        seed: Seed of that random choice.
        normalize: Bring the features of every sample to length 1 first; null does so for the last layer of a backbone
            only: inputs, and taps, which have been standardised, are read as they are.
        layers: Layers of the backbone whose features are read, as in `Backbone`; null is what the head reads.
        pool: How the maps and tokens of these layers become features, as in `Backbone`.
        name: Suffix of its scores, `_<name>`, where a model has more than one KNN; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"knn": ""}
    bank: Tensor
    labels: Tensor

    def __init__(
        self,
        k: int = 50,
        max_rows: int = 50_000,
        seed: int = 0,
        normalize: bool | None = None,
        layers: str | list[str] | None = None,
        pool: str | list[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        set_source(self, layers, pool, name)
        self.k, self.max_rows = checks.whole("k", k, 1), checks.whole("max_rows", max_rows, 1)
        self.seed = checks.whole("seed", seed, 0, 2**63 - 1)
        self.normalize = None if normalize is None else checks.flag("normalize", normalize)
        self._unit = self.normalize is not False
        self.register_buffer("bank", torch.empty(0, 0))
        self.register_buffer("labels", torch.empty(0, dtype=torch.int32))  # of the training samples that are kept

    def set_context(self, context: ScoreContext) -> None:
        """Take whether features are inputs or standardised taps, which are read as they are."""
        if self.normalize is None:
            self._unit = not (context.raw or context.scaled)

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor) -> KNN:
        """Keep training features (N, d), at most `max_rows` of them."""
        if len(features) > self.max_rows:
            rows = torch.randperm(len(features), generator=torch.Generator().manual_seed(self.seed))[: self.max_rows]
            features, labels = features[rows.to(features.device)], labels[rows.to(labels.device)]
        self.bank = self._prepare(features).to(self.bank.device)
        self.labels = labels.to(self.labels)
        return self

    def _prepare(self, features: Tensor) -> Tensor:
        x = features.to(self.bank.dtype)
        return F.normalize(x, dim=1) if self._unit else x

    @torch.no_grad()
    def distances(self, features: Tensor) -> Tensor:
        """Maps features (B, d) to the squared distance to the k-th neighbour, (B,)."""
        if features.dim() != 2 or features.shape[1] != self.bank.shape[1]:
            raise ValueError(
                f"expected features of shape (batch, {self.bank.shape[1]}) as k-NN was fitted to, got "
                f"{tuple(features.shape)}"
            )
        with torch.autocast(features.device.type, enabled=False):
            x = self._prepare(features)
            nearest = _largest_brackets(x, self.bank, min(self.k, len(self.bank)))[:, -1]
            return (x.square().sum(dim=1) - 2.0 * nearest).clamp_min(0.0)

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """Gives the score `knn` of a batch, (B,)."""
        return {"knn": self.distances(passes.features)}

    @torch.no_grad()
    def without_classes(self, passes: Passes, hidden: Tensor) -> Tensor:
        """`knn` (K, B) by the training samples of the other classes.

        Classes that are hidden in the same groups share a search, whose nearest samples are joined for each group: one
        pass over all training samples, however many groups there are.
        """
        groups, share_of_class = hidden.unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
        share_of_sample = share_of_class[self.labels.long()]
        x = self._prepare(passes.features)
        nearest = []
        for share in range(groups.shape[1]):
            bank = self.bank[share_of_sample == share]
            nearest.append(_largest_brackets(x, bank, min(self.k, len(bank))))
        found = []
        for hides in groups:
            others = torch.cat([nearest[share] for share in (~hides).nonzero()[:, 0].tolist()], dim=1)
            found.append(others.topk(min(self.k, others.shape[1]), dim=1).values[:, -1])
        return (x.square().sum(dim=1) - 2.0 * torch.stack(found)).clamp_min(0.0)

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read whether features are brought to length 1: those that were kept tell it."""
        super().before_load(stored)
        if self.normalize is None and "bank" in stored:
            length = stored["bank"].float().norm(dim=1)
            self._unit = bool(((length - 1).abs() < 1e-3).logical_or(length == 0).all())


def _largest_brackets(x: Tensor, bank: Tensor, k: int) -> Tensor:
    """Of samples (B, d) and training samples (N, d) the k largest x·b - |b|² / 2, (B, k), in falling order.

    |x - b|² = |x|² - 2 (x·b - |b|² / 2): the nearest has the largest bracket.
    """
    half = bank.square().sum(dim=1) / 2
    rows = max(1, ROOM // max(1, len(bank)))
    return in_parts(lambda part: (part @ bank.t() - half).topk(k, dim=1).values, x, rows)
