"""Every head with its defaults, at equal size, on pixels, deep features and tables: who has the lowest NLL?

    python benchmarks/defaults.py --data DIR            # validation columns alone, on seeds that are not used again
    python benchmarks/defaults.py --data DIR --final    # test columns: docs/results/defaults.json, about 90 minutes
    python benchmarks/defaults.py --data DIR --final --splits    # five small tables, all 20 published splits of each
    python benchmarks/defaults.py --smoke               # shows in a minute that everything works

One rule for all heads: Adam at the module's own rate 0.001, batches of 128, the epoch with the lowest validation NLL
(as `ModelCheckpoint` chooses it), 15 passes. Nothing is chosen for a head by itself. The budget of parameters is what
BRAINet takes by default, and every other head but the linear one gets as many. A seed chooses the training samples, the
initial weights and the batches, the same for all heads, so that differences are paired; BRAINet learns its structure
anew from each seed's training samples. Finished cells are kept: a run that was cut goes on.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common.command import arguments, parse
from common.data import synthetic_uci
from common.measures import quality_of
from common.store import Cell, Store
from common.tables import table
from common.tasks import CifarTaps, Loader, Sample, digits, nll, pixels, uci
from common.training import Fitted, fit_best, shuffled

from brainet_pl.network import MLP, Bayes, BRAINetHead, Ensemble, Head, HeadSettings, Linear, MCDropout, Tree
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.tasks import Regression

PASSES, BATCH, RATE = 15, 128, 1e-3
ROWS = 20_000  # that a structure is learned from, at the most
TUNING = 10  # the first of the seeds that look at validation data alone
OURS, CONTROL = "BRAINet", "BRAINet, shuffled"
PEERS: dict[str, Callable[[int], HeadSettings]] = {  # budget → settings
    "linear": lambda budget: Linear(),
    "MLP": lambda budget: MLP(num_params=budget),
    "MC-dropout": lambda budget: MCDropout(num_params=budget),
    "ensemble": lambda budget: Ensemble(num_params=budget),
    "Bayes": lambda budget: Bayes(num_params=budget),
}
HEADS = [*PEERS, OURS, CONTROL]


class Entry(NamedTuple):
    """A task, the longest training, how long without progress ends it, and how many seeds it has at the most."""

    load: Loader
    epochs: int
    patience: int
    seeds: int = 5


def entries(data: Path | None, cache: Path | None, out: Path) -> dict[str, Entry]:
    """The tasks, cheap ones first; without data, small stand-ins."""
    taps = CifarTaps(data, cache)
    tables = synthetic_uci(out / "uci", "yacht", 2) if data is None else data / "uci"
    names = ["yacht"] if data is None else ["concrete", "energy", "kin8nm"]

    def late(make: Callable[[], Loader]) -> Loader:
        """Reads its data when it is first asked for."""
        found: list[Loader] = []

        def draw(seed: int) -> Sample:
            if not found:
                found.append(make())
            return found[0](seed)

        return draw

    images = {
        "digits": Entry(digits, 150, 30),
        "MNIST 5,000": Entry(late(partial(pixels, data, "MNIST", 5000, 1000)), 80, 15),
        "Fashion-MNIST 5,000": Entry(late(partial(pixels, data, "FashionMNIST", 5000, 1000)), 80, 15),
        "stage 2, 4,000": Entry(late(partial(taps.task, "layer2", 4000)), 60, 10),
        "stage 3, 4,000": Entry(late(partial(taps.task, "layer3", 4000)), 60, 10),
        "last layer, 50,000": Entry(late(partial(taps.task, "last", 50_000)), 20, 5),
        "MNIST 60,000": Entry(late(partial(pixels, data, "MNIST", 55_000, 5000)), 30, 6, seeds=2),
    }
    rows = {name: Entry(uci(tables, name), 100 if name == "kin8nm" else 250, 20) for name in names}
    found = images | rows
    return {name: found[name] for name in ("digits", "yacht")} if data is None else found


def small_tables(data: Path) -> dict[str, Entry]:
    """Regression sets of at most 1,600 rows with all their published splits."""
    return {
        name: Entry(uci(data / "uci", name), 250, 20, seeds=20)
        for name in ("yacht", "boston", "energy", "concrete", "wine")
    }


# -- one cell ---------------------------------------------------------------------------------------------------------


def structure(sample: Sample) -> GGT:
    """The tree of the training features, with the defaults."""
    return learn_structure(sample.train[0], max_rows=ROWS, progress=False)


def build(name: str, sample: Sample, ggt: GGT, seed: int) -> Head:
    """A head with its defaults, of as many parameters as BRAINet takes."""
    d, out = sample.in_features, sample.task.out_features
    torch.manual_seed(seed)
    if name in PEERS:
        budget = Tree().build(d, out, ggt).num_params
        torch.manual_seed(seed)
        return PEERS[name](budget).build(d, out)
    return Tree().build(d, out, shuffled(ggt, seed) if name == CONTROL else ggt)


def fit(head: Head, sample: Sample, entry: Entry, seed: int, name: str, smoke: bool = False) -> Fitted:
    """Train by the one rule for all heads; two epochs for a smoke run."""
    epochs = 2 if smoke else entry.epochs
    pace = {"epochs": epochs, "patience": entry.patience, "lr": RATE, "batch": BATCH, "passes": PASSES}
    return fit_best(head, sample, seed=seed, name=name, **pace)  # type: ignore[arg-type]


def measure(head: Head, sample: Sample, part: str) -> Cell:
    """Validation or test measures of a trained head."""
    x, y = sample.val if part == "val" else sample.test
    torch.manual_seed(0)
    with torch.no_grad():
        found = [head.passes(rows, PASSES) for rows in x.split(2000)]
    outputs, weights = torch.cat([f.values for f in found], dim=1), found[0].weights
    cell = {"nll": nll(sample.task, outputs, weights, y)}
    predicted = sample.task.predictive(outputs, weights)
    if isinstance(sample.task, Regression):
        return cell | {"rmse": float((predicted[:, 0] - y).square().mean().sqrt())}
    return cell | {key: value for key, value in quality_of(predicted, y).items() if key != "nll"}


class Lab:
    """Samples and trees of one seed at a time, and finished cells."""

    def __init__(self, tasks: dict[str, Entry], store: Store, smoke: bool) -> None:
        self.tasks, self.store, self.smoke = tasks, store, smoke
        self._at: tuple[str, int] | None = None

    def _draw(self, task: str, seed: int) -> None:
        if self._at != (task, seed):
            self.sample = self.tasks[task].load(seed)
            start = time.perf_counter()
            self.ggt = structure(self.sample)
            self.learned = time.perf_counter() - start
            self._at = task, seed

    def cell(self, task: str, head: str, seed: int, final: bool) -> dict[str, Any]:
        """What is known of a head after training on one seed: measures, and facts of the training."""

        def run() -> dict[str, Any]:
            self._draw(task, seed)
            entry = self.tasks[task]
            start = time.perf_counter()
            made = build(head, self.sample, self.ggt, seed)
            fitted = fit(made, self.sample, entry, seed, f"{task}, {head}, seed {seed}", self.smoke)
            found: dict[str, Any] = {
                part: measure(fitted.head, self.sample, part) for part in ("val", "test")[: 1 + final]
            }
            found |= {"epoch": fitted.epoch, "params": fitted.head.num_params}
            if isinstance(fitted.head, BRAINetHead):
                found |= {"threshold": self.ggt.settings["threshold"], "structure seconds": round(self.learned, 1)}
            return found | {"seconds": round(time.perf_counter() - start, 1)}

        found: dict[str, Any] = self.store.cell(f"{task}/{head}/{seed}", run)
        return found


# -- tables -----------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Mean and standard error of paired differences; the error of a single one is unknown, NaN."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" if math.isnan(self.error) else f"{self.mean:+.4f} ± {self.error:.4f}"


def paired(a: Sequence[float], b: Sequence[float]) -> Difference:
    """a - b, sample by sample.

    >>> print(paired([1.0, 2.0, 3.0], [0.5, 1.0, 3.0]))
    +0.5000 ± 0.2887
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return Difference(statistics.fmean(differences), error)


