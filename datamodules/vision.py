"""Torchvision's data sets, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torchvision.datasets as tv
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl.datamodules.base import Samples, SplitData, image_transform
from brainet_pl.datamodules.shifts import Shifts
from brainet_pl.metrics.sets import check_set_names

VisionName = Literal["mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100", "svhn"]


class _Entry(NamedTuple):
    """A data set: its class, channel statistics, image size, and whether flips and crops make sense."""

    source: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    augment: bool


TABLE: dict[str, _Entry] = {
    "mnist": _Entry(tv.MNIST, (0.1307,), (0.3081,), 28, False),
    "fashion_mnist": _Entry(tv.FashionMNIST, (0.2860,), (0.3530,), 28, True),
    "kmnist": _Entry(tv.KMNIST, (0.1918,), (0.3483,), 28, False),
    "cifar10": _Entry(tv.CIFAR10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 32, True),
    "cifar100": _Entry(tv.CIFAR100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 32, True),
    "svhn": _Entry(tv.SVHN, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), 32, False),
}


class TorchvisionData(SplitData):
    """One of torchvision's data sets, from a folder as torchvision lays it out.

    Args:
        name: The data set: mnist, fashion_mnist, kmnist, cifar10, cifar100 or svhn.
        root: The folder with the files, as torchvision lays them out; existing files are used as they are.
        download: Whether to fetch what is missing.
        augment: Whether training images are cropped and flipped at random; None does what is usual for the set.
        ood: The names of further sets in the same folder, as out-of-distribution data.
        limit: The number of samples to use of each split, from its beginning; None uses all.
        batch_size: The number of samples in a batch, at least 2 because batch norm can't train on one.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of training images that is held out for validation, between 0 and 1.
        seed: The seed of the validation split; the test images do not depend on it.
        near: Those names of `ood` that resemble the training data; the others are far.
        shifts: The shifts of the test set to evaluate too: corruptions × severities; None has none.
    """

    def __init__(
        self,
        name: VisionName,
        root: str = "data",
        download: bool = False,
        augment: bool | None = None,
        ood: tuple[VisionName, ...] = (),
        limit: int | None = None,
        batch_size: int = 256,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
        near: Sequence[str] = (),
        shifts: Shifts | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed, near, shifts=shifts)
        checks.one_of("name", name, TABLE, "choose one of the list")
        for other in ood:
            checks.one_of("ood", other, TABLE, "choose one of the list")
        check_set_names(ood, near)
        self.dataset, self.root, self.download, self.limit, self.ood = str(name), root, download, limit, tuple(ood)
        self.augment = TABLE[name].augment if augment is None else augment

    def prepare_data(self) -> None:
        """Download once, on one process."""
        if self.download:
            for name in (self.dataset, *self.ood):
                for train in (True, False):
                    self._open(name, train, download=True)

    def setup(self, stage: str) -> None:
        """Read all splits into memory."""
        entry = TABLE[self.dataset]
        plain = image_transform(entry.mean, entry.std)
        crop = image_transform(entry.mean, entry.std, entry.size) if self.augment else plain
        data = self._open(self.dataset, train=True)
        self.class_names = tuple(getattr(data, "classes", ()))
        x, y = self._arrays(data)
        self.take(Samples(x, y, plain), Samples(x, y, crop), len(x))
        self.test_set = Samples(*self._arrays(self._open(self.dataset, train=False)), plain)
        self.ood_sets = {name: Samples(*self._arrays(self._open(name, train=False)), plain) for name in self.ood}

    def _open(self, name: str, train: bool, download: bool = False) -> Any:
        split: dict[str, Any] = {"split": "train" if train else "test"} if name == "svhn" else {"train": train}
        try:
            return TABLE[name].source(self.root, download=download, **split)
        except RuntimeError as error:
            raise FileNotFoundError(
                f"expected {name} in {Path(self.root).resolve()}, found none: set download, or root to its folder"
            ) from error

    def _arrays(self, data: Any) -> tuple[Tensor, Tensor]:
        """uint8 images (N, C, H, W) and labels (N,)."""
        x = torch.as_tensor(data.data)[: self.limit]
        y = torch.as_tensor(data.targets if hasattr(data, "targets") else data.labels)[: self.limit].long()
        if x.dim() == 3:
            x = x.unsqueeze(1)
        elif x.shape[-1] == 3:
            x = x.permute(0, 3, 1, 2)
        return x.contiguous(), y
