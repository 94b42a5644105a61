"""Do predictions know when an input is strange? Calibration under corruption, and confidence on unknown images.

    python benchmarks/honest.py --data DIR            # choose on validation images and perturbed ones alone
    python benchmarks/honest.py --data DIR --final    # test columns: docs/results/honest.json, docs/images/frontier.png
    python benchmarks/honest.py --smoke

A frozen ResNet-20 on CIFAR-10, whose training images densities are fitted to. The first 2,000 test images are the
validation data: temperatures and the rate of fading are settled on them, at a price on known data, `cost`. What there
is to choose beside that, layers and thresholds of the density, was chosen by eight perturbations of these images in
five severities, none of which is a corruption of the test, and by images of which nothing known is left: without
`--final` no test image and no unknown one is read. The other 8,000 test images are the clean test; every fourth of them
is corrupted in fifteen ways and five severities. Standard errors are those of 200 samples of the images, the same for
all rows, so that differences are paired.

Digits (8 × 8 pixels, two classes unknown) and MNIST (14 × 14 pixels; Fashion-MNIST and notMNIST unknown) have turns as
their shift, a BRAINet head, and the same defaults.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.data import Labelled, mnist_pixels, synthetic_pixels
from common.readings import (
    EVERY,
    Reading,
    Readings,
    corrupted_names,
    perturbed_names,
    stage_columns,
    stage_widths,
    strange_names,
    synthetic_reading,
)
from common.store import Cell, Store
from common.tables import table
from common.tasks import Sample, digits
from common.training import fit_best, shuffled
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils.parts import primitive
from brainet_pl.calibration import Calibrator, DensityScaling, TemperatureScaling
from brainet_pl.datamodules.corruptions import SEVERITIES, corrupt_image
from brainet_pl.datamodules.digits import Digits
from brainet_pl.metrics.curves import N_BINS, separation
from brainet_pl.network import Ensemble, Head, MCDropout, Tree
from brainet_pl.scores import KNN, Combined, Generative, Score, ScoreContext, Stages
from brainet_pl.scores.fitting import fit_score
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.structure.ggt import Leaf
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes

COSTS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
SHOWN = (0.01, 0.04)  # of these, the rows of tables
REPEATS, BINS = 200, N_BINS
NEAREST, BANK = 50, 10_000
OURS = "stages, learned"
TEMPERATURE = "temperature scaling"
IMAGES = Path(__file__).parents[1] / "docs" / "images"


# -- what is predicted and read ---------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A set of inputs: what scores read, what models predict.

    Attributes:
        views: name → (N, d) features.
        predicted: model → (N, C) probabilities.
        y: (N,) labels.
        logits: (N, C) of the network, where it has some.
    """

    views: dict[str, Tensor]
    predicted: dict[str, Tensor]
    y: Tensor
    logits: Tensor = torch.empty(0)


class World(NamedTuple):
    """A task: sets by name, read when they are asked for, and the scores that are compared.

    Attributes:
        read: name → set; `train`, `val`, `test`, and the names below.
        scores: name → score and the view that it reads.
        widths: of the layers of the view `stages`.
        perturbed: sets to choose by; shifted validation inputs, five severities of each shift.
        strange: sets to choose by; inputs of nothing known.
        shifted: sets of the test.
        unknown: sets of the test.
        every: of the test inputs, those that are shifted.
        raw: whether features are inputs.
    """

    read: Callable[[str], Seen]
    scores: dict[str, tuple[Callable[[], Score], str]]
    widths: tuple[int, ...]
    perturbed: list[str]
    strange: list[str]
    shifted: list[str]
    unknown: list[str]
    every: int = 1
    raw: bool = False


# -- densities: ours, and controls of it ------------------------------------------------------------------------------


class Shuffled(Generative):
    """The same tree with its variables exchanged at random."""

    def _tree(self, features: Tensor, shared: bool) -> GGT:
        return shuffled(super()._tree(features, shared))


