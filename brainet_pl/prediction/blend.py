"""How much a network's own classification layer, a new head and a linear layer count in one prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl.tasks.linear import SoftmaxLayer

LAYER = ("center", "weight", "bias")  # of a `SoftmaxLayer`


class Weights(NamedTuple):
    """What the logits of each part are multiplied by before they are summed.

    Attributes:
        base: of the layer that was removed.
        head: of the new head; 0 does not run it.
        linear: of a linear layer on the features that the head reads.
    """

    base: float
    head: float
    linear: float = 0.0


class Blend(DataSizedBuffers):
    """The weighted sum of the logits of the layer that was removed, of the new head, and of a linear layer.

    The weights are numbers, so that an exported graph has no branches; they travel in the state dict, and the linear
    layer with them.

    Attributes:
        weights: of the three parts.
    """

    may_be_missing: ClassVar[bool] = True
    center: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weights = Weights(0.0, 1.0)
        for name in LAYER:
            self.register_buffer(name, torch.empty(0))

    @property
    def active(self) -> bool:
        """Whether the logits of the removed layer count."""
        return self.weights.base != 0

    @property
    def is_head_alone(self) -> bool:
        """Whether nothing but the head counts, as it is."""
        return self.weights == Weights(0.0, 1.0)

    def set(self, base: float, head: float, linear: float = 0.0, layer: SoftmaxLayer | None = None) -> None:
        """Take the weights, and the linear layer where it counts."""
        if linear and layer is None:
            raise ValueError("expected the linear layer that is to count, got none: give it as layer")
        self.weights = Weights(base, head, linear)
        for name in LAYER:
            value = getattr(layer, name).float() if linear else torch.empty(0)
            setattr(self, name, value.to(getattr(self, name).device))

    def get_extra_state(self) -> Tensor:
        """The weights, in 64 bits."""
        return torch.tensor(self.weights, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the weights from a state dict."""
        self.weights = Weights(*state.tolist())

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """A state without a blend leaves the head alone."""
        if not stored:
            self.set(0.0, 1.0)

    def linear(self, features: Tensor) -> Tensor:
        """Features (B, d) → the logits (B, C) of the linear layer."""
        return F.linear(features.to(self.weight.dtype) - self.center, self.weight, self.bias)
