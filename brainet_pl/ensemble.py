"""Deep ensembles on one structure: M networks of equal wiring and separate weights, computed as one batched network.

The wiring is a tree with one branch a node: the MAP structure of a learned tree (BRAINet inside Deep Ensembles), or
`stacked_tree`, plain dense layers. A level of all members is one batched matrix product.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl.head import ACTIVATIONS
from brainet_pl.plan import build_plan, masked_bucket, solve_width
from brainet_pl.structure.ggt import GGT, Branch, Leaf, Node, Tree


def stacked_tree(in_features: int, hidden: int) -> GGT:
    """Dense layers one upon the other: `hidden` nodes over all d variables, each with one branch and no ancestors."""
    if hidden < 1:
        raise ValueError(f"expected at least 1 hidden layer, got {hidden}: without one, use the linear head")
    variables = tuple(range(in_features))
    tree: Tree = Leaf(variables, tuple(() for _ in variables), 0.0)
    for _ in range(hidden):
        tree = Node(variables, (Branch((), tree),))
    return GGT(tree, in_features)


class EnsembleHead(nn.Module):
    """M networks that share a wiring and nothing else: features (B, d) → (M, B, O), one row for each member.

    Every layer is dense → batch norm → activation (→ dropout), as in `BRAINetHead`; its members are initialised, train
    and predict exactly as M such heads would, one after the other.

    Args:
        ggt: the wiring; of a tree with several branches a node, the MAP sub-network.
        out_features: O.
        num_params: budget of all members together.
        members: M.
        min_width: neurons that every layer has at the least.
        activation: one of relu, gelu, silu, tanh, elu.
        norm: "batch", or None for a bias instead.
        dropout: of the outputs of layers; with it, `passes` draws masks.
    """

    weight: nn.Parameter
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        ggt: GGT,
        out_features: int,
        num_params: int,
        members: int = 5,
        *,
        min_width: int = 1,
        activation: str = "relu",
        norm: Literal["batch"] | None = "batch",
        dropout: float = 0.0,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if members < 1:
            raise ValueError(f"expected at least 1 member, got {members}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"expected activation to be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if norm not in ("batch", None):
            raise ValueError(f"expected norm to be 'batch' or None, got {norm!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"expected a dropout of at least 0 and below 1, got {dropout}")
        self.ggt = ggt.only(ggt.map())
        self.in_features, self.out_features, self.members = ggt.num_variables, out_features, members
        self.activation, self.norm, self.dropout = activation, norm, dropout
        self.momentum, self.eps = momentum, eps
        factor = solve_width(self.ggt, num_params // members, out_features, min_width, 2 if norm else 1)
        self.plan = build_plan(self.ggt, factor, min_width)
        neurons = members * self.plan.num_neurons
        self.weight = nn.Parameter(torch.empty(members, self.plan.num_weights))
        # By level, then by member: so the neurons of a level lie together.
        self.scale = nn.Parameter(torch.empty(neurons)) if norm else None
        self.bias = nn.Parameter(torch.empty(neurons))
        self.out_weight = nn.Parameter(torch.empty(members, out_features, len(self.plan.root_rows)))
        self.out_bias = nn.Parameter(torch.empty(members, out_features, 1))
        self.register_buffer("running_mean", torch.zeros(neurons if norm else 0))
        self.register_buffer("running_var", torch.ones(neurons if norm else 0))
        self._register_plan()
        self.reset_parameters()

    def _register_plan(self) -> None:
        """Where each level reads, and where its weights stand in a dense block, zero where a layer does not look."""
        position = np.empty(self.plan.num_weights, dtype=np.int64)
        self._shapes: list[tuple[int, int]] = []
        offset = 0
        for h, level in enumerate(self.plan.levels):
            bucket = masked_bucket(level, self.plan.node_rows)
            position[bucket.weights[:, 1]] = offset + bucket.weights[:, 0]
            self._shapes.append((bucket.shape[1], bucket.shape[2]))
            offset += math.prod(bucket.shape)
            self.register_buffer(f"_rows_{h}", torch.as_tensor(bucket.rows[0]), persistent=False)
        dense = np.array_equal(position, np.arange(offset))
        self._assembled = 0 if dense else offset
        self.register_buffer("_position", torch.as_tensor(position), persistent=False)
        self.register_buffer("_root_rows", torch.as_tensor(self.plan.root_rows), persistent=False)

    def reset_parameters(self) -> None:
        """Each layer as `nn.Linear` would be: uniform within 1/√fan_in; norm to the identity."""
        with torch.no_grad():
            for level in self.plan.levels:
                for layer in level.layers:
                    bound = 1.0 / math.sqrt(layer.fan_in)
                    self.weight[:, layer.first_weight :][:, : layer.fan_in * layer.width].uniform_(-bound, bound)
            if self.scale is not None:
                self.scale.fill_(1.0)
            self.bias.zero_()
            self.running_mean.zero_()
            self.running_var.fill_(1.0)
            bound = 1.0 / math.sqrt(self.out_weight.shape[2])
            self.out_weight.uniform_(-bound, bound)
            self.out_bias.uniform_(-bound, bound)

    @property
    def num_params(self) -> int:
        """Trainable parameters of all members together."""
        return sum(p.numel() for p in self.parameters())

    def extra_repr(self) -> str:
        """For `print(head)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, members={self.members}, "
            f"num_params={self.num_params:,}, depth={self.ggt.depth}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, d), or (M, B, d) with samples of its own for each member → (M, B, O); dropout only while training."""
        return self._run(x, self.dropout if self.training else 0.0)

    def passes(self, x: Tensor, passes: int) -> Tensor:
        """(B, d) or (M, B, d) → (M, B, O); with dropout (M·T, B, O), T masks for each member in turn."""
        if not self.dropout:
            return self._run(x, 0.0)
        outputs = self._run(torch.cat([x] * passes, dim=-2), self.dropout)  # (M, T·B, O)
        return outputs.reshape(self.members * passes, x.shape[-2], self.out_features)

    def _run(self, x: Tensor, dropout: float) -> Tensor:
        shared = x.dim() == 2
        if x.shape[-1] != self.in_features or not (shared or (x.dim() == 3 and len(x) == self.members)):
            raise ValueError(
                f"expected features of shape (batch, {self.in_features}) or ({self.members}, batch, "
                f"{self.in_features}), got {tuple(x.shape)}"
            )
        if self.training and self.norm and x.shape[-2] < 2:
            raise ValueError(
                "expected at least 2 samples in a training batch for batch norm, got 1: use drop_last=True in the "
                "training loader, or norm=None"
            )
        inputs = x.transpose(-1, -2)
        state = inputs.expand(self.members, -1, -1)  # (M, rows, B), inputs and then level after level
        for h, weight in enumerate(self._weights()):
            rows = self._buffers[f"_rows_{h}"]
            assert rows is not None
            if h == 0 and shared:  # the lowest level reads inputs alone, the same for all members
                y = torch.mm(weight.flatten(0, 1), inputs.index_select(0, rows)).view(self.members, -1, len(x))
            else:
                y = torch.bmm(weight, state.index_select(1, rows))
            y = ACTIVATIONS[self.activation](self._normalise(h, y))
            y = F.dropout(y, dropout, training=True) if dropout else y
            state = torch.cat([state, y], dim=1)
        root = state.index_select(1, self._buffers["_root_rows"])  # type: ignore[arg-type]
        return torch.baddbmm(self.out_bias, self.out_weight, root).transpose(1, 2)

    def _weights(self) -> list[Tensor]:
        """(M, O, I) of each level."""
        flat = self.weight
        if self._assembled:
            position = self._buffers["_position"]
            assert position is not None
            flat = flat.new_zeros(self.members, self._assembled).index_copy(1, position, flat)  # type: ignore[assignment]
        parts = flat.split([out * fan_in for out, fan_in in self._shapes], dim=1)  # type: ignore[no-untyped-call]
        return [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _normalise(self, h: int, y: Tensor) -> Tensor:
        """(M, O, B): batch norm for each neuron of each member, or the bias alone."""
        level = self.plan.levels[h]
        own = slice(self.members * level.first_neuron, self.members * (level.first_neuron + level.num_neurons))
        if self.scale is None:
            return y + self.bias[own].view(self.members, -1, 1)
        flat = F.batch_norm(
            y.reshape(1, -1, y.shape[2]),
            self.running_mean[own],
            self.running_var[own],
            self.scale[own],
            self.bias[own],
            self.training,
            self.momentum,
            self.eps,
        )
        return flat.view_as(y)