def outcome(difference: Difference) -> str:
    """ "win", "tie" (within one standard error) or "loss" of something whose NLL is so much above another's."""
    if abs(difference.mean) <= (0.0 if math.isnan(difference.error) else difference.error):
        return "tie"
    return "loss" if difference.mean > 0 else "win"


Scores = dict[str, dict[str, list[float]]]  # task → head → NLL of each seed


def report(cells: Scores, errors: Scores) -> None:
    """NLL by task and head, then BRAINet against each of the others: differences, and how often it wins."""
    means = {task: {head: statistics.fmean(v) for head, v in found.items()} for task, found in cells.items()}
    print("\nNLL, mean over seeds (error in % or RMSE behind it)")
    table(
        ["task", "seeds", *HEADS],
        (
            [task, len(found[OURS]), *(_entry(means[task], errors[task], head) for head in HEADS)]
            for task, found in cells.items()
        ),
    )
    others = [head for head in HEADS if head != OURS]
    differences = {task: {head: paired(found[OURS], found[head]) for head in others} for task, found in cells.items()}
    print("\nNLL of BRAINet less that of others, ± the standard error of paired differences")
    table(["task", *others], ([task, *(str(found[head]) for head in others)] for task, found in differences.items()))
    rows = []
    for head in others:
        results = [outcome(found[head]) for found in differences.values()]
        rows.append([head, *(results.count(kind) for kind in ("win", "tie", "loss"))])
    print("\nBRAINet against each of the others; within one standard error is a tie")
    table(["against", "wins", "ties", "losses"], rows)
    peers = list(PEERS)
    first = [t for t, f in differences.items() if outcome(f[min(peers, key=lambda h: means[t][h])]) != "loss"]
    wired = [t for t, f in differences.items() if f[CONTROL].mean < -2 * f[CONTROL].error]
    linear = [t for t, f in differences.items() if outcome(f["linear"]) == "loss"]
    print(f"\nfirst, or within a standard error of the first: {len(first)} of {len(cells)} tasks ({', '.join(first)})")
    print(f"worse than linear by more than a standard error: {', '.join(linear) or 'nowhere'}")
    print(f"learned wiring ahead of shuffled by two standard errors: {', '.join(wired) or 'nowhere'}")


