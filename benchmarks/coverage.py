"""Do the estimators keep their word on few rows? Sets, intervals, p-values and probabilities of many small fits.

    python benchmarks/coverage.py                # docs/results/coverage.json, some hours on one core
    python benchmarks/coverage.py --rows 60 --draws 20    # one size alone, and so many draws at the most
    python benchmarks/coverage.py --smoke

Each draw makes other rows, fits `BRAINetClassifier` or `BRAINetRegressor` with their defaults, and asks 1,000 new rows
of the same kind. Targets hang together with the columns, or are drawn by chance: then everything that a fit chooses by
rows that vouch for it shows. Finished blocks of draws are kept, and a run that was cut goes on from there.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import add_out, results_folder
from common.store import Store
from numpy.typing import NDArray
from pages import coverage

from brainet_pl import BRAINetClassifier, BRAINetRegressor

KINDS = ("classes by chance", "classes", "numbers by chance", "numbers")
ROWS = {40: 100, 60: 200, 100: 100, 300: 40, 2000: 10}  # rows of a fit → draws
BLOCK = 10  # draws of one cell
COLUMNS, CLASSES = 6, 3
NEW = 1000  # rows that are asked
LEVELS = (0.8, 0.9)  # of sets and intervals
STRANGE = (0.05, 0.1, 0.2, 0.5)  # shares of rows like those of the fit that p-values call unknown at the most
BINS = 10  # of confidence


class Sample(NamedTuple):
    """Rows (N, 6) and targets (N,)."""

    x: NDArray[np.float64]
    y: NDArray[Any]


def sample(kind: str, rows: int, rng: np.random.Generator) -> Sample:
    """Rows of one kind, three of whose columns hang together."""
    x = rng.normal(size=(rows, COLUMNS))
    x[:, 1:3] = 0.7 * x[:, :1] + 0.7 * x[:, 1:3]
    noise = rng.normal(size=(rows, CLASSES))
    if kind == "classes by chance":
        return Sample(x, rng.integers(0, CLASSES, rows))
    if kind == "numbers by chance":
        return Sample(x, noise[:, 0])
    if kind == "classes":
        sides = np.stack([x[:, 0] + x[:, 3], -x[:, 0] + x[:, 4], x[:, 5] ** 2], axis=1)
        return Sample(x, (sides + 0.7 * noise).argmax(axis=1))
    return Sample(x, x[:, 0] + np.sin(2 * x[:, 3]) + (0.2 + 0.5 * (x[:, 4] > 0)) * noise[:, 0])


def one_draw(kind: str, rows: int, number: int, settings: Mapping[str, Any]) -> dict[str, float]:
    """Shares of 1,000 new rows for which one fit keeps its word."""
    rng = np.random.default_rng([rows, KINDS.index(kind), number])
    seen, new = sample(kind, rows, rng), sample(kind, NEW, rng)
    if kind.startswith("classes"):
        found = of_classes(BRAINetClassifier(random_state=number, **settings).fit(*seen), new)
    else:
        found = of_numbers(BRAINetRegressor(random_state=number, **settings).fit(*seen), new)
    model, measures = found
    p = model.known_p(new.x)
    return measures | {f"unknown at {level}": float((p <= level).mean()) for level in STRANGE}


def of_classes(model: Any, new: Sample) -> tuple[Any, dict[str, float]]:
    """Coverage and size of sets, log loss, and how far confidence is from accuracy."""
    labels = np.searchsorted(model.classes_, new.y)
    every, probs = np.arange(NEW), model.predict_proba(new.x)
    found = {"loss": float(-np.log(probs[every, labels]).mean())}
    for level in LEVELS:
        sets = model.predict_set(new.x, level)
        found |= {
            f"coverage at {level}": float(sets[every, labels].mean()),
            f"size at {level}": float(sets.sum(1).mean()),
        }
    sure, right = probs.max(axis=1), probs.argmax(axis=1) == labels
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [float((sure - right)[place == bin_].sum()) / NEW for bin_ in range(BINS)]
    return model, found | {"ece": sum(map(abs, gaps)), "too sure": sum(gaps)}


def of_numbers(model: Any, new: Sample) -> tuple[Any, dict[str, float]]:
    """Coverage and width of intervals, and the NLL of Gaussians."""
    mean, deviation = model.predict(new.x, return_std=True)
    found = {"loss": float((np.log(2 * np.pi * deviation**2) / 2 + ((new.y - mean) / deviation) ** 2 / 2).mean())}
    for level in LEVELS:
        ends = model.predict_interval(new.x, level)
        covered = (ends[:, 0] <= new.y) & (new.y <= ends[:, 1])
        found |= {f"coverage at {level}": float(covered.mean()), f"size at {level}": float(np.diff(ends).mean())}
    return model, found


def block(kind: str, rows: int, first: int, settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """Name → the measures of ten draws."""
    draws = [one_draw(kind, rows, number, settings) for number in range(first, first + BLOCK)]
    return {name: [round(draw[name], 4) for draw in draws] for name in draws[0]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures block by block, the same number of blocks for all kinds and sizes first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="rows of a fit; all sizes if not given")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="kinds of targets")
    parser.add_argument("--draws", type=int, default=max(ROWS.values()), help="draws of one cell, at the most")
    add_out(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*p-value is no finer.*")
    settings: dict[str, Any] = {"max_epochs": 1} if args.smoke else {}
    store = Store(results_folder(args) / "coverage.json", {"columns": COLUMNS, "new": NEW, "block": BLOCK, **settings})
    sizes = args.rows[:1] if args.smoke else args.rows
    draws = {size: BLOCK if args.smoke else min(args.draws, ROWS.get(size, BLOCK)) for size in sizes}
    for first in range(0, max(draws.values()), BLOCK):
        for size in (size for size in sizes if first < draws[size]):
            for kind in args.kinds:
                store.cell(f"{kind}/{size}/{first}", lambda k=kind, s=size, f=first: block(k, s, f, settings))
    print(coverage(store.content["cells"]))


if __name__ == "__main__":
    main()
