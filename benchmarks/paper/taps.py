"""Features of earlier layers: heads of equal size on a frozen ResNet-20, CIFAR-10, by tap and number of images.

    python benchmarks/paper/taps.py --data DIR            # choose settings on validation images, print their columns
    python benchmarks/paper/taps.py --data DIR --final    # test columns: docs/results/taps.json, about 35 minutes
    python benchmarks/paper/taps.py --data DIR ood        # unknown images, by the taps that a density reads
    python benchmarks/paper/taps.py --data DIR table1     # unknown images, by heads on stage 2: the paper's Table 1
    python benchmarks/paper/taps.py --smoke

The features are means over a 4×4 grid of the maps at the end of a stage: 256 of stage 1, 512 of stage 2, 1,024 of stage
3. Stage 2 comes first, with 5 seeds; a seed chooses the training images, the initial weights and the batches, the same
for all heads. The first 2,000 test images choose, the other 8,000 test: the network has seen all training images. Every
head has as many parameters as BRAINet takes by default, and is trained and stopped by one rule (`defaults.py`). What
heads have to choose, the rate of MC-dropout and the members of an ensemble, is chosen by validation NLL on stage 2 with
4,000 images, on two seeds that are not used again; BRAINet has its defaults.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` and `defaults` are

import torch
from common.command import arguments, parse
from common.measures import COLUMNS, quality
from common.measures import separation as by_outputs
from common.store import Cell, Store
from common.tables import spread, table
from common.tasks import CifarTaps, Sample
from common.training import fit_best, shuffled
from defaults import BATCH, CONTROL, HEADS, OURS, PASSES, PEERS, RATE, measure, paired, structure
from torch import Tensor

from brainet_pl.metrics.curves import separation
from brainet_pl.network import Ensemble, Head, HeadSettings, MCDropout, Tree
from brainet_pl.scores import KNN, Generative, ScoreContext
from brainet_pl.structure import GGT
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes

EPOCHS, PATIENCE = 60, 8
STAGES = {"stage 2": "layer2", "stage 3": "layer3", "stage 1": "layer1"}
# (tap, images) → seeds, in the order in which they are run
CELLS = {
    ("stage 2", 4000): 5,
    ("stage 2", 2000): 5,
    ("stage 2", 12_000): 5,
    ("stage 1", 4000): 5,
    ("stage 3", 4000): 5,
    ("stage 1", 2000): 5,
    ("stage 3", 2000): 5,
    ("stage 1", 12_000): 3,
    ("stage 2", 50_000): 1,
}
GRID: dict[str, dict[str, Callable[[int], HeadSettings]]] = {  # head → choices
    "MC-dropout": {f"rate {p}": lambda n, p=p: MCDropout(rate=p, num_params=n) for p in (0.1, 0.3, 0.5)},
    "ensemble": {f"{m} members": lambda n, m=m: Ensemble(members=m, num_params=n) for m in (2, 5)},
}
TUNING = (100, 101)  # seeds


class Lab:
    """One sample and its tree at a time, and finished cells."""

    def __init__(self, taps: CifarTaps, store: Store, smoke: bool) -> None:
        self.taps, self.store, self.smoke = taps, store, smoke
        self._at: tuple[str, int, int] | None = None
        self.sample: Sample
        self.ggt: GGT

    def fit(self, tap: str, images: int, seed: int, make: Callable[[int], HeadSettings] | str) -> Head:
        """A trained head: BRAINet, its control, or the settings that `make` gives for a budget."""
        if self._at != (tap, images, seed):
            self.sample = self.taps.task(STAGES[tap], images)(seed)
            self.ggt = structure(self.sample)
            self._at = tap, images, seed
        d, out = self.sample.in_features, self.sample.task.out_features
        budget = Tree().build(d, out, self.ggt).num_params
        torch.manual_seed(seed)
        if isinstance(make, str):
            head: Head = Tree().build(d, out, shuffled(self.ggt, seed) if make == CONTROL else self.ggt)
        else:
            head = make(budget).build(d, out)
        epochs = 2 if self.smoke else EPOCHS
        pace = {"epochs": epochs, "patience": PATIENCE, "lr": RATE, "batch": BATCH, "passes": PASSES}
        return fit_best(head, self.sample, seed=seed, **pace).head  # type: ignore[arg-type]

    def tuned(self, head: str, tap: str, images: int, seeds: Sequence[int]) -> str:
        """The choice with the smallest validation NLL, mean over the tuning seeds."""
        found: dict[str, float] = {}
        for name, make in GRID[head].items():
            cells = []
            for seed in seeds:

                def run(make: Callable[[int], HeadSettings] = make, seed: int = seed) -> Cell:
                    return measure(self.fit(tap, images, seed, make), self.sample, "val")

                cells.append(self.store.cell(f"tune/{head}/{name}/{seed}", run)["nll"])
            found[name] = statistics.fmean(cells)
        print(f"validation NLL, {head}: " + ", ".join(f"{name}: {value:.4f}" for name, value in found.items()))
        return min(found, key=lambda name: found[name])


def heads(lab: Lab, args: Any) -> None:
    """Tune, train, compare."""
    seeds = TUNING[: 1 if args.smoke else 2]
    chosen = {head: lab.tuned(head, "stage 2", 4000, seeds) for head in GRID}
    lab.store.content["chosen"] = chosen
    makers: dict[str, Callable[[int], HeadSettings] | str] = dict(PEERS) | {OURS: OURS, CONTROL: CONTROL}
    makers |= {head: GRID[head][name] for head, name in chosen.items()}
    if not args.final:
        return
    cells: dict[tuple[str, int], dict[str, list[Cell]]] = {}
    for (tap, images), most in CELLS.items():
        for seed in range(1 if args.smoke else min(args.seeds, most)):
            for head in HEADS:

                def run(head: str = head, tap: str = tap, images: int = images, seed: int = seed) -> Cell:
                    return measure(lab.fit(tap, images, seed, makers[head]), lab.sample, "test")

                found = lab.store.cell(f"{tap}/{images}/{head}/{seed}", run)
                cells.setdefault((tap, images), {}).setdefault(head, []).append(found)
    report(cells)


def report(cells: dict[tuple[str, int], dict[str, list[Cell]]]) -> None:
    """NLL (error in %, ECE) by tap and size; then the differences to BRAINet."""
    rows = []
    for (tap, images), found in cells.items():
        means = {h: [statistics.fmean(c[k] for c in cs) for k in ("nll", "err", "ece")] for h, cs in found.items()}
        texts = (f"{m[0]:.4f} ({m[1]:.1f}, {m[2]:.3f})" for m in (means[head] for head in HEADS))
        rows.append([tap, f"{images:,}", len(found[OURS]), *texts])
    print("\nNLL (error in %, ECE), mean over seeds")
    table(["tap", "images", "seeds", *HEADS], rows)
    others = [head for head in HEADS if head != OURS]
    for key, name in (("nll", "NLL"), ("err", "error in %")):
        rows = []
        for (tap, images), found in cells.items():
            values = {head: [cell[key] for cell in found[head]] for head in HEADS}
            rows.append([tap, f"{images:,}", *(str(paired(values[OURS], values[head])) for head in others)])
        print(f"\n{name} of BRAINet less that of others, ± the standard error of paired differences")
        table(["tap", "images", *others], rows)


# -- Table 1 ----------------------------------------------------------------------------------------------------------

TABLE = ("stage 2", 12_000)


def table1(lab: Lab, args: Any) -> None:
    """What heads on features of an earlier layer, as the paper has them, say of unknown images."""
    chosen = {head: lab.tuned(head, "stage 2", 4000, TUNING[: 1 if args.smoke else 2]) for head in GRID}
    makers: dict[str, Callable[[int], HeadSettings] | str] = dict(PEERS) | {OURS: OURS, CONTROL: CONTROL}
    makers |= {head: GRID[head][name] for head, name in chosen.items()}
    tap, images = TABLE
    cells: dict[str, list[Cell]] = {}
    for seed in range(args.seeds):
        for head in HEADS:

            def run(head: str = head, seed: int = seed) -> Cell:
                fitted = lab.fit(tap, images, seed, makers[head])
                x, y = lab.sample.test
                known = drawn(fitted, x)
                others = {
                    title: drawn(fitted, lab.taps.unknown(name, STAGES[tap], images, seed) if args.data else x.flip(1))
                    for name, title in UNKNOWN.items()
                }
                return quality(known, y) | by_outputs(known, others)

            cells.setdefault(head, []).append(lab.store.cell(f"table1/{head}/{seed}", run))
    for title in UNKNOWN.values():
        rows = []
        for head, found in cells.items():
            numbers = [spread([c[key] for c in found], digits=d) for key, d in (("err", 2), ("ece", 4), ("nll", 4))]
            alone = head in ("linear", "MLP")
            aurocs = [
                "–"
                if alone and score in ("mutual_information", "expected_entropy")
                else spread([c[f"{title}/{score}/AUROC"] for c in found], digits=1)
                for score in COLUMNS
            ]
            rows.append([head, *numbers, *aurocs])
        print(f"\n{title}, {tap}, {images:,} images, {args.seeds} seeds")
        table(["head", "error %", "ECE", "NLL", *(f"AUROC {c}" for c in COLUMNS.values())], rows)


def drawn(head: Head, x: Tensor) -> Tensor:
    """(N, d) → (T, N, C): passes, each as often as its weight says where they have weights."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = [head.passes(rows, PASSES) for rows in x.split(2000)]
    outputs, weights = torch.cat([f.values for f in found], dim=1), found[0].weights
    if weights is None:
        return outputs
    return outputs[torch.multinomial(weights, 200, replacement=True, generator=torch.Generator().manual_seed(0))]


