"""The linear head: one dense layer, what most classifiers end in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from brainet_pl.network.base import Head, HeadSettings, Outputs, as_features, check_sizes
from brainet_pl.structure.ggt import GGT


class LinearHead(Head):
    """One dense layer, as the classification layer of most networks is.

    Args:
        in_features: d, the number of features.
        out_features: O, the number of outputs.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.layers = nn.Linear(*check_sizes(in_features, out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to outputs (B, O)."""
        return torch.as_tensor(self.layers(as_features(x, self.layers.in_features, self.layers.weight)))

    def passes(self, x: Tensor, count: int) -> Outputs:
        """Maps features (B, d) to outputs (1, B, O): there is only one network."""
        return Outputs(torch.as_tensor(self(x)).unsqueeze(0))


class Linear(HeadSettings):
    """One dense layer, for comparison. It has no settings."""

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> LinearHead:
        """Builds the dense layer for so many features and outputs."""
        return LinearHead(in_features, out_features)
