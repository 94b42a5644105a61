"""Networks to compare with: one dense layer, stacked dense layers, MC-dropout on them, and Bayes by backprop."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import MOST_PASSES, Budget, Head, HeadSettings, Norm, Outputs
from brainet_pl.structure.ggt import GGT


class LinearHead(Head):
    """One dense layer, as the classification layer of most networks is.

    Args:
        in_features: d, the number of features.
        out_features: O, the number of outputs.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.layers = nn.Linear(*base.check_sizes(in_features, out_features))

    @property
    def averages_one(self) -> bool:
        """There is only one network."""
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to outputs (B, O)."""
        return torch.as_tensor(self.layers(base.as_features(x, self.layers.in_features, self.layers.weight)))

    def passes(self, x: Tensor, count: int) -> Outputs:
        """Maps features (B, d) to outputs (1, B, O): there is only one network."""
        return Outputs(torch.as_tensor(self(x)).unsqueeze(0))


class Linear(HeadSettings):
    """One dense layer, for comparison. It has no settings."""

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> LinearHead:
        """Builds the dense layer for so many features and outputs."""
        return LinearHead(in_features, out_features)


def hidden_width(d: int, out: int, hidden: int, num_params: int, norm: bool = True) -> int:
    """The width of `hidden` equal layers whose network (dense, batch norm, ReLU; dense) comes nearest a budget."""
    base.check_hidden(hidden)

    def size(w: int) -> int:
        return d * w + (hidden - 1) * w * w + (1 + norm) * hidden * w + (w + 1) * out

    best = 1
    while size(best + 1) <= num_params:
        best += 1
    return min((best, best + 1), key=lambda w: abs(size(w) - num_params))


def mlp_layers(d: int, out: int, hidden: int, width: int, dropout: float = 0.0, norm: Norm = "batch") -> nn.Sequential:
    """dense → batch norm → ReLU (→ dropout), `hidden` times, then dense: the layers of a BRAINet head, stacked."""
    parts: list[nn.Module] = []
    for i in range(hidden):
        parts.append(nn.Linear(d if i == 0 else width, width, bias=norm is None))
        parts += [nn.BatchNorm1d(width), nn.ReLU()] if norm else [nn.ReLU()]
        parts += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*parts, nn.Linear(width if hidden else d, out))


class MLPHead(Head):
    """Stacked dense layers with batch norm, or a bias instead; with `dropout`, MC-dropout: `passes` draws masks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_params: int,
        hidden: int = 2,
        dropout: float = 0.0,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        in_features, out_features = base.check_sizes(in_features, out_features)
        self.in_features = in_features
        width = hidden_width(in_features, out_features, hidden, num_params, norm is not None)
        self.layers = mlp_layers(in_features, out_features, hidden, width, dropout, norm)
        self.dropout = checks.share("dropout", dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to outputs (B, O)."""
        return torch.as_tensor(self.layers(base.as_features(x, self.in_features, self._weights)))

    @property
    def averages_one(self) -> bool:
        """There is only one network, unless passes draw dropout masks."""
        return not self.dropout

    @property
    def _weights(self) -> Tensor:
        return next(self.layers.parameters())

    def passes(self, x: Tensor, count: int) -> Outputs:
        """Maps features (B, d) to (1, B, O); with dropout to (T, B, O), T masks, all in one large batch.

        Batch norm is as in evaluation.
        """
        if not self.dropout:
            return Outputs(torch.as_tensor(self(x)).unsqueeze(0))
        y = base.as_features(x, self.in_features, self._weights).repeat(
            checks.whole("passes", count, 1, MOST_PASSES), 1
        )
        for layer in self.layers:
            y = F.dropout(y, layer.p, training=True) if isinstance(layer, nn.Dropout) else layer(y)
        return Outputs(y.view(count, x.shape[0], -1))


class MLP(HeadSettings):
    """Stacked dense layers with batch norm and ReLU, one network, for comparison.

    Args:
        num_params: Budget of parameters; "auto" is 16,000, or 250 for each feature where that is more, and for each
            output beyond 16 twice what a linear layer has for it.
        hidden: Number of hidden layers.
        norm: "batch" for batch norm in every layer, or null for a bias instead.
    """

    rate = 0.0  # of dropout

    def __init__(self, num_params: Budget = "auto", hidden: int = 2, norm: Norm = "batch") -> None:
        self.num_params, self.hidden, self.norm = (
            base.check_budget(num_params),
            base.check_hidden(hidden),
            base.check_norm(norm),
        )

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> MLPHead:
        """Builds the network for so many features and outputs."""
        budget = base.resolve_budget(self.num_params, in_features, out_features=out_features)
        return MLPHead(in_features, out_features, budget, self.hidden, self.rate, self.norm)


class MCDropout(MLP):
    """MC-dropout (Gal & Ghahramani 2016): stacked dense layers whose passes draw dropout masks.

    Args:
        rate: Share of the outputs of hidden layers that each pass drops.
        num_params: Budget of parameters; "auto" is 16,000, or 250 for each feature where that is more, and for each
            output beyond 16 twice what a linear layer has for it.
        hidden: Number of hidden layers.
        norm: "batch" for batch norm in every layer, or null for a bias instead.
    """

    def __init__(self, rate: float = 0.1, num_params: Budget = "auto", hidden: int = 2, norm: Norm = "batch") -> None:
        super().__init__(num_params, hidden, norm)
        self.rate = checks.share("rate", rate)


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
        return BayesHead(
            in_features,
            out_features,
            base.resolve_budget(self.num_params, in_features, out_features=out_features),
            self.hidden,
        )
