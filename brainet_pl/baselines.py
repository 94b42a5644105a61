"""Heads to compare with: linear, MLP, MC-dropout, Bayes by backprop; the deep ensemble is in `ensemble.py`.

Each maps features (B, d) to logits (B, C) in `forward`, and to (T, B, C) in `passes`.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def hidden_width(d: int, out: int, hidden: int, num_params: int, norm: bool = True) -> int:
    """The width of `hidden` equal layers whose network (dense, batch norm, ReLU; dense) comes nearest a budget."""

    if hidden < 1:
        raise ValueError(f"expected at least 1 hidden layer, got {hidden}: without one, use the linear head")

    def size(w: int) -> int:
        return d * w + (hidden - 1) * w * w + (1 + norm) * hidden * w + (w + 1) * out

    best = 1
    while size(best + 1) <= num_params:
        best += 1
    return min((best, best + 1), key=lambda w: abs(size(w) - num_params))


def mlp_layers(
    d: int, out: int, hidden: int, width: int, dropout: float = 0.0, norm: Literal["batch"] | None = "batch"
) -> nn.Sequential:
    """dense → batch norm → ReLU (→ dropout), `hidden` times, then dense: the layers of a BRAINet head, stacked."""
    parts: list[nn.Module] = []
    for i in range(hidden):
        parts.append(nn.Linear(d if i == 0 else width, width, bias=norm is None))
        parts += [nn.BatchNorm1d(width), nn.ReLU()] if norm else [nn.ReLU()]
        parts += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*parts, nn.Linear(width if hidden else d, out))


class LinearHead(nn.Module):
    """One dense layer: what most classifiers end in."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.layers = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """(B, d) → (B, C)."""
        return torch.as_tensor(self.layers(x))

    def passes(self, x: Tensor, passes: int) -> Tensor:
        """(B, d) → (1, B, C): there is only one network."""
        return torch.as_tensor(self(x)).unsqueeze(0)


class MLPHead(LinearHead):
    """Stacked dense layers with batch norm, or a bias instead; with `dropout`, MC-dropout: `passes` draws masks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_params: int,
        hidden: int = 2,
        dropout: float = 0.0,
        norm: Literal["batch"] | None = "batch",
    ) -> None:
        nn.Module.__init__(self)
        width = hidden_width(in_features, out_features, hidden, num_params, norm is not None)
        self.layers = mlp_layers(in_features, out_features, hidden, width, dropout, norm)  # type: ignore[assignment]
        self.dropout = dropout

    def passes(self, x: Tensor, passes: int) -> Tensor:
        """(B, d) → (T, B, C): T masks, all in one large batch; batch norm as in evaluation."""
        if not self.dropout:
            return super().passes(x, passes)
        y = x.repeat(passes, 1)
        for layer in self.layers:  # type: ignore[attr-defined]
            y = F.dropout(y, layer.p, training=True) if isinstance(layer, nn.Dropout) else layer(y)
        return y.view(passes, len(x), -1)


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
        """KL(q ‖ prior) in nats."""
        sigma = F.softplus(self.rho)
        return (0.5 * (sigma**2 + self.mean**2 - 1.0) - sigma.log()).sum()


class BayesHead(nn.Module):
    """Bayes by backprop: Gaussian weights, so about half as many neurons for the same number of parameters."""

    def __init__(self, in_features: int, out_features: int, num_params: int, hidden: int = 2) -> None:
        super().__init__()
        width = hidden_width(in_features, out_features, hidden, num_params // 2)
        sizes = [in_features] + [width] * hidden
        self.hidden = nn.ModuleList(BayesLinear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(hidden))
        self.output = BayesLinear(sizes[-1], out_features)

    def forward(self, x: Tensor) -> Tensor:
        """(B, d) → (B, C) with freshly drawn weights."""
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return torch.as_tensor(self.output(x))

    def passes(self, x: Tensor, passes: int) -> Tensor:
        """(B, d) → (T, B, C): T draws of the weights."""
        return torch.as_tensor(self(x.repeat(passes, 1)).view(passes, len(x), -1))

    def penalty(self) -> Tensor:
        """KL divergence of all layers; divide by the number of training samples."""
        layers = [*self.hidden, self.output]
        return torch.stack([layer.divergence() for layer in layers if isinstance(layer, BayesLinear)]).sum()
