"""Table 1 and the figure of AUROC against passes: frozen ResNet-20, CIFAR-10 against SVHN (and TinyImageNet).

    python benchmarks/paper/table1.py --data DIR      # docs/results/table1.{json,png}, about 25 minutes on two cores

All heads have 16,000 parameters (the linear one 650) and train with Adam at a fixed rate on the same features: four
copies of the training images, three of them augmented. Settings are chosen by the NLL of the 2,000 validation images,
on two seeds that are not used again: the rate of MC-dropout, the threshold and the temperature (the tempered default,
or uniform) of BRAINet, the rate and the temperature of BRAINet with dropout. Unknown images are seen only when the
table is made.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` is

import torch
from common.command import arguments, parse
from common.data import Data, cifar_features
from common.measures import COLUMNS, quality, separation
from common.store import Cell, Store
from common.tables import spread, table
from common.training import outputs_of, shuffled, train
from matplotlib.figure import Figure
from torch import nn

from brainet_pl.network import BRAINetHead, EnsembleHead, LinearHead, MLPHead, stacked_tree
from brainet_pl.structure import GGT, learn_structure

BUDGET, PASSES = 16_000, 15
RATES = (0.1, 0.3, 0.5)
THRESHOLDS = (0.05, 0.12, 0.2, 0.3)
TUNING = (100, 101)  # seeds
COUNTS = (1, 2, 3, 5, 8, 15, 30, 50)
PAPER = {  # error, then AUROC by max p, entropy, MI, expected entropy
    "linear": "7.7 | 90.4 | 90.7 | – | –",
    "MC-dropout": "8.2 | 90.7 | 90.3 | 84.7 | 90.6",
    "BRAINet, simultaneous": "8.0 | 91.6 | 92.2 | – | –",
    "BRAINet": "7.5 | 92.1 | 92.6 | 91.9 | 93.0",
}


def heat(head: nn.Module, temperature: str) -> None:
    """Set the temperature of the posterior over sub-networks; a trained head is not trained again for it."""
    if isinstance(head, BRAINetHead):
        head.temperature = "auto" if temperature == "auto" else float(temperature)


class Experiment:
    """Data, trees and finished cells."""

    def __init__(self, data: Data, store: Store, epochs: int) -> None:
        self.data, self.store, self.epochs = data, store, epochs
        self.trees: dict[float, GGT] = {}

    def tree(self, threshold: float) -> GGT:
        """s = 2 and two layers, as in the paper."""
        if threshold not in self.trees:
            self.trees[threshold] = learn_structure(
                self.data.plain[0],
                bootstrap="paper",
                test="gaussian",
                threshold=threshold,
                s=2,
                max_order=1,
                progress=False,
            )
        return self.trees[threshold]

    def fit(self, make: Callable[[], nn.Module], seed: int, name: str) -> nn.Module:
        """A trained head."""
        torch.manual_seed(seed)
        return train(make(), *self.data.train, epochs=self.epochs, seed=seed, name=f"{name}, seed {seed}")

    def tuned(self, family: str, makers: dict[float, Callable[[], nn.Module]]) -> tuple[float, str]:
        """The setting and the temperature with the smallest validation NLL, mean over the tuning seeds."""

        def measure(value: float, seed: int) -> dict[str, Cell]:
            head = self.fit(makers[value], seed, f"{family} {value:g}")
            found = {}
            for temperature in ("auto", "inf") if isinstance(head, BRAINetHead) else ("auto",):
                heat(head, temperature)
                found[temperature] = quality(outputs_of(head, self.data.val[0], PASSES, seed=seed), self.data.val[1])
            return found

        losses: dict[tuple[float, str], list[float]] = {}
        for value in makers:
            for seed in TUNING:
                found = self.store.cell(f"tune/{family}/{value:g}/{seed}", lambda v=value, s=seed: measure(v, s))
                for temperature, cell in found.items():
                    losses.setdefault((value, temperature), []).append(cell["nll"])
        means = {setting: statistics.fmean(values) for setting, values in losses.items()}
        print(f"validation NLL, {family}: " + ", ".join(f"{v:g} {t}: {nll:.4f}" for (v, t), nll in means.items()))
        return min(means, key=lambda setting: means[setting])

    def measure(self, make: Callable[[], nn.Module], temperature: str, seed: int, name: str) -> dict[str, Cell]:
        """Test quality and separation: in the head's own way, by one simultaneous pass, and against passes."""
        head = self.fit(make, seed, name)
        heat(head, temperature)
        known, unknown = self.data.test, self.data.ood
        found = {}
        modes = ["stochastic", "simultaneous"] if isinstance(head, BRAINetHead) else ["stochastic"]
        for mode in modes:
            outputs = outputs_of(head, known[0], PASSES, mode, seed)
            others = {k: outputs_of(head, v, PASSES, mode, seed) for k, v in unknown.items()}
            found[mode] = quality(outputs, known[1]) | separation(outputs, others)
        if name in ("MC-dropout", "BRAINet", "BRAINet + dropout"):
            inside = outputs_of(head, known[0][:4000], max(COUNTS), "stochastic", seed)
            outside = outputs_of(head, unknown["svhn"][:4000], max(COUNTS), "stochastic", seed)
            found["passes"] = {
                f"{score}/{count}": separation(inside[:count], {"svhn": outside[:count]})[f"svhn/{score}/AUROC"]
                for count in COUNTS
                for score in COLUMNS
            }
        return found


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, train, print, draw."""
    args = parse(arguments(__doc__, epochs=6), argv)
    settings = {"budget": BUDGET, "passes": PASSES, "epochs": args.epochs, "thresholds": THRESHOLDS, "rates": RATES}
    store = Store(args.out / "table1.json", settings)
    lab = Experiment(cifar_features(args.data, args.cache), store, args.epochs)

    def brainet(threshold: float, dropout: float = 0.0, control: bool = False) -> Callable[[], nn.Module]:
        tree = shuffled(lab.tree(threshold)) if control else lab.tree(threshold)
        return lambda: BRAINetHead(tree, 10, num_params=BUDGET, dropout=dropout)

    rate, _ = lab.tuned("MC-dropout", {p: lambda p=p: MLPHead(64, 10, BUDGET, 2, p) for p in RATES})
    threshold, cold = lab.tuned("BRAINet", {t: brainet(t) for t in THRESHOLDS})
    rates = {p: brainet(threshold, p) for p in (0.2, 0.35, 0.5)}
    dropout, warm = lab.tuned(f"BRAINet + dropout at {threshold:g}", rates)
    rows: dict[str, tuple[Callable[[], nn.Module], str]] = {
        "linear": (lambda: LinearHead(64, 10), ""),
        "MLP": (lambda: MLPHead(64, 10, BUDGET), ""),
        "MC-dropout": (lambda: MLPHead(64, 10, BUDGET, 2, rate), ""),
        "deep ensemble (5)": (lambda: EnsembleHead(stacked_tree(64, 2), 10, BUDGET), ""),
        "BRAINet": (brainet(threshold), cold),
        "BRAINet + dropout": (brainet(threshold, dropout), warm),
        "BRAINet, shuffled": (brainet(threshold, control=True), cold),
        "BRAINet + dropout, shuffled": (brainet(threshold, dropout, control=True), warm),
    }
    chosen = {
        "rate": rate,
        "threshold": threshold,
        "temperature": cold,
        "dropout": dropout,
        "temperature with it": warm,
    }
    print(f"chosen: {chosen}")
    print(lab.tree(threshold).summary())
    cells: dict[str, list[Cell]] = {}
    passes: dict[str, list[Cell]] = {}
    for seed in range(args.seeds):
        for name, (make, temperature) in rows.items():

            def run(make=make, temperature=temperature, seed=seed, name=name) -> dict[str, Cell]:
                return lab.measure(make, temperature, seed, name)

            found = store.cell(f"{name}/{seed}", run)
            cells.setdefault(name, []).append(found["stochastic"])
            if "simultaneous" in found:
                cells.setdefault(f"{name}, simultaneous", []).append(found["simultaneous"])
            if "passes" in found:
                passes.setdefault(name, []).append(found["passes"])
    store.content["chosen"] = chosen
    store.save()
    report(cells)
    draw(passes).savefig(args.out / "table1.png", dpi=130)


def report(cells: dict[str, list[Cell]]) -> None:
    """One table a set of unknown images, mean ± deviation over seeds; the paper's numbers under the first."""
    single = {"linear", "MLP"}
    for name, title in (("svhn", "SVHN"), ("tiny", "TinyImageNet")):
        header = ["head", "error %", "ECE", "NLL", "Brier", *(f"AUROC {c}" for c in COLUMNS.values()), "AUPR entropy"]
        rows = []
        for head, found in cells.items():
            alone = head in single or head.endswith("simultaneous")
            aurocs = [
                "–" if alone and score in ("mutual_information", "expected_entropy")
                else spread([c[f"{name}/{score}/AUROC"] for c in found], digits=1)
                for score in COLUMNS
            ]  # fmt: skip
            numbers = [
                spread([c[k] for c in found], digits=d) for k, d in (("err", 2), ("ece", 4), ("nll", 4), ("brier", 4))
            ]
            rows.append([head, *numbers, *aurocs, spread([c[f"{name}/entropy/AUPR"] for c in found], digits=1)])
        print(f"\n{title}")
        table(header, rows)
    print("\nThe paper's own numbers, on SVHN:")
    table(
        ["head", "error %", *(f"AUROC {c}" for c in COLUMNS.values())], [[k, *v.split(" | ")] for k, v in PAPER.items()]
    )


