"""How much a network's own classification layer and a new head count in one prediction."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Blend(nn.Module):
    """The weighted sum of the logits of the layer that was removed and the outputs of the new head.

    The weights are numbers, so that an exported graph has no branches; they travel in the state dict.

    Attributes:
        base: weight of the logits of the layer that was removed.
        head: weight of the outputs of the head; 0 is the network as it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = 0.0, 1.0

    @property
    def active(self) -> bool:
        """Whether the logits of the removed layer count."""
        return self.base != 0

    def set(self, base: float, head: float) -> None:
        """Take the weights of the removed layer's logits and of the head."""
        self.base, self.head = base, head

    def get_extra_state(self) -> Tensor:
        """Both weights, in 64 bits."""
        return torch.tensor([self.base, self.head], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take both weights from a state dict."""
        self.base, self.head = state.tolist()

    def forward(self, base_logits: Tensor, outputs: Tensor) -> Tensor:
        """Base logits (B, O) and outputs (…, B, O) → their weighted sum (…, B, O)."""
        return self.base * base_logits + self.head * outputs
