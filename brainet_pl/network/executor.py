"""Runs a plan: from features to the outputs of the root, for the tree of a BRAINet and for the members of an ensemble.

    train       every node passes on drawn branches, so many versions of its output for each sample; norm by the batch
    evaluate    every node passes on the mean of its branches under given probabilities; norm by kept statistics
    draws       many sub-networks at once, each node of each with the branch that it takes; norm by kept statistics
    chosen      the same from tensors of choices, in shapes that depend on nothing random, for compilers and exports

Activations have features first: a part is (M, rows, B), part 0 the inputs and part h + 1 the output of level h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from brainet_pl.network.kernels import has_kernels
from brainet_pl.network.plan import BranchBucket, Level
from brainet_pl.network.step import run_level
from brainet_pl.network.weights import ACTIVATIONS, LayerWeights, LevelTensors, join_rows, repeat_columns
from brainet_pl.structure.ggt import SubNetwork

RunLevel = Callable[[LevelTensors, Sequence[Tensor], list[Tensor], int], Tensor]


class Versions(NamedTuple):
    """How often a level is computed and read in a training step, for each sample."""

    columns: int  # how often its layers are computed, each time with other versions of what they read
    emitted: int  # versions of a node's output; version v takes column v mod `columns`


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
    emitted, levels = min(draws, math.prod(branches)), []
    for most in reversed(branches):
        columns = -(-emitted // most)
        levels.append(Versions(columns, emitted))
        emitted = columns
    return levels[::-1]


class Executor(LayerWeights):
    """Runs the dense layers of a plan: dense → norm → activation, level by level.

    With what it inherits it has more methods than most classes here: four ways to run share small steps and weights.
    """

    def draw(self, draws: int, samples: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """The branches that `run_train` takes: for each level (nodes, V, samples), all that is random in it.

        Version v of a node's output takes the branch [node, v] and column v mod C. Each is uniform and a node's are
        independent of another's; a node's versions go through its branches in turn, from a random one on, so that C·s
        versions are each branch of each column. `samples` is 1 where all samples of a batch share their draws.
        """
        choices = []
        for level, (columns, emitted) in zip(self.ordered, self.versions(draws), strict=True):
            if level.num_branches == 1:
                choices.append(level.sizes.new_zeros(len(level.sizes), emitted, 1))
                continue
            each = _uniform((len(level.sizes), 1, samples), level.sizes.device, generator)
            sizes, v = level.sizes.unsqueeze(-1), torch.arange(emitted, device=level.sizes.device).view(1, -1, 1)
            turn = v + v // torch.lcm(sizes, torch.full_like(sizes, columns))  # a column meets another branch each time
            choices.append(((each * sizes).long() + turn) % sizes)
        return choices

    def draw_posterior(self, draws: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """The branches that `run_chosen` takes, for each level (nodes, draws, 1): draws of the posterior."""
        each = [_uniform((len(level.sizes), draws, 1), level.sizes.device, generator) for level in self.ordered]
        return [(u.unsqueeze(-1) >= level.upto).sum(dim=-1) for u, level in zip(each, self.ordered, strict=True)]

    def choices(self, subnetworks: Sequence[SubNetwork]) -> list[Tensor]:
        """The branches of given sub-networks for `run_chosen`; nodes that one does not reach take their first."""
        ggt, device = self.plan.ggt, self.weight.device
        taken = np.zeros((len(ggt.nodes), len(subnetworks), 1), dtype=np.int64)
        for u, subnetwork in enumerate(subnetworks):
            for node, branch in ggt.path(subnetwork):
                taken[node, u] = branch
        first = [0]  # in place of the nodes of fields, which are of none and have one way
        return [torch.as_tensor(taken[list(level.level.nodes) or first], device=device) for level in self.ordered]

    def versions(self, draws: int) -> list[Versions]:
        """`share_draws` for this plan."""
        return share_draws(draws, [level.num_branches for level in self.ordered])

    def run_train(self, x: Tensor, choices: Sequence[Tensor], dropout: float) -> Tensor:
        """Features (B, d) or (M, B, d) to the root's rows (M, t, R, V·B/t) of the V draws a sample that `choices` name.

        All branches of all nodes are computed, so batch-norm statistics are kept for each of them at every step, over
        all columns of all samples. The order of the draws means nothing: where the root emits each of its columns
        through each of its t branches, these are left apart. Elsewhere t is 1.
        """
        parts, batch = [self._inputs(x)], x.shape[-2]
        if self.norm and batch < 2:
            raise ValueError(
                "expected at least 2 samples in a training batch for batch norm, got 1: use drop_last=True in the "
                "training loader, or norm=None"
            )
        self._cache_key = ()  # batch norm moves its statistics without a trace in their version counters
        if self.norm and has_kernels(parts[0]) and not torch.is_autocast_enabled("cpu"):
            step = _Step(self)
            return step.end(self._run_train([parts[0].contiguous()], choices, dropout, step.run))
        return self._run_train(parts, choices, dropout, self._level)

    def _run_train(self, parts: list[Tensor], choices: Sequence[Tensor], dropout: float, run: RunLevel) -> Tensor:
        """`run_train` of inputs as a part (M, d, B), by one of two ways to run a level."""
        columns, last, batch = 1, len(self.ordered) - 1, parts[0].shape[2]
        for level, blocks, choice in zip(self.ordered, self._assemble(), choices, strict=True):
            emitted = choice.shape[1]
            y = level.by_branch(run(level, blocks, parts, columns * batch))
            if level.number == last and self._in_turn(emitted, columns):
                return F.dropout(y, dropout, training=True) if dropout else y
            y = level.choose(y, choice, columns)
            columns = emitted
            parts.append(F.dropout(y, dropout, training=True) if dropout else y)
        return self._root(parts).unsqueeze(1)

    def _level(self, level: LevelTensors, blocks: Sequence[Tensor], parts: list[Tensor], batch: int) -> Tensor:
        """Parts so far → (M, neurons, `batch`): product, norm by the batch, activation, in plain operations."""
        y = self._multiply(level, parts, [(block, None) for block in blocks], batch)
        return self.activate(self._normalise(level, y))

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

    @property
    def only_root_branches(self) -> bool:
        """Whether no node but the root has several branches: these are then all sub-networks that there are."""
        return bool(self.ordered) and all(level.num_branches == 1 for level in self.ordered[:-1])

    def run_root_branches(self, x: Tensor) -> Tensor:
        """Features (B, d) to the rows (s, R, B) of each branch of the root, where no other node has several."""
        parts = [self._inputs(x)]
        for level, products in zip(self.ordered, self._folded(), strict=True):
            y = level.by_branch(self.activate(self._multiply(level, parts, products)))
            parts.append(y[:, 0])
        return y[0]

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
        """Statistics for `run_evaluate` from features (N, d), in one pass, level by level.

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
            at = level.neurons
            self.mixed_mean[at], self.mixed_var[at] = mean.to(y.dtype), var.to(y.dtype)
            scale = None if self.scale is None else self.scale[at]
            y = F.batch_norm(y, self.mixed_mean[at], self.mixed_var[at], scale, self.bias[at], False, 0.0, self.eps)
            y = level.by_branch(self.activate(y)) * level.mix.to(y.dtype)
            parts.append(y.sum(dim=1))
        self.use_mixed(True)

    def run_draws(
        self, x: Tensor, subnetworks: list[SubNetwork], dropout: float, generator: torch.Generator | None
    ) -> Tensor:
        """Features (B, d) to the root's rows (U, R, B) of U sub-networks, sharing what they share.

        The lowest level reads inputs alone, so its neurons are the same in all passes and are computed once. Above it,
        each pass computes only the branches it takes. Dropout stands where it stands while training: on the outputs of
        nodes, one mask a pass for all that read them, and never on inputs.
        """
        walk = _Walk(self, self._inputs(x), subnetworks, dropout, generator)
        for tensors in self.ordered:
            if tensors.number == 0:
                walk.add_lowest(tensors.level, self.activate(self._multiply(tensors, walk.parts, self._folded()[0]))[0])
                continue
            for bucket, folded in zip(tensors.level.branch_buckets, self._folded_branches(tensors), strict=True):
                walk.add_branches(bucket, *folded)
        return walk.root()

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
        gathered = _gather(level, parts, batch, self.members)
        outputs = []
        for bucket, (weight, bias) in zip(level.ordered, products, strict=True):
            if bucket.slice is not None:
                y = _product(weight, _sliced(parts, bucket.slice, weight, batch), bias)
            elif _reads_few(weight, gathered[0]):
                y = _sparse_product(weight, gathered[0][0], bucket.rows, bias)
            else:
                y = _product(weight, gathered[0].index_select(1, bucket.rows).view(-1, weight.shape[2], batch), bias)
            if y.dim() != 3 or y.shape[0] != self.members:
                y = y.flatten().view(self.members, -1, batch)  # flat first, as in `join_rows`
            outputs.append(y)
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return together if level.in_order else together.index_select(1, level.arrange)

    def _normalise(self, level: LevelTensors, y: Tensor) -> Tensor:
        """(M, neurons, B): batch norm over the last dimension with the statistics of this batch, or the bias alone."""
        flat, at = y if self.members == 1 else y.reshape(1, -1, y.shape[2]), level.neurons
        if self.scale is None:
            return (flat + self.bias[at].unsqueeze(-1)).view_as(y)
        mean, var = self.running_mean[at], self.running_var[at]
        flat = F.batch_norm(flat, mean, var, self.scale[at], self.bias[at], True, self.momentum, self.eps)
        return flat.view_as(y)

    def _root(self, parts: list[Tensor]) -> Tensor:
        """The root's output: the last part, or features where the whole tree is a leaf."""
        root = parts[-1] if self.plan.levels else parts[0].index_select(1, self._root_rows)
        return _of_each(root, self.members)


