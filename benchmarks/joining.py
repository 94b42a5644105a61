"""Should scores be joined by what they notice of classes left out? Development tasks only; no set of a test is read.

    python benchmarks/joining.py --data DIR    # docs/results/joining.json
    python benchmarks/joining.py --smoke

A rule judges each part of `Combined` by the training data of its network alone: a class is left out of the scores, as
`brainet_pl.scores.left_out` does it, and the AUROC of its held-out samples is told. Parts that a rule drops count only
beyond a share of the validation samples (the gate), so that far inputs are still noticed. Tasks are ResNet-8s that know
six classes, an EfficientNet-Lite0 of ImageNet with heads that know six or seven, and tables without a class; the
classes that a network does not know are near, other data are far. `--data` needs efficientnet_lite0.pth for the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.left_out import trained
from common.readings import GREY, SMALL, Readings, grey_images, stage_columns, stage_widths
from common.store import Store
from common.tables import markdown
from torch import Tensor
from torch.nn import functional as F

from brainet_pl.backbones import Backbone
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import Taps
from brainet_pl.features.extraction import Extracted
from brainet_pl.metrics.curves import roc_area
from brainet_pl.scores import KNN, Generative, Score, ScoreContext, ScoreSet, Stages
from brainet_pl.scores.fitting import fit_score
from brainet_pl.scores.left_out import MOST_ROWS, classes_to_leave_out, fit_networks
from brainet_pl.scores.reference import fit_surprise
from brainet_pl.tasks.classification import predictive_scores
from brainet_pl.tasks.passes import Passes

PARTS = ("energy", "knn", "generative", "stages")
GATES = (0.1, 0.05, 0.02)
SIDE, ROWS, FEW = 96, 4500, 600  # pixels of images for Lite0, images of its known sets, and of far ones
TAPS = Taps.of("auto", "mean_std")
Columns = Mapping[str, Tensor]
Rule = Callable[[Sequence[tuple[Columns, Columns]]], Callable[[Columns], Tensor]]


class Bed(NamedTuple):
    """Scores of a network: those of `val`, `test`, near and far sets, and for each left-out class of others and it."""

    sets: dict[str, dict[str, Tensor]]
    left_out: list[tuple[dict[str, Tensor], dict[str, Tensor]]]


# -- scores of a task -------------------------------------------------------------------------------------------------


def run(scores: ScoreSet, rows: Extracted, logits: Tensor) -> dict[str, Tensor]:
    """All scores (N,) of samples with their logits (N, C)."""
    probs = logits.softmax(dim=1)
    predicted = predictive_scores(probs[None], logits[None])
    found: dict[str, Tensor] = scores(Passes(logits[None], None, rows.features, probs, predicted, rows.output))
    return {name: found[name] for name in PARTS if name in found}


def rows_of(samples: Extracted, which: Tensor) -> Extracted:
    """Some of the samples."""
    return Extracted(samples.output[which], samples.targets[which])


@torch.no_grad()
def make_bed(
    parts: Sequence[Score],
    context: Callable[[Score], ScoreContext],
    train: Extracted,
    sets: Mapping[str, Extracted],
) -> Bed:
    """Fit scores, and once more without each class; the network's own logits are taken where it has some."""
    units = dict.fromkeys(predictive_scores(torch.full((1, 1, 2), 0.5), torch.zeros(1, 1, 2)), "")
    scores = ScoreSet(parts, units)
    for score in scores:
        score.set_context(context(score))
        fit_score(score, train.output.view(score.taps), train.targets)
    head = fit_networks(train.features, train.targets) if train.output.base_logits is None else None

    def logits(rows: Extracted) -> Tensor:
        return head(rows.features) if head is not None else rows.output.base_logits  # type: ignore[return-value]

    found = {name: run(scores, rows, logits(rows)) for name, rows in sets.items()}
    seen, held, left = train.sample(MOST_ROWS), sets["val"], []
    for label in classes_to_leave_out(seen, held, 0.05)[0].tolist():
        learned, strange = rows_of(seen, seen.targets != label), rows_of(held, held.targets == label)
        if len(strange.targets) < 3:
            continue
        labels = torch.unique(learned.targets, return_inverse=True)[1]
        copies, classify = scores.refitted(learned.output, labels), fit_networks(learned.features, labels)
        others = rows_of(held, held.targets != label)
        left.append((run(copies, others, classify(others.features)), run(copies, strange, classify(strange.features))))
    return Bed(found, left)