class Edgeless(Generative):
    """Features are independent within a class."""

    def _tree(self, features: Tensor, shared: bool) -> GGT:
        d = features.shape[1]
        return GGT(Leaf(tuple(range(d)), ((),) * d, 0.0), d, len(features))


class Full(Generative):
    """Every feature depends on all before it: a covariance for each class."""

    def _tree(self, features: Tensor, shared: bool) -> GGT:
        d = features.shape[1]
        self.max_parents = d
        return GGT(Leaf(tuple(range(d)), tuple(tuple(range(i)) for i in range(d)), 0.0), d, len(features))


def wired(kind: type[Generative]) -> type[Stages]:
    """Stages with densities of another kind; full covariances read as many features as trees do."""
    return type(f"{kind.__name__}Stages", (Stages,), {"_density": kind})


# -- measures ---------------------------------------------------------------------------------------------------------


class Shift(NamedTuple):
    """How predictions of S shifted sets of the same N images hold, and of R samples of these images.

    Attributes:
        ece: (S, R + 1), the first column of the images themselves.
        nll: (S, R + 1) likewise.
    """

    ece: Tensor
    nll: Tensor


def weights(n: int) -> Tensor:
    """(N, R + 1): one for each image, then how often a sample with replacement holds it."""
    draw = np.random.default_rng(0)
    drawn = [np.bincount(draw.integers(n, size=n), minlength=n) for _ in range(REPEATS)]
    return torch.from_numpy(np.stack([np.ones(n), *drawn], axis=1))


def shift(probs: Iterable[Tensor], y: Tensor) -> Shift:
    """Probabilities (N, C) of each set and labels (N,) → calibration errors, and likelihoods."""
    w = weights(len(y))
    ece, nll = [], []
    for p in probs:
        confidence, answer = p.double().max(dim=1)
        gap = confidence - (answer == y).double()
        bins = (confidence * BINS).long().clamp(0, BINS - 1)
        ece.append((F.one_hot(bins, BINS).double() * gap[:, None]).t().matmul(w).abs().sum(dim=0) / len(y))
        nll.append(-p.double().gather(1, y[:, None])[:, 0].clamp_min(1e-38).log().matmul(w) / len(y))
    return Shift(torch.stack(ece), torch.stack(nll))


class Outcome(NamedTuple):
    """One row, with samples where errors are told: clean, shifted (five severities of each shift), unknown.

    Attributes:
        clean: ECE and NLL, (1, R + 1) each.
        shifted: (S, R + 1) each.
        confidence: unknown set → (R + 1,) mean of the largest probability.
        auroc: unknown set → AUROC of known against unknown inputs by it, in %.
    """

    clean: Shift
    shifted: Shift
    confidence: dict[str, Tensor]
    auroc: dict[str, float]


def outcome(final: Callable[[str], Tensor], world: World, known: str, shifts: list[str], unknown: list[str]) -> Outcome:
    """Final probabilities by the name of a set → how they hold."""
    probs = final(known)
    clean = shift([probs], world.read(known).y)
    found = shift((final(name) for name in shifts), world.read(shifts[0]).y)
    confidence, auroc = {}, {}
    for name in unknown:
        most = final(name).max(dim=1).values
        confidence[name] = most.double() @ weights(len(most)) / len(most)
        auroc[name] = 100 * separation(-probs.max(dim=1).values, -most)["AUROC"]
    return Outcome(clean, found, confidence, auroc)


