"""What all datamodules share: loaders, a validation split that never touches the test set, augmentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import v2

Samples = Dataset[tuple[Tensor, Any]]


class Images(Dataset[tuple[Tensor, Any]]):
    """Arrays in memory: inputs (N, …) and labels or numbers (N,), prepared sample by sample."""

    def __init__(self, x: Tensor, y: Tensor, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        if len(x) != len(y):
            raise ValueError(f"expected as many labels as inputs, got {len(y)} labels for {len(x)} inputs")
        self.x, self.y, self.prepare = x, y, prepare

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        x, y = self.x[i], self.y[i]
        return (x if self.prepare is None else self.prepare(x)), (y if y.is_floating_point() else int(y))


def image_transform(
    mean: tuple[float, ...] | None, std: tuple[float, ...] | None, augment_size: int | None = None
) -> Callable[[Tensor], Tensor]:
    """uint8 or float (C, H, W) → normalised float; with `augment_size`, a random crop after padding by 4, and flips."""
    steps: list[Any] = []
    if augment_size is not None:
        steps += [v2.RandomCrop(augment_size, padding=4), v2.RandomHorizontalFlip()]
    steps.append(v2.ToDtype(torch.float32, scale=True))
    if mean is not None and std is not None:
        steps.append(v2.Normalize(list(mean), list(std)))
    prepare: Callable[[Tensor], Tensor] = v2.Compose(steps)
    return prepare


class SplitData(pl.LightningDataModule):
    """Train, validation and test sets, and any number of out-of-distribution sets by name.

    A subclass fills the attributes below in `setup`.

    Attributes:
        train_set, structure_set: the training samples with and without augmentation, in the same order.
        val_set, test_set: always without. ood_sets: name → samples unlike the training data.
        near: names of the out-of-distribution sets that resemble the training data; the others are far.
    """

    train_set: Samples
    structure_set: Samples
    val_set: Samples
    test_set: Samples

    def __init__(
        self,
        batch_size: int = 256,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
        near: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not 0 < val_fraction < 1:
            raise ValueError(f"expected a val_fraction between 0 and 1, got {val_fraction}")
        if batch_size < 2:
            raise ValueError(f"expected a batch_size of at least 2 (batch norm), got {batch_size}")
        self.batch_size, self.num_workers = batch_size, num_workers
        self.val_fraction, self.seed = val_fraction, seed
        self.ood_sets: Mapping[str, Samples] = {}
        self.near = tuple(near)

    def split(self, n: int) -> tuple[list[int], list[int]]:
        """Indices for training and validation, the same for every run with this seed."""
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed)).tolist()
        held = max(1, round(self.val_fraction * n))
        if held >= n:
            raise ValueError(f"expected enough training samples to hold out {held} for validation, got {n}")
        return sorted(order[held:]), sorted(order[:held])

    def take(self, plain: Samples, augmented: Samples, n: int) -> None:
        """Fill the training and validation sets from n samples."""
        train, val = self.split(n)
        self.train_set, self.structure_set = Subset(augmented, train), Subset(plain, train)
        self.val_set = Subset(plain, val)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; an incomplete last batch is dropped, because batch norm can't train on one sample."""
        size = len(self.train_set)  # type: ignore[arg-type]
        if not size:
            raise ValueError("expected training samples, got an empty set: check the data's folder and settings")
        return self._loader(self.train_set, shuffle=True, drop_last=size > self.batch_size)

    def structure_dataloader(self) -> DataLoader[Any]:
        """Training samples without augmentation, in a fixed order."""
        return self._loader(self.structure_set)

    def val_dataloader(self) -> DataLoader[Any]:
        """Held-out training samples."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """Test samples, then each out-of-distribution set in the order of `ood_sets`."""
        return [self._loader(self.test_set), *self.ood_dataloaders().values()]

    def predict_dataloader(self) -> DataLoader[Any]:
        """Test samples."""
        return self._loader(self.test_set)

    def ood_dataloaders(self) -> dict[str, DataLoader[Any]]:
        """Out-of-distribution samples by name."""
        return {name: self._loader(samples) for name, samples in self.ood_sets.items()}

    def _loader(self, samples: Samples, **settings: Any) -> DataLoader[Any]:
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            **settings,
        )
