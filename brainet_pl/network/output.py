"""The last layer of a tree: dense, with weights of its own for each branch of the root."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


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
        return self._add_bias(torch.bmm(self.weight, rows).transpose(1, 2))

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
        return self._add_bias(torch.mm(weight, rows.flatten(0, 1)).t())

    def _add_bias(self, outputs: Tensor) -> Tensor:
        return outputs + self.bias.to(outputs.dtype)  # under autocast a product has fewer bits than the bias