def numbers(found: Outcome, base: Outcome, ours: Outcome | None = None) -> Cell:
    """Means and standard errors; `base` is temperature scaling, `ours` what differences are taken to."""
    cell = {"ece": float(found.clean.ece[0, 0]), "nll": float(found.clean.nll[0, 0])}
    costs = found.clean.nll[0] / base.clean.nll[0] - 1
    cell |= {"cost": float(costs[0]), "cost se": float(costs[1:].std())}
    worst = slice(len(SEVERITIES) - 1, None, len(SEVERITIES))
    for key, one, other, rows in (
        ("shifted ece", found.shifted.ece, base.shifted.ece, slice(None)),
        ("worst ece", found.shifted.ece, base.shifted.ece, worst),
        ("shifted nll", found.shifted.nll, base.shifted.nll, slice(None)),
    ):
        mean, ratio = one[rows].mean(dim=0), one[rows].mean(dim=0) / other[rows].mean(dim=0)
        cell |= {key: float(mean[0]), f"{key} se": float(mean[1:].std())}
        cell |= {f"{key} ratio": float(ratio[0]), f"{key} ratio se": float(ratio[1:].std())}
    if ours is not None:
        less = found.shifted.ece.mean(dim=0) - ours.shifted.ece.mean(dim=0)
        cell |= {"behind": float(less[0]), "behind se": float(less[1:].std())}
    for name, values in found.confidence.items():
        cell |= {f"{name} confidence": float(values[0]), f"{name} confidence se": float(values[1:].std())}
        cell[f"{name} auroc"] = found.auroc[name]
    return cell


# -- rows -------------------------------------------------------------------------------------------------------------


class Bench:
    """Columns of scores, calibrators fitted to validation data, and their rows.

    Args:
        world: the task.
        keep: a folder where columns of scores are kept, or None.
    """

    def __init__(self, world: World, keep: Path | None) -> None:
        self.world, self.keep = world, keep
        self._fitted: dict[str, Score] = {}
        self._columns: dict[tuple[str, str], dict[str, Tensor]] = {}

    def columns(self, score: str, name: str) -> dict[str, Tensor]:
        """The columns of a score for a set, (N,) each."""
        if (score, name) not in self._columns:
            path = None if self.keep is None else self.keep / self._file(score, name)
            if path is None or not path.is_file():
                found = self._score(score, name)
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    torch.save(found, path)
            else:
                found = torch.load(path)
            self._columns[score, name] = found
        return self._columns[score, name]

    def _file(self, score: str, name: str) -> str:
        """Of other settings, another file."""
        settings = json.dumps(primitive(self.world.scores[score][0]().settings()), sort_keys=True)
        return f"{score}_{zlib.crc32(settings.encode()):08x}_{name}.pt".replace("/", "_").replace(", ", "_")

    def _score(self, score: str, name: str) -> dict[str, Tensor]:
        make, view = self.world.scores[score]
        if score not in self._fitted:
            part, seen = make(), self.world.read("train")
            widths = self.world.widths if view == "stages" else ()
            part.set_context(ScoreContext(int(seen.y.max()) + 1, self.world.raw, None, widths))
            fit_score(part, seen.views[view], seen.y)
            self._fitted[score] = part
        seen = self.world.read(name)
        probs = next(iter(seen.predicted.values()))
        with torch.no_grad():
            return self._fitted[score](Passes(probs.log().unsqueeze(0), None, seen.views[view], probs))

    def calibrated(self, part: Calibrator, score: str | None = None, model: str = "network") -> Callable[[str], Tensor]:
        """A calibrator settled on validation data → final probabilities by the name of a set."""

        def columns(name: str) -> dict[str, Tensor]:
            if score is None:
                return {}
            found = self.columns(score, name)
            return {"score": next(iter(found.values()))} | found

        val = self.world.read("val")
        part.observe(val.predicted[model], val.y, columns("val"))
        part.finalize()

        def final(name: str) -> Tensor:
            return part(self.world.read(name).predicted[model], columns(name))

        return final

    def rows(self, models: Sequence[str], costs: Sequence[float]) -> Iterator[tuple[str, Callable[[str], Tensor]]]:
        """Name → final probabilities of every row; temperature scaling first, ours second."""
        yield TEMPERATURE, self.calibrated(TemperatureScaling())
        yield "network", lambda name: self.world.read(name).predicted["network"]
        for model in models:
            yield f"{model}, {TEMPERATURE}", self.calibrated(TemperatureScaling(), model=model)
        for cost in costs:
            for score in self.world.scores:
                yield f"{score}, {cost:g}", self.calibrated(DensityScaling(cost, "score"), score)


