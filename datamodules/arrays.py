"""Any data as .npz files with `x` and `y`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from brainet_pl.datamodules.base import Images, SplitData, image_transform


class Arrays(SplitData):
    """Images (N, H, W, C) or (N, H, W) as uint8, or features (N, d), from .npz files.

    Args:
        train, test: files with `x` and `y`. val: likewise; None holds out a part of `train`.
        ood: name → file whose `x` is unlike the training data.
        near: those names of `ood` that resemble the training data; the others are far.
        mean, std: of the channels of images scaled to [0, 1].
        augment: random crops and flips of training images.
        limit: use only so many samples of each file.
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
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed, near)
        self.files = {"train": train, "test": test} | ({"val": val} if val else {})
        self.ood_files = dict(ood or {})
        self.mean, self.std, self.augment, self.limit = mean, std, augment, limit

    def setup(self, stage: str) -> None:
        """Read the files."""
        loaded = {name: self._read(path) for name, path in self.files.items()}
        x = loaded["train"][0]
        prepare = image_transform(self.mean, self.std) if x.dim() == 4 else None
        crop = image_transform(self.mean, self.std, x.shape[-1]) if self.augment and x.dim() == 4 else prepare
        plain, augmented = Images(*loaded["train"], prepare), Images(*loaded["train"], crop)
        if "val" in loaded:
            self.train_set, self.structure_set = augmented, plain
            self.val_set = Images(*loaded["val"], prepare)
        else:
            self.take(plain, augmented, len(plain))
        self.test_set = Images(*loaded["test"], prepare)
        self.ood_sets = {
            name: Images(*self._read(path, labelled=False), prepare) for name, path in self.ood_files.items()
        }

    def _read(self, path: str, labelled: bool = True) -> tuple[Tensor, Tensor]:
        if not Path(path).is_file():
            raise FileNotFoundError(f"expected an .npz file with x and y at {path}, found none: check the path")
        with np.load(path) as data:
            if "x" not in data or (labelled and "y" not in data):
                raise ValueError(f"expected arrays x and y in {path}, got {', '.join(data)}")
            x = torch.from_numpy(data["x"][: self.limit])
            y = (
                torch.from_numpy(data["y"][: self.limit]).long()
                if "y" in data
                else torch.zeros(len(x), dtype=torch.long)
            )
        if x.dim() == 3:
            x = x.unsqueeze(-1)
        return (x.permute(0, 3, 1, 2).contiguous() if x.dim() == 4 else x.float()), y
