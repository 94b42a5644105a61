"""What all datamodules share: loaders, a validation split that never touches the test set, augmentation."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import v2

from brainet_pl._utils import checks
from brainet_pl._utils.framework import pl, watch_mixes
from brainet_pl.datamodules.shifts import ShiftedSets, Shifts, make_shifts
from brainet_pl.features import identity
from brainet_pl.metrics.sets import TEST, check_set_names
from brainet_pl.metrics.shift import LOADER

SampleSet = Dataset[tuple[Tensor, Any]]


@identity.plain
class Samples(Dataset[tuple[Tensor, Any]]):
    """Inputs (N, …) and labels or numbers (N,) in memory, prepared sample by sample.

    Args:
        x: The inputs, of any shape (N, …).
        y: One integer label or one floating-point number for each input, (N,).
        prepare: A function of one input, called whenever a sample is taken; None takes inputs as they are.
    """

    def __init__(self, x: Tensor, y: Tensor, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        if len(x) != len(y):
            raise ValueError(
                f"expected as many targets as inputs, got {len(y)} targets for {len(x)} inputs: check that both have "
                "one entry for each sample"
            )
        self.x, self.y, self.prepare = x, y, prepare

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        x, y = self.raw(i)
        return self.finish(x), y

    def raw(self, i: int) -> tuple[Tensor, Any]:
        """One input as it is before `finish`, where a shift may change it, and its target."""
        y = self.y[i]
        return self.x[i], (y if y.is_floating_point() else int(y))

    def finish(self, x: Tensor) -> Tensor:
        """What a sample becomes after a shift."""
        return x if self.prepare is None else self.prepare(x)


def check_statistics(mean: object, std: object) -> None:
    """Refuse a mean of channels without their deviation, and the other way round."""
    if (mean is None) != (std is None):
        raise ValueError(f"expected both mean and std, or neither, got mean={mean} and std={std}: give the other too")


def check_share(setting: str, value: float) -> None:
    """Refuse a share that would leave one of its two parts empty."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 < value < 1:
        raise ValueError(
            f"expected a {setting} between 0 and 1, got {value!r}: give the share to hold out, such as 0.1"
        )


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

    A subclass fills the attributes below in `setup`. A `LightningDataModule` that does not derive from this class works
    as well; so that its unknown sets are evaluated, it offers

    - `test_dataloader()`, which returns a dictionary of loaders by name, `{"test": known, "far": unknown, …}`. The key
      "test", or without such a key the first, is the known test set; every other loader is an out-of-distribution set.
    - `near`, an optional attribute: the names of those sets that resemble the training data. All others are far.
    - in that dictionary, loaders called `shift/<corruption>/<severity>`: known samples, with targets, after a shift;
      the loader `shift` holds many, see `ShiftedSets`.
    - `structure_dataloader()`, optional: training samples without augmentation and in a fixed order, for learning the
      structure. Without it the training loader is read.
    - `class_names`, an optional attribute, known after `setup`: the names of the classes in the order of their numbers.
      They go into checkpoints, tables and predictions.

    Every loader gives batches (inputs, targets); targets of out-of-distribution sets are not used.

    Args:
        batch_size: The number of samples in a batch, at least 2 because batch norm can't train on one.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of training samples that is held out for validation, between 0 and 1.
        seed: The seed of the validation split; the test set does not depend on it.
        near: The names of those out-of-distribution sets that resemble the training data; the others are far.
        shifts: The shifts of the test set to evaluate too: corruptions × severities; None has none.

    Attributes:
        train_set: The training samples, with augmentation where there is any.
        structure_set: The same samples in the same order, without augmentation.
        val_set: The validation samples, without augmentation.
        test_set: The known test samples, without augmentation.
        predict_set: The samples to predict; None is the test samples.
        ood_sets: The samples unlike the training data, by name. No set may be called "test", and no two names may be
            equal once "/" is replaced by "_".
        near: The names of the out-of-distribution sets that resemble the training data.
        class_names: The names of the classes in the order of their numbers, once they are known; empty without names.
    """

    train_set: SampleSet
    structure_set: SampleSet
    val_set: SampleSet
    test_set: SampleSet
    predict_set: SampleSet | None = None

    def __init__(
        self,
        batch_size: int = 256,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
        near: Sequence[str] = (),
        shifts: Shifts | None = None,
    ) -> None:
        super().__init__()
        watch_mixes()
        check_share("val_fraction", val_fraction)
        self.batch_size = checks.whole("batch_size", batch_size, 2, hint="batch norm can't train on one sample")
        self.num_workers = checks.whole("num_workers", num_workers, 0)
        self.val_fraction, self.seed = val_fraction, checks.whole("seed", seed, 0, 2**63 - 1)
        self.ood_sets = {}
        self.near = tuple(near)
        self.shifts = make_shifts(shifts)
        self.class_names: tuple[str, ...] = ()

    @property
    def ood_sets(self) -> Mapping[str, SampleSet]:
        """Samples unlike the training data, by name."""
        return self._ood_sets

    @ood_sets.setter
    def ood_sets(self, sets: Mapping[str, SampleSet]) -> None:
        check_set_names(sets)  # here, so that a subclass can't forget it and a long fit can't end with this error
        self._ood_sets = sets

    def split(self, n: int) -> tuple[list[int], list[int]]:
        """Indices for training and validation, the same for every run with this seed."""
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed)).tolist()
        held = max(1, round(self.val_fraction * n))
        if held >= n:
            raise ValueError(
                f"expected enough training samples to hold out {held} for validation, got {n}: give more samples, or "
                "lower val_fraction"
            )
        return sorted(order[held:]), sorted(order[:held])

    def take(self, plain: SampleSet, augmented: SampleSet, n: int) -> None:
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
        """Gives batches of the training samples that were held out."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> dict[str, DataLoader[Any]]:
        """Loaders by name: "test" for the known samples, each set of `ood_sets`, "shift" for them after all shifts."""
        loaders = {TEST: self._loader(self.test_set), **self.ood_dataloaders()}
        if self.shifts is not None:  # one behind the other
            loaders[LOADER] = self._loader(ShiftedSets(self.shifts.sets(self.test_set)))
        return loaders

    def predict_dataloader(self) -> DataLoader[Any]:
        """Gives the samples of `predict_set` where a subclass has set it, else the test samples."""
        return self._loader(self.test_set if self.predict_set is None else self.predict_set)

    def ood_dataloaders(self) -> dict[str, DataLoader[Any]]:
        """Out-of-distribution samples by name."""
        return {name: self._loader(samples) for name, samples in self.ood_sets.items()}

    def _loader(self, samples: SampleSet, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Any]:
        # Workers of the training data are seeded anew in every epoch, so that a resumed one can seed them alike. Others
        # draw nothing; they live on, with a generator of their own, so that starting them moves nobody else's draws.
        keep = self.num_workers > 0 and not shuffle
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=keep,
            shuffle=shuffle,
            drop_last=drop_last,
            generator=torch.Generator().manual_seed(0) if keep else None,
        )
