"""Shaping of the last layer's inputs: ASH-S (Djurisic et al. 2023) and SCALE (Xu et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl.scores.last_layer import LastLayerScore

Kind = Literal["scale", "ash"]


class Shaped(LastLayerScore):
    """The energy of the logits of shaped features: `shaped` = -log Σ_c exp l_c(z').

    r is the sum of a sample's features over the sum of its largest ones. SCALE multiplies all features by exp(r), ASH-S
    the largest ones alone and sets the others to 0. Both are meant for features behind a ReLU.

    Args:
        kind: "scale" or "ash".
        share: Share of the features that do not count among the largest.
        name: Suffix of its score, `_<name>`, where a model has more than one Shaped; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"shaped": ""}

    def __init__(self, kind: Kind = "scale", share: float = 0.85, name: str | None = None) -> None:
        super().__init__(name)
        checks.one_of("kind", kind, get_args(Kind))
        self.kind = kind
        self.share = checks.share("share", share)

    def learn(self, z: Tensor, labels: Tensor) -> None:
        """Nothing but the layer is needed."""

    def score(self, z: Tensor) -> dict[str, Tensor]:
        """Gives `shaped` (B,), one number a sample."""
        largest = z.topk(max(1, z.shape[1] - round(z.shape[1] * self.share)), dim=1)
        ratio = z.sum(dim=1) / largest.values.sum(dim=1).clamp_min(1e-12)
        kept = z if self.kind == "scale" else z.new_zeros(z.shape).scatter(1, largest.indices, largest.values)
        return {"shaped": -self.logits(kept * ratio.exp()[:, None]).logsumexp(dim=1)}
