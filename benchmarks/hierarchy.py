"""Alternatives at every node of the tree against four whole structures, at equal size: does the hierarchy pay?

    python benchmarks/hierarchy.py --data DIR     # docs/results/hierarchy.json, resumable
    python benchmarks/hierarchy.py --smoke        # shows in a minute that everything works

A node with alternatives gives their features in the same rows to one layer above it, which has to cope with all of
them. Two cures are tried: `norm`, batch norm with statistics, scale and shift of its own for each combination of
alternatives that a layer reads, with shared weights (switchable batch norm of slimmable networks); and `block`, weights
of its own for each alternative of an input. A training step draws alternatives for a batch, in turn, so that every
branch of every node takes part. Everything else is as in `defaults.py`: rate, batches, the epoch of least validation
NLL, 15 passes, and the parameters of the default head.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.data import Labelled, mnist_pixels
from common.measures import quality_of
from common.store import Store
from common.tables import table
from common.tasks import CifarTaps, Sample, digits, pixels
from common.training import fit_best
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl.datamodules.digits import Digits
from brainet_pl.metrics.curves import separation
from brainet_pl.network import BRAINetHead, Tree
from brainet_pl.network.executor import Executor
from brainet_pl.network.tree_head import GAIN
from brainet_pl.network.weights import LevelTensors
from brainet_pl.network.widths import fields_of
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.structure.ggt import Node, SubNetwork
from brainet_pl.tasks import Classification
from brainet_pl.uncertainty import mutual_information, predictive_entropy

PASSES, BATCH, RATE = 15, 128, 1e-3
EVERY = 10**4  # draws: as many as it takes for every branch of every node
OURS = "four structures"


class Arm(NamedTuple):
    """A tree, and how its layers tell alternatives apart."""

    s: int | tuple[int, ...]
    norm: bool = False
    block: bool = False
    every: bool = True  # every branch of every node in each step, drawn for a batch; else as the head does by default


ARMS = {
    OURS: Arm((4, 1), every=False),
    "s=2": Arm(2, every=False),
    "s=2, every branch": Arm(2),
    "s=2, norm": Arm(2, norm=True),
    "s=2, block": Arm(2, block=True),
    "s=2, norm and block": Arm(2, norm=True, block=True),
    "s=3": Arm(3, every=False),
    "s=3, norm": Arm(3, norm=True),
    "s=3, norm and block": Arm(3, norm=True, block=True),
    "s=4 and 2": Arm((4, 2), every=False),
    "s=4 and 2, norm": Arm((4, 2), norm=True),
    "s=4 and 2, norm and block": Arm((4, 2), norm=True, block=True),
}


# -- the network ------------------------------------------------------------------------------------------------------


class Switched(Executor):
    """Runs a plan whose layers know which alternatives of their inputs they read.

    Vectors over neurons have an entry for each neuron and combination of alternatives, the flat weights one for each
    weight and alternative of the node that it reads.

    Args:
        head: Whose plan and settings it takes.
        norm: Whether batch norm is switched.
        block: Whether weights are switched.
    """

    source: Tensor  # (weights,) node that each weight reads; one behind the last where that has no alternatives
    first_weight: Tensor  # (weights,) of the entries of each
    reads: Tensor  # (neurons, 2) nodes that each reads, as in `source`
    stride: Tensor  # (neurons, 2) how far apart entries of their alternatives lie
    first_entry: Tensor  # (neurons,) of its entries

    def __init__(self, head: BRAINetHead, norm: bool, block: bool) -> None:
        old = head.layers
        super().__init__(head.plan, activation=old.activation, norm=old.norm, eps=old.eps, gain=GAIN)
        plan, nodes = head.plan, head.ggt.nodes
        sizes = [len(node.branches) if isinstance(node, Node) else 1 for node in nodes]
        source = np.full(plan.num_weights, len(nodes))
        bound = np.zeros(plan.num_weights)
        reads, stride = np.full((plan.num_neurons, 2), len(nodes)), np.zeros((plan.num_neurons, 2), dtype=int)
        entries = np.ones(plan.num_neurons, dtype=int)
        for level in plan.levels:
            for layer in level.layers:
                inner = [j for j in layer.sources if j < len(nodes) and sizes[j] > 1]
                widths = [len(plan.source_rows(j)) for j in layer.sources]
                row = np.repeat([j if j in inner else len(nodes) for j in layer.sources], widths)
                at = slice(layer.first_weight, layer.first_weight + layer.fan_in * layer.width)
                bound[at] = GAIN / math.sqrt(layer.fan_in)
                mine = slice(
                    level.first_neuron + layer.first_neuron, level.first_neuron + layer.first_neuron + layer.width
                )
                if block:
                    source[at] = np.tile(row, layer.width)
                if norm:
                    for k, j in enumerate(inner):
                        reads[mine, k], stride[mine, k] = j, entries[mine][0]
                        entries[mine] *= sizes[j]
        copies = np.array([*sizes, 1])[source]
        index = {"source": source, "first_weight": np.cumsum(copies) - copies, "reads": reads, "stride": stride}
        for name, values in (index | {"first_entry": np.cumsum(entries) - entries}).items():
            self.register_buffer(name, torch.as_tensor(values), persistent=False)
        limits = torch.as_tensor(np.repeat(bound, copies), dtype=torch.float32)
        self.weight = nn.Parameter(((2 * torch.rand(len(limits)) - 1) * limits).unsqueeze(0))
        total = int(entries.sum())
        self.scale, self.bias = nn.Parameter(torch.ones(total)), nn.Parameter(torch.zeros(total))
        self.running_mean, self.running_var = torch.zeros(total), torch.ones(total)
        self.norm_switched, self.block = norm, block

    def run_train(self, x: Tensor, choices: Sequence[Tensor], dropout: float) -> Tensor:
        """Features (B, d) to the root's rows (1, R, V·B), as `Executor` does; choices are those of a batch."""
        return self._run(x, choices)

    def run_draws(
        self, x: Tensor, subnetworks: list[SubNetwork], dropout: float, generator: torch.Generator | None
    ) -> Tensor:
        """Features (B, d) to the root's rows (U, R, B) of U sub-networks."""
        root = self._run(x, self.choices(subnetworks)).squeeze(0)
        return root.view(len(root), -1, len(x)).transpose(0, 1)

    def root_choice(self, choices: Sequence[Tensor]) -> Tensor | None:
        """The root's branch behind each draw, (V, 1)."""
        return choices[-1][0]

    def _run(self, x: Tensor, choices: Sequence[Tensor]) -> Tensor:
        parts, batch, columns = [self._inputs(x)], len(x), 1
        for level, choice in zip(self.ordered, choices, strict=True):
            taken = self._taken(choices, columns)
            y = self._switched_norm(level, self._products(level, parts, taken, batch), taken)
            y, columns = level.choose(level.by_branch(y), choice, columns), choice.shape[1]
            parts.append(self.activate(y))
        return self._root(parts)

    def _taken(self, choices: Sequence[Tensor], columns: int) -> Tensor:
        """(nodes + 1, C): the branch of each node that column c of a layer above it reads; 0 for what has one."""
        taken = torch.zeros(len(self.plan.ggt.nodes) + 1, columns, dtype=torch.int64)
        column = torch.arange(columns)
        for level, choice in zip(self.ordered, choices, strict=True):
            taken[list(level.level.nodes)] = choice[:, column % choice.shape[1], 0]
        return taken

    def _products(self, level: LevelTensors, parts: list[Tensor], taken: Tensor, batch: int) -> Tensor:
        """(1, neurons, C·B): column by column, where each has weights of its own."""
        columns = taken.shape[1]
        if not self.block or columns == 1:
            blocks = self._blocks(level, taken[:, 0])
            return self._multiply(level, parts, blocks, columns * batch)
        found = []
        for c in range(columns):
            read = [p.narrow(2, c % (p.shape[2] // batch) * batch, batch) for p in parts]
            found.append(self._multiply(level, read, self._blocks(level, taken[:, c])))
        return torch.cat(found, dim=2)

    def _blocks(self, level: LevelTensors, taken: Tensor) -> list[tuple[Tensor, None]]:
        """Weights (G, O, I) of the level's buckets under the alternatives `taken` (nodes + 1,)."""
        blocks: list[tuple[Tensor, None]] = []
        for bucket in level.level.buckets:
            position, number = torch.as_tensor(bucket.weights).T
            entry = self.first_weight[number] + (taken[self.source[number]] if self.block else 0)
            flat = self.weight.new_zeros(math.prod(bucket.shape)).index_copy(0, position, self.weight[0, entry])
            blocks.append((flat.view(bucket.shape), None))
        return blocks

    def _switched_norm(self, level: LevelTensors, y: Tensor, taken: Tensor) -> Tensor:
        """(1, neurons, C·B): batch norm over the samples of a column, or of all columns where it is not switched."""
        neurons, columns = y.shape[1], taken.shape[1] if self.norm_switched else 1
        at = slice(level.level.first_neuron, level.level.first_neuron + neurons)
        entry = self.first_entry[at, None] + torch.einsum("nk,nkc->nc", self.stride[at], taken[self.reads[at]])
        entry = entry[:, :columns].flatten()
        mean, var = self.running_mean[entry], self.running_var[entry]
        settings = (self.training, self.momentum, self.eps)
        flat = y.reshape(1, neurons * columns, -1)
        flat = F.batch_norm(flat, mean, var, self.scale[entry], self.bias[entry], *settings)
        if self.training:
            self.running_mean[entry], self.running_var[entry] = mean, var
        return flat.view_as(y)


def build(arm: Arm, sample: Sample, ggt: GGT, budget: int, seed: int) -> BRAINetHead:
    """A head of so many parameters; with more alternatives there are more fields, which read fewer neighbours."""
    d, out = sample.in_features, sample.task.out_features
    sizes = {n: fields_of(ggt, n) for n in (16, 8, 4, 2)}
    fields = next((n for n, found in sizes.items() if found and 2 * found.count(2) <= budget), None)
    if not arm.every:
        torch.manual_seed(seed)
        return Tree(num_params=budget, fields=fields).build(d, out, ggt)
    asked = float(budget)
    for _ in range(8):  # copies of weights and norms count too: ask for fewer until they fit
        torch.manual_seed(seed)
        head = Tree(num_params=round(asked), draws=EVERY, sampling="batch", fields=fields).build(d, out, ggt)
        if arm.norm or arm.block:
            head.layers = Switched(head, arm.norm, arm.block)
        if abs(head.num_params / budget - 1) < 0.01:
            break
        asked *= budget / head.num_params
    return head


# -- tasks ------------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A draw of a task by seed, rows that are unlike it, and how long to train."""

    load: Any  # seed → (Sample, unknown rows (N, d))
    epochs: int
    patience: int


def tasks(data: Path | None, cache: Path | None) -> dict[str, Task]:
    """Digits without 8 and 9, pixels with notMNIST or Fashion-MNIST, stage 2 with SVHN, white wine with red."""
    if data is None:
        return {"digits": Task(_digits, 2, 2)}
    taps = CifarTaps(data, cache)
    white, red = _wine(data)
    fashion = mnist_pixels(data, "FashionMNIST", pool=2)[1][0]
    load = pixels(data, "MNIST", 5000, 1000)
    return {
        "digits": Task(_digits, 150, 30),
        "white wine": Task(lambda seed: _split(white, red, seed), 80, 15),
        "MNIST 5,000": Task(lambda seed: (load(seed), fashion), 80, 15),
        "stage 2, 4,000": Task(
            lambda seed: (taps.task("layer2", 4000)(seed), taps.unknown("svhn_test10k", "layer2", 4000, seed)), 60, 10
        ),
    }


def _digits(seed: int) -> tuple[Sample, Tensor]:
    data = Digits(seed=seed)
    data.setup("test")
    return digits(seed), torch.stack([row for row, _ in data.ood_sets["held_out"]])


def _wine(data: Path) -> tuple[Labelled, Tensor]:
    """White wines of three grades, up to 5, 6, and from 7 on; red ones of any."""
    white = torch.as_tensor(np.loadtxt(data / "tables" / "winequality-white.csv", delimiter=","), dtype=torch.float32)
    red = torch.as_tensor(np.loadtxt(data / "uci" / "wine-quality-red" / "data.txt"), dtype=torch.float32)
    return (white[:, :11], (white[:, 11].long() - 5).clamp(0, 2)), red[:, :11]


def _split(rows: Labelled, unknown: Tensor, seed: int) -> tuple[Sample, Tensor]:
    x, y = rows
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    a, b, c = order[:3000], order[3000:3600], order[3600:]
    mean, std = x[a].mean(0), x[a].std(0)
    parts = [((x[i] - mean) / std, y[i]) for i in (a, b, c)]
    return Sample(*parts, Classification(3)), (unknown - mean) / std


# -- one cell ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(head: BRAINetHead, sample: Sample, part: str, unknown: Tensor) -> dict[str, float]:
    """NLL, error in % and ECE of validation or test rows, and how well MI and entropy tell unknown rows from them."""

    def probs(x: Tensor) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(0)
        drawn = head.stochastic(x[:2], PASSES).subnetworks
        auto = head.ggt.num_subnetworks <= PASSES
        head.hold(None if auto else drawn)
        found = [head.passes(rows, PASSES) for rows in x.split(1000)]
        head.hold(None)
        return torch.cat([f.values for f in found], dim=1).softmax(dim=-1), found[0].weights

    x, y = sample.val if part == "val" else sample.test
    known, weights = probs(x)
    far, _ = probs(unknown)
    mean = known.mean(0) if weights is None else torch.einsum("t,tbc->bc", weights.to(known), known)
    found = dict(quality_of(mean, y))
    for name, score in (("MI", mutual_information), ("entropy", predictive_entropy)):
        found[f"AUROC {name}"] = separation(score(known, weights), score(far, weights))["AUROC"]
    return found


def cell(arm: Arm, task: Task, seed: int, smoke: bool) -> dict[str, Any]:
    """Train one arm, and measure it on validation and on test rows."""
    sample, unknown = task.load(seed)
    trees = {s: learn_structure(sample.train[0], s=s, seed=seed, progress=False) for s in {ARMS[OURS].s, arm.s}}
    budget = Tree().build(sample.in_features, sample.task.out_features, trees[ARMS[OURS].s]).num_params
    head = build(arm, sample, trees[arm.s], budget, seed)
    start = time.process_time()
    pace = {"epochs": 2 if smoke else task.epochs, "patience": task.patience, "lr": RATE, "batch": BATCH}
    fitted = fit_best(head, sample, seed=seed, passes=PASSES, **pace)  # type: ignore[arg-type]
    facts = {"sub-networks": head.ggt.num_subnetworks, "perplexity": head.perplexity, "params": head.num_params}
    facts |= {"epoch": fitted.epoch, "seconds": round(time.process_time() - start, 1)}
    facts |= {part: measure(head, sample, part, unknown) for part in ("val", "test")}
    return facts | {"ms a step": _milliseconds(head, sample)}  # the last, as it moves the statistics of batch norm


def _milliseconds(head: BRAINetHead, sample: Sample) -> float:
    """Processor time of a training step, the median of 20."""
    x, y = (rows[:BATCH] for rows in sample.train)
    head.train()
    times = []
    for _ in range(20):
        start = time.thread_time()
        sample.task.loss(head(x), y).backward()
        times.append(time.thread_time() - start)
        head.zero_grad()
    head.eval()
    return 1e3 * statistics.median(times)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, compare."""
    parser = arguments(__doc__, seeds=2)
    parser.add_argument("--only", nargs="+", help="these tasks alone")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--arms", nargs="+", help="these arms alone")
    args = parse(parser, argv)
    warnings.filterwarnings("ignore", message=r"expected .* parameters within 2 %")
    store = Store(args.out / "hierarchy.json", {"rate": RATE, "batch": BATCH, "passes": PASSES})
    facts, measures = ["sub-networks", "perplexity", "params", "ms a step"], ["nll", "err", "AUROC MI", "AUROC entropy"]
    for name, task in tasks(args.data, args.cache).items():
        if args.only and name not in args.only:
            continue
        rows = []
        for arm in args.arms or ARMS:
            found = []
            for seed in range(args.first, args.first + args.seeds):
                run = partial(cell, ARMS[arm], task, seed, args.smoke)
                found.append(store.cell(f"{name}/{arm}/{seed}", run))
            row = [statistics.fmean(f[c] for f in found) for c in facts]
            row += [statistics.fmean(f[part][c] for f in found) for part in ("val", "test") for c in measures]
            rows.append([arm, *row])
            print(name, arm, [round(v, 4) for v in row], flush=True)
        print(f"\n{name}")
        table(["arm", *facts, *(f"{part} {c}" for part in ("val", "test") for c in measures)], rows)


if __name__ == "__main__":
    main()
