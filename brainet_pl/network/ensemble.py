"""Deep ensembles on one structure: M networks of equal wiring and separate weights, computed as one batched network.

The wiring is a tree with one branch a node: the MAP structure of a learned tree (BRAINet inside Deep Ensembles), or
`stacked_tree`, plain dense layers. A level of all members is one batched matrix product.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import MOST_PARAMS, MOST_PASSES, Budget, Head, HeadSettings, Norm, Outputs
from brainet_pl.network.executor import Executor
from brainet_pl.network.plan import build_plan
from brainet_pl.network.widths import count_parameters, solve_width
from brainet_pl.structure.ggt import GGT, Branch, Leaf, Node
from brainet_pl.structure.ggt import Tree as TreeNode


def stacked_tree(in_features: int, hidden: int) -> GGT:
    """Dense layers one upon the other: `hidden` nodes over all d variables, each with one branch and no ancestors."""
    base.check_hidden(hidden)
    variables = tuple(range(in_features))
    tree: TreeNode = Leaf(variables, tuple(() for _ in variables), 0.0)
    for _ in range(hidden):
        tree = Node(variables, (Branch((), tree),))
    return GGT(tree, in_features)


class EnsembleHead(Head):
    """M networks that share a wiring and nothing else: features (B, d) → (M, B, O), one row for each member.

    Every layer is dense → batch norm → activation (→ dropout), as in `BRAINetHead`; its members are initialised, train
    and predict exactly as M such heads would, one after the other.

    Args:
        ggt: The wiring; of a tree with several branches a node, the MAP sub-network.
        out_features: O, the number of outputs.
        num_params: Budget of parameters of all members together.
        members: M, the number of networks.
        min_width: Smallest number of neurons of a layer.
        activation: One of relu, gelu, silu, tanh, elu.
        norm: "batch", or None for a bias instead.
        dropout: Dropout rate of the outputs of layers; with it, `passes` draws masks.
        momentum: Momentum of the running statistics of the norm.
        eps: Number that the norm adds to variances.
    """

    def __init__(
        self,
        ggt: GGT,
        out_features: int,
        num_params: int,
        members: int = 5,
        *,
        min_width: int = 1,
        activation: str = "relu",
        norm: Norm = "batch",
        dropout: float = 0.0,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        members = checks.whole("members", members, 1, 1000)
        num_params = checks.whole("num_params", num_params, 1, MOST_PARAMS)
        min_width = checks.whole("min_width", min_width, 1, 10**6)
        wiring = ggt.only(ggt.map())
        self.in_features, out_features = base.check_sizes(ggt.num_variables, out_features)
        self.out_features, self.members = out_features, members
        self.dropout = checks.share("dropout", dropout)
        factor = solve_width(wiring, num_params // members, out_features, min_width, 2 if base.check_norm(norm) else 1)
        self.plan = build_plan(wiring, factor, min_width, members=members)
        settings = {"members": members, "momentum": momentum, "eps": eps}
        self.layers = Executor(self.plan, activation=activation, norm=norm, **settings)  # type: ignore[arg-type]
        self.out_weight = nn.Parameter(torch.empty(members, out_features, len(self.plan.root_rows)))
        self.out_bias = nn.Parameter(torch.empty(members, out_features, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, each layer of each member as `nn.Linear` would."""
        self.layers.reset_parameters()
        bound = 1.0 / math.sqrt(self.out_weight.shape[2])
        with torch.no_grad():
            self.out_weight.uniform_(-bound, bound)
            self.out_bias.uniform_(-bound, bound)

    def extra_repr(self) -> str:
        """Says what `print(head)` shows of it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, members={self.members}, "
            f"num_params={self.num_params:,}, depth={self.plan.ggt.depth}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d), or (M, B, d) of each member, to (M, B, O); dropout only while training."""
        x = self._samples(x)
        if not self.training:
            return self._emit(self.layers.run_evaluate(x))
        return self._emit(self.layers.run_train(x, self.layers.draw(1, 1), self.dropout)[:, 0])

    def passes(self, x: Tensor, count: int) -> Outputs:
        """Maps features (B, d) or (M, B, d) to (M, B, O); with dropout to (M·T, B, O), T masks for each member."""
        x = self._samples(x)
        if not self.dropout:
            return Outputs(self._emit(self.layers.run_evaluate(x)))
        count = checks.whole("passes", count, 1, MOST_PASSES)
        outputs = self._emit(self.layers.run_evaluate(torch.cat([x] * count, dim=-2), self.dropout))  # (M, T·B, O)
        return Outputs(outputs.reshape(self.members * count, x.shape[-2], self.out_features))

    def _samples(self, x: Tensor) -> Tensor:
        """The samples (1, B, d) of an only member as (B, d), and all others as they are."""
        return x.squeeze(0) if self.members == 1 and x.dim() == 3 else x

    def _emit(self, root: Tensor) -> Tensor:
        """The root's rows (M, R, B) → outputs (M, B, O)."""
        return torch.baddbmm(self.out_bias, self.out_weight, root).transpose(1, 2)


