"""Attacked images: the paper conjectures that a BRAINet's uncertainty gives them away. Does it?

    python benchmarks/attacks.py --data DIR     # docs/results/attacks.json
    python benchmarks/attacks.py --smoke

CIFAR-10: heads on the last layer of a frozen ResNet-20; MNIST, 14 × 14 pixels: heads on the pixels. Every head is
attacked by its own gradients, through the mean of its passes: FGSM and PGD of torchattacks, and an attack that knows
the detector. That one is a PGD on the margin of the answer and, wherever the answer is wrong, on what the score of the
verdict (`joint`: densities and energy) has above its threshold; of all its steps it keeps the best: wrong and called
known, else wrong with the least score. AUROC is that of attacked images against the same images before. Finished cells
are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common.command import arguments, parse
from common.data import BACKBONE, MEAN, STD, VALIDATION, mnist_pixels
from common.readings import Readings
from common.store import Cell, Store
from common.tables import markdown
from common.tasks import Sample
from honest import trained
from torch import Tensor, nn
from unknown import MOST

from brainet_pl import network
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.backbones import Backbone, FeatureExtractor
from brainet_pl.backbones.cifar import CifarResNet
from brainet_pl.metrics.curves import roc_area
from brainet_pl.scores import Generative, Score, Stages
from brainet_pl.structure import learn_structure
from brainet_pl.swap.model import SwappedModel
from brainet_pl.tasks import Classification

PASSES, BATCH = 8, 100
STEPS, KNOWING_STEPS = 7, 15  # of PGD, and of the attack that knows the detector
MARGIN = 5.0  # in nats, of a wrong answer, beyond which the attack that knows the detector looks at that alone
FITTED = 3000  # training images that densities are fitted to
HELD = 1000  # validation images
STRENGTHS = {"CIFAR-10": (0.5 / 255, 2 / 255, 8 / 255), "MNIST": (0.05, 0.1, 0.2)}
COLUMNS = {  # score → what the table calls it
    "mutual_information": "MI",
    "entropy": "entropy",
    "energy": "energy",
    "generative": "density",
    "stages": "stages",
    "joint": "joint",
}


class Victim(nn.Module):
    """A model under attack: images of pixels between 0 and 1 in, logarithms of mean probabilities (B, C) out.

    Its passes are drawn by one seed, so that all steps of an attack see the same sub-networks and masks.

    Args:
        model: calibrated, with its scores fitted; its backbone lets gradients through.
        prepare: pixels → what the backbone reads.
    """

    def __init__(self, model: SwappedModel, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.prepare = model.eval(), prepare

    def both(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Images → mean probabilities (B, C), and all scores (B,) by name."""
        with isolated_rng(0):
            passes = self.model.passes(self.prepare(x), PASSES)
            return passes.predicted, self.model.all_scores(passes)

    def forward(self, x: Tensor) -> Tensor:
        """Images → logits (B, C)."""
        with isolated_rng(0):
            predicted = self.model.passes(self.prepare(x), PASSES).predicted
        return predicted.clamp_min(1e-12).log()

    @property
    def threshold(self) -> float:
        """The score `joint` above which an image is called unknown."""
        reference = self.model.scores.reference["joint"]
        return float(reference[int(0.95 * (len(reference) + 1)) - 1])


class Bed(NamedTuple):
    """Images under attack and their labels, and how each head's model is made."""

    images: Tensor
    labels: Tensor
    victim: Callable[[network.HeadSettings], Victim]
    strengths: tuple[float, ...]


# -- attacks ----------------------------------------------------------------------------------------------------------


def knowing(victim: Victim, x: Tensor, y: Tensor, eps: float, steps: int = KNOWING_STEPS) -> Tensor:
    """Attack answer and detector: the margin of the right class, and where it is lost, also `joint` above its limit."""
    start, limit = x, victim.threshold
    draw = torch.Generator().manual_seed(0)
    x = (start + eps * (2 * torch.rand(start.shape, generator=draw) - 1)).clamp(0, 1)
    best, best_value = start.clone(), torch.full((len(x),), torch.inf)
    for step in range(steps + 1):
        x = x.detach().requires_grad_()
        probs, scores = victim.both(x)
        logs = probs.clamp_min(1e-12).log()
        right = logs.gather(1, y[:, None]).squeeze(1)
        margin = right - logs.scatter(1, y[:, None], -torch.inf).amax(dim=1)
        noticed = (scores["joint"] - limit).clamp_min(0)
        # A wrong answer is worth more than any score; among wrong ones, the less strange is the better.
        value = torch.where(margin >= 0, 1e6 + margin, noticed).detach()
        better = value < best_value
        best[better], best_value[better] = x.detach()[better], value[better]
        if step < steps:
            loss = (margin.clamp_min(-MARGIN) + torch.where(margin < 0, noticed, 0.0)).sum()
            (slope,) = torch.autograd.grad(loss, x)
            rate = 2.5 * eps / steps
            x = (start + (x - rate * slope.sign() - start).clamp(-eps, eps)).clamp(0, 1)
    return best