def compare(
    bench: Bench,
    store: Store | Scratch,
    key: str,
    models: Sequence[str],
    known: str,
    shifts: list[str],
    unknown: list[str],
) -> dict[str, Cell]:
    """All rows of a comparison, from the store where they are there."""

    def run() -> dict[str, Cell]:
        found = {}
        for name, final in bench.rows(models, COSTS):
            found[name] = outcome(final, bench.world, known, shifts, unknown)
        first = next(iter(bench.world.scores))
        cells = {}
        for name, one in found.items():
            cost = name.rsplit(", ", 1)[-1]
            rival = found.get(f"{first}, {cost}", found[f"{first}, {SHOWN[-1]:g}"])
            cells[name] = numbers(one, found[TEMPERATURE], rival)
        return cells

    cells: dict[str, Cell] = store.cell(key, run)
    return cells


def report(cells: dict[str, Cell], unknown: list[str]) -> None:
    """A table of the rows that count."""
    header = ["predictions", "clean cost in %", "ECE", "NLL", "shifted ECE", "of temperature's", "worst severity"]
    header += [
        "of temperature's",
        "shifted NLL",
        *(f"{n}: confidence" for n in unknown),
        *(f"{n}: AUROC" for n in unknown),
    ]
    header.append("ECE less ours")
    rows = []
    for name, cell in cells.items():
        if name.rsplit(", ", 1)[-1] in {f"{cost:g}" for cost in COSTS if cost not in SHOWN}:
            continue
        row = [
            name,
            f"{100 * cell['cost']:.1f} ± {100 * cell['cost se']:.1f}",
            f"{cell['ece']:.4f}",
            f"{cell['nll']:.4f}",
        ]
        for key in ("shifted ece", "worst ece"):
            row += [spread(cell, key, 4), spread(cell, f"{key} ratio", 3)]
        row.append(f"{cell['shifted nll']:.3f}")
        row += [f"{cell[f'{n} confidence']:.3f}" for n in unknown] + [f"{cell[f'{n} auroc']:.1f}" for n in unknown]
        rows.append([*row, spread(cell, "behind", 4)])
    table(header, rows)


def spread(cell: Cell, key: str, digits: int) -> str:
    """A number ± its standard error."""
    return f"{cell[key]:.{digits}f} ± {cell[f'{key} se']:.{digits}f}"


def combined(bench: Bench) -> Cell:
    """AUROC in % of single scores of the network, and of all of them in one by `Combined`, on each unknown set."""
    parts = {"stages": OURS, "generative": "last layer, learned", "knn": "last layer, k-NN"}

    def columns(name: str) -> dict[str, Tensor]:
        found = {key: next(iter(bench.columns(score, name).values())) for key, score in parts.items()}
        return found | {"energy": -torch.logsumexp(bench.world.read(name).logits, dim=1)}

    joint = Combined(of=[*parts, "energy"])
    joint.finalize(columns("val"))
    known = columns("test")
    known |= joint.combine(known)
    cell = {}
    for name in bench.world.unknown:
        outside = columns(name)
        outside |= joint.combine(outside)
        cell |= {f"{name} {key}": 100 * separation(known[key], outside[key])["AUROC"] for key in known}
    return cell


# -- worlds -----------------------------------------------------------------------------------------------------------


def densities(view: str, stages: bool) -> dict[str, tuple[Callable[[], Score], str]]:
    """Ours and its controls on a view, each with the defaults of the package."""
    kinds = {"learned": Generative, "shuffled": Shuffled, "no edges": Edgeless, "full covariance": Full}
    made: dict[str, type[Score]] = {name: wired(kind) if stages else kind for name, kind in kinds.items()}
    return {f"{view}, {name}": (lambda kind=kind: kind(progress=False), view) for name, kind in made.items()}


def trained(settings: Any, sample: Sample, epochs: int, ggt: GGT | None = None) -> Head:
    """A head with its best epoch by validation NLL."""
    torch.manual_seed(0)
    head = settings.build(sample.in_features, sample.task.out_features, ggt)
    return fit_best(head, sample, epochs=epochs, patience=5).head


