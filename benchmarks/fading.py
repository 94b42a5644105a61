"""Should confidence fade by default? One call to `swap_head(…).fit()` on each task, read with and without fading.

    python benchmarks/fading.py --data DIR            # docs/results/fading.json, some ten minutes on one core
    python benchmarks/fading.py --data DIR --only digits
    python benchmarks/fading.py --smoke

`DensityScaling` has the temperature of temperature scaling, so that one fit gives both answers for the same inputs:
with the temperature alone, and with fading at a price of at most 1 % of the held-out NLL. Inputs are known test inputs,
and unknown ones that no fit saw: classes that were left out, and other data sets. Finished cells are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.data import BACKBONE, MEAN, STD
from common.measures import quality_of
from common.store import Cell, Store
from common.tables import table
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl import swap_head
from brainet_pl.backbones.loading import make_backbone
from brainet_pl.calibration import DensityScaling
from brainet_pl.calibration.temperature import scale
from brainet_pl.metrics.curves import separation
from brainet_pl.swap.model import SwappedModel

BATCH = 100
SURE = 0.9  # confidence above which an answer to an unknown input is counted
LEFT_OUT = ("hat", "shoes")  # kinds of clothes that are unknown
SIDE = 160  # pixels of the photographs
UNKNOWN = 400  # inputs of an unknown set
SENTENCES = 64  # at a time

Labelled = tuple[Tensor, Tensor]


class Task(NamedTuple):
    """A trained network, labelled inputs to fit and test on, and unknown inputs by name; `layers` for `swap_head`."""

    network: nn.Module
    train: Labelled
    held: Labelled
    test: Labelled
    unknown: Mapping[str, Tensor]
    layers: str | None = "auto"


# -- images and sentences ---------------------------------------------------------------------------------------------


def read_npz(data: Path, name: str, most: int) -> Labelled:
    """Images (N, C, H, W) from 0 to 1, and labels (N,)."""
    with np.load(data / f"{name}.npz") as content:
        x, y = content["x"][:most], content["y"][:most]
    images = torch.from_numpy(x).float() / 255
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    return images, torch.from_numpy(y).long()


def grey_images(data: Path, name: str, train: bool, most: int) -> Labelled:
    """Images (N, 1, 28, 28) of a data set of torchvision, and labels (N,)."""
    from torchvision import datasets

    found = getattr(datasets, name)(str(data), train=train)
    return found.data[:most, None].float() / 255, found.targets[:most].long()


def resized(images: Tensor, side: int, channels: int) -> Tensor:
    """Images (N, C, H, W) at another size, in grey or in colour."""
    found = F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)
    if channels == 1 and found.shape[1] == 3:
        return found.mean(dim=1, keepdim=True)
    return found.expand(-1, channels, -1, -1)


def split(x: Tensor, y: Tensor, shares: tuple[float, float], seed: int) -> tuple[Labelled, Labelled, Labelled]:
    """Samples in a random order, in three parts."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    first, second = (round(share * len(y)) for share in shares)
    parts = order[:first], order[first : first + second], order[first + second :]
    return tuple((x[rows], y[rows]) for rows in parts)  # type: ignore[return-value]


def photographs(data: Path) -> tuple[Tensor, list[str]]:
    """All photographs of clothes (N, 3, 160, 160) from 0 to 1, and the kind of each."""
    images, kinds = [], []
    for path in sorted((data / "clothing").glob("*/*/*.jpg")):
        image = Image.open(path).convert("RGB")
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        crop = np.asarray(image.crop((left, top, left + SIDE, top + SIDE)))
        images.append(torch.from_numpy(crop.copy()).permute(2, 0, 1))
        kinds.append(path.parent.name)
    return torch.stack(images), kinds


