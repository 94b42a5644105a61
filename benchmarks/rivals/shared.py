"""Structures that share weights: what they have in common once, and an adapter of rank one for each structure."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl.network import Tree, base
from brainet_pl.network.base import Budget, Head, HeadSettings, Outputs
from brainet_pl.network.output import Skip
from brainet_pl.network.widths import READS, Fields, fields_of, split_width
from brainet_pl.structure.ggt import GGT, Branch, Node

GAIN = 0.2  # of initial weights under a norm, as those of `BRAINetHead`


class SharedHead(Head):
    """Fields, two hidden layers and an output layer for each branch of the root.

    A field of the same variable reads a neighbour by the same weight in all structures that have this neighbour. The
    hidden layers are one matrix each; a neuron of the first sees what its layer sees in the structure at hand: an
    ancestor set and the descendant. Each structure scales the inputs and the outputs of every layer by vectors of its
    own, and has norms and outputs of its own.
    """

    reads: Tensor
    pairs: Tensor
    mask: Tensor

    def __init__(self, ggt: GGT, fields: Fields, out_features: int, width: int) -> None:
        super().__init__()
        assert isinstance(ggt.root, Node)
        reads = np.array(fields.reads)  # (s, d, I): all know as many neighbours
        self.structures, d, self.inputs = reads.shape
        self.in_features = d
        pairs = np.arange(d)[None, :, None] * d + reads
        known, numbers = np.unique(pairs, return_inverse=True)
        self.register_buffer("reads", torch.as_tensor(reads), persistent=False)
        self.register_buffer("pairs", torch.as_tensor(numbers.reshape(pairs.shape)), persistent=False)
        mask = np.stack([_mask(branch, d, width) for branch in ggt.root.branches])
        self.register_buffer("mask", torch.as_tensor(mask, dtype=torch.float32), persistent=False)
        self.field = _uniform(self.inputs, len(known))
        self.first, self.second = _uniform(d, width, d), _uniform(width, width, width)
        sizes = {"in0": d, "out0": d, "in1": d, "out1": width, "in2": width, "out2": width}
        self.adapters = nn.ParameterDict({k: nn.Parameter(torch.ones(self.structures, n)) for k, n in sizes.items()})
        self.norms = nn.ModuleList(nn.BatchNorm1d(self.structures * n) for n in (d, width, width))
        self.weight = nn.Parameter(torch.zeros(self.structures, width, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.skip = Skip(d, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to the outputs (s, B, O) of the structures."""
        a = self.adapters
        weight = self.field[self.pairs] * torch.stack([a["in0"][t][own] for t, own in enumerate(self.reads)])
        rows = x.t().contiguous()
        sums = F.embedding_bag(
            self.reads.flatten(0, 1), rows, per_sample_weights=weight.flatten(0, 1).contiguous(), mode="sum"
        )
        y = self._end(0, sums.view(self.structures, -1, len(x)) * a["out0"].unsqueeze(2))
        wired = self.first * self.mask * a["in1"].unsqueeze(1) * a["out1"].unsqueeze(2)
        y = self._end(1, torch.bmm(wired, y))
        y = self._end(2, torch.bmm(self.second * a["in2"].unsqueeze(1) * a["out2"].unsqueeze(2), y))
        return torch.bmm(y.transpose(1, 2), self.weight) + self.bias + self.skip(x)

    def passes(self, x: Tensor, count: int) -> Outputs:
        """The structures' outputs, whatever the count."""
        return Outputs(torch.as_tensor(self(x)))

    def _end(self, layer: int, y: Tensor) -> Tensor:
        """Norm and activation of (s, rows, B)."""
        flat = y.flatten(0, 1).t()
        return F.relu(self.norms[layer](flat)).t().reshape(y.shape)


def _uniform(fan_in: int, *shape: int) -> nn.Parameter:
    bound = GAIN / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


def _mask(branch: Branch, d: int, width: int) -> np.ndarray:
    """(width, d) what each neuron of the first hidden layer sees: the descendant, and its share of the ancestors."""
    seen = np.zeros((width, d), dtype=bool)
    seen[:, list(branch.descendant.variables)] = True
    if not branch.ancestors:
        return seen
    top = 0
    for ancestor, share in zip(
        branch.ancestors, split_width(width, [len(a.variables) for a in branch.ancestors], 0), strict=True
    ):
        seen[top : top + share, list(ancestor.variables)] = True
        top += share
    return seen


class Shared(HeadSettings):
    """Structures of a tree with shared weights, at the size of a budget."""

    needs_tree = True

    def __init__(self, num_params: Budget = "auto") -> None:
        self.num_params = base.check_budget(num_params)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> SharedHead:
        """The head whose size comes nearest the budget."""
        ggt = base.need_tree(ggt, self)
        fields = fields_of(ggt, READS)
        assert fields is not None
        budget = (
            Tree().build(in_features, out_features, ggt).num_params if self.num_params == "auto" else self.num_params
        )
        width, least = 1, SharedHead(ggt, fields, out_features, 1).num_params
        slope = SharedHead(ggt, fields, out_features, 2).num_params - least
        while least + (width - 1) * slope + (width - 1) * width < budget:
            width += 1
        return SharedHead(ggt, fields, out_features, max(1, width - 1))
