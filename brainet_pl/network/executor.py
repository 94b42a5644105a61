"""Runs a plan: from features to the outputs of the root, for the tree of a BRAINet and for the members of an ensemble.

    train       every node passes on drawn branches, so many versions of its output for each sample; norm by the batch
    evaluate    every node passes on the mean of its branches under given probabilities; norm by kept statistics
    draws       many sub-networks at once, each node of each with the branch that it takes; norm by kept statistics
    chosen      the same from tensors of choices, in shapes that depend on nothing random, for compilers and exports

All weights of all layers lie in one flat vector for each member, layer after layer, so that the optimizer sees few
tensors and the keys of a state dict depend on nothing but the tree. Activations are kept with features first: a part is
(M, rows, B), part 0 the inputs and part h + 1 the output of level h.
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
from brainet_pl.network.base import Norm
from brainet_pl.network.plan import Level, Plan
from brainet_pl.structure.ggt import Node, SubNetwork

T = TypeVar("T")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "elu": F.elu,
}


class Versions(NamedTuple):
    """How often a level is computed and read in a training step, for each sample.

    Attributes:
        columns: how often its layers are computed, each time with other versions of what they read.
        emitted: versions of a node's output; version v takes column v mod `columns`.
    """

    columns: int
    emitted: int


def share_draws(draws: int, branches: Sequence[int]) -> list[Versions]:
    """What each level contributes to `draws` sub-networks a sample, given the most branches of a node at each level.

    A node is read by one branch of one other, so of M draws at the root only M/s pass through each of its branches, and
    M/s² through each branch below that: only what some draw reaches is computed. More draws than there are ways to
    combine branches would be repetitions; there are none.

    >>> share_draws(2, [2, 2])  # both branches of the root, each with a random one below
    [Versions(columns=1, emitted=1), Versions(columns=1, emitted=2)]
    >>> share_draws(4, [2, 2])  # every branch of every node
    [Versions(columns=1, emitted=2), Versions(columns=2, emitted=4)]
    """
    emitted, found = min(draws, math.prod(branches)), []
    for most in reversed(branches):
        columns = -(-emitted // most)
        found.append(Versions(columns, emitted))
        emitted = columns
    return found[::-1]


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
        _index(self, "rows", np.empty(0))
        _index(self, "neurons", neurons)


class LevelTensors(nn.Module):
    """The index tensors of one level, as buffers that move with the module and stay out of the state dict.

    Attributes:
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
        self.own = slice(first, first + members * level.num_neurons)  # of the vectors over neurons, by level, by member
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
        _index(self, "arrange", np.empty(0) if self.in_order else arrange)
        _index(self, "branches", level.branch_neurons.ravel() if self.uneven else np.empty(0))
        _index(self, "owner", np.repeat(np.arange(len(level.nodes)), level.node_widths))
        _index(self, "sizes", np.asarray(sizes)[:, None])
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
                found = np.searchsorted(starts, bucket.rows, side="right") - 1
                local = bucket.rows.copy()
                for at, part in zip(place, [*self.gathered, h + 1], strict=True):
                    local[found == part] += at - starts[part]
                _index(tensors, "rows", local.ravel())

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
            return _repeat(branches[:, 0], emitted * batch)
        if choice.shape[2] == 1:
            row, column = (torch.arange(n, device=choice.device) for n in (width, emitted))
            place = (choice[self.owner, :, 0] * width + row[:, None]) * columns + column % columns  # (W, V)
            rows = branches.reshape(members, -1, batch).index_select(1, place.flatten())
            return rows.view(members, width, emitted * batch)
        found = []
        for part in choice.split(columns, dim=1):  # type: ignore[no-untyped-call]
            taken = part.flatten(1).index_select(0, self.owner)
            out = branches[:, 0, :, : taken.shape[1]]
            for t in range(1, s):
                out = torch.where(taken == t, branches[:, t, :, : taken.shape[1]], out)
            found.append(out)
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)


