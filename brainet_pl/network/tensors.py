"""The index tensors by which each level of a plan reads its rows, orders its neurons and picks its branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from brainet_pl.network.plan import Level, Plan
from brainet_pl.structure.ggt import Node


class Slice(NamedTuple):
    """Rows that lie together: so many `rows` of part `part`, from row `first` on."""

    part: int
    first: int
    rows: int


class BucketTensors(nn.Module):
    """Where one bucket of a level reads and writes.

    Attributes:
        shape: (G, O, I). Either G or the number of members is 1.
        slice: where its rows lie, if they lie together; else `rows` (G·I,) picks them from the level's gathered parts.
        neurons: (N, O) its neurons in the vectors over all neurons, for N = G blocks or members; -1 for padding.
    """

    rows: Tensor
    neurons: Tensor

    def __init__(self, shape: tuple[int, int, int], neurons: NDArray[np.int64]) -> None:
        super().__init__()
        self.shape = shape
        self.slice: Slice | None = None
        index_buffer(self, "rows", np.empty(0))
        index_buffer(self, "neurons", neurons)


class LevelTensors(nn.Module):
    """The index tensors of one level, as buffers that move with the module and stay out of the state dict.

    Attributes:
        neurons: where the level's neurons lie in the vectors over all neurons, which go by level, then by member.
        gathered: the parts that buckets without a slice pick their rows from; `zeros` asks for a row of zeros behind.
        arrange: order of the buckets' outputs that makes them the level's neurons; empty where they are `in_order`.
        branches: (s·W,) neurons as branches where these are `uneven`, else empty: they are in order.
        owner: (W,) node of each output row. sizes: (nodes, 1) branches of each node.
        mix: (s, W, 1) and share: (neurons,) probability of the branch that a neuron belongs to.
        upto: (nodes, 1, 1, s) probability of a branch and those before it; 1 from a node's last branch on.
    """

    arrange: Tensor
    branches: Tensor
    owner: Tensor
    sizes: Tensor
    mix: Tensor
    share: Tensor
    upto: Tensor

    def __init__(self, h: int, level: Level, plan: Plan, members: int) -> None:
        super().__init__()
        self.number, self.level = h, level
        first = members * level.first_neuron
        self.neurons = slice(first, first + members * level.num_neurons)
        self.num_branches, self.width = level.branch_neurons.shape
        arrange = np.full(level.num_neurons, -1, dtype=np.int64)
        outputs = 0
        self.ordered: list[BucketTensors] = []  # a plain list: `nn.Module` looks up its children slowly
        for bucket in level.buckets:
            flat = bucket.neurons.ravel()
            arrange[flat[flat >= 0]] = outputs + np.flatnonzero(flat >= 0)
            outputs += len(flat)
            starts = first + level.num_neurons * np.arange(members)
            absolute = np.where(bucket.neurons >= 0, bucket.neurons + starts[:, None], -1)
            self.ordered.append(BucketTensors(bucket.shape, absolute))
        self.buckets = nn.ModuleList(self.ordered)
        self.in_order = np.array_equal(arrange, np.arange(outputs))
        self.uneven = bool((level.branch_neurons < 0).any())
        sizes = [len(n.branches) if isinstance(n, Node) else 1 for n in (plan.ggt.nodes[i] for i in level.nodes)]
        index_buffer(self, "arrange", np.empty(0) if self.in_order else arrange)
        index_buffer(self, "branches", level.branch_neurons.ravel() if self.uneven else np.empty(0))
        index_buffer(self, "owner", np.repeat(np.arange(len(level.nodes)), level.node_widths))
        index_buffer(self, "sizes", np.asarray(sizes)[:, None])
        self.set_mixture([np.full(n, 1.0 / n) for n in sizes], torch.device("cpu"))
        self._find_rows(plan)

    def set_mixture(self, probabilities: Sequence[NDArray[np.float64]], device: torch.device) -> None:
        """Take the branch probabilities (s,) of each of the level's nodes."""
        level = self.level
        mix, start = np.zeros(level.branch_neurons.shape), 0
        for p, width in zip(probabilities, level.node_widths, strict=True):
            mix[: len(p), start : start + width] = p[:, None]
            start += width
        share = np.empty(level.num_neurons)
        share[level.branch_neurons[level.branch_neurons >= 0]] = mix[level.branch_neurons >= 0]
        upto = np.ones((len(probabilities), 1, 1, self.num_branches))
        for i, p in enumerate(probabilities):
            upto[i, 0, 0, : len(p) - 1] = np.cumsum(p)[:-1]
        for name, values in (("mix", mix[:, :, None]), ("share", share), ("upto", upto)):
            self.register_buffer(name, torch.as_tensor(values, dtype=torch.float32, device=device), persistent=False)

    def _find_rows(self, plan: Plan) -> None:
        """How the level finds its rows: slices where they lie together, else one gather from the parts it needs."""
        h, level = self.number, self.level
        starts = np.array([0, *(below.first_row for below in plan.levels[:h]), level.first_row])
        parts: set[int] = set()
        for bucket, tensors in zip(level.buckets, self.ordered, strict=True):
            rows = bucket.rows[0]
            part = int(np.searchsorted(starts, rows[0], side="right")) - 1
            together = len(bucket.rows) == 1 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
            if together and rows[-1] < starts[part + 1 : part + 2].sum():
                tensors.slice = Slice(part, int(rows[0] - starts[part]), len(rows))
            else:
                parts |= set((np.searchsorted(starts, bucket.rows.ravel(), side="right") - 1).tolist())
        self.zeros = h + 1 in parts  # padding points just behind the last part
        self.gathered = sorted(parts - {h + 1})
        place = np.cumsum([0, *(starts[part + 1] - starts[part] for part in self.gathered)])
        for bucket, tensors in zip(level.buckets, self.ordered, strict=True):
            if tensors.slice is None:
                part_of = np.searchsorted(starts, bucket.rows, side="right") - 1
                local = bucket.rows.copy()
                for at, part in zip(place, [*self.gathered, h + 1], strict=True):
                    local[part_of == part] += at - starts[part]
                index_buffer(tensors, "rows", local.ravel())

    def by_branch(self, neurons: Tensor) -> Tensor:
        """Turns (M, neurons, B) into (M, s, W, B), with zeros where a node has fewer than s branches."""
        if self.uneven:
            padded = torch.cat([neurons, neurons.new_zeros(len(neurons), 1, neurons.shape[2])], dim=1)
            neurons = padded.index_select(1, self.branches.remainder(padded.shape[1]))
        return neurons.view(len(neurons), self.num_branches, self.width, -1)

    def choose(self, branches: Tensor, choice: Tensor, columns: int) -> Tensor:
        """Branches (M, s, W, C·B) → (M, W, V·B), the versions that `choice` (nodes, V, samples) names."""
        members, s, width, total = branches.shape
        emitted, batch = choice.shape[1], total // columns
        if s == 1:
            return repeat_columns(branches[:, 0], emitted * batch)
        if choice.shape[2] == 1:
            row, column = (torch.arange(n, device=choice.device) for n in (width, emitted))
            place = (choice[self.owner, :, 0] * width + row[:, None]) * columns + column % columns  # (W, V)
            rows = branches.reshape(members, -1, batch).index_select(1, place.flatten())
            return rows.view(members, width, emitted * batch)
        chosen = []
        for part in choice.split(columns, dim=1):  # type: ignore[no-untyped-call]
            taken = part.flatten(1).index_select(0, self.owner)
            out = branches[:, 0, :, : taken.shape[1]]
            for t in range(1, s):
                out = torch.where(taken == t, branches[:, t, :, : taken.shape[1]], out)
            chosen.append(out)
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=2)


def repeat_columns(part: Tensor, columns: int) -> Tensor:
    """Repeats the columns of a part, (M, rows, B) → (M, rows, columns)."""
    have = part.shape[2]
    if have == columns:
        return part
    return part.repeat(1, 1, -(-columns // have)).narrow(2, 0, columns)


def index_buffer(module: nn.Module, name: str, values: NDArray[Any]) -> None:
    """Register whole numbers as a buffer that moves with the module and stays out of the state dict."""
    if not len(values):  # nobody reads it; but torch.export.save takes all empty tensors for one and stumbles
        values = np.zeros(1)
    module.register_buffer(name, torch.as_tensor(values.astype(np.int64)), persistent=False)
