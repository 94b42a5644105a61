"""The tasks that heads are compared on: features, targets, and how a prediction of them is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from brainet_pl.backbones.loading import make_backbone
from brainet_pl.backbones.taps import pooled
from brainet_pl.datamodules.digits import Digits
from brainet_pl.datamodules.uci import read_split, standardise
from brainet_pl.tasks import Classification, Regression, Task
from common.data import BACKBONE, MEAN, STD, VALIDATION, Labelled, mnist_pixels, synthetic_features, synthetic_pixels

STAGES = ("layer1", "layer2", "layer3")


class Sample(NamedTuple):
    """One draw of a task: a seed chooses training rows and, where they are not fixed, validation and test rows."""

    train: Labelled
    val: Labelled
    test: Labelled
    task: Task

    @property
    def in_features(self) -> int:
        """The number of features."""
        return self.train[0].shape[1]


Loader = Callable[[int], Sample]  # seed → a draw


def nll(task: Task, outputs: Tensor, weights: Tensor | None, y: Tensor) -> float:
    """Mean negative log-likelihood of the averaged prediction; of a regression in the target's own units."""
    found = task.predictive(outputs, weights)
    if isinstance(task, Regression):
        mean, variance = found[:, 0].double(), found[:, 1].double()
        return float((0.5 * (torch.log(2 * torch.pi * variance) + (y - mean) ** 2 / variance)).mean())
    return float(F.nll_loss(found.clamp_min(1e-12).log(), y))


# -- images -----------------------------------------------------------------------------------------------------------


def digits(seed: int) -> Sample:
    """Scikit-learn's digits 0 to 7 as the shipped configuration has them: 856 to train, 151 to choose, 432 to test."""
    data = Digits(seed=seed)
    data.setup("fit")
    train, val, test = (_whole(part) for part in (data.train_set, data.val_set, data.test_set))
    return Sample(train, val, test, Classification(data.num_classes))


def _whole(data: Dataset[tuple[Tensor, Tensor]]) -> Labelled:
    return next(iter(DataLoader(data, batch_size=len(data))))  # type: ignore[arg-type]


def pixels(data: Path | None, name: str, images: int, validation: int) -> Loader:
    """`images` random training images at 14×14 (means of 2×2 pixels), `validation` further ones, all test images."""
    (x, y), test = mnist_pixels(data, name, pool=2) if data else (synthetic_pixels(900), synthetic_pixels(200, seed=1))

    def draw(seed: int) -> Sample:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        first, then = min(images, len(x) * 2 // 3), min(validation, len(x) // 3)
        a, b = order[:first], order[first : first + then]
        return Sample((x[a], y[a]), (x[b], y[b]), test, Classification(10))

    return draw


class CifarTaps:
    """Features of all stages of the public ResNet-20, read once in one pass and then from a file.

    Args:
        data: the folder with images and weights; None gives synthetic features.
        cache: where features are kept.
    """

    def __init__(self, data: Path | None, cache: Path | None = None) -> None:
        self.data = data
        self.cache = (cache or data / "cache") if data else None
        self._read: dict[str, dict[str, Tensor]] = {}

    def read(self, name: str) -> dict[str, Tensor]:
        """What the taps gave for one set of images: stage → (N, d) means on a 4×4 grid, in 16 bits; and the rest.

        `STAGE:mean_std` are means and deviations of channels, `logits` the network's own outputs, `y` the labels.
        """
        if name not in self._read:
            assert self.data is not None
            assert self.cache is not None
            path = self.cache / f"taps_{name}.pt"
            if not path.is_file():
                self.cache.mkdir(parents=True, exist_ok=True)
                torch.save(_tapped(self.data, name), path)
            self._read[name] = torch.load(path)
        return self._read[name]

    def features(self, name: str, stage: str) -> Tensor:
        """(N, d) of one stage, or of the "last" layer: what the classification layer reads."""
        found = self.read(name)
        return found["layer3:mean_std"][:, :64] if stage == "last" else found[stage].float()

    def unknown(self, name: str, stage: str, images: int, seed: int) -> Tensor:
        """(N, d) of a set of unknown images, on the scale of a draw of `task`."""
        x = self.features("cifar10_train", stage)
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:images]]
        return (self.features(name, stage) - x.mean(dim=0)) / x.std(dim=0).clamp_min(1e-6)

    def task(self, stage: str, images: int) -> Loader:
        """`images` random training images; the first 2,000 test images choose, the other 8,000 test.

        The network has seen all training images, so that none of them is fit for validation.
        """
        if self.data is None:
            return lambda seed: _standard(*synthetic_features()[1:4])
        x, y = self.features("cifar10_train", stage), self.read("cifar10_train")["y"]
        u, v = self.features("cifar10_test", stage), self.read("cifar10_test")["y"]

        def draw(seed: int) -> Sample:
            rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:images]
            train, val, test = (x[rows], y[rows]), (u[:VALIDATION], v[:VALIDATION]), (u[VALIDATION:], v[VALIDATION:])
            return _standard(train, val, test)

        return draw


def _standard(train: Labelled, val: Labelled, test: Labelled) -> Sample:
    """Features on the scale of the training images, as taps have them."""
    mean, std = train[0].mean(dim=0), train[0].std(dim=0).clamp_min(1e-6)
    parts = [((x - mean) / std, y) for x, y in (train, val, test)]
    return Sample(*parts, Classification(10))


def _tapped(data: Path, name: str) -> dict[str, Tensor]:
    """One pass of the network over a set of images."""
    net = make_backbone("cifar_resnet20", str(data / BACKBONE))
    assert net is not None
    net.eval()
    caught: dict[str, Tensor] = {}

    def catch(stage: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda module, inputs, output: caught.update({stage: output})

    for stage in STAGES:
        net.get_submodule(stage).register_forward_hook(catch(stage))
    with np.load(data / f"{name}.npz") as arrays:
        x, y = torch.from_numpy(arrays["x"]).permute(0, 3, 1, 2), torch.from_numpy(arrays["y"]).long()
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    found: dict[str, list[Tensor]] = {}
    with torch.inference_mode():
        for part in tqdm(x.split(250), desc=f"taps of {name}", leave=False):
            found.setdefault("logits", []).append(net((part.float() / 255 - mean) / std))
            for stage, maps in caught.items():
                found.setdefault(stage, []).append(pooled(maps, "4x4").half())
                found.setdefault(f"{stage}:mean_std", []).append(pooled(maps, "mean_std"))
    return {key: torch.cat(parts) for key, parts in found.items()} | {"y": y}


# -- tables -----------------------------------------------------------------------------------------------------------


def uci(data: Path, name: str, validation: float = 0.2) -> Loader:
    """A regression set; a seed is the number of a published split, whose last training rows choose."""

    def draw(seed: int) -> Sample:
        rows = read_split(data, name, seed)
        order = np.random.default_rng(seed).permutation(len(rows.x_train))
        cut = round((1 - validation) * len(order))
        a, b = order[:cut], order[cut:]
        x, x_val, x_test = standardise(rows.x_train[a], rows.x_train[b], rows.x_test)
        y, y_val, y_test = (
            torch.tensor(t, dtype=torch.float32) for t in (rows.y_train[a], rows.y_train[b], rows.y_test)
        )
        task = Regression()
        task.prepare(y)
        return Sample((x, y), (x_val, y_val), (x_test, y_test), task)

    return draw