# -- unknown images ---------------------------------------------------------------------------------------------------

VIEWS = ("last layer", "all stages")
UNKNOWN = {"svhn_test10k": "SVHN", "tinyimagenet32": "TinyImageNet"}
TASK = Classification(10)


def looks(found: dict[str, Tensor], view: str) -> Tensor:
    """(N, 64) what the classification layer reads, or (N, 224) means and deviations of the channels of all stages."""
    if view == "last layer":
        return found["layer3:mean_std"][:, :64]
    return torch.cat([found[f"{stage}:mean_std"] for stage in sorted(STAGES.values())], dim=1)


def synthetic_readings(known: bool) -> dict[str, Tensor]:
    """Of the same form as what taps read, for a smoke run."""
    draw = torch.Generator().manual_seed(int(known))
    widths = {"layer1": 32, "layer2": 64, "layer3": 128}
    y = torch.randint(10, (300,), generator=draw)
    found = {f"{k}:mean_std": torch.rand(300, w, generator=draw) + 0.1 * known * y[:, None] for k, w in widths.items()}
    return found | {"logits": torch.randn(300, 10, generator=draw), "y": y}


def ood(taps: CifarTaps, store: Store) -> None:
    """AUROC on unknown images by what a density and k-NN read; the energy is that of the network's own logits."""

    def read(name: str) -> dict[str, Tensor]:
        return synthetic_readings(name.startswith("cifar")) if taps.data is None else taps.read(name)

    def look(found: dict[str, Tensor], view: str, centre: Tensor, scale: Tensor) -> Passes:
        outputs, x = found["logits"].unsqueeze(0), (looks(found, view) - centre) / scale
        return Passes(outputs, None, x, TASK.predictive(outputs, None), TASK.scores(outputs, None))

    def run(view: str) -> Cell:
        train, test = read("cifar10_train"), read("cifar10_test")
        x = looks(train, view)
        # Features of the last layer are read as they are, taps on the scale of the training data.
        plain = view == "last layer"
        centre, scale = (torch.zeros(()), torch.ones(())) if plain else (x.mean(dim=0), x.std(dim=0).clamp_min(1e-6))
        density, nearest = Generative(progress=False), KNN()
        density.set_context(ScoreContext(num_classes=10, scaled=not plain))
        for score in (density, nearest):
            score.fit((x - centre) / scale, train["y"])
        parts = {k: v[: len(v) // 5] for k, v in test.items()}  # the first 2,000, which choose everywhere
        val = look(parts, view, centre, scale)
        density.finalize(val.scores | density(val))

        def scores(found: dict[str, Tensor]) -> dict[str, Tensor]:
            passes = look(found, view, centre, scale)
            return density(passes) | nearest(passes) | {"energy": passes.scores["energy"]}

        known = scores({k: v[len(v) // 5 :] for k, v in test.items()})
        cell = {}
        for name, title in UNKNOWN.items():
            unknown = scores(read(name))
            for score in ("energy", "generative", "combined", "knn"):
                cell[f"{title}/{score}"] = 100 * separation(known[score], unknown[score])["AUROC"]
        return cell

    rows = []
    for view in VIEWS:
        cell = store.cell(f"ood/{view}", lambda view=view: run(view))
        rows.append([view, *(f"{value:.1f}" for value in cell.values())])
        header = list(cell)
    print("\nAUROC in %")
    table(["read", *header], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = arguments(__doc__)
    parser.add_argument("what", nargs="?", choices=["heads", "ood", "table1"], default="heads")
    parser.add_argument("--final", action="store_true", help="measure test images, on the seeds that count")
    args = parse(parser, argv)
    warnings.filterwarnings("ignore", message=r"expected .* parameters within 2 %")
    settings = {"rate": RATE, "batch": BATCH, "passes": PASSES, "epochs": EPOCHS, "BRAINet": Tree().settings()}
    store = Store(args.out / f"taps{'' if args.what == 'heads' else '_' + args.what}.json", settings)
    taps = CifarTaps(args.data, args.cache)
    if args.what == "ood":
        ood(taps, store)
    elif args.what == "table1":
        table1(Lab(taps, store, args.smoke), args)
    else:
        heads(Lab(taps, store, args.smoke), args)


if __name__ == "__main__":
    main()