def sentences(data: Path, texts: list[str]) -> Tensor:
    """The mean embedding (N, 384) of each sentence by MiniLM."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (kind.from_pretrained(str(data / "minilm")) for kind in (AutoTokenizer, AutoModel))
    found = []
    with torch.no_grad():
        for first in range(0, len(texts), SENTENCES):
            tokens = tokenizer(texts[first : first + SENTENCES], padding=True, truncation=True, return_tensors="pt")
            states, mask = model(**tokens).last_hidden_state, tokens["attention_mask"][:, :, None]
            found.append((states * mask).sum(dim=1) / mask.sum(dim=1))
    return torch.cat(found)


# -- networks ---------------------------------------------------------------------------------------------------------


def trained(network: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    """A network after some epochs of Adam."""
    torch.manual_seed(seed)
    for part in network.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    network.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    return network.eval()


def small_network(side: int, classes: int) -> nn.Module:
    """Three convolutions for grey images."""
    last = side // 4
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(32 * last * last, 64), nn.ReLU()),
        nn.Linear(64, classes),
    )


# -- tasks ------------------------------------------------------------------------------------------------------------


def digits(data: Path, seed: int) -> Task:
    """Scikit-learn's digits without 8 and 9, which are unknown, as are letters and clothes of the same size."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(x).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(y).long()
    known = labels < 8
    train, held, test = split(images[known], labels[known], (0.5, 0.25), seed)
    unknown = {"left out": images[~known]} | small_unknown(data, 8)
    return Task(trained(small_network(8, 8), *train, 30, seed), train, held, test, unknown)


def small_unknown(data: Path, side: int) -> dict[str, Tensor]:
    """Letters and clothes as small grey images."""
    letters, clothes = read_npz(data, "notmnist_test", UNKNOWN)[0], grey_images(data, "FashionMNIST", False, UNKNOWN)[0]
    return {"letters": resized(letters, side, 1), "clothes": resized(clothes, side, 1)}


def mnist(data: Path, seed: int) -> Task:
    """Digits of MNIST, 5,000 of them; letters, clothes and house numbers are unknown."""
    x, y = grey_images(data, "MNIST", True, 60_000)
    train, held, _ = split(x, y, (5000 / 60_000, 1000 / 60_000), seed)
    network = trained(small_network(28, 10), *train, 8, seed)
    numbers = resized(read_npz(data, "svhn_test10k", UNKNOWN)[0], 28, 1)
    unknown = small_unknown(data, 28) | {"house numbers": numbers}
    return Task(network, train, held, grey_images(data, "MNIST", False, 3000), unknown)