class Ensemble(HeadSettings):
    """A deep ensemble of plain dense networks, trained side by side as one batched network.

    Args:
        members: Number of networks.
        num_params: Budget of all members together; "auto" is 16,000, or 250 for each feature where that is more, and
            for each output beyond 16 twice what a linear layer has for it.
        hidden: Number of hidden layers of each member.
        norm: "batch" for batch norm in every layer, or null for a bias instead.
        dropout: Dropout rate of the outputs of layers; above 0 each pass also draws a dropout mask for each member.
    """

    def __init__(
        self,
        members: int = 5,
        num_params: Budget = "auto",
        hidden: int = 2,
        norm: Norm = "batch",
        dropout: float = 0.0,
    ) -> None:
        self.members, self.num_params = checks.whole("members", members, 1, 1000), base.check_budget(num_params)
        self.hidden, self.norm = base.check_hidden(hidden), base.check_norm(norm)
        self.dropout = checks.share("dropout", dropout)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> EnsembleHead:
        """The head on stacked layers."""
        in_features, out_features = base.check_sizes(in_features, out_features)
        wiring = stacked_tree(in_features, self.hidden)
        settings = {"norm": self.norm, "dropout": self.dropout}
        budget = base.resolve_budget(self.num_params, in_features, out_features=out_features)
        return EnsembleHead(wiring, out_features, budget, self.members, **settings)  # type: ignore[arg-type]


class TreeEnsemble(HeadSettings):
    """A deep ensemble whose members are all wired by the best structure of the learned tree.

    Args:
        members: Number of networks.
        num_params: Budget of all members together; "auto" is 16,000, or 250 for each feature, or twice what the
            structure needs at the least, whichever is more; each output beyond 16 adds twice what a linear layer has
            for it.
        min_width: Smallest number of neurons of a layer.
        norm: "batch" for batch norm in every layer, or null for a bias instead.
        dropout: Dropout rate of the outputs of layers; above 0 each pass also draws a dropout mask for each member.
    """

    needs_tree: ClassVar[bool] = True

    def __init__(
        self,
        members: int = 5,
        num_params: Budget = "auto",
        min_width: int = 1,
        norm: Norm = "batch",
        dropout: float = 0.0,
    ) -> None:
        self.members, self.dropout = checks.whole("members", members, 1, 1000), checks.share("dropout", dropout)
        self.num_params, self.norm = base.check_budget(num_params), base.check_norm(norm)
        self.min_width = checks.whole("min_width", min_width, 1, 10**6)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> EnsembleHead:
        """The networks on the tree's best structure."""
        tree, per_neuron = base.need_tree(ggt, self), 2 if self.norm else 1
        _, out_features = base.check_sizes(tree.num_variables, out_features)
        least = count_parameters(tree.only(tree.map()), 0.0, out_features, self.min_width, per_neuron)
        budget = base.resolve_budget(
            self.num_params, tree.num_variables, self.members * least, out_features=out_features
        )
        settings = {"min_width": self.min_width, "norm": self.norm, "dropout": self.dropout}
        head = EnsembleHead(tree, out_features, budget, self.members, **settings)  # type: ignore[arg-type]
        head.ggt = head.plan.ggt
        return head


class TreeDropout(TreeEnsemble):
    """MC-dropout on a single network that is wired by the best structure of the learned tree.

    Args:
        rate: Share of the outputs of layers that each pass drops.
        num_params: Budget of parameters; "auto" is 16,000, or 250 for each feature, or twice what the structure needs
            at the least, whichever is more; each output beyond 16 adds twice what a linear layer has for it.
        min_width: Smallest number of neurons of a layer.
        norm: "batch" for batch norm in every layer, or null for a bias instead.
    """

    def __init__(
        self, rate: float = 0.1, num_params: Budget = "auto", min_width: int = 1, norm: Norm = "batch"
    ) -> None:
        self.rate = checks.share("rate", rate)
        super().__init__(1, num_params, min_width, norm, self.rate)
