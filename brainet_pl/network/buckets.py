"""How the layers of a level are computed: as one masked product, or as batches of blocks of similar shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Cost of a block product in units of one multiply-add of a large matrix product, measured on CPU at batch 256.
_GROUPED_PENALTY = 1.6  # small batched products run slower than one large one
_ROW_COST = 30.0  # copying one input row into place, in multiply-adds a sample
_BLOCK_COST = 20000.0  # one more kernel launch, forward and backward


@dataclass(frozen=True)
class Layer:
    """One dense layer L_i^t (line 14): it reads an ancestor's output and the descendant's, or the latter alone.

    Attributes:
        node, branch: where it stands; `node` is a number in `GGT.nodes`.
        sources: numbers of the nodes it reads; behind those of all nodes, of single inputs.
        fan_in, width: rows in, neurons out.
        first_neuron: of the level. first_weight: of the head's flat weight vector; weights lie neuron by neuron.
    """

    node: int
    branch: int
    sources: tuple[int, ...]
    fan_in: int
    width: int
    first_neuron: int
    first_weight: int


@dataclass(frozen=True)
class Bucket:
    """Blocks of one padded shape, computed by one batched product.

    Attributes:
        rows: (G, I) state rows that feed each block; padding reads the row of zeros.
        neurons: (G, O) neuron of the level for each output, -1 for padding.
        weights: (M, 2) pairs: position in the flat (G·O·I) buffer, number of the weight that stands there.
    """

    rows: Ints
    neurons: Ints
    weights: Ints

    @property
    def shape(self) -> tuple[int, int, int]:
        """The padded shape (G, O, I): blocks, their neurons, and their inputs."""
        return (*self.neurons.shape, self.rows.shape[1])


@dataclass(frozen=True)
class BranchBucket:
    """Whole branches of one padded shape, for passes that need only some of them, each with inputs of its own.

    Attributes:
        nodes, branches: (G,) which branch each block is.
        sources: (G, I) node that each input comes from, -1 for padding. offsets: (G, I) row within that node's output,
            or the input row where the node is a leaf that gives its features as they are.
        neurons, weights: as in `Bucket`.
    """

    nodes: Ints
    branches: Ints
    sources: Ints
    offsets: Ints
    neurons: Ints
    weights: Ints

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
    layers: Sequence[Layer], rows: Sequence[Ints], zero_row: int, *, masked: bool = False
) -> tuple[Bucket, ...]:
    """The cheapest way found to compute the layers of a level: one masked product, or batches of similar blocks.

    `masked` asks for the one product whatever it costs.
    """
    reads = [np.concatenate([rows[j] for j in layer.sources]) for layer in layers]
    everything = _Block(tuple(layers), np.unique(np.concatenate(reads)))
    if masked:
        return (_bucket([everything], rows, zero_row),)
    groups, grouped = _partition(_branch_blocks(layers, reads))
    if everything.neurons * len(everything.rows) + _BLOCK_COST <= grouped:
        return (_bucket([everything], rows, zero_row),)
    return tuple(_bucket(group, rows, zero_row) for group in groups)


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


def choose_branch_buckets(layers: Sequence[Layer], rows: Sequence[Ints], inputs: int) -> tuple[BranchBucket, ...]:
    """Every branch as one block, in batches of similar shape; the first `inputs` rows of the state are the inputs."""
    by_branch: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        by_branch.setdefault((layer.node, layer.branch), []).append(layer)
    blocks = []
    for members in by_branch.values():
        sources = dict.fromkeys(j for layer in members for j in layer.sources)
        blocks.append(_Block(tuple(members), np.concatenate([rows[j] for j in sources])))
    groups, _ = _partition(blocks)
    return tuple(_branch_bucket(group, rows, inputs) for group in groups)


def _branch_bucket(blocks: Sequence[_Block], rows: Sequence[Ints], inputs: int) -> BranchBucket:
    plain = _bucket(blocks, rows, zero_row=-1)
    sources, offsets = np.full_like(plain.rows, -1), np.zeros_like(plain.rows)
    for g, block in enumerate(blocks):
        read = dict.fromkeys(j for layer in block.layers for j in layer.sources)
        n = len(block.rows)
        sources[g, :n] = np.concatenate([np.full(len(rows[j]), j) for j in read])
        offsets[g, :n] = np.concatenate([rows[j] if rows[j][0] < inputs else np.arange(len(rows[j])) for j in read])
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