class _Step:
    """The levels of one training step as a CPU does them fastest; see `run_level`."""

    def __init__(self, executor: Executor) -> None:
        assert executor.scale is not None
        sizes = [level.neurons.stop - level.neurons.start for level in executor.ordered]
        self.executor, self.relu = executor, executor.activation == "relu"
        self.scales = executor.scale.split(sizes)  # type: ignore[no-untyped-call]
        self.biases = executor.bias.split(sizes)  # type: ignore[no-untyped-call]
        self.means: list[Tensor] = []
        self.variances: list[Tensor] = []

    def run(self, level: LevelTensors, blocks: Sequence[Tensor], parts: list[Tensor], batch: int) -> Tensor:
        """Parts so far → (M, neurons, `batch`), after norm and activation."""
        executor, number = self.executor, level.number
        read = [repeat_columns(part, batch) if i in level.reads else part for i, part in enumerate(parts)]
        scale, bias = self.scales[number], self.biases[number]
        y, mean, var = run_level(level, read, blocks, scale, bias, executor.eps, self.relu)
        self.means.append(mean)
        self.variances.append(var * (batch / (batch - 1)))
        return y if self.relu else executor.activate(y)

    def end(self, root: Tensor) -> Tensor:
        """Move the kept statistics of all levels; gives what it was given."""
        if self.means:
            with torch.no_grad():
                self.executor.running_mean.lerp_(torch.cat(self.means), self.executor.momentum)
                self.executor.running_var.lerp_(torch.cat(self.variances), self.executor.momentum)
        return root