def attacks(victim: Victim, eps: float) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Attack → attacked images of images and labels."""
    import torchattacks

    return {
        "FGSM": torchattacks.FGSM(victim, eps=eps),
        "PGD": torchattacks.PGD(victim, eps=eps, alpha=2.5 * eps / STEPS, steps=STEPS, random_start=True),
        "knows the detector": partial(knowing, victim, eps=eps),
    }


# -- measures ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def described(victim: Victim, x: Tensor) -> dict[str, Tensor]:
    """All that the model says of images, by name."""
    found = []
    for part in x.split(BATCH):
        with isolated_rng(0):
            passes = victim.model.passes(victim.prepare(part), PASSES)
            found.append(victim.model.describe(passes))
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def measures(clean: Mapping[str, Tensor], said: Mapping[str, Tensor], y: Tensor) -> Cell:
    """Accuracy, confidence, AUROC by each score, and the verdict; all but confidence in %."""
    wrong, unknown = said["class"] != y, ~said["known"]
    cell = {
        "accuracy": 100 * float((~wrong).double().mean()),
        "confidence": float(said["probabilities"].amax(dim=1).mean()),
        "unknown": 100 * float(unknown.double().mean()),
        "wrong and called known": 100 * float((wrong & ~unknown).double().mean()),
    }
    for score in COLUMNS:
        if score in said and said is not clean:
            cell[score] = 100 * roc_area(clean[score], said[score])
    return cell


def attacked(victim: Victim, bed: Bed) -> dict[str, Cell]:
    """Attack and strength → measures; "clean" for images as they are."""
    clean = described(victim, bed.images)
    found = {"clean": measures(clean, clean, bed.labels)}
    for eps in bed.strengths:
        for name, attack in attacks(victim, eps).items():
            torch.manual_seed(0)
            pairs = zip(bed.images.split(BATCH), bed.labels.split(BATCH), strict=True)
            images = torch.cat([attack(x, y).detach() for x, y in pairs])
            assert float((images - bed.images).abs().max()) <= eps + 1e-5
            found[f"{name}/{eps:.4f}"] = measures(clean, described(victim, images), bed.labels)
    return found


# -- beds -------------------------------------------------------------------------------------------------------------


def heads() -> dict[str, network.HeadSettings]:
    """The heads under attack."""
    return {
        "BRAINet": network.Tree(dropout=0.35),
        "MLP": network.MLP(),
        "ensemble": network.Ensemble(members=5),
        "MC-dropout": network.MCDropout(),
    }


def make_victim(
    body: FeatureExtractor,
    sample: Sample,
    fitted: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor],
    prepare: Callable[[Tensor], Tensor],
    scores: Sequence[Score],
    epochs: int,
    settings: network.HeadSettings,
) -> Victim:
    """A head trained on a sample of features, with scores and verdict of images, open to gradients."""
    ggt = learn_structure(sample.train[0], progress=False) if settings.needs_tree else None
    body.frozen = True
    model = SwappedModel(body, trained(settings, sample, epochs, ggt), sample.task.out_features)
    calibrate: Any = partial(model.calibrate, calibration="TemperatureScaling", passes=PASSES, progress=False)
    calibrate(*((prepare(x), y) for x, y in (fitted, held)), scores=list(scores))
    body.frozen = False  # the attack needs gradients; nothing is trained
    return Victim(model, prepare)


def cifar_bed(data: Path, cache: Path | None, count: int, epochs: int) -> Bed:
    """Heads on the ResNet-20's last layer."""
    readings = Readings(data, cache, most=MOST)
    train, val = readings["train"], readings["val"]
    held = (val.features, val.y)
    sample = Sample((train.features, train.y), held, held, Classification(10))
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)

    def images(name: str, rows: slice) -> tuple[Tensor, Tensor]:
        x, y = readings.images(name)
        return torch.from_numpy(x[rows]).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y[rows])

    def victim(settings: network.HeadSettings) -> Victim:
        body = Backbone("cifar_resnet20", str(data / BACKBONE), layers=None).build()
        scores = [Generative(progress=False), Stages(progress=False)]
        fitted, checked = images("train", slice(FITTED)), images("val", slice(HELD))
        return make_victim(body, sample, fitted, checked, lambda x: (x - mean) / std, scores, epochs, settings)

    return Bed(*images("test", slice(count)), victim, STRENGTHS["CIFAR-10"])


