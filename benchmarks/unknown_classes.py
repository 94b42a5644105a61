"""What a fit says it will notice, and what its verdict goes by, beside what is noticed of classes really left out.

    python benchmarks/unknown_classes.py --data DIR    # docs/results/unknown_classes.json, some 15 minutes
    python benchmarks/unknown_classes.py --smoke

In each task a small network and the densities of a fit learn some classes; the samples of a class that was left out, or
of another data set, are the unknown ones. The estimate sees held-out samples of the known classes alone. Tasks of even
number were there to choose by, the others judge what was chosen. `--data` needs the tables, clothing,
efficientnet_lite0.pth, clinc150.json, minilm, the images of CIFAR-10 and of its unknown sets, and resnet20_cifar10.pth.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common.command import arguments, parse
from common.data import mnist_pixels
from common.store import Store
from common.tables import markdown
from common.unknown_features import CIFAR, TAPS, Read, cifar, clothing, intents
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils.rng import isolated_rng
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import Extracted
from brainet_pl.fitting.settle import answer_rows, settle
from brainet_pl.metrics.curves import roc_area
from brainet_pl.network import MLP
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import KNN, Combined, Generative, Score, ScoreContext, ScoreSet, Stages
from brainet_pl.scores.fitting import fit_score
from brainet_pl.tasks import Classification

EPOCHS, RATE, BATCH = 40, 0.003, 128
# Tables and the class that is left out, kinds of clothes, numbers of known intents: to choose by, and to judge by.
TABLES = (
    [
        *(
            ("digits", 3),
            ("digits", 0),
            ("digits", 8),
            ("wine", 2),
            ("wine", 0),
            ("iris", 2),
            ("glass", 5),
            ("glass", 1),
        ),
        *(("winequality-white", 4), ("winequality-white", 2), ("MNIST", 4), ("MNIST", 0)),
        *(("FashionMNIST", 5), ("FashionMNIST", 6)),
    ],
    [
        *(("digits", 1), ("digits", 4), ("digits", 5), ("digits", 7), ("glass", 0), ("winequality-white", 3)),
        *(("MNIST", 1), ("MNIST", 3), ("MNIST", 7), ("MNIST", 9)),
        *(("FashionMNIST", 0), ("FashionMNIST", 1), ("FashionMNIST", 8), ("FashionMNIST", 9)),
    ],
)
SMOKE = ([("digits", 3), ("wine", 2)], [("digits", 1)])
CLOTHES = ((1, 6, 0, 4), (2, 7))
HATS_AND_SHOES = {"hats": 1, "shoes": 6}
INTENTS = ((150, 120, 15), (60, 30))


class Fit(NamedTuple):
    """One fit: known samples by role, and sets of unknown ones.

    Attributes:
        name: of the fit.
        train, held, test: known samples, with labels from 0 on.
        unknown: name → samples that are not of a known class.
        widths: of the stages; empty where the features are all.
        raw: whether the features are the columns of a table.
    """

    name: str
    train: Extracted
    held: Extracted
    test: Extracted
    unknown: dict[str, Extracted]
    widths: tuple[int, ...] = ()
    raw: bool = False


def split(
    name: str, read: Read, unknown: Mapping[str, Read], known: Tensor, shares: tuple[float, float] = (0.6, 0.2)
) -> Fit:
    """Known samples by role in a random order, standardised by the training samples."""
    rows = known.nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    ends = [0, int(shares[0] * len(rows)), int(sum(shares) * len(rows)), len(rows)]
    labels = torch.unique(read.y[rows], return_inverse=True)[1]
    train = rows[: ends[1]]
    raw = read.stages is None and not read.widths
    scales = [_scale(part[train]) for part in (read.last, read.stages) if part is not None]

    def extracted(source: Read, which: Tensor, y: Tensor) -> Extracted:
        parts = [part[which] for part in (source.last, source.stages) if part is not None]
        scaled = [(part - mean) / deviation for part, (mean, deviation) in zip(parts, scales, strict=True)]
        more = {} if len(scaled) == 1 else {TAPS: scaled[1]}
        return Extracted(BackboneOutput(scaled[0] if raw else parts[0], more), y)  # type: ignore[arg-type]

    known_parts = [extracted(read, rows[a:b], labels[a:b]) for a, b in pairwise(ends)]
    others = {key: extracted(one, torch.arange(len(one.y)), torch.zeros_like(one.y)) for key, one in unknown.items()}
    return Fit(name, *known_parts, others, read.widths if read.stages is not None else (), raw)


def _scale(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(dim=0), x.std(dim=0).clamp_min(1e-3)


def without(name: str, read: Read, label: int) -> Fit:
    """A fit that knows all classes but one."""
    return split(f"{name} without {label}", read, {"the class": only(read, label)}, read.y != label)


def without_several(name: str, read: Read, labels: Mapping[str, int]) -> Fit:
    """A fit that knows all classes but some, by what these are called."""
    left_out = {title: only(read, label) for title, label in labels.items()}
    return split(name, read, left_out, ~torch.isin(read.y, torch.tensor(list(labels.values()))))


def only(read: Read, label: int) -> Read:
    """The samples of one class."""
    rows = read.y == label
    return Read(read.last[rows], None if read.stages is None else read.stages[rows], read.y[rows], read.widths)


# -- tasks ------------------------------------------------------------------------------------------------------------


def table_of(data: Path, name: str) -> Read:
    """A table of numbers whose target is in the last column."""
    with (data / "tables" / f"{name}.csv").open() as file:
        rows = list(csv.reader(file))
    x = torch.tensor([[float(cell) for cell in row[:-1]] for row in rows])
    names = sorted({row[-1] for row in rows})
    return Read(x, None, torch.tensor([names.index(row[-1]) for row in rows]))


def sklearn_table(name: str) -> Read:
    """A table of scikit-learn; columns that do not vary are left out."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = torch.tensor(x[:, x.std(axis=0) > 0], dtype=torch.float32)
    return Read(x, None, torch.tensor(y))