def _entry(means: dict[str, float], errors: dict[str, list[float]], head: str) -> str:
    best = min(means[h] for h in HEADS if h != CONTROL)
    text = f"{means[head]:.4f} ({statistics.fmean(errors[head]):.3g})"
    return f"**{text}**" if means[head] == best else text


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, compare."""
    parser = arguments(__doc__)
    parser.add_argument("--final", action="store_true", help="measure test data, on the seeds that count")
    parser.add_argument("--splits", action="store_true", help="five small tables, all published splits")
    parser.add_argument("--only", nargs="+", help="these tasks alone")
    parser.add_argument("--heads", nargs="+", help="train these heads alone, and print no table")
    args = parse(parser, argv)
    warnings.filterwarnings("ignore", message=r"expected .* parameters within 2 %")
    splits = bool(args.splits and args.data)
    tasks = small_tables(args.data) if splits else entries(args.data, args.cache, args.out)
    if splits:
        args.seeds = 20
    unknown = set(args.only or ()) - set(tasks)
    if unknown:
        parser.error(f"expected tasks among {', '.join(tasks)}, got {', '.join(unknown)}")
    tasks = {name: entry for name, entry in tasks.items() if not args.only or name in args.only}
    settings = {"rate": RATE, "batch": BATCH, "passes": PASSES, "rows": ROWS, "heads": {"BRAINet": Tree().settings()}}
    kind = "_splits" if splits else ""
    store = Store(args.out / (f"defaults{kind}.json" if args.final else f"defaults{kind}_validation.json"), settings)
    lab = Lab(tasks, store, args.smoke)
    part, first = ("test", 0) if args.final else ("val", 0 if args.smoke else TUNING)
    cells: Scores = {}
    errors: Scores = {}
    for task, entry in tasks.items():
        for seed in range(first, first + min(args.seeds, entry.seeds)):
            for head in args.heads or HEADS:
                found = lab.cell(task, head, seed, args.final)[part]
                cells.setdefault(task, {}).setdefault(head, []).append(found["nll"])
                errors.setdefault(task, {}).setdefault(head, []).append(found.get("err", found.get("rmse", math.nan)))
    if not args.heads:
        report(cells, errors)


if __name__ == "__main__":
    main()