class Executor(nn.Module):
    """The dense layers of a plan, of `members` networks of equal wiring: dense → norm → activation, level by level.

    Its parameters are not initialised here: whoever owns it calls `reset_parameters`.

    Args:
        plan: what is computed. One with several members has one branch a node and one bucket a level.
        members: M, networks of equal wiring and separate weights.
        activation: one of relu, gelu, silu, tanh, elu.
        norm: "batch", or None for a bias instead.
        momentum: of the running statistics of the norm.
        eps: added to variances by the norm.
        gain: of the initial weights: 1 is as large as those of `nn.Linear`.
    """

    running_mean: Tensor
    running_var: Tensor
    mixed_mean: Tensor
    mixed_var: Tensor
    layout: Tensor
    _position: Tensor
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
        checks.one_of("norm", norm, ("batch", None))
        self.plan, self.members, self.norm = plan, members, norm
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
        self.mixed = False  # whether `evaluate` goes by statistics of its own, of averaged inputs
        self.register_buffer("layout", torch.tensor(list(bytes.fromhex(plan.layout)), dtype=torch.uint8))
        self.ordered = [LevelTensors(h, level, plan, members) for h, level in enumerate(plan.levels)]
        self.levels = nn.ModuleList(self.ordered)
        self._place_weights()
        _index(self, "_root_rows", plan.root_rows)
        self._cache_key: tuple[int, ...] = ()
        self._cache: dict[tuple[str, int], Any] = {}

    def _place_weights(self) -> None:
        """Where each weight of the flat vector stands among all blocks of all levels."""
        position = np.empty(self.plan.num_weights, dtype=np.int64)
        offset = 0
        for level in self.plan.levels:
            for bucket in level.buckets:
                position[bucket.weights[:, 1]] = offset + bucket.weights[:, 0]
                offset += math.prod(bucket.shape)
        self._in_place, self._assembled = np.array_equal(position, np.arange(offset)), offset
        _index(self, "_position", position)

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
        """Let `evaluate` go by the statistics that `finalize` found, or by those of training."""
        self.mixed, self._cache_key = mixed and len(self.mixed_mean) > 0, ()

    def set_mixture(self, probabilities: Sequence[NDArray[np.float64]]) -> None:
        """Take the branch probabilities (s,) of every node of the tree, by node number, for `evaluate`."""
        for level in self.ordered:
            found = (probabilities[node] for node in level.level.nodes)
            level.set_mixture([p if len(p) else np.ones(1) for p in found], self.weight.device)  # a leaf has one way
        self._cache_key = ()

    def train(self, mode: bool = True) -> Executor:
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

    # -- passes -------------------------------------------------------------------------------------------------------

    def draw(self, draws: int, samples: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """The branches that `run_train` takes: for each level (nodes, V, samples), all that is random in it.

        Version v of a node's output takes the branch [node, v] and column v mod C. Each is uniform and a node's are
        independent of another's; a node's versions go through its branches in turn, from a random one on, so that C·s
        versions are each branch of each column. `samples` is 1 where all samples of a batch share their draws.
        """
        found = []
        for level, (columns, emitted) in zip(self.ordered, self.versions(draws), strict=True):
            if level.num_branches == 1:
                found.append(level.sizes.new_zeros(len(level.sizes), emitted, 1))
                continue
            each = _uniform((len(level.sizes), 1, samples), level.sizes.device, generator)
            sizes, v = level.sizes.unsqueeze(-1), torch.arange(emitted, device=level.sizes.device).view(1, -1, 1)
            turn = v + v // torch.lcm(sizes, torch.full_like(sizes, columns))  # a column meets another branch each time
            found.append(((each * sizes).long() + turn) % sizes)
        return found

    def draw_posterior(self, draws: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """The branches that `run_chosen` takes, for each level (nodes, draws, 1): draws of the posterior."""
        each = [_uniform((len(level.sizes), draws, 1), level.sizes.device, generator) for level in self.ordered]
        return [(u.unsqueeze(-1) >= level.upto).sum(dim=-1) for u, level in zip(each, self.ordered, strict=True)]

    def choices(self, subnetworks: Sequence[SubNetwork]) -> list[Tensor]:
        """The same for given sub-networks; nodes that one does not reach take their first branch, for nobody."""
        ggt, device = self.plan.ggt, self.weight.device
        taken = np.zeros((len(ggt.nodes), len(subnetworks), 1), dtype=np.int64)
        for u, subnetwork in enumerate(subnetworks):
            for node, branch in ggt.path(subnetwork):
                taken[node, u] = branch
        return [torch.as_tensor(taken[list(level.level.nodes)], device=device) for level in self.ordered]

    def versions(self, draws: int) -> list[Versions]:
        """`share_draws` for this plan."""
        return share_draws(draws, [level.num_branches for level in self.ordered])

    def run_train(self, x: Tensor, choices: Sequence[Tensor], dropout: float) -> Tensor:
        """Features (B, d) or (M, B, d) to the root's rows (M, R, V·B) of the V draws a sample that `choices` name.

        All branches of all nodes are computed, so batch-norm statistics are kept for each of them at every step, over
        all columns of all samples. The order of the draws means nothing: where the root emits each of its columns
        through each of its branches, it is left as it is.
        """
        parts, batch = [self._inputs(x)], x.shape[-2]
        if self.norm and batch < 2:
            raise ValueError(
                "expected at least 2 samples in a training batch for batch norm, got 1: use drop_last=True in the "
                "training loader, or norm=None"
            )
        self._cache_key = ()  # batch norm moves its statistics without a trace in their version counters
        columns, last = 1, len(self.ordered) - 1
        for level, blocks, choice in zip(self.ordered, self._assemble(), choices, strict=True):
            emitted = choice.shape[1]
            products = [(block, None) for block in blocks]
            y = self._normalise(level, self._multiply(level, parts, products, columns * batch))
            y = level.by_branch(y)
            everything = level.number == last and self._in_turn(emitted, columns)
            y = y.transpose(1, 2).flatten(2) if everything else level.choose(y, choice, columns)
            columns = emitted
            y = self.activate(y)
            parts.append(F.dropout(y, dropout, training=True) if dropout else y)
        return self._root(parts)

    def _in_turn(self, emitted: int, columns: int) -> bool:
        """Whether the root emits each of its columns through each of its branches."""
        return bool(emitted == columns * self.ordered[-1].num_branches)

    def root_choice(self, choices: Sequence[Tensor]) -> Tensor | None:
        """The root's branch behind each draw of `run_train`, (V, samples); None where they come branch after branch.

        Then the first C·B columns are those of the first branch, and so on.
        """
        if not self.ordered:
            return None
        columns = choices[-2].shape[1] if len(choices) > 1 else 1
        return None if self._in_turn(choices[-1].shape[1], columns) else choices[-1][0]

    def run_evaluate(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        """Features (B, d) or (M, B, d) to the root's rows (M, R, B), by the mean of the branches of every node."""
        return self._root(self._evaluate(x, dropout)[0])

    def run_evaluate_branches(self, x: Tensor) -> Tensor:
        """Features (B, d) to the rows (s, R, B) of each branch of the root, times its probability."""
        parts, branches = self._evaluate(x)
        return self._root(parts) if branches is None else branches[0]

    def _evaluate(self, x: Tensor, dropout: float = 0.0) -> tuple[list[Tensor], Tensor | None]:
        """All parts, and those of the root by branch (M, s, R, B), which sum to the last part without its dropout."""
        parts, y = [self._inputs(x)], None
        early = self.activation == "relu"  # p·relu(y) = relu(p·y): the shares can go into the weights
        for level, products in zip(self.ordered, self._folded(averaged=True, shared=early), strict=True):
            y = level.by_branch(self.activate(self._multiply(level, parts, products)))
            y = y if early else y * level.mix.to(y.dtype)
            mean = y.sum(dim=1) if level.num_branches > 1 else y[:, 0]
            parts.append(F.dropout(mean, dropout, training=True) if dropout else mean)
        return parts, y

    @torch.no_grad()
    def set_mixed_statistics(self, x: Tensor) -> None:
        """Statistics for `evaluate` from features (N, d), in one pass, level by level.

        What a node passes on there is the mean of its branches, which varies less than any one of them: the statistics
        of training, which are of drawn branches, would leave the layers above it too small.
        """
        parts = [self._inputs(x)]
        if not len(self.mixed_mean):
            return
        for level, blocks in zip(self.ordered, self._assemble(), strict=True):
            y = self._multiply(level, parts, [(block, None) for block in blocks])
            exact = y[0].float() if y.element_size() < 4 else y[0]
            var, mean = torch.var_mean(exact, dim=1, correction=min(1, len(x) - 1))
            self.mixed_mean[level.own], self.mixed_var[level.own] = mean.to(y.dtype), var.to(y.dtype)
            mean, var = self.mixed_mean[level.own], self.mixed_var[level.own]
            y = F.batch_norm(y, mean, var, self._own(self.scale, level), self.bias[level.own], False, 0.0, self.eps)
            y = level.by_branch(self.activate(y)) * level.mix.to(y.dtype)
            parts.append(y.sum(dim=1))
        self.use_mixed(True)

    @staticmethod
    def _own(vector: Tensor | None, level: LevelTensors) -> Tensor | None:
        return None if vector is None else vector[level.own]

    def run_draws(
        self, x: Tensor, subnetworks: list[SubNetwork], dropout: float, generator: torch.Generator | None
    ) -> Tensor:
        """Features (B, d) to the root's rows (U, R, B) of U sub-networks, sharing what they share.

        The lowest level reads inputs alone, so its neurons are the same in all passes and are computed once. Above it,
        each pass computes only the branches it takes. Dropout stands where it stands while training: on the outputs of
        nodes, one mask a pass for all that read them, and never on inputs.
        """
        plan, ggt, device = self.plan, self.plan.ggt, x.device
        first_row = np.full((len(subnetworks), len(ggt.nodes) + 1), -1, dtype=np.int64)  # of each node's output
        first_row[:, [i for i in range(len(ggt.nodes)) if i not in plan.level_of]] = 0
        choice = np.full((len(subnetworks), len(ggt.nodes)), -1, dtype=np.int64)
        for u, subnetwork in enumerate(subnetworks):
            for node, branch in ggt.path(subnetwork):
                choice[u, node] = branch
        inputs = self._inputs(x)
        state = torch.cat([inputs.new_zeros(1, x.shape[0]), inputs[0]])  # zeros first: rows are only added behind
        first_row += 1  # padding reads node -1, row 0
        for tensors in self.ordered:
            level = tensors.level
            if tensors.number == 0:
                neurons = self.activate(self._multiply(tensors, [inputs], self._folded()[0]))[0]
                starts = np.concatenate([[0], np.cumsum(level.node_widths)])
                for node, column in zip(level.nodes, starts, strict=False):
                    taken = np.maximum(choice[:, node], 0)
                    first_row[:, node] = len(state) + level.branch_neurons[taken, column]
                    if dropout:  # a mask, and so a copy, for each pass
                        first_row[:, node] += len(neurons) * np.arange(len(subnetworks))
                if dropout:
                    neurons = _drop(neurons.expand(len(subnetworks), -1, -1), dropout, generator).flatten(0, 1)
                state = torch.cat([state, neurons])
                continue
            for bucket, (weight, bias) in zip(level.branch_buckets, self._folded_branches(tensors), strict=True):
                draw, g = np.nonzero(choice[:, bucket.nodes] == bucket.branches)
                if not len(draw):
                    continue
                rows = first_row[draw[:, None], bucket.sources[g]] + bucket.offsets[g]
                read = state.index_select(0, torch.as_tensor(rows.ravel(), device=device))
                read = read.view(len(draw), rows.shape[1], -1)
                at = torch.as_tensor(g, device=device)
                y = self.activate(torch.baddbmm(bias[at].to(read.dtype), weight[at], read))
                first_row[draw, bucket.nodes[g]] = len(state) + np.arange(len(draw)) * y.shape[1]
                state = torch.cat([state, _drop(y, dropout, generator).flatten(0, 1)])
        top = first_row[:, :1] + np.arange(len(plan.root_rows))
        if not plan.levels:
            top = np.tile(1 + plan.root_rows, (len(subnetworks), 1))
        return state.index_select(0, torch.as_tensor(top.ravel(), device=device)).view(*top.shape, -1)

    def run_chosen(self, x: Tensor, choices: Sequence[Tensor], dropout: float = 0.0) -> Tensor:
        """Features (B, d) to the root's rows (V, R, B) of the V sub-networks that `choices` name.

        Above the lowest level every branch is computed for every sub-network, taken or not: more work than `run_draws`,
        but nothing depends on what was drawn, so that one graph serves all draws.
        """
        parts, batch, columns = [self._inputs(x)], x.shape[-2], 1
        for level, products, choice in zip(self.ordered, self._folded(), choices, strict=True):
            y = self.activate(self._multiply(level, parts, products, columns * batch))
            y, columns = level.choose(level.by_branch(y), choice, columns), choice.shape[1]
            parts.append(F.dropout(y, dropout, training=True) if dropout else y)
        root = self._root(parts).squeeze(0)
        return root.view(len(root), columns, batch).transpose(0, 1)

    # -- pieces of a pass ---------------------------------------------------------------------------------------------

    def activate(self, y: Tensor) -> Tensor:
        """The activation, element by element."""
        return ACTIVATIONS[self.activation](y)

    def _inputs(self, x: Tensor) -> Tensor:
        """(B, d) → (1, d, B), or (M, B, d) → (M, d, B)."""
        d = self.plan.ggt.num_variables
        fits = x.dim() == 2 or (x.dim() == 3 and len(x) == self.members > 1)
        if not fits or x.shape[-1] != d or x.is_complex():
            apart = f" or ({self.members}, batch, {d})" if self.members > 1 else ""
            raise ValueError(
                f"expected features of shape (batch, {d}){apart}, got {tuple(x.shape)} of {x.dtype}: this head's tree "
                f"{self.plan.ggt.fingerprint} was learned from {d} features; learn a structure for these, or give the "
                "head what it was learned from"
            )
        x = x.to(self.weight.dtype)
        return x.t().unsqueeze(0) if x.dim() == 2 else x.transpose(1, 2)

    def _multiply(
        self,
        level: LevelTensors,
        parts: list[Tensor],
        products: Sequence[tuple[Tensor, Tensor | None]],
        batch: int | None = None,
    ) -> Tensor:
        """The parts so far → (M, neurons of the level, B) before norm and activation.

        With `batch`, so many columns, for which parts of fewer are repeated.
        """
        batch = parts[0].shape[2] if batch is None else batch
        gathered = [_repeat(parts[i], batch) for i in level.gathered]
        if level.zeros:
            gathered.append(parts[0].new_zeros(1, 1, batch))
        if len(gathered) > 1:
            gathered = [torch.cat([self._each(part) for part in gathered], dim=1)]
        outputs = []
        for bucket, (weight, bias) in zip(level.ordered, products, strict=True):
            if bucket.slice is not None:
                part, first, count = bucket.slice
                rows = parts[part] if parts[part].shape[1] == count else parts[part].narrow(1, first, count)
                rows = _repeat(rows, batch)
            elif _reads_few(weight, gathered[0]):
                y = _sparse_product(weight, gathered[0][0], bucket.rows, bias)
                outputs.append(y.view(self.members, -1, batch))
                continue
            else:
                rows = gathered[0].index_select(1, bucket.rows).view(-1, weight.shape[2], batch)
            y = _product(weight, rows, bias)
            outputs.append(y if y.dim() == 3 and y.shape[0] == self.members else y.view(self.members, -1, batch))
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return together if level.in_order else together.index_select(1, level.arrange)

    def _normalise(self, level: LevelTensors, y: Tensor) -> Tensor:
        """(M, neurons, B): batch norm over the last dimension with the statistics of this batch, or the bias alone."""
        flat, own = y if self.members == 1 else y.reshape(1, -1, y.shape[2]), level.own
        if self.scale is None:
            return (flat + self.bias[own].unsqueeze(-1)).view_as(y)
        mean, var = self.running_mean[own], self.running_var[own]
        flat = F.batch_norm(flat, mean, var, self.scale[own], self.bias[own], True, self.momentum, self.eps)
        return flat.view_as(y)

    def _root(self, parts: list[Tensor]) -> Tensor:
        """The root's output: the last part, or features where the whole tree is a leaf."""
        root = parts[-1] if self.plan.levels else parts[0].index_select(1, self._root_rows)
        return self._each(root)

    def _each(self, part: Tensor) -> Tensor:
        """A part (1, rows, B) that all members share, or (M, rows, B) → (M, rows, B)."""
        return part if part.shape[0] == self.members else part.expand(self.members, -1, -1)

    # -- weights as blocks --------------------------------------------------------------------------------------------

    def _assemble(self) -> list[list[Tensor]]:
        """The flat weights as (N, O, I) blocks, zero where a layer does not look, for each level and bucket."""
        flat = self.weight
        if not self._in_place:
            flat = flat.new_zeros(self.members, self._assembled).index_copy(1, self._position, flat)  # type: ignore[assignment]
        blocks: list[list[Tensor]] = []
        start = 0
        for level in self.ordered:
            blocks.append([])
            for bucket in level.ordered:
                size = math.prod(bucket.shape)
                _, out, fan_in = bucket.shape
                blocks[-1].append(flat.narrow(1, start, size).view(-1, out, fan_in))  # (M, G, O, I), M or G being 1
                start += size
        return blocks

    def _folded(self, averaged: bool = False, shared: bool = False) -> list[list[tuple[Tensor, Tensor]]]:
        """Blocks and biases of each level with the norm and, if `shared`, branch probabilities folded in.

        With `averaged`, the norm is that of averaged inputs, where there is one.
        """

        def make() -> list[list[tuple[Tensor, Tensor]]]:
            return [
                [
                    self._fold(level, block, bucket.neurons, averaged and self.mixed, shared)
                    for bucket, block in zip(level.ordered, blocks, strict=True)
                ]
                for level, blocks in zip(self.ordered, self._assemble(), strict=True)
            ]

        return self._remember((f"folded {averaged} {shared}", 0), make)

    def _folded_branches(self, tensors: LevelTensors) -> list[tuple[Tensor, Tensor]]:
        """The same for the branch buckets of a level."""

        def make() -> list[tuple[Tensor, Tensor]]:
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
    ) -> tuple[Tensor, Tensor]:
        """Weights (N, O, I) and biases (N, O, 1) of `neurons` (N, O); evaluation norm is y ↦ scale·y + shift."""
        at = neurons.clamp_min(level.own.start)
        shift = self.bias[at]
        if self.scale is not None:
            mean, var = (self.mixed_mean, self.mixed_var) if averaged else (self.running_mean, self.running_var)
            scale = self.scale[at] * torch.rsqrt(var[at] + self.eps)
            shift = shift - mean[at] * scale
            weight = weight * scale.unsqueeze(-1)
        shift = torch.where(neurons >= 0, shift, torch.zeros_like(shift)).unsqueeze(-1)
        if shared and level.num_branches > 1:
            share = level.share.to(weight.dtype)[at - level.own.start].unsqueeze(-1)
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


def _product(weight: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """(N, O, I) · (N, I, B) → (N, O, B), plus biases (N, O, 1).

    Rows (1, I, B) that several blocks share are read once, and the result is (N·O, B).
    """
    if rows.shape[0] == 1 and weight.shape[0] > 1:
        flat, shared = weight.flatten(0, 1), rows.squeeze(0)  # a view whose gradient is a view, unlike rows[0]
        return torch.mm(flat, shared) if bias is None else torch.addmm(bias.flatten(0, 1).to(rows.dtype), flat, shared)
    return torch.bmm(weight, rows) if bias is None else torch.baddbmm(bias.to(rows.dtype), weight, rows)


def _reads_few(weight: Tensor, rows: Tensor) -> bool:
    """Whether blocks (G, 1, I) of one neuron each can be computed without a copy of the rows that each reads.

    On a CPU: copies are what takes the time there, and compilers and exports know the plain product better.
    """
    plain = rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64) and rows.dtype == weight.dtype
    return plain and weight.shape[0] > 1 == weight.shape[1] and not _is_traced()


def _is_traced() -> bool:
    """Whether a compiler, an exporter or a tracer looks on."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _sparse_product(weight: Tensor, rows: Tensor, reads: Tensor, bias: Tensor | None) -> Tensor:
    """(G, 1, I) weights and rows (R, B), of which block g reads `reads`[g·I : (g + 1)·I] → (G, B), plus (G, 1, 1)."""
    weight = weight.squeeze(1)
    # The sum of a bag of rows, each with its weight, is the product of a sparse matrix.
    y = F.embedding_bag(reads.view(weight.shape), rows.contiguous(), per_sample_weights=weight, mode="sum")
    return y if bias is None else y + bias.squeeze(2).to(y.dtype)


def _repeat(part: Tensor, columns: int) -> Tensor:
    """(M, rows, B) → (M, rows, columns): the same columns again and again."""
    have = part.shape[2]
    if have == columns:
        return part
    return part.repeat(1, 1, -(-columns // have)).narrow(2, 0, columns)


def _uniform(shape: Sequence[int], device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Random numbers from 0 to 1; a compiler takes no generator, not even None."""
    return (
        torch.rand(shape, device=device) if generator is None else torch.rand(shape, device=device, generator=generator)
    )


def _drop(x: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    if not p:
        return x
    keep = _uniform(x.shape, x.device, generator) >= p
    return x * keep / (1.0 - p)


def _index(module: nn.Module, name: str, values: NDArray[Any]) -> None:
    if not len(values):  # nobody reads it; but torch.export.save takes all empty tensors for one and stumbles
        values = np.zeros(1)
    module.register_buffer(name, torch.as_tensor(values.astype(np.int64)), persistent=False)
