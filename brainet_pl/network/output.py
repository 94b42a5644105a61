"""What the outputs of a tree are made of: a dense layer for each branch of its root, and one past the tree."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl.network.base import Norm
from brainet_pl.network.weights import join_rows

SkipKind = Literal["auto", "linear", "base_logits", "base_logits_or_linear"]
SKIPS = (*get_args(SkipKind), None)


class Skip(nn.Module):
    """Features (B, d) → outputs (B, O), linear, of features that are brought to a mean of 0 and a common scale of 1.

    One scale for all features: a pixel that hardly ever varies is not blown up to the size of the others. It starts at
    zero, and has no bias: the output layer that it is added to has one.

    Args:
        in_features: d, the number of features.
        out_features: O, the number of outputs.
        norm: "batch" scales features, by the batch while training and by kept statistics afterwards; None does not.
        momentum: Momentum of the running statistics of the norm.
        eps: Number that the norm adds to variances.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, in_features: int, out_features: int, norm: Norm = "batch", momentum: float = 0.1, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.norm, self.momentum, self.eps = norm, momentum, eps
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_buffer("running_mean", torch.zeros(in_features if norm else 0))
        self.register_buffer("running_var", torch.ones(in_features if norm else 0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Puts all weights back to zero, so that the layer adds nothing."""
        with torch.no_grad():
            self.weight.zero_()
            self.running_mean.zero_()
            self.running_var.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to what is added to the outputs, (B, O)."""
        x = x.to(self.weight.dtype)
        if self.norm is None:
            return F.linear(x, self.weight)
        if not self.training:
            weight = self.weight * torch.rsqrt(self.running_var.mean() + self.eps)
            return F.linear(x, weight, -(weight @ self.running_mean))
        mean = x.mean(dim=0)
        centred = x - mean
        var = centred.square().mean(dim=0)  # many times as fast as torch.var
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(var.to(self.running_var.dtype), self.momentum)
        return F.linear(centred, self.weight) * torch.rsqrt(var.mean() + self.eps)


class BranchOutput(nn.Module):
    """From the rows of the root to the outputs. Each branch of the root has its own weights, all have one bias.

    The branches of a node are alternatives: each gives its own features in the same rows. One layer for all of them
    would ask row i of every branch to mean the same.

    Args:
        branches: s, the number of branches of the root.
        rows: R, the number of neurons that each of them gives.
        out_features: O, the number of outputs.
    """

    def __init__(self, branches: int, rows: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(branches, out_features, rows))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each branch as `nn.Linear` would be."""
        bound = 1.0 / math.sqrt(max(1, self.weight.shape[2]))
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            self.bias.uniform_(-bound, bound)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows (s, R, N) of every branch → outputs (s, N, O)."""
        return self._add_bias(torch.bmm(rows.transpose(1, 2), self.weight.transpose(1, 2)))

    def of(self, rows: Tensor, branch: Tensor) -> Tensor:
        """Rows (U, R, N) of the branches (U,) → outputs (U, N, O)."""
        weight = self.weight.expand(len(rows), -1, -1) if len(self.weight) == 1 else self.weight[branch]
        return self._add_bias(torch.bmm(weight, rows).transpose(1, 2))

    def each(self, rows: Tensor, branch: Tensor) -> Tensor:
        """Rows (R, N), each column of its own branch (N,) → outputs (N, O)."""
        every = self(rows.expand(len(self.weight), -1, -1))  # a few branches: all are cheaper than a search for the one
        return torch.as_tensor(every[branch, torch.arange(rows.shape[1], device=rows.device)])

    def mixed(self, rows: Tensor) -> Tensor:
        """Rows (s, R, N), each branch times its probability → the mean of the branches' outputs (N, O)."""
        weight = self.weight.transpose(0, 1).flatten(1)  # (O, s·R)
        return self._add_bias(torch.mm(weight, join_rows(rows)).t())

    def _add_bias(self, outputs: Tensor) -> Tensor:
        return outputs + self.bias.to(outputs.dtype)  # under autocast a product has fewer bits than the bias