def draw(passes: dict[str, list[Cell]]) -> Figure:
    """AUROC against the number of passes, one panel a score."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    styles = {"MC-dropout": ("#D55E00", "s", "--"), "BRAINet": ("#0072B2", "o", "-")}
    styles["BRAINet + dropout"] = ("#009E73", "^", ":")
    panels = figure.subplots(1, len(COLUMNS), sharey=True)
    for axes, (score, title) in zip(panels, COLUMNS.items(), strict=True):
        for name, cells in passes.items():
            values = [[cell[f"{score}/{count}"] for cell in cells] for count in COUNTS]
            means = [statistics.fmean(v) for v in values]
            spreads = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
            color, marker, line = styles[name]
            axes.errorbar(
                COUNTS, means, spreads, label=name, color=color, marker=marker, linestyle=line, capsize=2, ms=4
            )
        axes.set_xscale("log")
        axes.set_xticks([1, 3, 15, 50], ["1", "3", "15", "50"])
        axes.minorticks_off()
        axes.set_title(f"by {title}")
        axes.set_xlabel("passes")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("AUROC on SVHN (%)")
    # Two equal draws have no mutual information: with few passes its deviation would fill the figure.
    plain = [cell[key] for cells in passes.values() for cell in cells for key in cell if "mutual" not in key]
    panels[0].set_ylim(min(plain) - 0.5, max(plain) + 1.5)
    panels[-1].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