def pixels(data: Path, name: str, count: int = 4000, width: int = 30) -> Read:
    """The first principal components of the pixels of grey images."""
    x, y = mnist_pixels(data, name)[1]
    x = x[:count].flatten(1)
    centred = x - x.mean(dim=0)
    with isolated_rng(0):
        basis = torch.pca_lowrank(centred, width, center=False)[2]
    return Read(centred @ basis, None, y[:count])


def fits(data: Path | None, cache: Path | None, judge: bool) -> Iterator[tuple[str, Callable[[], Fit]]]:
    """The fits that the range was chosen by, or those that judge it, to be read one after the other."""
    tables = TABLES[judge] if data is not None else SMOKE[judge]
    for name, label in tables:
        yield f"{name} without {label}", lambda name=name, label=label: without(name, read_table(data, name), label)
    if data is None:
        return
    cache = (cache or data / "cache") / "unknown"
    for label in CLOTHES[judge]:
        yield f"clothing without {label}", lambda label=label: without("clothing", clothing(data, cache), label)
    if not judge:  # hats and shoes were there to choose by, one at a time
        yield (
            "clothing without hats and shoes",
            lambda: without_several("clothing", clothing(data, cache), HATS_AND_SHOES),
        )
    for count in INTENTS[judge]:
        yield f"{count} intents", lambda count=count: intents_of(data, cache, count)
    if not judge:
        yield "CIFAR-10", lambda: images_of_cifar(data, cache)


def read_table(data: Path | None, name: str) -> Read:
    """A table by its name, from wherever it is."""
    if name in ("digits", "wine", "iris"):
        return sklearn_table(name)
    assert data is not None
    return pixels(data, name) if name.endswith("MNIST") else table_of(data, name)


def images_of_cifar(data: Path, cache: Path) -> Fit:
    """All classes of CIFAR-10, whose network saw the training images: held-out ones are test images."""
    sets = {name: cifar(data, cache, name) for name in CIFAR}
    train, test = sets.pop("train"), sets.pop("test")
    assert train.stages is not None
    assert test.stages is not None
    fit = split("CIFAR-10", test, sets, torch.ones(len(test.y), dtype=torch.bool), (0.0, 0.4))
    mean, deviation = _scale(train.stages)
    own_mean, own_deviation = test.stages.mean(dim=0), test.stages.std(dim=0)

    def extracted(read: Read, which: slice) -> Extracted:
        assert read.stages is not None
        more = {TAPS: (read.stages[which] - mean) / deviation}
        return Extracted(BackboneOutput(read.last[which], more), read.y[which])  # type: ignore[arg-type]

    del own_mean, own_deviation
    every = slice(None)
    return fit._replace(
        train=extracted(train, every),
        held=extracted(test, slice(0, 2000)),
        test=extracted(test, slice(2000, None)),
        unknown={name: extracted(read, every) for name, read in sets.items()},
    )


def intents_of(data: Path, cache: Path, count: int) -> Fit:
    """Some of 150 intents; unknown are queries of none, and of the intents that were left out."""
    train, test = intents(data, cache, "train"), intents(data, cache, "test")
    chosen = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:count]
    both = Read(torch.cat([train.last, test.last]), None, torch.cat([train.y, test.y]), (384,))
    inside = torch.isin(both.y, chosen)
    unknown = {"no intent": intents(data, cache, "oos")}
    if count < 150:
        others = ~inside
        unknown["other intents"] = Read(both.last[others][:1500], None, both.y[others][:1500], (384,))
    return split(f"{count} intents", both, unknown, inside)


