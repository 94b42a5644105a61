"""What a frozen ResNet-20 gives for images as they are, corrupted, perturbed and unknown; read once, then kept."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from brainet_pl.backbones import Backbone, FeatureExtractor
from brainet_pl.backbones.cifar import CifarResNet
from brainet_pl.backbones.taps import Taps
from brainet_pl.datamodules.corruptions import FIFTEEN, SEVERITIES, corrupt_image
from common.data import BACKBONE, MEAN, STD, VALIDATION, mnist_pixels
from common.perturbations import PERTURBATIONS, STRANGE, perturbed

EVERY = 4  # of the 8,000 test images, those that are corrupted
LAYERS = ("bn1", *(f"layer{i}.{j}" for i in (1, 2, 3) for j in (0, 1, 2)))
SMALL = ("bn1", *(f"layer{i}.0" for i in (1, 2, 3)))  # of a ResNet-8
UNKNOWN = {"svhn": "svhn_test10k", "tiny": "tinyimagenet32"}
GREY = {
    "mnist": "MNIST",
    "fashion": "FashionMNIST",
    "notmnist": "notmnist_test",
}  # 28×28, brought to 32×32 and 3 colours


class Reading(NamedTuple):
    """One set of images.

    Attributes:
        features: (N, 64) what the last layer reads.
        blocks: (N, 704) means, then deviations, of the channels of every block, one block behind the other.
        logits: (N, 10) the network's own.
        y: (N,) labels.
    """

    features: Tensor
    blocks: Tensor
    logits: Tensor
    y: Tensor


class Known(NamedTuple):
    """A network of some classes of a data set.

    Attributes:
        name: names its files.
        weights: the file of its weights, a state dict of a ResNet-8.
        classes: the classes that it knows, in the order of its outputs.
        data: the data set: "cifar", "mnist" or "fashion".
    """

    name: str
    weights: Path
    classes: tuple[int, ...]
    data: str = "cifar"


class Readings:
    """Readings of sets of images by name, from files where they are there.

    `train`; `val`, the first 2,000 test images; `test`, the other 8,000; `val/<perturbation>/<severity>`;
    `test/<corruption>/<severity>`, of every fourth test image; `svhn`, `tiny`, `mnist`, `fashion`, `notmnist`. Of a
    network of some classes, `left_out` are the test images of the others, and all other sets have its own.

    Args:
        data: the folder with images and weights.
        cache: where readings are kept.
        network: another network than the public one, and the classes that it knows.
        every: of the 8,000 test images, those that are corrupted.
        most: images that are read of a set, the first ones; None reads all.
    """

    def __init__(
        self,
        data: Path,
        cache: Path | None = None,
        network: Known | None = None,
        every: int = EVERY,
        most: Mapping[str, int] | None = None,
    ) -> None:
        self.data, self.network, self.every, self.most = data, network, every, most or {}
        self.cache = (cache or data / "cache") / ("honest" if network is None else network.name)
        self._body: FeatureExtractor | None = None
        self._read: dict[str, Reading] = {}

    def __getitem__(self, name: str) -> Reading:
        if name not in self._read:
            few = "" if self.every == EVERY or not name.startswith("test/") else f"_{self.every}"
            few += f"_first{self.most[name]}" if name in self.most else ""
            path = self.cache / f"{name.replace('/', '_')}{few}.pt"
            if not path.is_file():
                self.cache.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                torch.save(tuple(self._extract(name)), part)
                part.replace(path)
            self._read[name] = Reading(*torch.load(path))
        return self._read[name]

    def forget(self, name: str) -> None:
        """Free the memory of a set."""
        self._read.pop(name, None)

    def images(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(N, 32, 32, 3) between 0 and 1, and labels (N,)."""
        kind, *how = name.split("/")
        own = "cifar" if self.network is None else self.network.data
        if kind in GREY or (own in GREY and kind in ("train", "val", "test", "left_out")):
            x, y = grey_images(self.data, GREY[kind if kind in GREY else own], kind == "train")
        else:
            file = UNKNOWN.get(kind, "cifar10_train" if kind == "train" else "cifar10_test")
            with np.load(self.data / f"{file}.npz") as arrays:
                x, y = arrays["x"], arrays["y"].astype(np.int64)
        if kind in ("val", "test"):
            x, y = (v[:VALIDATION] if kind == "val" else v[VALIDATION:] for v in (x, y))
        if self.network is not None and kind in ("train", "val", "test", "left_out"):
            places = np.full(10, -1)
            places[list(self.network.classes)] = np.arange(len(self.network.classes))
            known = places[y] >= 0
            rows = ~known if kind == "left_out" else known
            x, y = x[rows], places[y[rows]]
        x, y = x[: self.most.get(name)], y[: self.most.get(name)]
        if not how:
            return (x / 255).astype(np.float32), y
        severity = int(how[1])
        if kind == "val":
            return perturbed(x, how[0], severity), y
        places = range(0, len(x), self.every)
        pictures = torch.from_numpy(x).permute(0, 3, 1, 2)
        rows = tqdm(places, desc=name, leave=False, disable=None)
        found = torch.stack([corrupt_image(pictures[i], how[0], severity, i) for i in rows])
        return (found.permute(0, 2, 3, 1).numpy() / 255).astype(np.float32), y[:: self.every]

    @torch.no_grad()
    def _extract(self, name: str) -> Reading:
        taps = Taps.of(list(LAYERS if self.network is None else SMALL), "mean_std")
        assert taps is not None
        if self._body is None:
            if self.network is None:
                self._body = Backbone("cifar_resnet20", str(self.data / BACKBONE)).build()
            else:
                model = CifarResNet(8, num_classes=len(self.network.classes))
                model.load_state_dict(torch.load(self.network.weights))
                self._body = Backbone(model, layers=None).build()
            self._body.add_view(taps)
        mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
        x, y = self.images(name)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in torch.from_numpy(x).permute(0, 3, 1, 2).split(250):
            read = self._body((part - mean) / std, more=True)
            found.append((read.features, read.more[taps], read.base_logits))
        return Reading(*(torch.cat(column) for column in zip(*found, strict=True)), torch.from_numpy(y))