def mnist_bed(data: Path | None, count: int, epochs: int) -> Bed:
    """Heads on pixels."""
    whole, test = mnist_pixels(data, pool=2 if data is not None else 1)
    held = min(VALIDATION, len(whole[0]) // 3)
    parts = [(whole[0][rows], whole[1][rows]) for rows in (slice(held, held + 10_000), slice(held))]
    sample = Sample(parts[0], parts[1], test, Classification(10))

    def victim(settings: network.HeadSettings) -> Victim:
        fitted = (sample.train[0][:FITTED], sample.train[1][:FITTED])
        scores = [Generative(progress=False)]
        return make_victim(Backbone().build(), sample, fitted, sample.val, lambda x: x, scores, epochs, settings)

    return Bed(test[0][:count], test[1][:count], victim, STRENGTHS["MNIST"])


def synthetic_bed(count: int, epochs: int) -> Bed:
    """Small images of noise on a network of random weights, for a smoke run of the path through a backbone."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(10, (300,), generator=draw)
    x = (torch.rand(300, 3, 16, 16, generator=draw) * 0.2 + 0.07 * y[:, None, None, None]).clamp(0, 1)
    torch.manual_seed(0)
    model = CifarResNet(8)

    def victim(settings: network.HeadSettings) -> Victim:
        body = Backbone(model, layers=None).build()
        with torch.no_grad():
            features = body(x)
        sample = Sample((features[:200], y[:200]), (features[200:], y[200:]), (features, y), Classification(10))
        scores = [Generative(progress=False), Stages(progress=False)]
        few, held = (x[:200], y[:200]), (x[200:], y[200:])
        return make_victim(body, sample, few, held, lambda pixels: pixels, scores, epochs, settings)

    return Bed(x[:count], y[:count], victim, STRENGTHS["CIFAR-10"][-1:])


# -- tables -----------------------------------------------------------------------------------------------------------


def table(every: Mapping[str, Mapping[str, Cell]], title: str) -> str:
    """A row for each attack, strength and head of a bed, from finished cells "bed/head"."""
    cells = {head: every[f"{title}/{head}"] for head in heads() if f"{title}/{head}" in every}
    first, strengths, unit = next(iter(cells.values())), STRENGTHS[title], "/255" if title == "CIFAR-10" else ""
    order = ["clean", *(f"{name}/{eps:.4f}" for name in ("FGSM", "PGD", "knows the detector") for eps in strengths)]
    scores = [score for score in COLUMNS if any(score in cell for cell in first.values())]
    header = ["attack", "strength", "head", "accuracy", "confidence", *(COLUMNS[score] for score in scores)]
    rows = []
    for attack in (one for one in order if one in first):
        name, _, eps = attack.partition("/")
        strength = next((f"{one * (255 if unit else 1):g}{unit}" for one in strengths if f"{one:.4f}" == eps), "–")
        for head, found in cells.items():
            cell = found[attack]
            aurocs = [f"{cell[score]:.0f}" if score in cell else "–" for score in scores]
            shares = [f"{cell['unknown']:.0f} %", f"{cell['wrong and called known']:.0f} %"]
            line = [name, strength, head, f"{cell['accuracy']:.0f} %", f"{cell['confidence']:.2f}", *aurocs, *shares]
            rows.append(line)
    return markdown([*header, "called unknown", "wrong and called known"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Attack, and print the tables."""
    parser = arguments(__doc__, epochs=8)
    parser.add_argument(
        "--count", type=int, default=500, help="images of MNIST that are attacked, four for each of CIFAR-10"
    )
    args = parse(parser, argv)
    count = 20 if args.smoke else args.count
    settings = {
        "count": count,
        "steps": [STEPS, KNOWING_STEPS],
        "strengths": STRENGTHS,
        "passes": PASSES,
        "margin": MARGIN,
    }
    store = Store(args.out / "attacks.json", settings)
    few = count // 4  # each costs a pass through a network and back, for every step
    beds = {"MNIST": partial(mnist_bed, args.data, count, args.epochs)}
    if args.data is None:
        beds["CIFAR-10"] = partial(synthetic_bed, count, args.epochs)
    else:
        beds["CIFAR-10"] = partial(cifar_bed, args.data, args.cache, few, args.epochs)
    for title, find in beds.items():
        made: list[Bed] = []

        def run(settings: network.HeadSettings, find: Callable[[], Bed] = find, made: list[Bed] = made) -> Any:
            made += [] if made else [find()]
            return attacked(made[0].victim(settings), made[0])

        for head, head_settings in heads().items():
            store.cell(f"{title}/{head}", partial(run, head_settings))
            print(title, head, "done", flush=True)
        print(f"\n{title}\n{table(store.content['cells'], title)}\n")


if __name__ == "__main__":
    main()
