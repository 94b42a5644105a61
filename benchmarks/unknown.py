"""Unknown images against the strongest detectors, on one network and the same images for all.

    python benchmarks/unknown.py --data DIR            # choose: networks of six classes, no set of the test is read
    python benchmarks/unknown.py --data DIR --final    # the test: docs/results/unknown.json
    python benchmarks/unknown.py --smoke

The test is a frozen ResNet-20 on CIFAR-10: TinyImageNet is near; SVHN, MNIST, Fashion-MNIST and notMNIST are far. The
first 2,000 test images validate, the other 8,000 are known. All detectors read the same features and logits. Forms
of `Combined` are compared on ResNet-8s that know six of ten classes of CIFAR-10 and of Fashion-MNIST, where the other
four classes are near and the other data sets far, and on the three grey sets that are far for the ResNet-20. SVHN and
TinyImageNet are read with `--final` alone; docs/howto/unknown.md tells what was chosen before and after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.data import last_layer
from common.left_out import trained
from common.readings import LAYERS, SMALL, Reading, Readings, stage_columns, stage_widths, synthetic_reading
from common.store import Cell, Store
from common.tables import markdown
from torch import Tensor

from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import Taps
from brainet_pl.datamodules.corruptions import FIFTEEN
from brainet_pl.metrics.curves import coverage_at_risk, generalized_risk, separation
from brainet_pl.scores import (
    FDBD,
    GEN,
    KNN,
    RMDS,
    Combined,
    Generative,
    KLMatching,
    Mahalanobis,
    NNGuide,
    Score,
    ScoreContext,
    ScoreSet,
    Shaped,
    Stages,
    ViM,
)
from brainet_pl.scores.base import LastLayer
from brainet_pl.scores.fitting import fit_score
from brainet_pl.scores.reference import fit_surprise
from brainet_pl.tasks.classification import predictive_scores
from brainet_pl.tasks.passes import Passes

NEAR, FAR = ("tiny",), ("svhn", "mnist", "fashion", "notmnist")
MOST = {"train": 20_000, **dict.fromkeys((*NEAR, *FAR), 5000)}  # images that are read of a set
GREY = ("mnist", "fashion", "notmnist")
LEFT_OUT = (("cifar", 1), ("fashion", 0))  # networks that know six classes, and their seeds
ROWS = {"train": 10_000, **dict.fromkeys(FAR, 3000)}  # images that are read for these
EVERY, SEVERITIES = 16, (1, 3, 5)  # of the corrupted test images
GATES, STEEP = (0.5, 0.2, 0.1, 0.05, 0.02), (1, 2, 4)
PEERS = ("energy", "knn", "fdbd", "gen", "vim")  # what must be beaten
TITLES = {
    "joint": "`Combined`, the sum",
    "one_minus_max_p": "max softmax (MSP)",
    "energy": "energy",
    "entropy": "entropy",
    "gen": "`GEN`",
    "kl_matching": "`KLMatching`",
    "knn": "`KNN`, last layer",
    "knn_stages": "`KNN`, all stages",
    "mahalanobis": "`Mahalanobis`",
    "rmds": "`RMDS`",
    "vim": "`ViM`",
    "fdbd": "`FDBD`",
    "nnguide": "`NNGuide`",
    "shaped": "`Shaped`, SCALE",
    "shaped_ash": "`Shaped`, ASH-S",
    "generative": "`Generative`, last layer",
    "stages": "`Stages`",
}


class Bed(NamedTuple):
    """A network and what it is tested on.

    Attributes:
        read: name → a set; `train`, `val`, `test` and those below.
        near, far: names of unknown sets.
        weight, bias: of its last layer.
        blocks: the layers that `Reading.blocks` has.
        shifted: names of known sets that look otherwise.
    """

    read: Callable[[str], Reading]
    near: tuple[str, ...]
    far: tuple[str, ...]
    layer: LastLayer
    blocks: Sequence[str]
    shifted: tuple[str, ...] = ()


# -- scores of a network ----------------------------------------------------------------------------------------------


class Scored:
    """All scores of a bed, fitted to its training images with its validation images as reference."""

    def __init__(self, bed: Bed) -> None:
        self.bed, self.last = bed, Taps.of("last")
        self.columns = stage_columns(bed.blocks)
        train = bed.read("train")
        x = train.blocks[:, self.columns]
        self.centre, scale = x.mean(dim=0), x.std(dim=0)
        self.scale = torch.where(scale > 1e-6 * self.centre.abs().clamp_min(1e-6), scale, torch.ones(()))
        stages = KNN(layers="auto", pool="mean_std", name="stages")
        stages.joins = "never"
        parts: list[Score] = [Generative(progress=False), Stages(progress=False), KNN(), stages, Mahalanobis(), RMDS()]
        parts += [GEN(), KLMatching(), ViM(), FDBD(), NNGuide(), Shaped("scale"), Shaped("ash", 0.9, "ash"), Combined()]
        units = dict.fromkeys(predictive_scores(torch.full((1, 1, 2), 0.5), torch.zeros(1, 1, 2)), "")
        self.scores = ScoreSet(parts, units)
        output = self._output(train)
        for score in self.scores:
            if score.needs_fit:
                tapped = score.taps is not None and score.taps != self.last
                moments = (self.centre, self.scale) if tapped else None
                widths = stage_widths() if tapped else ()
                context = ScoreContext(int(train.y.max()) + 1, False, None, widths, tapped, moments, bed.layer)
                score.set_context(context)
                fit_score(score, output.view(score.taps), train.y)
        val = self._passes(bed.read("val"))
        self.scores.observe(val, self.scores(val))
        self.scores.finalize()

    def _output(self, found: Reading) -> BackboneOutput:
        standard = (found.blocks[:, self.columns] - self.centre) / self.scale
        more = dict.fromkeys({Taps.of("auto", "mean_std")}, standard) | {self.last: found.features}
        return BackboneOutput(found.features, more, found.logits)  # type: ignore[arg-type]

    def _passes(self, found: Reading) -> Passes:
        logits, output = found.logits[None], self._output(found)
        probs = logits.softmax(dim=-1)
        return Passes(logits, None, output.features, probs[0], predictive_scores(probs, logits), output)

    @torch.no_grad()
    def __call__(self, name: str) -> dict[str, Tensor]:
        """All scores (N,) of a set."""
        found: dict[str, Tensor] = self.scores(self._passes(self.bed.read(name)))
        return found


def measures(bed: Bed, table: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Cell]:
    """Score → AUROC and FPR95 of each set in %, their means, full-spectrum means, and selective prediction."""
    found, known = {}, bed.read("test")
    wrong = (known.logits.argmax(dim=1) != known.y).double()
    unknown = (*bed.near, *bed.far)
    for score in table["test"]:
        cell: Cell = {}
        wide = torch.cat([table[name][score] for name in ("test", *bed.shifted)])
        for name in unknown:
            one = separation(table["test"][score], table[name][score])
            cell |= {f"{name} auroc": 100 * one["AUROC"], f"{name} fpr": 100 * one["FPR95"]}
            if bed.shifted:
                cell[f"{name} full"] = 100 * separation(wide, table[name][score])["AUROC"]
        for kind, names in [("near", bed.near)] * bool(bed.near) + [("far", bed.far)]:
            for key in ("auroc", "fpr", *(["full"] if bed.shifted else [])):
                cell[f"{kind} {key}"] = float(np.mean([cell[f"{name} {key}"] for name in names]))
        every = torch.cat([table[name][score] for name in ("test", *unknown)])
        failed = torch.cat([wrong, torch.ones(len(every) - len(wrong))])
        share = [torch.full((len(wrong),), 0.5 / len(wrong))]
        share += [torch.full((n,), 0.5 / len(unknown) / n) for n in (len(table[name][score]) for name in unknown)]
        weight = torch.cat(share)
        cell["augrc"] = 1000 * generalized_risk(table["test"][score], wrong)
        cell["scod"] = 1000 * generalized_risk(every, failed, weight)
        cell["coverage"] = 200 * coverage_at_risk(every, failed, 0.05, weight)  # in % of the known half
        found[score] = cell
    return found


# -- how Combined counts its parts ------------------------------------------------------------------------------------


def forms(val: Mapping[str, Tensor]) -> dict[str, Callable[[Mapping[str, Tensor]], Tensor]]:
    """Ways to make one score of the surprises of validation data: by groups that count always, and gated ones."""
    parts = ("energy", "knn", "generative", "stages")
    surprise = {name: fit_surprise(val[name]) for name in parts}

    def make(always: Sequence[str], gate: float, steep: float) -> Callable[[Mapping[str, Tensor]], Tensor]:
        def joint(scores: Mapping[str, Tensor]) -> Tensor:
            found = {name: surprise[name](scores[name]) for name in parts}
            gated = [(found[name] + math.log(gate)).clamp_min(0) for name in parts if name not in always]
            return sum([found[name] for name in always], steep * sum(gated, torch.zeros(())))

        return joint

    def largest(scores: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([surprise[name](scores[name]) for name in parts]).amax(dim=0)

    found = {"sum of all": make(parts, 1.0, 1.0), "largest of all": largest}
    for always in (("energy",), ("energy", "knn"), ("energy", "knn", "generative")):
        for gate in GATES:
            for steep in STEEP:
                found[f"{' + '.join(always)}; others beyond {gate:g}, × {steep}"] = make(always, gate, steep)
    return found


def choose(find: Callable[[], Bed]) -> dict[str, Cell]:
    """Form or single score → AUROC of each set, near and far means, and how far it is behind the best single score."""
    bed = find()
    scored = Scored(bed)
    table = {name: dict(scored(name)) for name in ("val", "test", *bed.near, *bed.far)}
    made = forms(table["val"])
    for columns in table.values():
        columns |= {name: joint(columns) for name, joint in made.items()}
    cells = measures(bed, table)
    single = [name for name in cells if name not in made and name != "joint"]
    for cell in cells.values():
        gaps = [max(cells[s][f"{n} auroc"] for s in single) - cell[f"{n} auroc"] for n in (*bed.near, *bed.far)]
        cell["behind"] = max(gaps)
    return cells


# -- beds -------------------------------------------------------------------------------------------------------------


def public_bed(data: Path | None, cache: Path | None) -> Bed:
    """The ResNet-20 of CIFAR-10."""
    shifted = tuple(f"test/{name}/{severity}" for name in FIFTEEN for severity in SEVERITIES)
    if data is None:
        layer = last_layer(None)
        return Bed(
            synthetic_reading, NEAR, FAR, LastLayer(layer.weight.detach(), layer.bias.detach()), LAYERS, shifted[:3]
        )
    layer, readings = last_layer(data), Readings(data, cache, every=EVERY, most=MOST)
    return Bed(readings.__getitem__, NEAR, FAR, LastLayer(layer.weight.detach(), layer.bias.detach()), LAYERS, shifted)


def left_out_bed(data: Path, cache: Path | None, name: str, seed: int) -> Bed:
    """A network that knows six classes of a data set."""
    known = trained(data, cache or data / "cache", name, seed)
    weights = torch.load(known.weights)
    layer = LastLayer(weights["linear.weight"], weights["linear.bias"])
    far = tuple(other for other in FAR if other not in ("svhn", name))
    readings = Readings(data, cache, known, most=ROWS)
    return Bed(readings.__getitem__, ("left_out",), far, layer, SMALL)


# -- tables -----------------------------------------------------------------------------------------------------------


def leaderboard(cells: Mapping[str, Cell]) -> str:
    """The table of the page: all scores, the best mean first."""
    sets = {
        "tiny": "TinyImageNet",
        "svhn": "SVHN",
        "mnist": "MNIST",
        "fashion": "Fashion-MNIST",
        "notmnist": "notMNIST",
    }
    header = ["score", "near", "far", *sets.values(), "near, full", "far, full", "AUGRC", "SCOD", "answered at 5 %"]
    order = sorted(cells, key=lambda name: -cells[name]["near auroc"] - cells[name]["far auroc"])
    rows = []
    for name in order:
        cell = cells[name]
        keys = ["near auroc", "far auroc", *(f"{one} auroc" for one in sets), "near full", "far full"]
        tail = [f"{cell['augrc']:.1f}", f"{cell['scod']:.0f}", f"{cell['coverage']:.1f} %"]
        rows.append([TITLES.get(name, name.replace("_", " ")), *(f"{cell[key]:.1f}" for key in keys), *tail])
    return markdown(header, rows)


# -- the command ------------------------------------------------------------------------------------------------------


def show(cells: Mapping[str, Cell]) -> None:
    """Print AUROC of all rows, the best mean first."""
    keys = [key for key in next(iter(cells.values())) if key.endswith("auroc")]
    rows = [[name, *(f"{cell[k]:.1f}" for k in keys), f"{cell.get('behind', 0):.2f}"] for name, cell in cells.items()]
    first = {name: -sum(cells[name].get(f"{kind} auroc", 0.0) for kind in ("near", "far")) for name in cells}
    header = ["score", *(key.removesuffix(" auroc") for key in keys), "behind"]
    print(markdown(header, sorted(rows, key=lambda row: first[row[0]])), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Choose, or measure."""
    parser = arguments(__doc__)
    parser.add_argument("--final", action="store_true", help="read the sets of the test")
    args = parse(parser, argv)
    store = Store(args.out / "unknown.json", {"most": MOST, "every": EVERY, "severities": SEVERITIES})
    bed = public_bed(args.data, args.cache)
    if args.final or args.smoke:
        cells = store.cell("test", partial(final, bed))
        show(cells)
    if args.data is None:
        return
    if args.final:
        print("\nother forms on the sets of the test, looked at after the choice")
        show(store.cell("forms", partial(choose, lambda: bed._replace(shifted=()))))
    beds = {"choose, ten classes of cifar": lambda: bed._replace(near=(), far=GREY, shifted=())}
    for name, seed in LEFT_OUT:
        beds[f"choose, six classes of {name}"] = partial(left_out_bed, args.data, args.cache, name, seed)
    for title, find in beds.items():
        print(f"\n{title}")
        show(store.cell(title, partial(choose, find)))


def final(bed: Bed) -> dict[str, Cell]:
    """All measures of all scores on the sets of the test."""
    scored = Scored(bed)
    return measures(bed, {name: scored(name) for name in ("test", *bed.near, *bed.far, *bed.shifted)})


if __name__ == "__main__":
    main()
