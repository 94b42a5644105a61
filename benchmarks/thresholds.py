"""Which rule for the threshold of a tree transfers from task to task? On validation data alone.

    python benchmarks/thresholds.py --data DIR      # docs/results/thresholds.json, about 20 minutes
    python benchmarks/thresholds.py --smoke

A BRAINet with its defaults is trained on the tasks of `defaults.py`, on seeds that are used for nothing else, with each
of a few rules: the threshold of largest modularity ("auto"), those that keep a share of all pairs, fixed ones in nats,
and a tree that is never split. A rule is chosen for each task by all others: the one with the least mean loss, in
standard deviations of a task over rules. What that choice costs on the task left out says whether rules transfer.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.command import arguments, parse
from common.store import Store
from common.tables import table
from common.tasks import Sample
from defaults import BATCH, RATE, ROWS, TUNING, entries, fit

from brainet_pl.network import Tree
from brainet_pl.structure import GGT, PreparedData, find_test, learn_structure

TASKS = (
    "digits",
    "MNIST 5,000",
    "Fashion-MNIST 5,000",
    "stage 2, 4,000",
    "stage 3, 4,000",
    "concrete",
    "energy",
    "kin8nm",
)
NEVER = 1e3  # nats: no pair depends so much on each other


def kept(share: float) -> Callable[[Sample], float]:
    """The threshold that keeps this share of all pairs."""

    def threshold(sample: Sample) -> float:
        data = PreparedData.prepare(sample.train[0], 3, ROWS)
        everything = np.arange(data.d)
        found = find_test("gaussian").on(data, None, 0.0).block((), everything, everything)
        pairs = found[np.triu_indices(data.d, 1)]
        pairs[~np.isfinite(pairs)] = pairs[np.isfinite(pairs)].max()  # copies share more than any number of nats
        return float(np.quantile(pairs, 1 - share))

    return threshold


RULES: dict[str, Callable[[Sample], Any]] = {
    "auto": lambda sample: "auto",
    "2 % of pairs": kept(0.02),
    "10 % of pairs": kept(0.1),
    "30 % of pairs": kept(0.3),
    "0.05 nats": lambda sample: 0.05,
    "0.3 nats": lambda sample: 0.3,
    "never split": lambda sample: NEVER,
}


def tree(sample: Sample, rule: str) -> GGT:
    """The tree of the training features, with the defaults but for the threshold."""
    return learn_structure(
        sample.train[0], test="gaussian", threshold=RULES[rule](sample), max_rows=ROWS, progress=False
    )


def choose(losses: dict[str, dict[str, float]], tasks: Sequence[str]) -> str:
    """The rule with the least loss, mean over tasks, each in its own standard deviations over rules.

    >>> choose({"a": {"x": 0.0, "y": 1.0}, "b": {"x": 0.2, "y": 0.1}, "c": {"x": 0.0, "y": 3.0}}, ["a", "c"])
    'x'
    """

    def standard(task: str, rule: str) -> float:
        found = list(losses[task].values())
        return (losses[task][rule] - statistics.fmean(found)) / (statistics.pstdev(found) or 1.0)

    return min(losses[tasks[0]], key=lambda rule: statistics.fmean(standard(task, rule) for task in tasks))


def report(losses: dict[str, dict[str, float]]) -> None:
    """Validation NLL by task and rule, and what a rule that the other tasks chose costs on each."""
    rows = []
    for task, found in losses.items():
        others = [other for other in losses if other != task]
        rule = choose(losses, others) if others else min(found, key=lambda r: found[r])
        cost = found[rule] - min(found.values())
        rows.append([task, *(f"{found[r]:.4f}" for r in RULES), rule, f"{cost:.4f}"])
    print("\nvalidation NLL, mean over seeds; the rule that all other tasks choose, and what it costs against the best")
    table(["task", *RULES, "chosen by the others", "cost"], rows)
    print(f"\nchosen by all tasks: {choose(losses, list(losses))}")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, choose."""
    args = parse(arguments(__doc__, seeds=2), argv)
    warnings.filterwarnings("ignore", message=r"expected .* parameters within 2 %")
    tasks = entries(args.data, args.cache, args.out)
    settings = {"rate": RATE, "batch": BATCH, "rows": ROWS, "head": Tree().settings()}
    store = Store(Path(args.out) / "thresholds.json", settings)
    losses: dict[str, dict[str, float]] = {}
    first = 0 if args.smoke else TUNING
    for task in [name for name in TASKS if name in tasks] + ([] if args.data else ["yacht"]):
        for rule in RULES:
            cells = []
            for seed in range(first, first + args.seeds):

                def run(task: str = task, rule: str = rule, seed: int = seed) -> dict[str, float]:
                    entry = tasks[task]
                    sample = entry.load(seed)
                    ggt = tree(sample, rule)
                    torch.manual_seed(seed)
                    head = Tree().build(sample.in_features, sample.task.out_features, ggt)
                    fitted = fit(head, sample, entry, seed, f"{task}, {rule}, seed {seed}", args.smoke)
                    return {"nll": fitted.nll, "threshold": ggt.settings["threshold"], "depth": float(ggt.depth)}

                cells.append(store.cell(f"{task}/{rule}/{seed}", run)["nll"])
            losses.setdefault(task, {})[rule] = statistics.fmean(cells)
    report(losses)


if __name__ == "__main__":
    main()
