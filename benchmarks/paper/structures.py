"""Unique structures against the size of the training set (Appendix C, Figure 1): MNIST pixels, s = 3, 5 repeats.

    python benchmarks/paper/structures.py --data DIR      # docs/results/structures.{json,png}, a few minutes

A small set leaves more doubt about the structure, so bootstrap samples disagree more: the paper finds fewer unique
structures as the set grows, down to a number above one. Pixels are pooled to 14×14.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` is

import numpy as np
from common.command import arguments, parse
from common.data import mnist_pixels
from common.store import Store
from common.tables import spread, table
from matplotlib.figure import Figure

from brainet_pl.structure import learn_structure

SIZES = (100, 300, 1000, 3000, 10000, 30000, 60000)
SETTINGS = {"s": 3, "max_order": 1, "test": "gaussian", "threshold": 0.1, "pool": 2}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and draw the figure."""
    args = parse(arguments(__doc__), argv)
    store = Store(args.out / "structures.json", {"sizes": SIZES, "repeats": args.seeds, **SETTINGS})
    (x, _), _ = mnist_pixels(args.data, pool=2)
    rows, means, spreads = [], [], []
    for size in SIZES:
        found = []
        for seed in range(args.seeds):

            def count(size: int = size, seed: int = seed) -> dict[str, float]:
                chosen = np.random.default_rng(seed).permutation(len(x))[:size]
                settings = {k: v for k, v in SETTINGS.items() if k != "pool"}
                ggt = learn_structure(x[chosen], bootstrap="paper", seed=seed, progress=False, **settings)
                return {
                    "log10 unique": math.log10(ggt.num_unique_structures),
                    "log10 sub-networks": math.log10(ggt.num_subnetworks),
                    "perplexity": ggt.perplexity(),
                }

            found.append(store.cell(f"{size}/{seed}", count))
        logs = [cell["log10 unique"] for cell in found]
        means.append(statistics.fmean(logs))
        spreads.append(statistics.stdev(logs) if len(logs) > 1 else 0.0)
        rows.append([f"{size:,}", spread(logs), spread([cell["log10 sub-networks"] for cell in found])])
    table(["training images", "log10 unique structures", "log10 sub-networks"], rows)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(SIZES, means, spreads, color="#0072B2", marker="o", capsize=4)
    axes.set_xscale("log")
    axes.set_xlabel("training images")
    axes.set_ylabel("unique structures (log10)")
    axes.set_title(f"MNIST 14×14, s = 3: mean and deviation of {args.seeds} repeats")
    axes.grid(alpha=0.3)
    figure.savefig(args.out / "structures.png", dpi=130)


if __name__ == "__main__":
    main()