@torch.no_grad()
def predicted(head: Head, x: Tensor, task: Any) -> Tensor:
    """(N, d) → averaged probabilities (N, C) of fifteen passes."""
    torch.manual_seed(0)
    return torch.cat([task.predictive(*head.passes(part, 15)) for part in x.split(2000)])


def cifar(data: Path | None, cache: Path | None, epochs: int) -> World:
    """The frozen ResNet-20."""
    readings = None if data is None else Readings(data, cache)

    def reading(name: str) -> Reading:
        return synthetic_reading(name) if readings is None else readings[name]

    train = reading("train")
    columns = stage_columns()
    x = train.blocks[:, columns]
    centre, scale = x.mean(dim=0), x.std(dim=0)
    scale = torch.where(scale > 1e-6 * centre.abs().clamp_min(1e-6), scale, torch.ones(()))  # as taps do it
    kept: dict[str, Seen] = {}
    heads: dict[str, Head] = {}
    task = Classification(10)

    def read(name: str) -> Seen:
        if name not in kept:
            found = reading(name)
            views = {"last layer": found.features, "stages": (found.blocks[:, columns] - centre) / scale}
            guesses = {"network": found.logits.softmax(dim=1)}
            if name != "train" and not name.startswith("val/"):
                val = reading("val")
                sample = Sample((train.features, train.y), (val.features, val.y), (val.features, val.y), task)
                for title, settings in (("MC-dropout", MCDropout()), ("ensemble of 5 heads", Ensemble(members=5))):
                    if title not in heads:
                        heads[title] = trained(settings, sample, epochs)
                    guesses[title] = predicted(heads[title], found.features, task)
            kept[name] = Seen(views, guesses, found.y, found.logits)
            if readings is not None:
                readings.forget(name)
        return kept[name]

    scores = densities("stages", True) | densities("last layer", False)
    scores["last layer, k-NN"] = (lambda: KNN(k=NEAREST, max_rows=BANK), "last layer")
    few = slice(None) if data else slice(5)
    unknown = ["svhn", "tiny"]
    return World(
        read, scores, stage_widths(), perturbed_names()[few], strange_names(), corrupted_names()[few], unknown, EVERY
    )


def candidates() -> dict[str, tuple[Callable[[], Score], str]]:
    """What else there was to choose from: thresholds, one density of all stages."""
    found: dict[str, tuple[Callable[[], Score], str]] = {
        f"stages, learned at {t:g}": (lambda t=t: Stages(threshold=t, progress=False), "stages") for t in (0.005, 0.02)
    }
    joint = {"normalize": False, "progress": False}
    found["all stages in one"] = (lambda: Generative(threshold=0.005, **joint), "stages")  # type: ignore[arg-type]
    return found


def turned(x: Tensor, side: int, severity: int) -> Tensor:
    """(N, side²) → the same images, turned by 15 to 90 degrees."""
    images = (corrupt_image(one.view(1, side, side).clamp(0, 1), "rotation", severity, i) for i, one in enumerate(x))
    return torch.stack([image.flatten() for image in images])


def pixel_world(sample: Sample, unknown: dict[str, Tensor], side: int, epochs: int) -> World:
    """A BRAINet head on pixels."""
    ggt = learn_structure(sample.train[0], progress=False)
    head = trained(Tree(), sample, epochs, ggt)
    test = sample.test

    def read(name: str) -> Seen:
        if name in ("train", "val", "test"):
            x, y = getattr(sample, name)
        elif name in unknown:
            x, y = unknown[name], torch.zeros(len(unknown[name]), dtype=torch.long)
        else:
            x, y = turned(test[0], side, int(name[-1])), test[1]
        return Seen({"pixels": x}, {"network": predicted(head, x, sample.task)}, y)

    kept: dict[str, Seen] = {}

    def keep(name: str) -> Seen:
        if name not in kept:
            kept[name] = read(name)
        return kept[name]

    scores = densities("pixels", False)
    scores["pixels, k-NN"] = (lambda: KNN(k=NEAREST, max_rows=BANK), "pixels")
    return World(keep, scores, (), [], [], [f"rotation/{s}" for s in SEVERITIES], list(unknown), raw=True)


