"""The dense layers of a plan: index tensors of each level, and parameters as flat vectors and as blocks to multiply.

All weights of all layers lie in one flat vector for each member, layer after layer, so that the optimizer sees few
tensors and the keys of a state dict depend on nothing but the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.network.base import Norm, check_norm
from brainet_pl.network.kernels import Place, place
from brainet_pl.network.plan import Level, Plan
from brainet_pl.structure.ggt import Node

T = TypeVar("T")
Product = tuple[Tensor, Tensor]  # weights (N, O, I) and biases (N, O, 1) of a bucket, with the norm folded in
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "elu": F.elu,
}


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
        source, position, number, first, follow, whole: which weights stand where, as `place` says it.
    """

    rows: Tensor
    neurons: Tensor
    source: Tensor
    position: Tensor
    number: Tensor
    first: int
    follow: bool
    whole: bool

    def __init__(self, shape: tuple[int, int, int], neurons: NDArray[np.int64]) -> None:
        super().__init__()
        self.shape = shape
        self.slice: Slice | None = None
        index_buffer(self, "rows", np.empty(0))
        index_buffer(self, "neurons", neurons)

    @property
    def place(self) -> Place:
        """Which weights of the flat vector stand where."""
        return Place(self.source, self.position, self.number, self.first if self.follow else None, self.whole)


class LevelTensors(nn.Module):
    """The index tensors of one level, as buffers that move with the module and stay out of the state dict."""

    arrange: Tensor  # order of the buckets' outputs that makes them the level's neurons; empty where `in_order`
    branches: Tensor  # (s·W,) neurons as branches where these are `uneven`, else empty: they are in order
    owner: Tensor  # (W,) node of each output row
    sizes: Tensor  # (nodes, 1) branches of each node
    mix: Tensor  # (s, W, 1) probability of the branch that a neuron belongs to
    share: Tensor  # (neurons,) the same by neuron
    upto: Tensor  # (nodes, 1, 1, s) probability of a branch and those before it; 1 from a node's last branch on

    def __init__(self, h: int, level: Level, plan: Plan, members: int) -> None:
        super().__init__()
        self.number, self.level, self.members = h, level, members
        first = members * level.first_neuron
        # Where the level's neurons lie in the vectors over all neurons, which go by level, then by member.
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
        sizes = sizes or [1]  # fields are of no node, and always there
        index_buffer(self, "arrange", np.empty(0) if self.in_order else arrange)
        index_buffer(self, "branches", level.branch_neurons.ravel() if self.uneven else np.empty(0))
        index_buffer(self, "owner", np.repeat(np.arange(len(sizes)), level.node_widths))
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
            rows = bucket.rows.ravel()  # of all blocks, which may lie side by side
            part = int(np.searchsorted(starts, rows[0], side="right")) - 1
            together = np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
            if together and rows[-1] < starts[part + 1 : part + 2].sum():
                tensors.slice = Slice(part, int(rows[0] - starts[part]), len(rows))
            else:
                parts |= set((np.searchsorted(starts, bucket.rows.ravel(), side="right") - 1).tolist())
        self.zeros = h + 1 in parts  # padding points just behind the last part
        self.gathered = sorted(parts - {h + 1})  # parts that buckets without a slice pick their rows from
        self.reads = {*self.gathered, *(one.slice.part for one in self.ordered if one.slice is not None)}
        alone = len(self.ordered) == 1 and self.ordered[0].slice is None and self.in_order and self.members == 1
        # Whether the level is one bucket of neurons that read a few rows each: a product of a sparse matrix.
        self.reads_few = alone and self.ordered[0].shape[1] == 1 < self.ordered[0].shape[0]
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
        if s == 1:  # no index, whose gradient would be a copy into zeros
            return repeat_columns(branches.squeeze(1), emitted * batch)
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


def join_rows(blocks: Tensor) -> Tensor:
    """Rows of blocks (N, R, B), one block after the other, (N·R, B).

    They are made flat first: torch 2.10 can't export, for any B, a view that joins N and R alone.
    """
    return blocks.flatten().view(blocks.shape[0] * blocks.shape[1], blocks.shape[2])


def index_buffer(module: nn.Module, name: str, values: NDArray[Any]) -> None:
    """Register whole numbers as a buffer that moves with the module and stays out of the state dict."""
    if not len(values):  # nobody reads it; but torch.export.save takes all empty tensors for one and stumbles
        values = np.zeros(1)
    module.register_buffer(name, torch.as_tensor(values.astype(np.int64)), persistent=False)


