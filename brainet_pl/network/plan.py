"""From a tree of structures to a flat execution plan: which rows feed which block of weights, level by level.

Activations are kept with features first, (rows, B). The state before level h holds the inputs, then the outputs of all
nodes of lower levels, then one row of zeros for padding. A level computes every dense layer of its nodes, all branches;
a node's output is a choice or a mean of its branches. This file is pure data and arithmetic: no weights, no torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from brainet_pl.network.buckets import (
    BranchBucket,
    Bucket,
    Ints,
    Layer,
    choose_branch_buckets,
    choose_buckets,
    single_neurons,
)
from brainet_pl.network.widths import Fields, split_width, width_rule
from brainet_pl.structure.ggt import GGT, Leaf, Node, Tree

LAYOUT = 2  # of weights within a layer: neuron by neuron, each reading the rows of its sources in order


@dataclass(frozen=True)
class Level:
    """All layers of the nodes of one height, or of the leaves where these have fields.

    Attributes:
        nodes: their numbers. node_widths: neurons that each emits.
        branch_neurons: (s, W) the neuron that branch t gives to each output row; -1 where a node has fewer branches.
        first_row: of this level's output in the state, and so the number of rows before it. first_neuron: in the head.
    """

    nodes: tuple[int, ...]
    node_widths: tuple[int, ...]
    layers: tuple[Layer, ...]
    branch_neurons: Ints
    first_row: int
    first_neuron: int
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
class Plan:
    """Everything the head needs to know about a tree.

    Attributes:
        root_rows: state rows of the root's output.
        node_rows: for each node of the tree, its rows in the state.
    """

    ggt: GGT
    levels: tuple[Level, ...]
    num_weights: int
    num_neurons: int
    root_rows: Ints
    node_rows: tuple[Ints, ...]
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

    def source_rows(self, source: int) -> Ints:
        """The rows of the state that a layer reads from one of its sources: a node, or a single input."""
        inputs = len(self.ggt.nodes)
        return self.node_rows[source] if source < inputs else np.array([source - inputs])

    def multiply_adds(self, choices: dict[int, int] | None = None) -> int:
        """Multiply-adds a sample of all layers, or only of the branches in `choices` (node number → branch)."""
        layers = [layer for level in self.levels for layer in level.layers]
        if choices is not None:
            taken = [layer for layer in layers if choices.get(layer.node) == layer.branch]
            read = {source for layer in taken for source in layer.sources} | {0}
            layers = taken + [x for x in layers if isinstance(self.ggt.nodes[x.node], Leaf) and x.node in read]
        return sum(layer.fan_in * layer.width for layer in layers)


def build_plan(ggt: GGT, factor: float, min_width: int = 1, *, members: int = 1, fields: Fields | None = None) -> Plan:
    """The plan for node widths `width_rule(factor, min_width, fields)`.

    Networks of several members are batched over the members, so that each of their levels is one masked product.
    """
    width = width_rule(factor, min_width, fields)
    number = {id(node): i for i, node in enumerate(ggt.nodes)}
    # Behind those of the nodes, the row of each input alone: what fields read.
    rows: list[Ints] = [np.empty(0, dtype=np.int64)] * len(ggt.nodes) + [
        np.array([v]) for v in range(ggt.num_variables)
    ]
    for i, node in enumerate(ggt.nodes):
        if isinstance(node, Leaf):
            rows[i] = np.asarray(node.variables, dtype=np.int64)
    levels: list[Level] = []
    first_row, first_neuron, first_weight = ggt.num_variables, 0, 0
    if fields is not None:
        level = _field_level(ggt, fields, rows, masked=members > 1)
        levels.append(level)
        starts = first_row + np.concatenate([[0], np.cumsum(level.node_widths)])
        for i, start, count in zip(level.nodes, starts, level.node_widths, strict=False):
            rows[i] = start + np.arange(count)
        first_row += level.width
        first_neuron = level.num_neurons
        first_weight = sum(layer.fan_in * layer.width for layer in level.layers)
    for height in range(1, max(ggt.heights) + 1):
        nodes = nodes_at(ggt, height)
        widths = [width(_inner(ggt.nodes[i])) for i in nodes]
        offsets = np.concatenate([[0], np.cumsum(widths)])
        most = max(len(_inner(ggt.nodes[i]).branches) for i in nodes)
        branch_neurons = np.full((most, offsets[-1]), -1, dtype=np.int64)
        layers: list[Layer] = []
        neuron = 0
        for t in range(most):  # branch after branch, so that with equal s a branch is one slice of the neurons
            for i, node_width, offset in zip(nodes, widths, offsets, strict=False):
                node = _inner(ggt.nodes[i])
                if t >= len(node.branches):
                    continue
                branch_neurons[t, offset : offset + node_width] = neuron + np.arange(node_width)
                for sources, out in _branch_layers(node, t, node_width, min_width, number):
                    fan_in = sum(width(ggt.nodes[j]) for j in sources)
                    layers.append(Layer(i, t, sources, fan_in, out, neuron, first_weight))
                    neuron += out
                    first_weight += fan_in * out
        for i, node_width, offset in zip(nodes, widths, offsets, strict=False):
            rows[i] = first_row + offset + np.arange(node_width)
        buckets = choose_buckets(layers, rows, first_row, masked=members > 1)
        branch_buckets = choose_branch_buckets(layers, rows, ggt.num_variables)
        levels.append(
            Level(
                tuple(nodes),
                tuple(widths),
                tuple(layers),
                branch_neurons,
                first_row,
                first_neuron,
                buckets,
                branch_buckets,
            )
        )
        first_row += int(offsets[-1])
        first_neuron += neuron
    return Plan(ggt, tuple(levels), first_weight, first_neuron, rows[0], tuple(rows[: len(ggt.nodes)]), factor)


def _field_level(ggt: GGT, fields: Fields, rows: list[Ints], *, masked: bool) -> Level:
    """The lowest level: for each variable of a leaf a layer that reads it and its neighbours."""
    inputs = len(ggt.nodes)  # where `rows` has those of single inputs
    nodes = [i for i, node in enumerate(ggt.nodes) if isinstance(node, Leaf)]
    layers: list[Layer] = []
    neuron = weight = 0
    for i in nodes:
        leaf = ggt.nodes[i]
        assert isinstance(leaf, Leaf)
        for x, near in zip(leaf.variables, leaf.neighbours, strict=True):
            sources = tuple(inputs + v for v in (x, *near[: fields.reads]))
            layers.append(Layer(i, 0, sources, len(sources), fields.width, neuron, weight))
            neuron += fields.width
            weight += len(sources) * fields.width
    widths = tuple(len(ggt.nodes[i].variables) * fields.width for i in nodes)
    single = None if masked else single_neurons(layers, rows)
    buckets = choose_buckets(layers, rows, ggt.num_variables, masked=masked) if single is None else (single,)
    # No branch buckets: nothing below this level is drawn, so that all passes share it.
    return Level(tuple(nodes), widths, tuple(layers), np.arange(neuron)[None], ggt.num_variables, 0, buckets, ())


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