def digit_world(epochs: int) -> World:
    """Scikit-learn's digits; 8 and 9 are unknown."""
    data = Digits()
    data.setup("test")
    held = data.ood_sets["held_out"]
    return pixel_world(digits(0), {"held_out": torch.stack([held[i][0] for i in range(len(held))])}, 8, epochs)  # type: ignore[arg-type]


def mnist_world(data: Path | None, epochs: int) -> World:
    """10,000 images to train, 2,000 to validate, 2,000 of the test images."""
    if data is None:
        whole, test = synthetic_pixels(600), synthetic_pixels(200, seed=1)
        unknown = {"fashion": synthetic_pixels(100, seed=2)[0], "notmnist": torch.rand(100, 49)}
        cut = (slice(0, 400), slice(400, 600))
    else:
        whole, test = mnist_pixels(data, "MNIST", pool=2)
        unknown = {"fashion": mnist_pixels(data, "FashionMNIST", pool=2)[1][0][:5000], "notmnist": not_mnist(data)}
        cut = (slice(0, 10_000), slice(10_000, 12_000))
    train, val = ((whole[0][rows], whole[1][rows]) for rows in cut)
    few: Labelled = (test[0][::5], test[1][::5])
    return pixel_world(Sample(train, val, few, Classification(10)), unknown, round(train[0].shape[1] ** 0.5), epochs)


def not_mnist(data: Path) -> Tensor:
    """(N, 196) letters."""
    with np.load(data / "notmnist_test.npz") as arrays:
        x = torch.from_numpy(arrays["x"]).float().view(-1, 1, 28, 28) / 255
    return F.avg_pool2d(x, 2).flatten(1)[:5000]


# -- pictures ---------------------------------------------------------------------------------------------------------


