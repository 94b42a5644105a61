"""From a tree of structures to a flat execution plan: which rows feed which block of weights, level by level.

Activations are kept with features first, (rows, B). The state before level h holds the inputs, then the outputs of all
nodes of lower levels, then one row of zeros for padding. A level computes every dense layer of its nodes, all branches;
a node's output is a choice or a mean of its branches. This file is pure data and arithmetic: no weights, no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from brainet_pl.network.widths import Fields, Widths, root_branch_of, split_width, width_rule
from brainet_pl.structure.ggt import GGT, Leaf, Node, Tree

LAYOUT = 2  # of weights within a layer: neuron by neuron, each reading the rows of its sources in order
FIELDS = -1  # in place of a node's number, where a layer belongs to no node: a field, which all leaves may read
Ints = NDArray[np.int64]

# Cost of a block product in units of one multiply-add of a large matrix product, measured on CPU at batch 256.
_GROUPED_PENALTY = 1.6  # small batched products run slower than one large one
_ROW_COST = 30.0  # copying one input row into place, in multiply-adds a sample
DENSE = 4  # times as many features as a field reads, up to which one product of all fields is faster than sparse ones
_BLOCK_COST = 20000.0  # one more kernel launch, forward and backward


T = TypeVar("T", bound="Unchanging")


class Unchanging:
    """What is planned never changes: copies of a head share it."""

    def __deepcopy__(self: T, memo: object) -> T:
        return self


@dataclass(frozen=True)
class Layer(Unchanging):
    """One dense layer L_i^t (line 14): it reads an ancestor's output and the descendant's, or the latter alone."""

    node: int  # a number in `GGT.nodes`, or `FIELDS`
    branch: int  # of a field, the set that it belongs to
    sources: tuple[int, ...]  # numbers of the nodes it reads; behind those of all nodes, of single inputs
    fan_in: int  # rows in
    width: int  # neurons out
    first_neuron: int  # of the level
    first_weight: int  # of the head's flat weight vector; weights lie neuron by neuron


@dataclass(frozen=True)
class Bucket(Unchanging):
    """Blocks of one padded shape, computed by one batched product."""

    rows: Ints  # (G, I) state rows that feed each block; padding reads the row of zeros
    neurons: Ints  # (G, O) neuron of the level for each output, -1 for padding
    weights: Ints  # (M, 2) pairs: position in the flat (G·O·I) buffer, number of the weight that stands there

    @property
    def shape(self) -> tuple[int, int, int]:
        """The padded shape (G, O, I): blocks, their neurons, and their inputs."""
        return (*self.neurons.shape, self.rows.shape[1])


@dataclass(frozen=True)
class BranchBucket(Unchanging):
    """Whole branches of one padded shape, for passes that need only some of them, each with inputs of its own."""

    nodes: Ints  # (G,) the node of each block
    branches: Ints  # (G,) which branch of its node it is
    sources: Ints  # (G, I) node that each input comes from, -1 for padding
    offsets: Ints  # (G, I) row within that node's output; of a leaf, the row of the state of an input or field
    neurons: Ints  # as in `Bucket`
    weights: Ints  # as in `Bucket`

    @property
    def shape(self) -> tuple[int, int, int]:
        """The padded shape (G, O, I): blocks, their neurons, and their inputs."""
        return (*self.neurons.shape, self.sources.shape[1])


@dataclass(frozen=True)
class _Block:
    """Layers computed as one dense block: the rows they read together, zero weights where a layer does not look."""

    layers: tuple[Layer, ...]
    rows: Ints

    @property
    def neurons(self) -> int:
        return sum(layer.width for layer in self.layers)


def choose_buckets(
    layers: Sequence[Layer],
    rows: Sequence[Ints],
    zero_row: int,
    *,
    masked: bool = False,
    structures: Sequence[Structure] = (),
) -> tuple[Bucket, ...]:
    """The cheapest way found to compute the layers of a level.

    That is one masked product, one of equal size for each of the `structures`, or batches of similar blocks. `masked`
    asks for the one product whatever it costs.
    """
    reads = [np.concatenate([rows[j] for j in layer.sources]) for layer in layers]
    everything = _Block(tuple(layers), np.unique(np.concatenate(reads)))
    if masked:
        return (_bucket([everything], rows, zero_row),)
    groups, cost = _partition(_branch_blocks(layers, reads))
    if everything.neurons * len(everything.rows) + _BLOCK_COST <= cost:
        groups, cost = [[everything]], everything.neurons * len(everything.rows) + _BLOCK_COST
    apart = _structure_blocks(layers, structures)
    if apart and len(apart) * max(block.neurons for block in apart) * len(apart[0].rows) + _BLOCK_COST <= cost:
        groups = [apart]  # their rows lie side by side, so that none is copied
    return tuple(_bucket(group, rows, zero_row) for group in groups)


class Structure(NamedTuple):
    """A branch of the root, in a level that reads fields: its nodes, and the rows of its fields."""

    nodes: frozenset[int]
    rows: Ints


def _structure_blocks(layers: Sequence[Layer], structures: Sequence[Structure]) -> list[_Block]:
    """A masked block for each structure, all of which read equally many rows; none where one has no layers."""
    found = []
    for nodes, fields in structures:
        own = tuple(layer for layer in layers if layer.node in nodes)
        if own:
            found.append(_Block(own, fields))
    return found if len(found) == len(structures) else []


def single_neurons(layers: Sequence[Layer], rows: Sequence[Ints]) -> Bucket | None:
    """Every neuron as a block of its own, for layers that all read equally many rows; else None.

    Their weights then lie in the flat vector as they lie in the blocks, and a sparse product can read them there.
    """
    reads = [np.concatenate([rows[j] for j in layer.sources]) for layer in layers]
    if len({len(read) for read in reads}) != 1:
        return None
    widths = [layer.width for layer in layers]
    reads_of_neuron = np.repeat(np.stack(reads), widths, axis=0)
    weights = np.arange(reads_of_neuron.size)
    return Bucket(reads_of_neuron, np.arange(len(reads_of_neuron))[:, None], np.stack([weights, weights], axis=1))


def _branch_blocks(layers: Sequence[Layer], reads: Sequence[Ints]) -> list[_Block]:
    """For each branch of each node: one masked block, or a block a layer, whichever costs less."""
    by_branch: dict[tuple[int, int], list[int]] = {}
    for k, layer in enumerate(layers):
        by_branch.setdefault((layer.node, layer.branch), []).append(k)
    blocks = []
    for members in by_branch.values():
        together = _Block(tuple(layers[k] for k in members), np.unique(np.concatenate([reads[k] for k in members])))
        apart = [_Block((layers[k],), reads[k]) for k in members]
        cost = sum(len(b.rows) * (b.neurons + _ROW_COST) for b in apart)
        blocks += [together] if len(together.rows) * (together.neurons + _ROW_COST) <= cost else apart
    return blocks


def _partition(blocks: list[_Block]) -> tuple[list[list[_Block]], float]:
    """Split blocks, sorted by size, into runs that share a padded shape: the cheapest split, by dynamic programming."""
    blocks = sorted(blocks, key=lambda b: (len(b.rows), b.neurons))
    fan_in, out = np.array([len(b.rows) for b in blocks]), np.array([b.neurons for b in blocks])
    n = len(blocks)
    best = np.full(n + 1, np.inf)
    best[0], cut = 0.0, np.zeros(n + 1, dtype=int)
    for end in range(1, n + 1):
        widest = np.maximum.accumulate(out[:end][::-1])[::-1]  # of blocks start … end-1
        count = end - np.arange(end)
        shape = count * fan_in[end - 1] * (widest * _GROUPED_PENALTY + _ROW_COST)
        total = best[:end] + shape + _BLOCK_COST
        cut[end] = int(np.argmin(total))
        best[end] = total[cut[end]]
    groups, end = [], n
    while end:
        groups.append(blocks[cut[end] : end])
        end = int(cut[end])
    return groups[::-1], float(best[n])


def choose_branch_buckets(layers: Sequence[Layer], rows: Sequence[Ints], shared: int) -> tuple[BranchBucket, ...]:
    """Every branch as one block, in batches of similar shape.

    The first `shared` rows of the state are those of no node: inputs, and fields.
    """
    by_branch: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        by_branch.setdefault((layer.node, layer.branch), []).append(layer)
    blocks = []
    for members in by_branch.values():
        sources = dict.fromkeys(j for layer in members for j in layer.sources)
        blocks.append(_Block(tuple(members), np.concatenate([rows[j] for j in sources])))
    groups, _ = _partition(blocks)
    return tuple(_branch_bucket(group, rows, shared) for group in groups)


def _branch_bucket(blocks: Sequence[_Block], rows: Sequence[Ints], shared: int) -> BranchBucket:
    plain = _bucket(blocks, rows, zero_row=-1)
    sources, offsets = np.full_like(plain.rows, -1), np.zeros_like(plain.rows)
    for g, block in enumerate(blocks):
        read = dict.fromkeys(j for layer in block.layers for j in layer.sources)
        n = len(block.rows)
        sources[g, :n] = np.concatenate([np.full(len(rows[j]), j) for j in read])
        offsets[g, :n] = np.concatenate([rows[j] if rows[j][0] < shared else np.arange(len(rows[j])) for j in read])
    nodes = np.array([block.layers[0].node for block in blocks])
    branches = np.array([block.layers[0].branch for block in blocks])
    return BranchBucket(nodes, branches, sources, offsets, plain.neurons, plain.weights)


def _bucket(blocks: Sequence[_Block], rows: Sequence[Ints], zero_row: int) -> Bucket:
    fan_in, out = max(len(b.rows) for b in blocks), max(b.neurons for b in blocks)
    reads = np.full((len(blocks), fan_in), zero_row, dtype=np.int64)
    neurons = np.full((len(blocks), out), -1, dtype=np.int64)
    weights = []
    for g, block in enumerate(blocks):
        reads[g, : len(block.rows)] = block.rows
        place = {int(row): i for i, row in enumerate(block.rows)}
        top = 0
        for layer in block.layers:
            columns = np.array([place[int(r)] for j in layer.sources for r in rows[j]])
            outs = top + np.arange(layer.width)
            neurons[g, outs] = layer.first_neuron + np.arange(layer.width)
            position = (g * out + outs[:, None]) * fan_in + columns
            source = layer.first_weight + np.arange(layer.width * layer.fan_in).reshape(layer.width, -1)
            weights.append(np.stack([position.ravel(), source.ravel()], axis=1))
            top += layer.width
    return Bucket(reads, neurons, np.concatenate(weights))


@dataclass(frozen=True)
class Level(Unchanging):
    """All layers of the nodes of one height, or all fields, which belong to no node."""

    nodes: tuple[int, ...]  # their numbers
    node_widths: tuple[int, ...]  # neurons that each emits
    layers: tuple[Layer, ...]
    branch_neurons: Ints  # (s, W) neuron that branch t gives to each output row; -1 where a node has fewer branches
    first_row: int  # of this level's output in the state, and so the number of rows before it
    first_neuron: int  # in the head
    buckets: tuple[Bucket, ...]
    branch_buckets: tuple[BranchBucket, ...]

    @property
    def width(self) -> int:
        """W, the rows that it adds to the state."""
        return int(self.branch_neurons.shape[1])

    @property
    def num_neurons(self) -> int:
        """The number of neurons of all branches of the level."""
        return sum(layer.width for layer in self.layers)


@dataclass(frozen=True)
class Plan(Unchanging):
    """Everything the head needs to know about a tree."""

    ggt: GGT
    levels: tuple[Level, ...]
    num_weights: int
    num_neurons: int
    root_rows: Ints  # state rows of the root's output
    node_rows: tuple[Ints, ...]  # for each node of the tree, its rows in the state
    width_factor: float

    @cached_property
    def layout(self) -> str:
        """A hash of what every number of the flat weight vector and of the vectors over neurons stands for.

        Two plans of one tree with different layouts would read each other's weights without an error: the shapes agree.
        """
        layers = [
            [x.node, x.branch, *x.sources, x.fan_in, x.width, level.first_neuron + x.first_neuron, x.first_weight]
            for level in self.levels
            for x in level.layers
        ]
        rows = [r.tolist() for r in self.node_rows]
        content = json.dumps([LAYOUT, self.ggt.fingerprint, layers, rows, self.root_rows.tolist()])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def level_of(self) -> dict[int, tuple[int, int]]:
        """Node number → (level, position among its nodes)."""
        return {node: (h, i) for h, level in enumerate(self.levels) for i, node in enumerate(level.nodes)}

    @property
    def has_fields(self) -> bool:
        """Whether leaves give fields, and not inputs as they are."""
        return bool(self.levels) and not self.levels[0].nodes

    @cached_property
    def leaf_sets(self) -> dict[int, int]:
        """Number of each leaf → the set of fields that it gives; 0 where all leaves give inputs as they are."""
        leaves = {i: t for i, t in root_branch_of(self.ggt).items() if isinstance(self.ggt.nodes[i], Leaf)}
        return {i: t if self.has_fields else 0 for i, t in leaves.items()}

    def inputs_of(self, field: Layer) -> tuple[int, ...]:
        """The numbers of the inputs that a field reads, its own first."""
        return tuple(source - len(self.ggt.nodes) for source in field.sources)

    def multiply_adds(self, choices: dict[int, int] | None = None) -> int:
        """Multiply-adds a sample of all layers, or only of the branches in `choices` (node number → branch)."""
        layers = [layer for level in self.levels for layer in level.layers]
        if choices is not None:
            taken = [layer for layer in layers if choices.get(layer.node) == layer.branch]
            layers = taken + [layer for layer in layers if layer.node == FIELDS]
        return sum(layer.fan_in * layer.width for layer in layers)


def build_plan(ggt: GGT, factor: float, min_width: int = 1, *, members: int = 1, fields: Fields | None = None) -> Plan:
    """The plan for node widths `width_rule(factor, min_width, fields)`.

    Networks of several members are batched over the members, so that each of their levels is one masked product.
    """
    return _Planner(ggt, width_rule(factor, min_width, fields), min_width, fields, masked=members > 1).plan(factor)


class _Planner:
    """Builds the levels of a plan, from the inputs up.

    Attributes:
        rows: the state rows of each node so far; behind those of the nodes, the row of each input alone: what fields
            read.
    """

    def __init__(self, ggt: GGT, width: Widths, min_width: int, fields: Fields | None, masked: bool) -> None:
        self.ggt, self.width, self.min_width, self.fields, self.masked = ggt, width, min_width, fields, masked
        self.number = {id(node): i for i, node in enumerate(ggt.nodes)}
        self.levels: list[Level] = []
        self.first_row, self.first_neuron, self.first_weight = ggt.num_variables, 0, 0
        self.rows: list[Ints] = [np.empty(0, dtype=np.int64)] * len(ggt.nodes)
        self.rows += list(np.arange(ggt.num_variables)[:, None])
        for i, node in enumerate(ggt.nodes):
            if isinstance(node, Leaf):
                self.rows[i] = np.asarray(node.variables, dtype=np.int64)

    def plan(self, factor: float) -> Plan:
        """All levels: that of the fields, if there are any, then height by height."""
        ggt, structures = self.ggt, []
        if self.fields is not None:
            structures = _structures(ggt, self.first_row, self.fields)
            self._add_fields(self.fields)
        shared = self.first_row  # rows of no node
        for height in range(1, max(ggt.heights) + 1):
            self._add_level(nodes_at(ggt, height), shared, structures)
        node_rows = tuple(self.rows[: len(ggt.nodes)])
        return Plan(ggt, tuple(self.levels), self.first_weight, self.first_neuron, node_rows[0], node_rows, factor)

    def _add_fields(self, fields: Fields) -> None:
        level = _field_level(self.ggt, fields, self.rows, masked=self.masked)
        of_branch = root_branch_of(self.ggt)
        for i, node in enumerate(self.ggt.nodes):
            if isinstance(node, Leaf):
                field = of_branch[i] * self.ggt.num_variables + np.asarray(node.variables)
                self.rows[i] = (self.first_row + field[:, None] * fields.width + np.arange(fields.width)).ravel()
        self.levels.append(level)
        self.first_row += level.width
        self.first_neuron = level.num_neurons
        self.first_weight = sum(layer.fan_in * layer.width for layer in level.layers)

    def _add_level(self, nodes: list[int], shared: int, structures: list[Structure]) -> None:
        """The level of the nodes of one height."""
        ggt = self.ggt
        widths = [self.width(ggt.nodes[i]) for i in nodes]
        offsets = np.concatenate([[0], np.cumsum(widths)])
        most = max(len(_inner(ggt.nodes[i]).branches) for i in nodes)
        branch_neurons = np.full((most, offsets[-1]), -1, dtype=np.int64)
        layers: list[Layer] = []
        neuron = 0
        for t in range(most):  # branch after branch, so that with equal s a branch is one slice of the neurons
            for i, node_width, offset in zip(nodes, widths, offsets, strict=False):
                if t < len(_inner(ggt.nodes[i]).branches):
                    branch_neurons[t, offset : offset + node_width] = neuron + np.arange(node_width)
                    layers += self._branch_layers(i, t, node_width, neuron)
                    neuron += node_width
        for i, node_width, offset in zip(nodes, widths, offsets, strict=False):
            self.rows[i] = self.first_row + offset + np.arange(node_width)
        read = set(chain.from_iterable(layer.sources for layer in layers))
        apart = structures if all(isinstance(ggt.nodes[j], Leaf) for j in read) else []
        buckets = choose_buckets(layers, self.rows, self.first_row, masked=self.masked, structures=apart)
        branch_buckets = choose_branch_buckets(layers, self.rows, shared)
        places = self.first_row, self.first_neuron
        self.levels.append(
            Level(tuple(nodes), tuple(widths), tuple(layers), branch_neurons, *places, buckets, branch_buckets)
        )
        self.first_row += int(offsets[-1])
        self.first_neuron += neuron

    def _branch_layers(self, i: int, t: int, node_width: int, neuron: int) -> list[Layer]:
        """The layers of branch t of node i, whose neurons begin with `neuron`."""
        layers = []
        for sources, out in _branch_layers(_inner(self.ggt.nodes[i]), t, node_width, self.min_width, self.number):
            fan_in = sum(self.width(self.ggt.nodes[j]) for j in sources)
            layers.append(Layer(i, t, sources, fan_in, out, neuron, self.first_weight))
            neuron += out
            self.first_weight += fan_in * out
        return layers


def _field_level(ggt: GGT, fields: Fields, rows: list[Ints], *, masked: bool) -> Level:
    """The lowest level: for each variable of each set a layer that reads it and its neighbours."""
    inputs = len(ggt.nodes)  # where `rows` has those of single inputs
    layers: list[Layer] = []
    neuron = weight = 0
    for t, reads in ((t, reads) for t, own in enumerate(fields.reads) for reads in own):
        sources = tuple(inputs + v for v in reads)
        layers.append(Layer(FIELDS, t, sources, len(sources), fields.width, neuron, weight))
        neuron += fields.width
        weight += len(sources) * fields.width
    masked = masked or ggt.num_variables <= DENSE * max(len(layer.sources) for layer in layers)
    single = None if masked else single_neurons(layers, rows)
    buckets = choose_buckets(layers, rows, ggt.num_variables, masked=masked) if single is None else (single,)
    # No branch buckets: nothing in this level is drawn, so that all passes share it.
    return Level((), (neuron,), tuple(layers), np.arange(neuron)[None], ggt.num_variables, 0, buckets, ())


def _structures(ggt: GGT, first_row: int, fields: Fields) -> list[Structure]:
    """The branches of the root, each with the rows of its set of fields, which begin with `first_row`."""
    of_branch, rows = root_branch_of(ggt), ggt.num_variables * fields.width
    return [
        Structure(frozenset(i for i, s in of_branch.items() if s == t), first_row + t * rows + np.arange(rows))
        for t in range(len(fields.reads))
    ]


def nodes_at(ggt: GGT, height: int) -> list[int]:
    """Numbers of the nodes of one height. Their order is the order of weights, so it belongs to the layout."""
    return [i for i, h in enumerate(ggt.heights) if h == height]


def _branch_layers(
    node: Node, t: int, width: int, least: int, number: dict[int, int]
) -> list[tuple[tuple[int, ...], int]]:
    """(sources, neurons) of the layers of branch t; without ancestors one layer reads the descendant alone."""
    branch = node.branches[t]
    descendant = number[id(branch.descendant)]
    if not branch.ancestors:
        return [((descendant,), width)]
    shares = split_width(width, [len(a.variables) for a in branch.ancestors], least)
    return [((number[id(a)], descendant), out) for a, out in zip(branch.ancestors, shares, strict=True)]


def _inner(node: Tree) -> Node:
    assert isinstance(node, Node)
    return node
