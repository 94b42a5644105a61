"""BRAINet inside Deep Ensembles and inside MC-dropout on nine UCI regression sets: the paper's Appendix D.

    python benchmarks/uci.py tune --data DIR           # settings, on validation rows: docs/results/uci_settings.json
    python benchmarks/uci.py run --data DIR --quick    # 5 splits of each set, about 10 minutes on 2 cores
    python benchmarks/uci.py run --data DIR            # all published splits
    python benchmarks/uci.py table                     # print what is there again
    python benchmarks/uci.py speed                     # batched members against a loop
    python benchmarks/uci.py run --smoke               # shows in half a minute that everything works

Every finished cell is a line of docs/results/uci.jsonl, and a cell that is there is not run again. Every head of a set
has the parameters of one hidden layer of 50 neurons (protein: 100), times 5 for the ensembles. Settings come from the
training rows of the first published split alone: each variant gets the same number of trials, with the same learning
rates, weight decays and lengths; those of BRAINet differ in the structure as well.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import add_out, results_folder
from common.data import synthetic_uci
from common.store import stamp, write_whole
from common.tables import markdown, spread, table
from common.timing import race
from numpy.typing import NDArray
from torch import Tensor

from brainet_pl.datamodules.uci import FOLDERS, read_split, standardise
from brainet_pl.metrics.measures import collect
from brainet_pl.network import EnsembleHead, stacked_tree
from brainet_pl.structure import GGT, Leaf, learn_structure
from brainet_pl.structure.ggt import Tree
from brainet_pl.tasks import Regression

MEMBERS, PASSES = 5, 50
TRIALS = 18
QUICK_SPLITS = 5

# variant → hidden layers of a plain network, 0 for the MAP structure. The last four are controls with BRAINet's own
# settings: two stacked dense layers instead of the structure, and the structure with the columns of its input shuffled.
VARIANTS: dict[str, int] = {
    "ensemble": 1,
    "brainet_ensemble": 0,
    "mc_dropout": 1,
    "brainet_dropout": 0,
    "brainet_ensemble_stacked": 2,
    "brainet_dropout_stacked": 2,
    "brainet_ensemble_shuffled": 0,
    "brainet_dropout_shuffled": 0,
}
MAIN = list(VARIANTS)[:4]

# The structures that BRAINet's trials go through; plain trials differ in the other settings alone.
STRUCTURES: list[dict[str, Any]] = [
    {"test": "gaussian", "threshold": 0.0005, "max_order": 1},
    {"test": "gaussian", "threshold": 0.02, "max_order": 1},
    {"test": "cmi", "threshold": 0.05, "max_order": 1},
    {"test": "gaussian", "threshold": 0.005, "max_order": 3},
    {"test": "cmi", "threshold": 0.01, "max_order": 1},
    {"test": "gaussian", "threshold": 0.1, "max_order": 1},
]

# Appendix D, Tables 1 and 2: mean and standard deviation of RMSE, then of NLL.
PAPER: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "concrete": {
        "ensemble": (5.46, 0.52, 2.92, 0.16),
        "brainet_ensemble": (4.17, 0.59, 2.56, 0.13),
        "mc_dropout": (4.83, 0.52, 2.92, 0.09),
        "brainet_dropout": (3.09, 0.78, 2.64, 0.12),
    },
    "boston": {
        "ensemble": (2.90, 0.71, 2.37, 0.25),
        "brainet_ensemble": (2.17, 0.56, 1.88, 0.21),
        "mc_dropout": (2.80, 0.52, 2.39, 0.15),
        "brainet_dropout": (1.90, 0.38, 2.16, 0.08),
    },
    "power": {
        "ensemble": (4.11, 0.16, 2.82, 0.03),
        "brainet_ensemble": (4.10, 0.14, 2.80, 0.03),
        "mc_dropout": (4.02, 0.18, 2.80, 0.05),
        "brainet_dropout": (4.00, 0.16, 2.79, 0.04),
    },
    "yacht": {
        "ensemble": (3.09, 1.03, 2.25, 0.39),
        "brainet_ensemble": (1.10, 0.36, 1.09, 0.14),
        "mc_dropout": (1.42, 0.48, 1.60, 0.13),
        "brainet_dropout": (0.61, 0.25, 1.38, 0.06),
    },
    "kin8nm": {
        "ensemble": (0.09, 0.00, -1.18, 0.02),
        "brainet_ensemble": (0.08, 0.00, -1.23, 0.03),
        "mc_dropout": (0.10, 0.00, -0.95, 0.03),
        "brainet_dropout": (0.08, 0.00, -1.10, 0.03),
    },
    "energy": {
        "ensemble": (0.95, 0.26, 1.16, 0.25),
        "brainet_ensemble": (0.71, 0.10, 1.02, 0.13),
        "mc_dropout": (0.88, 0.13, 1.62, 0.03),
        "brainet_dropout": (0.56, 0.08, 1.44, 0.02),
    },
    "naval": {
        "ensemble": (0.00, 0.00, -3.55, 0.06),
        "brainet_ensemble": (0.00, 0.00, -3.68, 0.05),
        "mc_dropout": (0.0018, 0.0002, -4.22, 0.01),
        "brainet_dropout": (0.0012, 0.0003, -4.35, 0.02),
    },
    "wine": {
        "ensemble": (0.64, 0.04, 0.92, 0.08),
        "brainet_ensemble": (0.59, 0.05, 0.76, 0.05),
        "mc_dropout": (0.62, 0.04, 0.93, 0.06),
        "brainet_dropout": (0.54, 0.04, 0.82, 0.05),
    },
    "protein": {
        "ensemble": (4.62, 0.17, 2.79, 0.03),
        "brainet_ensemble": (4.16, 0.15, 2.60, 0.09),
        "mc_dropout": (3.60, 0.03, 2.69, 0.01),
        "brainet_dropout": (3.46, 0.19, 2.67, 0.03),
    },
}
SETS = list(PAPER)
LARGE = ("kin8nm", "power", "naval", "protein")  # thousands of rows
Floats = NDArray[np.float64]


# -- networks -----------------------------------------------------------------------------------------------------


class Replica(NamedTuple):
    """One ensemble, or one network with dropout, among those trained together: its rows and its settings."""

    x: Floats
    y: Floats
    x_eval: Floats
    y_eval: Floats
    settings: dict[str, Any]


def budget(name: str, d: int) -> int:
    """Parameters of dense (w) → ReLU → dense (2) with w = 50, for protein 100, as in the published comparisons."""
    w = 100 if name == "protein" else 50
    return (d + 1) * w + (w + 1) * 2


def rate(step: int, settings: dict[str, Any]) -> float:
    """Learning rate: a tenth of the steps rising, then half a cosine down to 0, where it stays."""
    done = step / settings["steps"]
    shape = done / 0.1 if done < 0.1 else 0.5 * (1 + math.cos(math.pi * min(1.0, (done - 0.1) / 0.9)))
    return float(settings["lr"] * shape)


class Adam:
    """AdamW over batched members, each with a learning rate and a weight decay of its own."""

    def __init__(self, head: EnsembleHead, decay: Tensor) -> None:
        levels = head.plan.levels
        # The member of every element: weights are (M, …), biases lie level by level and then member by member.
        owner = torch.cat([torch.arange(head.members).repeat_interleave(level.num_neurons) for level in levels])
        self.places = [
            (p, owner if p is head.layers.bias else torch.arange(head.members).view(-1, *[1] * (p.dim() - 1)))
            for p in head.parameters()
        ]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p, _ in self.places]
        self.decay, self.time = decay, 0

    @torch.no_grad()
    def step(self, lr: Tensor) -> None:
        """One update; `lr` (M,)."""
        self.time += 1
        size = lr * math.sqrt(1 - 0.999**self.time) / (1 - 0.9**self.time)
        shrink = 1 - lr * self.decay
        for (p, owner), (mean, square) in zip(self.places, self.moments, strict=True):
            assert p.grad is not None
            mean.lerp_(p.grad, 0.1)
            square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.mul_(shrink[owner]).sub_(size[owner] * mean / square.sqrt().add_(1e-8))
            p.grad = None


def train(
    ggt: GGT, replicas: list[Replica], name: str, members: int, dropout: float, seed: int
) -> list[dict[str, float]]:
    """Train all replicas as one batched `EnsembleHead` and evaluate each, in the units of its target."""
    torch.manual_seed(seed)
    R, M = len(replicas), len(replicas) * members
    head = EnsembleHead(ggt, 2, M * budget(name, ggt.num_variables), M, norm=None, dropout=dropout)
    n, batch = min(len(r.x) for r in replicas), 200 if name == "protein" else 128 if name in LARGE else 32
    tasks, inputs, evals, targets = [], [], [], []
    for r in replicas:
        x, x_eval = standardise(r.x, r.x_eval)
        y = torch.tensor(r.y, dtype=torch.float32)
        tasks.append(Regression())
        tasks[-1].prepare(y)
        inputs.append(x[:n])
        targets.append(((y - tasks[-1].center) / tasks[-1].scale)[:n])
        evals.append(x_eval)
    x, y = torch.stack(inputs), torch.stack(targets)
    common = Regression()  # targets are standardised already, each by its own rows
    each = torch.arange(R)[:, None]
    optimizer = Adam(head, torch.tensor([r.settings["weight_decay"] for r in replicas]).repeat_interleave(members))
    head.train()
    per_epoch = n // batch
    for step in range(max(r.settings["steps"] for r in replicas)):
        if step % per_epoch == 0:
            order = torch.rand(R, n).argsort(dim=1)
        rows = order[:, step % per_epoch * batch :][:, :batch]
        outputs = head(x[each, rows].repeat_interleave(members, dim=0))
        common.loss(outputs, y[each, rows].repeat_interleave(members, dim=0)).mul(M).backward()
        lr = [rate(step, r.settings) for r in replicas]
        optimizer.step(torch.tensor(lr).repeat_interleave(members))
    head.eval()
    longest = max(len(v) for v in evals)
    padded = torch.stack([torch.cat([v, v.new_zeros(longest - len(v), v.shape[1])]) for v in evals])
    with torch.no_grad():
        chunks = [head.passes(part.repeat_interleave(members, dim=0), PASSES) for part in padded.split(200, dim=1)]
    outputs = torch.cat([chunk.values for chunk in chunks], dim=1)
    outputs = outputs.unflatten(0, (R, -1))  # (R, members or passes, rows, 2)
    results = []
    for i, r in enumerate(replicas):
        metrics = collect(tasks[i].measures(), "", tasks[i].group)
        metrics.update(tasks[i].predictive(outputs[i, :, : len(r.x_eval)], None), torch.tensor(r.y_eval).float())
        results.append({k: round(float(v), 6) for k, v in metrics.compute().items()})
        results[-1] |= {"parameters": head.num_params // R, "depth": head.plan.ggt.depth}
    return results


def tree_of(variant: str, x: Floats, settings: dict[str, Any]) -> GGT:
    """Stacked layers for a plain variant, else the MAP structure of the training rows."""
    hidden = VARIANTS[variant]
    if hidden:
        return stacked_tree(x.shape[1], hidden)
    ggt = learn_structure(x, bootstrap="paper", progress=False, max_seconds=20, **settings["structure"])
    return ggt.only(ggt.map())


def wiring(node: Tree) -> Any:
    """What makes two trees with one branch a node the same network: variables, without scores."""
    if isinstance(node, Leaf):
        return node.variables
    branch = node.branches[0]
    return tuple(wiring(a) for a in branch.ancestors), wiring(branch.descendant)


def train_groups(
    variant: str, name: str, replicas: list[Replica], trees: list[GGT], members: int
) -> list[dict[str, float]]:
    """Replicas of equal wiring and dropout together; results in their order."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="expected .* parameters within 2 %")
    family = "dropout" in variant
    groups: dict[Any, list[int]] = {}
    for i, (r, ggt) in enumerate(zip(replicas, trees, strict=True)):
        groups.setdefault((wiring(ggt.root), r.settings["dropout"] if family else 0.0), []).append(i)
    results: list[dict[str, float]] = [{}] * len(replicas)
    for (_, dropout), rows in groups.items():
        found = train(
            trees[rows[0]], [replicas[i] for i in rows], name, 1 if family else members, dropout, seed=rows[0]
        )
        for i, result in zip(rows, found, strict=True):
            results[i] = result
    return results