class LayerWeights(nn.Module):
    """The dense layers of a plan, of `members` networks of equal wiring; `Executor` runs them.

    The parameters are not initialised here: whoever builds an executor calls `reset_parameters`.

    Args:
        plan: What is computed. One with several members has one branch a node and one bucket a level.
        members: M, the number of networks of equal wiring and separate weights.
        activation: One of relu, gelu, silu, tanh, elu.
        norm: "batch", or None for a bias instead.
        momentum: Momentum of the running statistics of the norm.
        eps: Number that the norm adds to variances.
        gain: Size of the initial weights; 1 is as large as those of `nn.Linear`.
    """

    running_mean: Tensor
    running_var: Tensor
    mixed_mean: Tensor
    mixed_var: Tensor
    layout: Tensor
    _root_rows: Tensor

    def __init__(
        self,
        plan: Plan,
        *,
        members: int = 1,
        activation: str = "relu",
        norm: Norm = "batch",
        momentum: float = 0.1,
        eps: float = 1e-5,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.gain = gain
        members = checks.whole("members", members, 1, 1000)
        checks.one_of("activation", activation, ACTIVATIONS)
        self.plan, self.members, self.norm = plan, members, check_norm(norm)
        self.activation, self.momentum = activation, checks.share("momentum", momentum)
        self.eps = checks.number("eps", eps, 0, "it is added to variances")
        neurons = members * plan.num_neurons
        self.weight = nn.Parameter(torch.empty(members, plan.num_weights))
        self.scale = nn.Parameter(torch.empty(neurons)) if norm else None
        self.bias = nn.Parameter(torch.empty(neurons))
        self.register_buffer("running_mean", torch.zeros(neurons if norm else 0))
        self.register_buffer("running_var", torch.ones(neurons if norm else 0))
        several = any(level.branch_neurons.shape[0] > 1 for level in plan.levels[:-1])  # nothing reads the root's mean
        self.register_buffer("mixed_mean", torch.zeros(neurons if norm and several else 0))
        self.register_buffer("mixed_var", torch.ones(neurons if norm and several else 0))
        self.mixed = False  # whether `run_evaluate` uses the statistics of averaged inputs
        self.register_buffer("layout", torch.tensor(list(bytes.fromhex(plan.layout)), dtype=torch.uint8))
        self.ordered = [LevelTensors(h, level, plan, members) for h, level in enumerate(plan.levels)]
        self.levels = nn.ModuleList(self.ordered)
        self._place_weights()
        index_buffer(self, "_root_rows", plan.root_rows)
        self._cache_key: tuple[int, ...] = ()
        self._cache: dict[tuple[str, int], Any] = {}

    def _place_weights(self) -> None:
        """Note in each bucket which weights of the flat vector stand where."""
        for level, tensors in zip(self.plan.levels, self.ordered, strict=True):
            for bucket, target in zip(level.buckets, tensors.ordered, strict=True):
                position, number = bucket.weights[np.argsort(bucket.weights[:, 1])].T
                source = np.full(math.prod(bucket.shape), self.plan.num_weights)
                source[position] = number
                target.follow = np.array_equal(number, np.arange(number[0], number[0] + len(number)))
                target.whole = target.follow and np.array_equal(position, np.arange(len(source)))
                target.first = int(number[0])
                index_buffer(target, "source", source)
                index_buffer(target, "position", position)
                index_buffer(target, "number", number)

    def reset_parameters(self) -> None:
        """Each layer as `nn.Linear` would be, times the gain: uniform within gain/√fan_in; norm to the identity."""
        with torch.no_grad():
            for level in self.plan.levels:
                for layer in level.layers:
                    bound = self.gain / math.sqrt(layer.fan_in)
                    self.weight[:, layer.first_weight :][:, : layer.fan_in * layer.width].uniform_(-bound, bound)
            if self.scale is not None:
                self.scale.fill_(1.0)
            self.bias.zero_()
            self.running_mean.zero_()
            self.running_var.fill_(1.0)
        self.use_mixed(False)

    def use_mixed(self, mixed: bool) -> None:
        """Let `run_evaluate` use the statistics of averaged branches, or those of training."""
        self.mixed, self._cache_key = mixed and len(self.mixed_mean) > 0, ()

    def set_mixture(self, probabilities: Sequence[NDArray[np.float64]]) -> None:
        """Take the branch probabilities (s,) of every node of the tree, by node number, for `run_evaluate`."""
        for level in self.ordered:
            branches = [probabilities[node] for node in level.level.nodes]
            level.set_mixture(branches or [np.ones(1)], self.weight.device)  # fields are always there
        self._cache_key = ()

    def train(self, mode: bool = True) -> LayerWeights:
        """Also forgets folded weights: a write through `.data` leaves no other trace."""
        self._cache_key = ()
        super().train(mode)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:  # type: ignore[no-untyped-def]
        """Refuse weights that lie in another order, or belong to another tree."""
        theirs = state_dict.get(f"{prefix}layout")
        if theirs is not None and not torch.equal(theirs.cpu(), self.layout.cpu()):
            ggt = self.plan.ggt
            raise ValueError(
                f"expected weights in the layout {self.plan.layout} of the tree {ggt.fingerprint} over "
                f"{ggt.num_variables} features, got the layout {bytes(theirs.tolist()).hex()}: build the head from the "
                "tree and with the settings it was trained with; weights of another version must be trained again"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _assemble(self) -> list[list[Tensor]]:
        """The flat weights as (N, O, I) blocks, zero where a layer does not look, for each level and bucket."""
        buckets = [bucket for level in self.ordered for bucket in level.ordered]
        parts = iter(place(self.weight, [bucket.place for bucket in buckets]) if buckets else ())
        blocks: list[list[Tensor]] = []
        for level in self.ordered:
            shapes = [bucket.shape[1:] for bucket in level.ordered]
            blocks.append([next(parts).view(-1, *shape) for shape in shapes])  # of (M, G, O, I) M or G is 1
        return blocks

    def _folded(self, averaged: bool = False, shared: bool = False) -> list[list[Product]]:
        """Blocks and biases of each level with the norm and, if `shared`, branch probabilities folded in.

        With `averaged`, the norm is that of averaged inputs, where there is one.
        """

        def make() -> list[list[Product]]:
            return [
                [
                    self._fold(level, block, bucket.neurons, averaged and self.mixed, shared)
                    for bucket, block in zip(level.ordered, blocks, strict=True)
                ]
                for level, blocks in zip(self.ordered, self._assemble(), strict=True)
            ]

        return self._remember((f"folded {averaged} {shared}", 0), make)

    def _folded_branches(self, tensors: LevelTensors) -> list[Product]:
        """Blocks and biases of the branch buckets of a level, with the norm folded in."""

        def make() -> list[Product]:
            device, weight, folded = self.weight.device, self.weight[0], []
            for bucket in tensors.level.branch_buckets:
                position, source = (torch.as_tensor(v, device=device) for v in bucket.weights.T)
                flat = weight.new_zeros(math.prod(bucket.shape)).index_copy(0, position, weight[source])
                first = tensors.level.first_neuron
                neurons = np.where(bucket.neurons >= 0, bucket.neurons + first, -1)
                folded.append(self._fold(tensors, flat.view(bucket.shape), torch.as_tensor(neurons, device=device)))
            return folded

        return self._remember(("branches", tensors.number), make)

    def _fold(
        self, level: LevelTensors, weight: Tensor, neurons: Tensor, averaged: bool = False, shared: bool = False
    ) -> Product:
        """Weights (N, O, I) and biases (N, O, 1) of `neurons` (N, O); evaluation norm is y ↦ scale·y + shift."""
        at = neurons.clamp_min(level.neurons.start)
        shift = self.bias[at]
        if self.scale is not None:
            mean, var = (self.mixed_mean, self.mixed_var) if averaged else (self.running_mean, self.running_var)
            scale = self.scale[at] * torch.rsqrt(var[at] + self.eps)
            shift = shift - mean[at] * scale
            weight = weight * scale.unsqueeze(-1)
        shift = torch.where(neurons >= 0, shift, torch.zeros_like(shift)).unsqueeze(-1)
        if shared and level.num_branches > 1:
            share = level.share.to(weight.dtype)[at - level.neurons.start].unsqueeze(-1)
            return weight * share, shift * share
        return weight, shift

    def _remember(self, key: tuple[str, int], make: Callable[[], T]) -> T:
        """Keep folded blocks until a parameter changes; never while gradients or a compiler look on."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return make()
        tensors = [self.weight, self.bias, self.running_mean, self.running_var, self.mixed_mean, self.mixed_var]
        tensors += [self.scale] if self.scale is not None else []
        if any(t.is_inference() for t in tensors):  # they keep no version
            return make()
        now = tuple(v for t in tensors for v in (t.data_ptr(), t._version))
        if now != self._cache_key:
            self._cache_key, self._cache = now, {}
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]  # type: ignore[no-any-return]