def small_network(data: Path, cache: Path | None, name: str, seed: int) -> Bed:
    """A ResNet-8 that knows six classes."""
    far = [other for other in GREY if other != name]
    most = {"train": 10_000, **dict.fromkeys(far, 3000)}
    readings = Readings(data, cache, trained(data, cache or data / "cache", name, seed), most=most)
    columns, train = stage_columns(SMALL), readings["train"]
    x = train.blocks[:, columns]
    centre, scale = x.mean(dim=0), x.std(dim=0).clamp_min(1e-6)

    def extracted(which: str) -> Extracted:
        found = readings[which]
        more = {TAPS: (found.blocks[:, columns] - centre) / scale}
        return Extracted(BackboneOutput(found.features, more, found.logits), found.y)  # type: ignore[arg-type]

    def context(score: Score) -> ScoreContext:
        tapped = score.taps is not None
        return ScoreContext(int(train.y.max()) + 1, widths=stage_widths() if tapped else (), scaled=tapped)

    sets = {("near" if which == "left_out" else which): extracted(which) for which in ("val", "test", "left_out", *far)}
    return make_bed([Generative(progress=False), Stages(progress=False), KNN()], context, extracted("train"), sets)


class LiteFeatures:
    """Features of an EfficientNet-Lite0 of ImageNet, of images brought to 96 pixels; read once, then kept."""

    def __init__(self, data: Path, cache: Path | None) -> None:
        self.data, self.cache = data, (cache or data / "cache") / "lite"
        self.cache.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, count: int) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        """Last layer (N, 1280), stages (N, d), labels (N,), and how wide each stage is."""
        path = self.cache / f"{name}.pt"
        if not path.is_file():
            torch.save(self._read(name), path)
        last, stages, y, widths = torch.load(path)
        return last[:count], stages[:count], y[:count], tuple(widths)

    @torch.no_grad()
    def _read(self, name: str) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        from efficientnet_lite_pytorch import EfficientNet

        model = EfficientNet.from_name("efficientnet-lite0")
        model.load_state_dict(torch.load(self.data / "efficientnet_lite0.pth", weights_only=True))
        body = Backbone(model).build()
        assert TAPS is not None
        body.add_view(TAPS)
        if name in GREY:
            x, y = grey_images(self.data, GREY[name])
        else:
            with np.load(self.data / {"cifar": "cifar10_test.npz", "svhn": "svhn_test10k.npz"}[name]) as arrays:
                x, y = arrays["x"], arrays["y"].astype(np.int64)
        last, stages = [], []
        for part in torch.from_numpy(x[:ROWS]).permute(0, 3, 1, 2).split(100):
            large = F.interpolate(part.float() / 255, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
            read = body((large - 0.5) / 0.5, more=True)
            last.append(read.features)
            stages.append(read.more[TAPS])
        return torch.cat(last), torch.cat(stages), torch.from_numpy(y[:ROWS]), tuple(body.widths(TAPS))


def frozen_network(data: Path, cache: Path | None, name: str, seed: int, known: int) -> Bed:
    """Small heads on a network of ImageNet that know some classes of another data set."""
    read = LiteFeatures(data, cache)
    last, stages, y, widths = read(name, ROWS)
    place = torch.full((10,), -1)
    place[sorted(np.random.default_rng(seed).permutation(10)[:known].tolist())] = torch.arange(known)
    labels = place[y]
    inside, n = labels >= 0, int((labels >= 0).sum())
    ends = [0, int(0.55 * n), int(0.75 * n), n]
    centre, scale = stages[inside][: ends[1]].mean(dim=0), stages[inside][: ends[1]].std(dim=0).clamp_min(1e-6)

    def extracted(z: Tensor, taps: Tensor, target: Tensor) -> Extracted:
        return Extracted(BackboneOutput(z, {TAPS: (taps - centre) / scale}, None), target)  # type: ignore[arg-type]

    parts = [(last[inside][a:b], stages[inside][a:b], labels[inside][a:b]) for a, b in pairwise(ends)]
    train, val, test = (extracted(*part) for part in parts)
    sets = {"val": val, "test": test, "near": extracted(last[~inside], stages[~inside], torch.zeros(len(y) - n).long())}
    for other in ("mnist", "fashion", "notmnist", "cifar", "svhn"):
        if other != name:
            z, taps, target, _ = read(other, FEW)
            sets[other] = extracted(z, taps, torch.zeros_like(target))

    def context(score: Score) -> ScoreContext:
        return ScoreContext(known, widths=widths if score.taps else (), scaled=score.taps is not None)

    return make_bed([Stages(progress=False), KNN()], context, train, sets)


def without_class(name: str, label: int) -> Bed:
    """A table of scikit-learn without a class; rows with permuted columns are far."""
    from sklearn import datasets

    arrays = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, y = torch.tensor(arrays[0], dtype=torch.float32), torch.tensor(arrays[1])
    rng, inside = np.random.default_rng(label), y != label
    order = torch.from_numpy(rng.permutation(int(inside.sum())))
    known, target = x[inside][order], torch.unique(y[inside], return_inverse=True)[1][order]
    half, most = len(order) // 2, 3 * len(order) // 4
    centre, scale = known[:half].mean(dim=0), known[:half].std(dim=0).clamp_min(1e-3)

    def extracted(rows: Tensor, labels: Tensor) -> Extracted:
        return Extracted(BackboneOutput((rows - centre) / scale, {}, None), labels)

    permuted = torch.stack([column[torch.from_numpy(rng.permutation(len(order)))] for column in known.t()], dim=1)
    sets = {
        "val": extracted(known[half:most], target[half:most]),
        "test": extracted(known[most:], target[most:]),
        "near": extracted(x[~inside], torch.zeros_like(y[~inside])),
        "permuted": extracted(permuted, torch.zeros_like(target)),
    }
    train = extracted(known[:half], target[:half])
    context = ScoreContext(int(target.max()) + 1, raw=True)
    return make_bed([Generative(progress=False), KNN()], lambda score: context, train, sets)


# -- rules ------------------------------------------------------------------------------------------------------------


def weighted(weights: Mapping[str, float], gate: float) -> Callable[[Columns], Tensor]:
    """Σ w·s, and of what is left of each part, (1 - w)·s beyond the gate."""

    def joint(s: Columns) -> Tensor:
        tails = [(1 - w) * (s[name] + math.log(gate)).clamp_min(0) for name, w in weights.items()]
        return sum((w * s[name] for name, w in weights.items()), torch.zeros(())) + sum(tails, torch.zeros(()))

    return joint


def noticed(left: Sequence[tuple[Columns, Columns]], joint: Callable[[Columns], Tensor]) -> Tensor:
    """The AUROC (K,) of each left-out class."""
    return torch.tensor([roc_area(joint(others), joint(strange)) for others, strange in left])


def dropping(margin: float, gate: float, errors: float = 0.0) -> Rule:
    """Drop the part without which the rest notices most, while that gains `margin`, and so many standard errors."""

    def rule(left: Sequence[tuple[Columns, Columns]]) -> Callable[[Columns], Tensor]:
        weights = dict.fromkeys(left[0][0], 1.0)
        best = noticed(left, weighted(weights, 1.0))
        while sum(weights.values()) > 1:
            kept = [name for name, weight in weights.items() if weight]
            trials = {name: noticed(left, _plain({**weights, name: 0.0})) for name in kept}
            name = max(trials, key=lambda one: float(trials[one].mean()))
            gain = trials[name] - best
            if float(gain.mean()) < max(margin, errors * float(gain.std(correction=0)) / len(gain) ** 0.5):
                break
            weights[name], best = 0.0, trials[name]
        return weighted(weights, gate)

    return rule


def _plain(weights: Mapping[str, float]) -> Callable[[Columns], Tensor]:
    return lambda s: sum((w * s[name] for name, w in weights.items()), torch.zeros(()))


def by_power(power: float, gate: float) -> Rule:
    """Weigh parts by how far above chance they notice left-out classes, to a power, the best by 1."""

    def rule(left: Sequence[tuple[Columns, Columns]]) -> Callable[[Columns], Tensor]:
        above = {name: max(float(noticed(left, lambda s, n=name: s[n]).mean()) - 0.5, 0.0) for name in left[0][0]}  # type: ignore[misc]
        most = max(above.values()) or 1.0
        return weighted({name: (value / most) ** power for name, value in above.items()}, gate)

    return rule


def rules() -> dict[str, Rule]:
    """All rules that were compared."""
    found: dict[str, Rule] = {"the sum": lambda left: _plain(dict.fromkeys(left[0][0], 1.0))}
    for gate in GATES:
        for margin in (0.005, 0.01, 0.02, 0.03):
            found[f"drop parts that cost {margin:g}, tails beyond {gate:g}"] = dropping(margin, gate)
        found[f"drop parts that cost 0.01 and two errors, tails beyond {gate:g}"] = dropping(0.01, gate, 2.0)
        for power in (1, 2):
            found[f"weights by power {power}, tails beyond {gate:g}"] = by_power(power, gate)
    return found


def measured(bed: Bed, parts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Rule or single part → near and far AUROC, and for parts that of left-out classes, in %."""

    def surprises(reference: Columns, columns: Columns) -> dict[str, Tensor]:
        return {name: fit_surprise(reference[name])(columns[name]) for name in parts}

    left = [(surprises(others, others), surprises(others, strange)) for others, strange in bed.left_out]
    sets = {name: surprises(bed.sets["val"], columns) for name, columns in bed.sets.items()}
    far = [name for name in sets if name not in ("val", "test", "near")]

    def cell(joint: Callable[[Columns], Tensor]) -> dict[str, float]:
        known = joint(sets["test"])
        areas = {name: 100 * roc_area(known, joint(sets[name])) for name in ("near", *far)}
        return {"near": areas["near"], "far": float(np.mean([areas[name] for name in far]))}

    found: dict[str, dict[str, float]] = {}
    for name in parts:
        alone: Callable[[Columns], Tensor] = lambda s, name=name: s[name]  # type: ignore[misc]  # noqa: E731
        found[name] = cell(alone) | {"left out": 100 * float(noticed(left, alone).mean())}
    return found | {name: cell(rule(left)) for name, rule in rules().items()}


# -- the command ------------------------------------------------------------------------------------------------------


def beds(data: Path | None, cache: Path | None) -> dict[str, Callable[[], Bed]]:
    """Title → a task."""
    tables = (("digits", 1), ("digits", 3), ("digits", 5), ("digits", 8), ("wine", 0), ("wine", 1))
    found: dict[str, Callable[[], Bed]] = {f"{n} without {c}": partial(without_class, n, c) for n, c in tables}
    if data is None:
        return {name: found[name] for name in ("wine without 1",)}
    for name, seed, known in (("cifar", 0, 6), ("svhn", 0, 6), ("fashion", 0, 6)):
        for more in (0, 1):
            title = f"Lite0, {known + more} classes of {name}"
            found[title] = partial(frozen_network, data, cache, name, seed + more, known + more)
    for name, seed in (("cifar", 1), ("cifar", 2), ("fashion", 0), ("mnist", 0)):
        found[f"ResNet-8, six classes of {name}, seed {seed}"] = partial(small_network, data, cache, name, seed)
    return found


def measure_all(make: Callable[[], Bed]) -> dict[str, Any]:
    """Sets of parts that a model may have → what was measured."""
    bed = make()
    there = [name for name in PARTS if name in bed.sets["val"]]
    wanted = [there, *(["energy", name] for name in ("stages", "generative") if name in there and len(there) > 2)]
    return {" + ".join(parts): measured(bed, parts) for parts in wanted}


def summary(cells: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> str:
    """Each rule against the sum over all tasks and sets of parts, the best near mean first."""
    rows = []
    for name in rules():
        gaps = {
            kind: [found[name][kind] - found["the sum"][kind] for task in cells.values() for found in task.values()]
            for kind in ("near", "far")
        }
        rows.append((name, *(f(gaps[kind]) for kind in ("near", "far") for f in (np.mean, min))))
    rows.sort(key=lambda row: -row[1])
    header = ["rule", "near, less the sum's", "worst task", "far, less the sum's", "worst task"]
    return markdown(header, [[row[0], *(f"{float(value):+.1f}" for value in row[1:])] for row in rows])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all tasks, and print the table."""
    args = parse(arguments(__doc__), argv)
    store, cells = Store(args.out / "joining.json", {"gates": GATES}), {}
    for title, make in beds(args.data, args.cache).items():
        cells[title] = store.cell(title, partial(measure_all, make))
        print(title, "done", flush=True)
    print(summary(cells))


if __name__ == "__main__":
    main()
