"""MNIST pixels: calibration against model size, against the number of passes, and the ablation of the structure.

    python benchmarks/paper/mnist.py size --data DIR      # NLL, error, Brier, ECE against parameters
    python benchmarks/paper/mnist.py passes --data DIR    # the same against the number of passes, at 240k parameters
    python benchmarks/paper/mnist.py ablation --data DIR  # against the threshold (0 is an ensemble), with the control

Each takes `--images 5000` (default) or 60000, prints its table, and writes JSON and a figure into docs/results. All
networks train with Adam, a rate that decays along a cosine, and batches of 128. Rates and lengths of the ensembles,
and the rate of dropout, were chosen by the NLL of 5,000 training images held out of 60,000; BRAINet has its defaults,
and the rate and length of the ensembles. The structure is learned from the training images' unlabelled pixels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` is

import torch
from common.command import arguments, parse
from common.data import mnist_pixels
from common.measures import quality
from common.store import Cell, Store
from common.tables import spread, table
from common.training import outputs_of, shuffled, train
from matplotlib.figure import Figure
from torch import Tensor, nn

from brainet_pl.network import BayesHead, BRAINetHead, EnsembleHead, MLPHead, stacked_tree
from brainet_pl.structure import GGT, learn_structure

UNIT = 240_000  # parameters of one network
PASSES, COUNTS = 15, (1, 2, 3, 5, 8, 15, 30, 50)
EPOCHS = {5000: {"sampled": 40, "plain": 20}, 60000: {"sampled": 15, "plain": 15}}
LEARNING_RATE = 1e-3
RATE = 0.2  # of MC-dropout
THRESHOLDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
STYLES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
MARKERS = "os^Dvx*P"
Maker = Callable[[], nn.Module]
Threshold = float | Literal["auto"]


class Lab:
    """Images, trees, and one trained and measured head at a time."""

    def __init__(self, data: Path | None, images: int) -> None:
        (x, y), self.test = mnist_pixels(data)
        self.pixels, self.short = x.shape[1], data is None  # a smoke run has no data
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:images]
        self.x, self.y, self.images = x[chosen], y[chosen], images
        self.trees: dict[Threshold, GGT] = {}

    def tree(self, threshold: Threshold) -> GGT:
        """With the defaults, but for the threshold, from at most 20,000 of the images."""
        if threshold not in self.trees:
            self.trees[threshold] = learn_structure(self.x, threshold=threshold, max_rows=20_000, progress=False)
        return self.trees[threshold]

    def brainet(self, budget: int, threshold: Threshold = "auto", control: bool = False) -> Maker:
        """A head on a learned tree, or on the same tree with its pixels shuffled."""

        def make() -> nn.Module:
            tree = self.tree(threshold)
            return BRAINetHead(shuffled(tree) if control else tree, 10, num_params=budget)

        return make

    def ensemble(self, budget: int, members: int) -> Maker:
        """Members of two hidden layers, all together of `budget` parameters."""
        return lambda: EnsembleHead(stacked_tree(self.pixels, 2), 10, budget, members)

    def measure(self, make: Maker, seed: int, name: str, counts: tuple[int, ...] = (PASSES,)) -> dict[str, Cell]:
        """Test quality for each number of passes, and of one simultaneous pass."""
        torch.manual_seed(seed)
        head = make()
        penalty = None
        if isinstance(head, BayesHead):

            def penalty() -> Tensor:
                return head.penalty() / self.images

        kind = "plain" if isinstance(head, EnsembleHead | BRAINetHead) else "sampled"
        epochs = 1 if self.short else EPOCHS[self.images][kind]
        train(head, self.x, self.y, epochs=epochs, lr=LEARNING_RATE, batch=128, seed=seed, decay=True,
              penalty=penalty, name=f"{name}, seed {seed}")  # fmt: skip
        x, y = self.test
        outputs = outputs_of(head, x, max(counts), seed=seed)
        found = {str(count): quality(outputs[:count], y) for count in counts}
        if isinstance(head, BRAINetHead):
            found["simultaneous"] = quality(outputs_of(head, x, mode="simultaneous"), y)
        return found


def size(lab: Lab, store: Store, args: argparse.Namespace) -> dict[str, dict[float, list[Cell]]]:
    """Deep ensembles of 1, 2, … networks of 240k parameters against one BRAINet of as many; and splits of 240k."""
    curves: dict[str, dict[float, list[Cell]]] = {}
    for times in args.sizes:
        budget = times * UNIT
        makers: dict[str, Maker] = {
            f"ensemble of {times} × 240k": lab.ensemble(budget, times),
            "BRAINet": lab.brainet(budget),
        }
        if times == 1:
            makers["BRAINet, shuffled"] = lab.brainet(budget, control=True)
            for m in (2, 5):
                makers[f"ensemble, {m} members"] = lab.ensemble(UNIT, m)
        for name, make in makers.items():
            for seed in range(args.seeds):

                def run(make: Maker = make, seed: int = seed, name: str = name) -> dict[str, Cell]:
                    return lab.measure(make, seed, name)

                found = store.cell(f"{times}/{name}/{seed}", run)
                line = "deep ensemble" if name.endswith("240k") else name
                curves.setdefault(line, {}).setdefault(float(times), []).append(found[str(PASSES)])
                if "simultaneous" in found:
                    curves.setdefault(f"{line}, simultaneous", {}).setdefault(float(times), []).append(
                        found["simultaneous"]
                    )
    return curves


def passes(lab: Lab, store: Store, args: argparse.Namespace) -> dict[str, dict[float, list[Cell]]]:
    """BRAINet, MC-dropout and Bayes by backprop (of twice the parameters) against the number of passes."""
    makers: dict[str, Maker] = {
        "BRAINet": lab.brainet(UNIT),
        "MC-dropout": lambda: MLPHead(lab.pixels, 10, UNIT, 2, RATE),
        "Bayes by backprop": lambda: BayesHead(lab.pixels, 10, 2 * UNIT),
    }
    curves: dict[str, dict[float, list[Cell]]] = {}
    for name, make in makers.items():
        for seed in range(args.seeds):

            def run(make: Maker = make, seed: int = seed, name: str = name) -> dict[str, Cell]:
                return lab.measure(make, seed, name, COUNTS)

            found = store.cell(f"{name}/{seed}", run)
            for count in COUNTS:
                curves.setdefault(name, {}).setdefault(float(count), []).append(found[str(count)])
    return curves


def ablation(lab: Lab, store: Store, args: argparse.Namespace) -> dict[str, dict[float, list[Cell]]]:
    """BRAINet of 240k parameters against the threshold, learned and shuffled."""
    curves: dict[str, dict[float, list[Cell]]] = {}
    for threshold in THRESHOLDS:
        for name, control in (("BRAINet", False), ("BRAINet, shuffled", True)):
            if control and not threshold:
                continue  # an ensemble over all pixels: there is nothing to shuffle
            for seed in range(args.seeds):

                def run(threshold: float = threshold, control: bool = control, seed: int = seed) -> dict[str, Cell]:
                    return lab.measure(lab.brainet(UNIT, threshold, control=control), seed, f"threshold {threshold:g}")

                found = store.cell(f"{threshold:g}/{name}/{seed}", run)
                curves.setdefault(name, {}).setdefault(threshold, []).append(found[str(PASSES)])
                curves.setdefault(f"{name}, simultaneous", {}).setdefault(threshold, []).append(found["simultaneous"])
    return curves


AXES = {"size": "parameters / 240k", "passes": "passes", "ablation": "threshold (nats of mutual information)"}


def draw(curves: dict[str, dict[float, list[Cell]]], what: str, title: str) -> Figure:
    """NLL, error, Brier and ECE side by side, mean and deviation over seeds."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    panels = figure.subplots(1, 4)
    for axes, (key, label) in zip(
        panels, {"nll": "NLL", "err": "error (%)", "brier": "Brier", "ece": "ECE"}.items(), strict=True
    ):
        for k, (name, points) in enumerate(curves.items()):
            places = sorted(points)
            means = [statistics.fmean(c[key] for c in points[p]) for p in places]
            spreads = [statistics.stdev([c[key] for c in points[p]]) if len(points[p]) > 1 else 0.0 for p in places]
            axes.errorbar(
                places, means, spreads, color=STYLES[k % 8], marker=MARKERS[k % 8], capsize=2, ms=5, label=name
            )
        axes.set(xlabel=AXES[what], title=label)
        if what == "passes":
            axes.set_xscale("log")
            axes.set_xticks([1, 3, 15, 50], ["1", "3", "15", "50"])
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the three."""
    parser = arguments(__doc__)
    parser.add_argument("what", choices=list(AXES))
    parser.add_argument("--images", type=int, default=5000, choices=list(EPOCHS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3])
    args = parse(parser, argv)
    settings = {"images": args.images, "epochs": EPOCHS, "lr": LEARNING_RATE, "unit": UNIT, "rate": RATE}
    store = Store(args.out / f"mnist_{args.what}_{args.images}.json", settings)
    lab = Lab(args.data, args.images)
    curves = {"size": size, "passes": passes, "ablation": ablation}[args.what](lab, store, args)
    rows = [
        [name, f"{place:g}", *(spread([c[k] for c in cells], digits=d) for k, d in COLUMNS.items())]
        for name, points in curves.items()
        for place, cells in sorted(points.items())
    ]
    table(["method", AXES[args.what], *COLUMNS], rows)
    title = f"MNIST, {args.images:,} training images, mean and deviation of {args.seeds} seeds"
    draw(curves, args.what, title).savefig(args.out / f"mnist_{args.what}_{args.images}.png", dpi=110)


COLUMNS = {"nll": 4, "err": 2, "brier": 4, "ece": 4}

if __name__ == "__main__":
    main()