# -- settings -----------------------------------------------------------------------------------------------------


def trial(name: str, number: int, shorten: int = 1) -> dict[str, Any]:
    """The settings of a trial, the same for all variants; each variant reads those that concern it.

    3 weight decays × 6 pairs of learning rate and length; a dropout rate and a structure go with each pair. A smoke run
    divides the length by `shorten`.
    """
    decay, pair = number % 3, number // 3
    if name in LARGE:
        lr, steps = [(0.01, 4000), (0.02, 4000), (0.02, 2000), (0.005, 4000), (0.01, 2000), (0.03, 4000)][pair]
    else:
        lr, steps = [(0.01, 2500), (0.02, 1000), (0.01, 1000), (0.005, 2500), (0.02, 2500), (0.005, 1000)][pair]
    return {
        "lr": lr,
        "steps": steps // shorten,
        "weight_decay": [0.0, 0.01, 0.1][decay] if name in LARGE else [0.03, 0.3, 1.0][decay],
        "dropout": [0.005, 0.01, 0.05, 0.01, 0.005, 0.05][pair],
        "structure": STRUCTURES[pair],
    }


def tune_one(data: str, name: str, variant: str, shorten: int) -> dict[str, Any]:
    """The trial with the lowest validation NLL, a mean over parts held out of the first split's training rows."""
    start = time.perf_counter()
    x, y, _, _ = read_split(data, name, 0)
    parts = []
    for holdout in range(1 if name in LARGE else 4):
        order = np.random.default_rng(holdout).permutation(len(x))
        held, kept = np.split(order, [min(len(x) // 5, 1000)])
        parts.append((x[kept], y[kept], x[held], y[held]))
    replicas, trees = [], []
    for number in range(TRIALS):
        settings = trial(name, number, shorten)
        if number % 3 == 0:
            ggt = tree_of(variant, x, settings)
        replicas += [Replica(*part, settings) for part in parts]
        trees += [ggt] * len(parts)
    found = train_groups(variant, name, replicas, trees, 2 if name in LARGE else MEMBERS)
    nll = np.array([f["reg/NLL"] for f in found]).reshape(TRIALS, -1).mean(axis=1)
    best = int(np.argmin(np.where(np.isfinite(nll), nll, np.inf)))
    seconds = round(time.perf_counter() - start, 1)
    settings = trial(name, best, shorten)
    return {"trial": best, "seconds": seconds, "validation NLL": nll.round(4).tolist(), "settings": settings}


def tune(out: Path, data: str, names: Iterable[str], variants: Iterable[str], workers: int, shorten: int = 1) -> None:
    """Choose settings for what has none yet."""
    path = out / "uci_settings.json"
    chosen = json.loads(path.read_text()) if path.exists() else {}
    todo = [(n, v) for n in names for v in variants if v in MAIN and v not in chosen.get(n, {})]
    with ProcessPoolExecutor(workers) as pool:
        futures = {pool.submit(tune_one, data, n, v, shorten): (n, v) for n, v in todo}
        for future in as_completed(futures):
            n, v = futures[future]
            found = future.result()
            chosen.setdefault(n, {})[v] = found
            write_whole(path, json.dumps(chosen, indent=1))
            print(n, v, found["settings"], f"{min(found['validation NLL']):.3f}", f"{found['seconds']} s", flush=True)


# -- test ---------------------------------------------------------------------------------------------------------


def tuned(variant: str) -> str:
    """The variant whose settings it uses: a control those of BRAINet."""
    return variant.removesuffix("_shuffled").removesuffix("_stacked")


def finished(out: Path) -> list[dict[str, Any]]:
    """All cells so far."""
    path = out / "uci.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def evaluate(data: str, name: str, variant: str, splits: list[int], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Some published splits of a set: trained on all training rows, evaluated on the test rows."""
    start = time.perf_counter()
    replicas, trees = [], []
    for split in splits:
        rows = read_split(data, name, split)
        trees.append(tree_of(variant, rows.x_train, settings))
        if variant.endswith("shuffled"):
            order = np.random.default_rng(split).permutation(rows.x_train.shape[1])
            rows = rows._replace(x_train=rows.x_train[:, order], x_test=rows.x_test[:, order])
        replicas.append(Replica(*rows, settings))
    results = train_groups(variant, name, replicas, trees, MEMBERS)
    seconds = round((time.perf_counter() - start) / len(splits), 2)
    return [
        {"set": name, "variant": variant, "split": split, "seconds": seconds, "measured": stamp(), **result}
        for split, result in zip(splits, results, strict=True)
    ]


def run(out: Path, data: str, names: list[str], variants: list[str], splits: int, workers: int) -> None:
    """Test cells that are not there yet, five splits at a time, so that an interrupted run has some of every set."""
    chosen = json.loads((out / "uci_settings.json").read_text())
    done = {(c["set"], c["variant"], c["split"]) for c in finished(out)}
    todo = []
    for first in range(0, splits, 5):
        for name in sorted(names, key=lambda n: n not in LARGE):
            for variant in variants:
                last = min(first + 5, splits, 5 if name == "protein" else 20)
                open_splits = [s for s in range(first, last) if (name, variant, s) not in done]
                if open_splits:
                    todo.append((name, variant, open_splits))
    start = time.perf_counter()
    with ProcessPoolExecutor(workers) as pool, (out / "uci.jsonl").open("a") as file:
        futures = [pool.submit(evaluate, data, n, v, s, chosen[n][tuned(v)]["settings"]) for n, v, s in todo]
        for i, future in enumerate(as_completed(futures)):
            for cell in future.result():
                file.write(json.dumps(cell) + "\n")
            file.flush()
            print(f"{i + 1} of {len(todo)} groups of cells, {time.perf_counter() - start:.0f} s", flush=True)


FAMILIES = {"Deep Ensembles": ("ensemble", "brainet_ensemble"), "MC-dropout": ("mc_dropout", "brainet_dropout")}


def show(out: Path) -> None:
    """Tables of RMSE and NLL, mean ± standard deviation over splits, beside the paper's; then who wins."""
    cells = finished(out)
    for family in FAMILIES:
        for metric in ("NLL", "RMSE"):
            found, tally = compared(cells, family, metric)
            print(f"\n{metric}, {family}:\n\n{found}\n\n" + "\n".join(tally))


def compared(cells: list[dict[str, Any]], family: str, metric: str) -> tuple[str, list[str]]:
    """The table of a family and a metric, and a line for each variant that BRAINet is compared with."""
    plain, ours = FAMILIES[family]
    there, at = {c["variant"] for c in cells}, {"NLL": 2, "RMSE": 0}[metric]
    others = [plain, *(v for v in (f"{ours}_stacked", f"{ours}_shuffled") if v in there)]
    rows, tally = [], {}
    for name in SETS:
        found = {v: _by_split(cells, name, v, f"reg/{metric}") for v in (ours, *others)}
        if not found[plain] or not found[ours]:
            continue
        digits = 4 if name == "naval" and at == 0 else 3 if name in ("kin8nm", "naval") else 2
        row: list[Any] = [name, len(found[ours])]
        row += [spread(list(found[v].values()), digits) for v in (plain, ours)]
        row += [f"{PAPER[name][v][at]:.{digits}f} ± {PAPER[name][v][at + 1]:.{digits}f}" for v in (plain, ours)]
        for other in others:
            row.append(_verdict(found[ours], found[other], digits, tally.setdefault(other, [])))
        rows.append(row)
    names = {other: other.removeprefix(f"{ours}_") if other != plain else "plain" for other in others}
    header = ["set", "splits", "plain", "BRAINet", "paper: plain", "paper: BRAINet"]
    lines = []
    for other, verdicts in tally.items():
        counts = {word: sum(v == word for v in verdicts) for word in ("better", "equal", "worse")}
        if sum(counts.values()):
            lines.append(f"BRAINet against {names[other]}: {', '.join(f'{n} {word}' for word, n in counts.items())}.")
    return markdown(header + [f"BRAINet - {name}" for name in names.values()], rows), lines


def _by_split(cells: list[dict[str, Any]], name: str, variant: str, metric: str) -> dict[int, float]:
    return {c["split"]: c[metric] for c in cells if c["set"] == name and c["variant"] == variant}


def _verdict(ours: dict[int, float], other: dict[int, float], digits: int, tally: list[str]) -> str:
    """Mean difference over common splits ± its standard error; equal within one standard error."""
    common = sorted(set(ours) & set(other))
    if len(common) < 2:
        return ""
    gaps = [ours[s] - other[s] for s in common]
    mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    tally.append("better" if mean < -error else "equal" if mean <= error else "worse")
    return f"{mean:+.{digits + 1}f} ± {error:.{digits + 1}f} {tally[-1]}"


# -- speed ------------------------------------------------------------------------------------------------------------


def speed(out: Path, seconds: float) -> None:
    """A training step of M batched members against M heads one after the other, plain and on a learned structure."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="expected .* parameters within 2 %")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 8))
    x[:, 4:] += x[:, :4]
    trees = {
        "one hidden layer": stacked_tree(8, 1),
        "learned": learn_structure(x, bootstrap="paper", test="gaussian", progress=False),
    }
    rows = []
    for label, ggt in trees.items():
        for members in (5, 20):
            for batch in (32, 256):
                inputs = torch.tensor(x[:batch], dtype=torch.float32)
                heads = [EnsembleHead(ggt, 2, 600, 1, norm=None) for _ in range(members)]
                calls = {
                    "batched": _step([EnsembleHead(ggt, 2, 600 * members, members, norm=None)], inputs),
                    "loop": _step(heads, inputs),
                }
                # The least processor seconds: other programs do not count.
                found = race(calls, seconds, number=5, clock=time.process_time)
                took = {name: min(times.times) for name, times in found.items()}
                rows.append([label, members, batch, 1e3 * took["batched"], took["loop"] / took["batched"]])
    table(["structure", "members", "batch", "batched step, ms", "loop / batched"], rows)
    names = ("structure", "members", "batch", "batched ms", "ratio")
    content = {"measured": stamp(), "rows": [dict(zip(names, row, strict=True)) for row in rows]}
    write_whole(out / "uci_speed.json", json.dumps(content, indent=1))


def _step(heads: list[Any], x: Tensor) -> Callable[[], None]:
    optimizers = [torch.optim.Adam(head.parameters(), fused=True) for head in heads]

    def step() -> None:
        for head, optimizer in zip(heads, optimizers, strict=True):
            optimizer.zero_grad()
            head(x).square().mean().backward()
            optimizer.step()

    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tune", "run", "table", "speed"])
    parser.add_argument("--data", help="folder with the folders of the nine sets")
    parser.add_argument("--sets", nargs="+", choices=list(FOLDERS), default=SETS)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=MAIN)
    parser.add_argument("--quick", action="store_true", help=f"only the first {QUICK_SPLITS} splits")
    parser.add_argument("--splits", type=int, default=20, help="at most so many splits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each race of `speed`")
    add_out(parser)
    args = parser.parse_args(argv)
    out, shorten, splits = results_folder(args), 1, QUICK_SPLITS if args.quick else args.splits
    if args.smoke:
        args.sets, args.seconds, shorten, splits = ["yacht"], 0.02, 100, 2
        args.data = str(synthetic_uci(out / "data", args.sets[0], splits))
    if args.part in ("tune", "run") and args.data is None:
        parser.error(f"{args.part} needs --data DIR")
    if args.part == "tune" or (args.part == "run" and args.smoke):
        tune(out, args.data, args.sets, args.variants, args.workers, shorten)
    if args.part == "run":
        run(out, args.data, args.sets, args.variants, splits, args.workers)
    if args.part in ("run", "table"):
        show(out)
    if args.part == "speed":
        speed(out, args.seconds)


if __name__ == "__main__":
    main()
