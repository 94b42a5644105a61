"""Any data as .npz files with `x` and `y`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brainet_pl.datamodules.base import Samples, SplitData, check_statistics, image_transform
from brainet_pl.datamodules.shifts import Shifts
from brainet_pl.metrics.sets import check_set_names


def as_targets(y: NDArray[Any], path: str) -> Tensor:
    """Targets (N,) or (N, 1) of a file as a tensor (N,): floating-point numbers as float32, integers and bools as long.

    A number stays a number: as an integer, every target of a regression between 0 and 1 would be 0.
    """
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise ValueError(
            f"expected one target for each sample of {path}, y of shape (N,) or (N, 1), got {y.shape}: keep one column"
        )
    if y.dtype.kind == "f":
        return torch.from_numpy(y.astype(np.float32))
    if y.dtype.kind in "iub":
        return torch.from_numpy(y.astype(np.int64))
    raise ValueError(
        f"expected numbers or integer labels as y of {path}, got values of type {y.dtype}: number the classes from 0, "
        "or store real numbers"
    )


class Arrays(SplitData):
    """Images (N, H, W, C) or (N, H, W) as uint8, or features (N, d), from .npz files with `x` and `y`.

    Integer targets are labels; floating-point targets stay numbers, for a regression.

    Args:
        train: The .npz file with the training samples, `x` and `y`.
        test: The .npz file with the test samples, `x` and `y`.
        val: The .npz file with the validation samples; None holds out a part of `train`.
        ood: The .npz files with samples unlike the training data, by the name of the set; they need no `y`.
        mean: The mean of each channel of images that are scaled to [0, 1]; None, with `std`, leaves them so.
        std: The standard deviation of each channel of images that are scaled to [0, 1]; None, with `mean`, likewise.
        augment: Whether training images are cropped and flipped at random; features never are.
        limit: The number of samples to use of each file, from its beginning; None uses all.
        batch_size: The number of samples in a batch, at least 2 because batch norm can't train on one.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of `train` that is held out for validation, between 0 and 1; unused with `val`.
        seed: The seed of the validation split.
        near: Those names of `ood` that resemble the training data; the others are far.
        shifts: The shifts of the test set to evaluate too: corruptions × severities; None has none.
    """

    def __init__(
        self,
        train: str,
        test: str,
        val: str | None = None,
        ood: Mapping[str, str] | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        augment: bool = False,
        limit: int | None = None,
        batch_size: int = 256,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
        near: Sequence[str] = (),
        shifts: Shifts | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed, near, shifts=shifts)
        check_set_names(ood or (), near)
        check_statistics(mean, std)
        self.files = {"train": train, "test": test} | ({"val": val} if val else {})
        self.ood_files = dict(ood or {})
        self.mean, self.std, self.augment, self.limit = mean, std, augment, limit

    def setup(self, stage: str) -> None:
        """Reads all files, and splits off validation data where there is no file of it."""
        loaded = {name: self._read(path) for name, path in self.files.items()}
        x = loaded["train"][0]
        prepare = image_transform(self.mean, self.std) if x.dim() == 4 else None
        crop = image_transform(self.mean, self.std, x.shape[-1]) if self.augment and x.dim() == 4 else prepare
        plain, augmented = Samples(*loaded["train"], prepare), Samples(*loaded["train"], crop)
        if "val" in loaded:
            self.train_set, self.structure_set = augmented, plain
            self.val_set = Samples(*loaded["val"], prepare)
        else:
            self.take(plain, augmented, len(plain))
        self.test_set = Samples(*loaded["test"], prepare)
        self.ood_sets = {
            name: Samples(*self._read(path, labelled=False), prepare) for name, path in self.ood_files.items()
        }

    def _read(self, path: str, labelled: bool = True) -> tuple[Tensor, Tensor]:
        if not Path(path).is_file():
            raise FileNotFoundError(f"expected an .npz file with x and y at {path}, found none: check the path")
        with np.load(path) as data:
            if "x" not in data or (labelled and "y" not in data):
                raise ValueError(
                    f"expected arrays x and y in {path}, got {', '.join(data)}: store them as np.savez(file, x=…, y=…)"
                )
            try:
                arrays = {name: data[name] for name in ("x", "y") if name in data}
            except ValueError as error:  # Python objects, which numpy would have to unpickle
                raise ValueError(
                    f"expected x and y of {path} to hold numbers, got Python objects: store arrays of numbers"
                ) from error
        x = torch.from_numpy(arrays["x"][: self.limit])
        y = as_targets(arrays["y"], path)[: self.limit] if "y" in arrays else torch.zeros(len(x), dtype=torch.long)
        if x.dim() == 3:
            x = x.unsqueeze(-1)
        return (x.permute(0, 3, 1, 2).contiguous() if x.dim() == 4 else x.float()), y
