"""TabM (Gorishniy, Kotelnikov & Babenko, 2025): members of one network that differ by vectors beside shared weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import Budget, Head, HeadSettings, Outputs
from brainet_pl.structure.ggt import GGT


class EnsembleLinear(nn.Module):
    """y = s ⊙ W(r ⊙ x) + b: W is shared by the members, each has an r, an s and a b of its own.

    The authors' initialisation: all members begin with the same bias, and all adapters with 1 but, in the first layer,
    those of the inputs, which are random signs.
    """

    def __init__(self, members: int, in_features: int, out_features: int, first: bool) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        signs = torch.randint(2, (members, in_features)) * 2.0 - 1.0
        self.r = nn.Parameter(signs if first else torch.ones(members, in_features))
        self.s = nn.Parameter(torch.ones(members, out_features))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound).repeat(members, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (M, B, I) or (B, I) to (M, B, O)."""
        y = F.linear(x * self.r.unsqueeze(1), self.weight)
        return torch.addcmul(self.bias.unsqueeze(1), y, self.s.unsqueeze(1))


class TabMHead(Head):
    """`hidden` layers of M members with shared weights, and an output layer for each member."""

    def __init__(self, in_features: int, out_features: int, width: int, hidden: int, members: int, rate: float) -> None:
        super().__init__()
        self.in_features, self.rate = in_features, rate
        sizes = [in_features] + [width] * hidden
        self.layers = nn.ModuleList(EnsembleLinear(members, sizes[i], width, i == 0) for i in range(hidden))
        bound = 1.0 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(members, width, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to the outputs (M, B, O) of the members."""
        y = base.as_features(x, self.in_features, self.weight)
        for layer in self.layers:
            y = F.dropout(F.relu(layer(y)), self.rate, self.training)
        return torch.baddbmm(self.bias, y, self.weight)

    def passes(self, x: Tensor, count: int) -> Outputs:
        """The members' outputs, whatever the count."""
        return Outputs(torch.as_tensor(self(x)))


class TabM(HeadSettings):
    """M members that share the weights of all hidden layers.

    Args:
        members: number of members.
        num_params: budget of parameters, as of other heads.
        hidden: number of hidden layers.
        rate: share of the outputs of hidden layers that training drops.
    """

    def __init__(self, members: int = 8, num_params: Budget = "auto", hidden: int = 2, rate: float = 0.1) -> None:
        self.members, self.num_params = checks.whole("members", members, 1, 1000), base.check_budget(num_params)
        self.hidden, self.rate = base.check_hidden(hidden), checks.share("rate", rate)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> TabMHead:
        """The network whose size comes nearest the budget."""
        d, out = base.check_sizes(in_features, out_features)
        budget = base.resolve_budget(self.num_params, d, out_features=out)

        def count(width: int) -> int:
            shared = d * width + (self.hidden - 1) * width * width
            own = d + (self.hidden - 1) * width + 2 * self.hidden * width + (width + 1) * out
            return shared + self.members * own

        width = 1
        while abs(count(width + 1) - budget) < abs(count(width) - budget):
            width += 1
        return TabMHead(d, out, width, self.hidden, self.members, self.rate)
