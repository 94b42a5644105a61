"""Bayes by backprop (Blundell et al. 2015): a Gaussian over every weight."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import MOST_PASSES, Budget, Head, HeadSettings, Outputs
from brainet_pl.network.mlp import hidden_width
from brainet_pl.structure.ggt import GGT


class BayesLinear(nn.Module):
    """A dense layer with an independent Gaussian over each weight (Blundell et al. 2015), prior N(0, 1)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        self.mean = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.rho = nn.Parameter(torch.full((out_features, in_features), -5.0))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Local reparametrisation: noise on the outputs, drawn for each sample."""
        sigma = F.softplus(self.rho)
        mean, variance = F.linear(x, self.mean, self.bias), F.linear(x**2, sigma**2)
        return mean + variance.clamp_min(1e-16).sqrt() * torch.randn_like(mean)

    def divergence(self) -> Tensor:
        """Computes KL(q ‖ prior) of weights and biases, in nats."""
        sigma = F.softplus(self.rho)
        return (0.5 * (sigma**2 + self.mean**2 - 1.0) - sigma.log()).sum()


class BayesHead(Head):
    """Bayes by backprop: Gaussian weights, so about half as many neurons for the same number of parameters."""

    def __init__(self, in_features: int, out_features: int, num_params: int, hidden: int = 2) -> None:
        super().__init__()
        in_features, out_features = base.check_sizes(in_features, out_features)
        self.in_features = in_features
        width = hidden_width(in_features, out_features, hidden, num_params // 2)
        sizes = [in_features] + [width] * hidden
        self.hidden = nn.ModuleList(BayesLinear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(hidden))
        self.output = BayesLinear(sizes[-1], out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to outputs (B, O) with freshly drawn weights."""
        x = base.as_features(x, self.in_features, self.output.mean)
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return torch.as_tensor(self.output(x))

    def passes(self, x: Tensor, count: int) -> Outputs:
        """Maps features (B, d) to the outputs of T draws of the weights, (T, B, O)."""
        x = base.as_features(x, self.in_features, self.output.mean)
        repeated = x.repeat(checks.whole("passes", count, 1, MOST_PASSES), 1)
        return Outputs(torch.as_tensor(self(repeated)).view(count, x.shape[0], -1))

    def penalty(self) -> Tensor:
        """KL divergence of all layers; divide by the number of training samples."""
        layers = [*self.hidden, self.output]
        return torch.stack([layer.divergence() for layer in layers if isinstance(layer, BayesLinear)]).sum()


class Bayes(HeadSettings):
    """Bayes by backprop, for comparison: Gaussian weights with batch norm, drawn anew in every pass.

    Args:
        num_params: Budget of parameters, means and deviations together; "auto" is 16,000, or 250 for each feature
            where that is more.
        hidden: Number of hidden layers.
    """

    def __init__(self, num_params: Budget = "auto", hidden: int = 2) -> None:
        self.num_params = base.check_budget(num_params)
        self.hidden = base.check_hidden(hidden)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> BayesHead:
        """Builds the network for so many features and outputs."""
        return BayesHead(in_features, out_features, base.resolve_budget(self.num_params, in_features), self.hidden)
