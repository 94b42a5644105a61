"""What scores share that read the inputs of a network's own linear classification layer, and its weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from brainet_pl.backbones.taps import LAST
from brainet_pl.scores.base import Score, ScoreContext, set_source


class LastLayerScore(Score):
    """A score of what the network's own classification layer is given, z (B, d), and of its weights and biases.

    The head of a model may be any other one: the layer is that of the network whose classification layer was removed,
    and the score says what the network itself makes of an input. A class of one's own needs `learn` and `score`.

    Attributes:
        weight: (C', d) of the layer.
        bias: (C',) of the layer.
        centre, spread: (d,) by which the backbone standardised z; they are undone.
    """

    joins = "never"
    weight: Tensor
    bias: Tensor
    centre: Tensor
    spread: Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        set_source(self, LAST, None, name)
        self._context = ScoreContext(num_classes=1)
        for buffer in ("weight", "bias", "centre", "spread"):
            self.register_buffer(buffer, torch.empty(0))

    def set_context(self, context: ScoreContext) -> None:
        """Take the classification layer of the network, and how features were standardised."""
        self._context = context

    def check(self, has_classes: bool, raw: bool) -> None:
        """Refuse a model without a network."""
        super().check(has_classes, raw)
        if raw:
            raise ValueError(_expected(type(self).__name__, "a model without a backbone"))

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor) -> Any:
        """Keep the layer, and learn from training features (N, d)."""
        layer, name = self._context.last_layer, type(self).__name__
        if layer is None:
            raise ValueError(_expected(name, "a backbone without one, or one that is trained"))
        if layer.weight.shape[1] != features.shape[1]:
            got = f"{features.shape[1]} features for a layer of {layer.weight.shape[1]}"
            raise ValueError(_expected(name, got))
        if len(layer.weight) < 2:
            raise ValueError(_expected(name, "a layer of one output, which tells no classes"))
        d, keep = features.shape[1], self.weight
        centre, spread = self._context.moments or (torch.zeros(d), torch.ones(d))
        self.weight, self.bias = layer.weight.detach().to(keep), layer.bias.detach().to(keep)
        self.centre, self.spread = centre.to(keep), spread.to(keep)
        self.learn(self._inputs(features), labels)
        return self

    def _inputs(self, features: Tensor) -> Tensor:
        """Standardised features (B, d) → what the layer is given."""
        return features.to(self.weight) * self.spread + self.centre

    def logits(self, z: Tensor) -> Tensor:
        """Inputs (B, d) of the layer → its logits (B, C')."""
        return z @ self.weight.t() + self.bias

    @abstractmethod
    def learn(self, z: Tensor, labels: Tensor) -> None:
        """Learn from training inputs (N, d) of the layer, and labels (N,)."""

    @abstractmethod
    def score(self, z: Tensor) -> dict[str, Tensor]:
        """Inputs (B, d) of the layer → scores (B,) by name."""

    def forward(self, passes: Any) -> dict[str, Tensor]:
        """Gives the scores of a batch by name, each (B,)."""
        return self.score(self._inputs(passes.features))


def _expected(name: str, got: str) -> str:
    return (
        f"expected a frozen network with its linear classification layer for the score {name}, got {got}: give the "
        f"whole network as backbone (head_layer=None finds the layer), or leave {name} out"
    )