class _Walk:
    """The rows of several sub-networks, which grow level by level.

    Attributes:
        state: (rows, B) a row of zeros, the inputs, then all outputs so far.
        first_row: (U, nodes + 1) where each node's output begins in the state; the last one is that of padding.
        choice: (U, nodes) the branch that each node takes, -1 where it is not reached.
    """

    def __init__(
        self,
        executor: Executor,
        inputs: Tensor,
        subnetworks: list[SubNetwork],
        dropout: float,
        generator: torch.Generator | None,
    ) -> None:
        self.plan, self.activate = executor.plan, executor.activate
        self.parts, self.dropout, self.generator = [inputs], dropout, generator
        ggt = self.plan.ggt
        self.leaves = [i for i in range(len(ggt.nodes)) if i not in self.plan.level_of]
        self.first_row = np.full((len(subnetworks), len(ggt.nodes) + 1), -1, dtype=np.int64)
        self.first_row[:, self.leaves] = 0
        self.first_row += 1  # padding reads node -1, row 0
        self.choice = np.full((len(subnetworks), len(ggt.nodes)), -1, dtype=np.int64)
        for u, subnetwork in enumerate(subnetworks):
            for node, branch in ggt.path(subnetwork):
                self.choice[u, node] = branch
        self.state = torch.cat([inputs.new_zeros(1, inputs.shape[2]), inputs[0]])  # rows are only added behind

    def add_lowest(self, level: Level, neurons: Tensor) -> None:
        """The neurons (W, B) of all branches of the lowest level, which are the same in all passes."""
        starts = np.concatenate([[0], np.cumsum(level.node_widths)])
        for node, column in zip(level.nodes, starts, strict=False):
            taken = np.maximum(self.choice[:, node], 0)
            self.first_row[:, node] = len(self.state) + level.branch_neurons[taken, column]
        if self.dropout:  # a mask, and so a copy, for each pass
            passes = len(self.choice)
            self.first_row[:, level.nodes or self.leaves] += len(neurons) * np.arange(passes)[:, None]
            neurons = join_rows(_drop(neurons.expand(passes, -1, -1), self.dropout, self.generator))
        self.state = torch.cat([self.state, neurons])

    def add_branches(self, bucket: BranchBucket, weight: Tensor, bias: Tensor) -> None:
        """Those branches of a bucket that a sub-network takes, each with what it reads there."""
        draw, g = np.nonzero(self.choice[:, bucket.nodes] == bucket.branches)
        if not len(draw):
            return
        rows = self.first_row[draw[:, None], bucket.sources[g]] + bucket.offsets[g]
        read = self._rows(rows)
        at = torch.as_tensor(g, device=self.state.device)
        y = self.activate(torch.baddbmm(bias[at].to(read.dtype), weight[at], read))
        self.first_row[draw, bucket.nodes[g]] = len(self.state) + np.arange(len(draw)) * y.shape[1]
        self.state = torch.cat([self.state, join_rows(_drop(y, self.dropout, self.generator))])

    def root(self) -> Tensor:
        """The root's rows (U, R, B)."""
        rows = self.plan.root_rows if 0 in self.leaves else np.arange(len(self.plan.root_rows))
        return self._rows(self.first_row[:, :1] + rows)

    def _rows(self, places: NDArray[np.int64]) -> Tensor:
        """Rows of the state by their places (…), (…, B)."""
        at = torch.as_tensor(places.ravel(), device=self.state.device)
        return self.state.index_select(0, at).view(*places.shape, -1)