def grey_images(data: Path, name: str, train: bool = False) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images of 28×28 pixels, those of the test or of the training, as (N, 32, 32, 3) bytes, and labels (N,)."""
    if name.startswith("notmnist"):
        with np.load(data / f"{name}.npz") as arrays:
            x, y = torch.from_numpy(arrays["x"]) / 255, arrays["y"].astype(np.int64)
    else:
        pixels, labels = mnist_pixels(data, name)[0 if train else 1]
        x, y = pixels.view(-1, 28, 28), labels.numpy()
    large = F.interpolate(x[:, None], size=(32, 32), mode="bilinear", align_corners=False)
    bytes_ = (255 * large).round().to(torch.uint8)
    return bytes_.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).contiguous().numpy(), y


def perturbed_names() -> list[str]:
    """All sets of perturbed validation images."""
    return [f"val/{name}/{severity}" for name in PERTURBATIONS for severity in SEVERITIES]


def strange_names() -> list[str]:
    """Validation images of which nothing that is known is left."""
    return [f"val/{name}/5" for name in STRANGE]


def corrupted_names() -> list[str]:
    """All sets of corrupted test images."""
    return [f"test/{name}/{severity}" for name in FIFTEEN for severity in SEVERITIES]


# -- the ends of stages -----------------------------------------------------------------------------------------------


def channels(layer: str) -> int:
    """The number of maps of a block."""
    return 16 * 2 ** (int(layer[5]) - 1) if layer.startswith("layer") else 16


def stage_columns(layers: Sequence[str] = LAYERS) -> list[int]:
    """Those columns of `Reading.blocks` that are of the last block of a stage: what taps read by "auto"."""
    found, start, last = [], 0, max(layer[-2:] for layer in layers if "." in layer)
    for layer in layers:
        end = start + 2 * channels(layer)
        found += range(start, end) if layer.endswith(last) and "." in layer else []
        start = end
    return found


def stage_widths() -> tuple[int, ...]:
    """How many of them each stage has."""
    return tuple(2 * channels(layer) for layer in LAYERS if layer.endswith(".2"))


def synthetic_reading(name: str) -> Reading:
    """Of the same form, for a smoke run: what is corrupted or unknown is noisier."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    n = 600 if name == "train" else 240 if "/" not in name else 60
    noise = 0.0 if name in ("train", "val", "test") else 0.3 * int(name[-1]) if "/" in name else 2.0
    y = torch.randint(10, (n,), generator=draw)
    if name.startswith("test/"):
        y = synthetic_reading("test").y[::EVERY]
    if name.startswith("val/"):
        y = synthetic_reading("val").y[:60]
    d = sum(2 * channels(layer) for layer in LAYERS)
    causes = F.one_hot(y, 10) + (0.3 + noise) * torch.randn(n, 10, generator=draw)
    mixing = torch.Generator().manual_seed(0)
    blocks = causes @ torch.randn(10, d, generator=mixing) + 0.5 * torch.randn(n, d, generator=draw)
    features = (causes @ torch.randn(10, 64, generator=mixing)).relu()
    return Reading(features, blocks, 8 * causes, y)
