"""Features of images and sentences by public networks, with what was left out of training; read once, then kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl.backbones import Backbone
from brainet_pl.backbones.taps import Taps
from common.data import BACKBONE, MEAN, STD
from common.readings import grey_images

TAPS = Taps.of("auto", "mean_std")
SIDE = 128  # pixels of photographs
BATCH = 100
CIFAR = {"train": ("cifar10_train", 8000), "test": ("cifar10_test", 5000), "svhn": ("svhn_test10k", 1500)}
CIFAR |= {"tiny": ("tinyimagenet32", 1500), "mnist": ("MNIST", 1500), "notmnist": ("notmnist_test", 1500)}
CLINC = {"train": 40, "test": 20}  # queries of each intent


class Read(NamedTuple):
    """Some samples as a network sees them.

    Attributes:
        last: (N, d) what its last layer reads.
        stages: (N, D) means and deviations of the channels of its stages; None of a text.
        y: (N,) labels.
        widths: how many of the D columns come from each stage.
    """

    last: Tensor
    stages: Tensor | None
    y: Tensor
    widths: tuple[int, ...] = ()


def kept(cache: Path, name: str, make: Callable[[], Read]) -> Read:
    """What was read before, or what is read now."""
    path = cache / f"{name}.pt"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        torch.save(tuple(make()), path)
    return Read(*torch.load(path))


@torch.no_grad()
def read_images(model: nn.Module, batches: Sequence[Tensor], y: Tensor) -> Read:
    """Prepared images, a batch at a time, through a frozen network."""
    body = Backbone(model).build()
    assert TAPS is not None
    body.add_view(TAPS)
    found = [body(batch, more=True) for batch in batches]
    stages = torch.cat([one.more[TAPS] for one in found])
    return Read(torch.cat([one.features for one in found]), stages, y, tuple(body.widths(TAPS)))


def cifar(data: Path, cache: Path, name: str) -> Read:
    """Images of 32 × 32 pixels by the public ResNet-20 of CIFAR-10."""

    def make() -> Read:
        file, count = CIFAR[name]
        x: NDArray[Any]
        if name in ("mnist", "notmnist"):
            x, y = grey_images(data, file)
        else:
            with np.load(data / f"{file}.npz") as arrays:
                x, y = arrays["x"], arrays["y"].astype(np.int64)
        images = torch.from_numpy(x[:count]).permute(0, 3, 1, 2).float()
        images = images / (255 if float(images.max()) > 2 else 1)
        ready = (images - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
        body = Backbone("cifar_resnet20", str(data / BACKBONE)).build().model
        return read_images(body, ready.split(BATCH), torch.from_numpy(y[:count]))

    return kept(cache, f"cifar_{name}", make)


def clothing(data: Path, cache: Path) -> Read:
    """All photographs of clothes by an EfficientNet-Lite0 of ImageNet; labels are kinds in alphabetical order."""

    def make() -> Read:
        from efficientnet_lite_pytorch import EfficientNet

        model = EfficientNet.from_name("efficientnet-lite0")
        model.load_state_dict(torch.load(data / "efficientnet_lite0.pth", weights_only=True))
        files = sorted((data / "clothing").glob("*/*/*.jpg"))
        kinds = sorted({file.parent.name for file in files})
        y = torch.tensor([kinds.index(file.parent.name) for file in files])
        images = torch.stack([_photograph(file) for file in files])
        return read_images(model, images.split(BATCH), y)

    return kept(cache, "clothing", make)


def _photograph(file: Path) -> Tensor:
    with Image.open(file) as image:
        pixels = torch.from_numpy(np.asarray(image.convert("RGB"))).permute(2, 0, 1).float()
    short = min(pixels.shape[1:])
    top, left = (pixels.shape[1] - short) // 2, (pixels.shape[2] - short) // 2
    square = pixels[None, :, top : top + short, left : left + short]
    return F.interpolate(square, size=(SIDE, SIDE), mode="bilinear", antialias=True)[0] / 127.5 - 1


def intents(data: Path, cache: Path, name: str) -> Read:
    """Queries of CLINC150 by MiniLM: "train", "test" or "oos", queries of no intent, whose labels are all 0."""

    def make() -> Read:
        content = json.loads((data / "clinc150.json").read_text())
        names = sorted({intent for _, intent in content["train"]})
        rows = content["oos_train"] + content["oos_val"] if name == "oos" else _some_of_each(content[name], CLINC[name])
        y = [0 if name == "oos" else names.index(intent) for _, intent in rows]
        return Read(_encode(data, [text for text, _ in rows]), None, torch.tensor(y))

    return kept(cache, f"intents_{name}", make)


def _some_of_each(rows: Sequence[Sequence[str]], count: int) -> list[Sequence[str]]:
    seen: dict[str, int] = {}
    found = []
    for row in rows:
        seen[row[1]] = seen.get(row[1], 0) + 1
        if seen[row[1]] <= count:
            found.append(row)
    return found


@torch.no_grad()
def _encode(data: Path, texts: Sequence[str]) -> Tensor:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(data / "minilm"))
    model = AutoModel.from_pretrained(str(data / "minilm")).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = torch.empty(len(texts), 384)
    for first in range(0, len(order), 64):
        rows = order[first : first + 64]
        tokens = tokenizer([texts[i] for i in rows], padding=True, truncation=True, return_tensors="pt")
        hidden, mask = model(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
        found[rows] = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    return found
