"""What a frozen ResNet-20 gives for images as they are, corrupted, perturbed and unknown; read once, then kept."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from brainet_pl.backbones import Backbone, FeatureExtractor
from brainet_pl.backbones.taps import Taps
from brainet_pl.datamodules.corruptions import FIFTEEN, SEVERITIES, corrupt_image
from common.data import BACKBONE, MEAN, STD, VALIDATION
from common.perturbations import PERTURBATIONS, STRANGE, perturbed

EVERY = 4  # of the 8,000 test images, those that are corrupted
LAYERS = ("bn1", *(f"layer{i}.{j}" for i in (1, 2, 3) for j in (0, 1, 2)))
UNKNOWN = {"svhn": "svhn_test10k", "tiny": "tinyimagenet32"}


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


class Readings:
    """Readings of sets of images by name, from files where they are there.

    `train`; `val`, the first 2,000 test images; `test`, the other 8,000; `val/<perturbation>/<severity>`;
    `test/<corruption>/<severity>`, of every fourth test image; `svhn`, `tiny`.

    Args:
        data: the folder with images and weights.
        cache: where readings are kept.
    """

    def __init__(self, data: Path, cache: Path | None = None) -> None:
        self.data, self.cache = data, (cache or data / "cache") / "honest"
        self._body: FeatureExtractor | None = None
        self._read: dict[str, Reading] = {}

    def __getitem__(self, name: str) -> Reading:
        if name not in self._read:
            path = self.cache / f"{name.replace('/', '_')}.pt"
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
        file = UNKNOWN.get(kind, "cifar10_train" if kind == "train" else "cifar10_test")
        with np.load(self.data / f"{file}.npz") as arrays:
            x, y = arrays["x"], arrays["y"].astype(np.int64)
        if kind in ("val", "test"):
            x, y = (v[:VALIDATION] if kind == "val" else v[VALIDATION:] for v in (x, y))
        if not how:
            return (x / 255).astype(np.float32), y
        severity = int(how[1])
        if kind == "val":
            return perturbed(x, how[0], severity), y
        places = range(0, len(x), EVERY)
        pictures = torch.from_numpy(x).permute(0, 3, 1, 2)
        rows = tqdm(places, desc=name, leave=False, disable=None)
        found = torch.stack([corrupt_image(pictures[i], how[0], severity, i) for i in rows])
        return (found.permute(0, 2, 3, 1).numpy() / 255).astype(np.float32), y[::EVERY]

    @torch.no_grad()
    def _extract(self, name: str) -> Reading:
        taps = Taps.of(list(LAYERS), "mean_std")
        assert taps is not None
        if self._body is None:
            self._body = Backbone("cifar_resnet20", str(self.data / BACKBONE)).build()
            self._body.add_view(taps)
        mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
        x, y = self.images(name)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in torch.from_numpy(x).permute(0, 3, 1, 2).split(250):
            read = self._body((part - mean) / std, more=True)
            found.append((read.features, read.more[taps], read.base_logits))
        return Reading(*(torch.cat(column) for column in zip(*found, strict=True)), torch.from_numpy(y))


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


def stage_columns() -> list[int]:
    """Those columns of `Reading.blocks` that are of the last block of a stage: what taps read by "auto"."""
    found, start = [], 0
    for layer in LAYERS:
        end = start + 2 * channels(layer)
        found += range(start, end) if layer.endswith(".2") else []
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