def cifar(data: Path, seed: int) -> Task:
    """CIFAR-10 and a ResNet-20 that was trained on it; house numbers and other small images are unknown."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    network = make_backbone("cifar_resnet20", str(data / BACKBONE))
    assert network is not None
    x, y = read_npz(data, "cifar10_test", 10_000)
    _, held, test = split((x - mean) / std, y, (0.6, 0.1), seed)
    x, y = read_npz(data, "cifar10_train", 50_000)
    train, *_ = split(x, y, (0.1, 0.0), seed)
    unknown = {
        "house numbers": (read_npz(data, "svhn_test10k", 1000)[0] - mean) / std,
        "other images": (read_npz(data, "tinyimagenet32", 1000)[0] - mean) / std,
    }
    return Task(network, ((train[0] - mean) / std, train[1]), held, test, unknown)


def clothing(data: Path, seed: int) -> Task:
    """Photographs of eight kinds of clothes; hats, shoes, house numbers, letters and digits are unknown."""
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(data / "efficientnet_lite0.pth", weights_only=True))
    images, kinds = photographs(data)
    names = sorted(set(kinds) - set(LEFT_OUT))
    known = torch.tensor([kind in names for kind in kinds])
    labels = torch.tensor([names.index(kind) for kind in kinds if kind in names])
    train, held, test = split(images[known].float() / 127.5 - 1, labels, (0.68, 0.12), seed)
    others = {
        "house numbers": read_npz(data, "svhn_test10k", UNKNOWN // 2)[0],
        "letters": read_npz(data, "notmnist_test", UNKNOWN // 2)[0],
        "digits": grey_images(data, "MNIST", False, UNKNOWN // 2)[0],
    }
    unknown = {"left out": images[~known][:UNKNOWN].float() / 127.5 - 1}
    for name, found in others.items():
        unknown[name] = resized(found, SIDE, 3) * 2 - 1
    return Task(network.eval(), train, held, test, unknown)


def intents(data: Path, seed: int) -> Task:
    """Sentences of 150 intents, as embeddings and a layer on them; sentences of none are unknown."""
    import json

    content = json.loads((data / "clinc150.json").read_text())
    names = sorted({intent for _, intent in content["train"]})

    def read(part: str) -> Labelled:
        texts = [text for text, _ in content[part]]
        return sentences(data, texts), torch.tensor([names.index(intent) for _, intent in content[part]])

    train, held, test = read("train"), read("val"), read("test")
    rows = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(seed))[:7500]
    train = train[0][rows], train[1][rows]
    network = trained(nn.Sequential(nn.Linear(384, 150)), *train, 30, seed)
    texts = [one if isinstance(one, str) else one[0] for one in content["oos_val"] + content["oos_train"]]
    return Task(network, train, held, test, {"no intent": sentences(data, texts)}, layers=None)


def synthetic(data: Path | None, seed: int) -> Task:
    """Small images of two classes, and noise."""
    torch.manual_seed(seed)
    y = torch.arange(400) % 2
    x = torch.randn(400, 1, 8, 8) + y[:, None, None, None]
    train, held, test = split(x, y, (0.4, 0.3), seed)
    return Task(
        trained(small_network(8, 2), *train, 1, seed), train, held, test, {"noise": 4 * torch.randn(50, 1, 8, 8)}
    )


TASKS: dict[str, Callable[[Any, int], Task]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar,
    "clothing": clothing,
    "intents": intents,
}


# -- what is measured -------------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """What a model says of N inputs: probabilities (N, C) with a temperature and with fading, and scores."""

    plain: Tensor
    faded: Tensor
    scores: dict[str, Tensor]
    known: Tensor


@torch.no_grad()
def answers(model: SwappedModel, x: Tensor) -> Answers:
    """Both answers to inputs, of the same sub-networks."""
    assert isinstance(model.calibration, DensityScaling)
    found = []
    for part in batches(x):
        passes = model.passes(part)
        said = model.describe(passes)
        plain, faded = scale(passes.predicted, model.calibration.tau), said["probabilities"]
        found.append((plain, faded, said.scores, said["known"]))
    plain, faded, scores, known = zip(*found, strict=True)
    joined = {name: torch.cat([one[name] for one in scores]) for name in scores[0]}
    return Answers(torch.cat(plain), torch.cat(faded), joined, torch.cat(known))


def batches(x: Tensor) -> Iterator[Tensor]:
    """Inputs in batches."""
    yield from x.split(BATCH)  # type: ignore[no-untyped-call]


def measured(task: Task, seed: int, epochs: int) -> Cell:
    """Quality on known test inputs and confidence on unknown ones, for both answers of one fit."""
    swapped = swap_head(task.network, task.train, held=task.held, layers=task.layers, progress=False)
    model = swapped.fit(calibration=DensityScaling(), seed=seed, max_epochs=epochs, progress=False)
    known = answers(model, task.test[0])
    calibration = model.calibration
    assert isinstance(calibration, DensityScaling)
    cell = {name: float(calibration.get_buffer(name)) for name in ("tau", "kappa", "rho")}
    cell["false alarms"] = 1 - float(known.known.float().mean())
    for name, probs in (("plain", known.plain), ("faded", known.faded)):
        cell |= {f"{name} {key}": value for key, value in quality_of(probs, task.test[1]).items()}
        cell[f"{name} sure"] = float((probs.amax(dim=1) > SURE).float().mean())
    for name, x in task.unknown.items():
        found = answers(model, x)
        cell[f"{name} noticed"] = 1 - float(found.known.float().mean())
        for kind, inside, outside in (("plain", known.plain, found.plain), ("faded", known.faded, found.faded)):
            highest = outside.amax(dim=1)
            cell[f"{name} {kind} confidence"] = float(highest.mean())
            cell[f"{name} {kind} sure"] = float((highest > SURE).float().mean())
            cell[f"{name} {kind} auroc"] = 100 * separation(1 - inside.amax(dim=1), 1 - highest)["AUROC"]
        for score in ("joint", "energy", calibration.score_name):
            cell[f"{name} {score} auroc"] = 100 * separation(known.scores[score], found.scores[score])["AUROC"]
    return cell


def main(argv: list[str] | None = None) -> None:
    """Measure all tasks."""
    parser = arguments(__doc__, seeds=1, epochs=60)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), help="these tasks alone")
    args = parse(parser, argv)
    tasks = {"synthetic": synthetic} if args.smoke else {n: TASKS[n] for n in args.only or TASKS}
    store = Store(args.out / "fading.json", {"epochs": args.epochs})
    for name, make in tasks.items():
        for seed in range(args.seeds):
            key = f"{name}/{seed}"
            cell = store.cell(key, lambda make=make, seed=seed: measured(make(args.data, seed), seed, args.epochs))
            rows = [[key, value] for key, value in cell.items()]
            table([f"{name}, seed {seed}", ""], rows)


if __name__ == "__main__":
    main()
