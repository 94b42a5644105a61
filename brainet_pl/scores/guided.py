"""NNGuide (Park et al. 2023): the energy, guided by neighbours and their energies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.scores.density import in_parts
from brainet_pl.scores.last_layer import LastLayerScore
from brainet_pl.scores.neighbours import ROOM


class NNGuide(LastLayerScore):
    """Minus the energy times its guide: `nnguide` = -E(x)·mean of the k largest E(b)·cos(z, b) over training samples b.

    E is log Σ_c exp l_c of the network's own logits.

    Args:
        k: Training samples that guide; all where there are fewer.
        max_rows: Most training samples that are kept, a random choice of them; they travel in the checkpoint.
        seed: Seed of that random choice.
        name: Suffix of its score, `_<name>`, where a model has more than one NNGuide; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"nnguide": ""}
    bank: Tensor

    def __init__(self, k: int = 10, max_rows: int = 50_000, seed: int = 0, name: str | None = None) -> None:
        super().__init__(name)
        self.k, self.max_rows = checks.whole("k", k, 1), checks.whole("max_rows", max_rows, 1)
        self.seed = checks.whole("seed", seed, 0, 2**63 - 1)
        self.register_buffer("bank", torch.empty(0, 0))

    def learn(self, z: Tensor, labels: Tensor) -> None:
        """Keep the directions of z (N, d), as long as their energies."""
        if len(z) > self.max_rows:
            rows = torch.randperm(len(z), generator=torch.Generator().manual_seed(self.seed))[: self.max_rows]
            z = z[rows.to(z.device)]
        self.bank = (F.normalize(z, dim=1) * self.logits(z).logsumexp(dim=1, keepdim=True)).to(self.weight)

    def score(self, z: Tensor) -> dict[str, Tensor]:
        """Gives `nnguide` (B,), one number a sample."""
        k, rows = min(self.k, len(self.bank)), max(1, ROOM // max(1, len(self.bank)))
        direction = F.normalize(z, dim=1)
        guide = in_parts(lambda part: (part @ self.bank.t()).topk(k, dim=1).values.mean(dim=1), direction, rows)
        return {"nnguide": -guide * self.logits(z).logsumexp(dim=1)}