# -- one fit ----------------------------------------------------------------------------------------------------------


def scores_of(fit: Fit) -> list[Score]:
    """The scores that a fit has by default: those of an estimator, of a swapped head of images, or of embeddings."""
    if fit.raw:
        names = ["entropy", "generative", "knn"]
        return [Generative(normalize=False, progress=False), KNN(k=5, normalize=False), Combined(of=names)]
    return [Stages(progress=False)] if fit.widths else [Generative(progress=False)]


def fitted(fit: Fit) -> Predictor:
    """A small network with its scores; not calibrated yet."""
    classes, d = int(fit.train.targets.max()) + 1, fit.train.features.shape[1]
    with isolated_rng(0):
        head = MLP().build(d, classes, None)
        train_head(head, fit.train.features, fit.train.targets)
    predictor = Predictor(FeatureExtractor(None), Classification(classes), head, calibration="auto")
    predictor.scores = ScoreSet(scores_of(fit), predictor.task.units)  # features are there: nothing has to be tapped
    predictor.scores.join_for_verdict()
    for score in predictor.scores:
        if score.needs_fit:
            context = ScoreContext(classes, raw=fit.raw, widths=fit.widths, scaled=bool(fit.widths))
            score.set_context(context)
            fit_score(score, fit.train.output.view(score.taps), fit.train.targets)
    return predictor.eval()


def train_head(head: nn.Module, x: Tensor, y: Tensor) -> None:
    """Adam with a rate that falls, on standardised features."""
    steps = EPOCHS * -(-len(x) // BATCH)
    optimizer = torch.optim.AdamW(head.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    head.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(head(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    head.eval()


@torch.no_grad()
def columns_of(predictor: Predictor, samples: Extracted) -> dict[str, Tensor]:
    """Score → (N,) of samples, and `known_p` where there is a verdict."""
    parts = []
    for first in range(0, len(samples.targets), 500):
        passes = predictor.passes(samples.output[slice(first, first + 500)])
        scores = predictor.all_scores(passes)
        parts.append(scores | predictor.judge(scores))
    return {name: torch.cat([part[name] for part in parts]).double() for name in parts[-1]}


def measured(fit: Fit) -> dict[str, Any]:
    """What is said about unknown inputs, and what is noticed of each unknown set, by score."""
    predictor = fitted(fit)
    settle(predictor, answer_rows(predictor, fit.held))
    expected = predictor.expected
    assert expected is not None
    names = [expected.score, *expected.parts]
    known = columns_of(predictor, fit.test)
    found = {"low": expected.low, "high": expected.high, "noticed": expected.noticed, "permuted": expected.permuted}
    sets = {}
    for name, samples in fit.unknown.items():
        strange = columns_of(predictor, samples)
        noticed = float((strange["known_p"] <= 0.05).double().mean())
        sets[name] = {"noticed": noticed, **{one: roc_area(known[one], strange[one]) for one in names}}
    known_ones = {name: value for name, value in found.items() if not math.isnan(value)}
    return known_ones | {"sets": sets, "false alarms": float((known["known_p"] <= 0.05).double().mean())}


def main(argv: list[str] | None = None) -> None:
    """Measure all fits; finished ones are kept."""
    args = parse(arguments(__doc__), argv)
    torch.set_num_threads(1)
    store = Store(args.out / "unknown_classes.json", {"epochs": EPOCHS})
    for judge in (False, True):
        for name, make in fits(args.data, args.cache, judge):
            cell = store.cell(name, lambda make=make, judge=judge: measured(make()) | {"judges": judge})  # type: ignore[misc]
            print(name, cell, flush=True)
    print(summary(store.content["cells"]))


def summary(cells: Mapping[str, Any]) -> str:
    """What was said and what was noticed, and by which score unknown samples rank best."""
    rows = []
    for name, cell in sorted(cells.items(), key=lambda item: (item[1]["judges"], item[0])):
        said = f"{100 * cell['low']:.0f} to {cell['high']:.0%}" if "low" in cell else "–"
        for unknown, found in cell["sets"].items():
            inside = "–" if "low" not in cell else "yes" if cell["low"] <= found["noticed"] <= cell["high"] else "no"
            areas = {score: area for score, area in found.items() if score not in ("noticed", "joint")}
            best = max(areas, key=areas.__getitem__)
            ranks = [f"{100 * found['joint']:.1f}", f"{best} {100 * areas[best]:.1f}"]
            use = "judge" if cell["judges"] else "choose"
            rows.append([name, unknown, use, said, f"{found['noticed']:.0%}", inside, *ranks])
    header = ["task", "unknown", "used to", "said", "noticed", "within", "AUROC of the sum", "best part"]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