def frontier(cells: dict[str, Cell], path: Path) -> None:
    """Draw what honesty costs: ECE of corrupted images against the NLL of clean ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = {
        "stages, learned": ("brainet_pl: learned networks, all stages", "C0", "-"),
        "stages, shuffled": ("the same, shuffled", "C0", ":"),
        "stages, no edges": ("the same, no edges", "C0", "--"),
        "last layer, learned": ("learned networks, last layer", "C2", "-"),
        "last layer, k-NN": ("k-NN, last layer", "C1", "--"),
    }
    points = {
        TEMPERATURE: ("temperature scaling", "o"),
        f"ensemble of 5 heads, {TEMPERATURE}": ("ensemble of 5 heads", "^"),
        f"MC-dropout, {TEMPERATURE}": ("MC-dropout", "v"),
    }
    figure, axes = plt.subplots(figsize=(9.2, 4.2), layout="constrained")
    for score, (label, colour, style) in lines.items():
        found = [cells[f"{score}, {cost:g}"] for cost in COSTS]
        x, y = [100 * cell["cost"] for cell in found], [cell["shifted ece"] for cell in found]
        axes.plot(x, y, color=colour, linestyle=style, marker=".", label=label)
        if score == OURS:
            error = [2 * cell["shifted ece se"] for cell in found]
            low, high = ([v + sign * e for v, e in zip(y, error, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    for name, (label, marker) in points.items():
        cell = cells[name]
        axes.plot(100 * cell["cost"], cell["shifted ece"], marker, color="0.2", label=label)
    axes.set_xlabel("NLL of clean test images, % above temperature scaling")
    axes.set_ylabel("ECE, mean of 15 corruptions × 5 severities")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


CLASSES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHOWN_SETS = (*["svhn"] * 4, *(f"test/{name}/5" for name in ("gaussian_noise", "glass_blur", "contrast", "fog")))


def picture(bench: Bench, readings: Readings, path: Path, cost: float = SHOWN[-1]) -> None:
    """House numbers and corrupted images, the first of a random order, with what three models say of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    says = {
        "network": lambda name: bench.world.read(name).predicted["network"],
        "temperature": bench.calibrated(TemperatureScaling()),
        "brainet_pl": bench.calibrated(DensityScaling(cost, "score"), OURS),
    }
    colours = {"network": "0.8", "temperature": "0.8", "brainet_pl": "#86b8e6"}
    figure, axes = plt.subplots(
        2, len(SHOWN_SETS), figsize=(12, 2.9), layout="constrained", gridspec_kw={"height_ratios": [1.6, 1]}
    )
    order = np.random.default_rng(0).permutation(2000)
    for i, name in enumerate(SHOWN_SETS):
        number = int(order[i])
        image, label = (part[number] for part in readings.images(name))
        kind = name.split("/")[1].replace("_", " ") if "/" in name else "house number"
        top, bottom = axes[:, i]
        top.imshow(image, interpolation="nearest")
        top.set_title(kind if name == "svhn" else f"{CLASSES[label]}, {kind}", fontsize=9)
        top.axis("off")
        for j, (title, final) in enumerate(says.items()):
            most, answer = final(name)[number].max(dim=0)
            bottom.barh(j, float(most), color=colours[title], height=0.75)
            bottom.text(0.03, j, f"{CLASSES[int(answer)]} {100 * float(most):.0f} %", va="center", fontsize=8)
        bottom.set(xlim=(0, 1), yticks=range(len(says)), xticks=[])
        bottom.set_yticklabels(list(says) if i == 0 else [], fontsize=9)
        bottom.invert_yaxis()
        bottom.tick_params(length=0)
        for side in ("top", "right", "bottom"):
            bottom.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Choose, or measure."""
    parser = arguments(__doc__, epochs=20)
    parser.add_argument("--final", action="store_true", help="read test and unknown images")
    parser.add_argument("--images", type=Path, help="folder for pictures; docs/images if not given")
    args = parse(parser, argv)
    warnings.filterwarnings("ignore", message=r"predictions fade by the strangest")
    images = args.images or (args.out if args.smoke else IMAGES)
    settings = {"Stages": Stages().settings(), "Generative": Generative().settings(), "costs": COSTS, "bank": BANK}
    store = Store(args.out / "honest.json", primitive(settings))
    keep = None if args.data is None else (args.cache or args.data / "cache") / "honest" / "scores"
    world = cifar(args.data, args.cache, args.epochs)
    chosen = world._replace(scores={OURS: world.scores[OURS]} | candidates() | world.scores)
    print("\nvalidation images; perturbed, and of nothing known")
    cells = compare(Bench(chosen, keep), store, "choose", [], "val", world.perturbed, world.strange)
    report(cells, world.strange)
    if not args.final:
        return
    models = ["MC-dropout", "ensemble of 5 heads"]
    bench = Bench(world, keep)
    print("\ntest images of CIFAR-10; corrupted, and unknown")
    cells = compare(bench, store, "cifar", models, "test", world.shifted, world.unknown)
    report(cells, world.unknown)
    frontier(cells, images / "frontier.png")
    found = store.cell("scores", lambda: combined(bench))
    print("\nAUROC in %, single scores and all in one")
    table(list(found), [[f"{value:.1f}" for value in found.values()]])
    if args.data is not None:
        picture(bench, Readings(args.data, args.cache), images / "honest.png")
    worlds = {
        "digits": (lambda: digit_world(args.epochs), ["held_out"]),
        "mnist": (lambda: mnist_world(args.data, args.epochs), ["fashion", "notmnist"]),
    }
    for key, (make, unknown) in worlds.items():

        def run(key: str = key, make: Callable[[], World] = make) -> dict[str, Cell]:
            here = make()
            return compare(Bench(here, None), Scratch(), key, [], "test", here.shifted, here.unknown)

        print(f"\n{key}: turned, and unknown")
        report(store.cell(key, run), unknown)


class Scratch:
    """A store that keeps nothing."""

    def cell(self, key: str, make: Callable[[], Any]) -> Any:
        """A new one."""
        return make()


if __name__ == "__main__":
    main()