def _gather(level: LevelTensors, parts: list[Tensor], batch: int, members: int) -> list[Tensor]:
    """All rows that the level's buckets choose from, as one part; none where each reads one part as it is."""
    gathered = [repeat_columns(parts[i], batch) for i in level.gathered]
    if level.zeros:
        gathered.append(parts[0].new_zeros(1, 1, batch))
    if len(gathered) < 2:
        return gathered
    return [torch.cat([_of_each(part, members) for part in gathered], dim=1)]


def _of_each(part: Tensor, members: int) -> Tensor:
    """A part (1, rows, B) that all members share, or (M, rows, B) → (M, rows, B)."""
    return part if part.shape[0] == members else part.expand(members, -1, -1)


def _sliced(parts: list[Tensor], where: tuple[int, int, int], weight: Tensor, batch: int) -> Tensor:
    """Rows that lie side by side in one part: `where` is the part, the first row, and their number."""
    part, first, count = where
    rows = parts[part] if parts[part].shape[1] == count else parts[part].narrow(1, first, count)
    rows = repeat_columns(rows, batch)
    return rows if len(rows) > 1 else rows.view(-1, weight.shape[2], batch)  # of blocks side by side


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
    return has_kernels(rows) and rows.dtype == weight.dtype and weight.shape[0] > 1 == weight.shape[1]


def _sparse_product(weight: Tensor, rows: Tensor, reads: Tensor, bias: Tensor | None) -> Tensor:
    """(G, 1, I) weights and rows (R, B), of which block g reads `reads`[g·I : (g + 1)·I] → (G, B), plus (G, 1, 1)."""
    weight = weight.squeeze(1)
    y = F.embedding_bag(reads.view(weight.shape), rows.contiguous(), per_sample_weights=weight, mode="sum")
    return y if bias is None else y + bias.squeeze(2).to(y.dtype)


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
