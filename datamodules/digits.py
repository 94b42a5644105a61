"""Scikit-learn's 8×8 digits: embedded, so that everything can be tried without a download."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits

from brainet_pl.datamodules.base import Images, SplitData


class Digits(SplitData):
    """1,797 digits as 64 pixels between 0 and 1; some classes held out as the unknown.

    Args:
        held_out: digits that are never trained on; they are the out-of-distribution set `held_out`. The others are
            renumbered from 0.
        test_fraction: of the known digits.
        images: give (1, 8, 8) images instead of 64 pixels.
    """

    def __init__(
        self,
        held_out: Sequence[int] = (8, 9),
        test_fraction: float = 0.3,
        images: bool = False,
        batch_size: int = 64,
        num_workers: int = 0,
        val_fraction: float = 0.15,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed, near=("held_out",))
        self.held_out, self.test_fraction, self.images = tuple(held_out), test_fraction, images

    @property
    def num_classes(self) -> int:
        """Known digits."""
        return 10 - len(set(self.held_out))

    def setup(self, stage: str) -> None:
        """Split the known digits into training, validation and test sets."""
        x, y = load_digits(return_X_y=True)
        inputs = torch.tensor(x, dtype=torch.float32) / 16.0
        inputs = inputs.view(-1, 1, 8, 8) if self.images else inputs
        labels = torch.tensor(y)
        known = [digit for digit in range(10) if digit not in self.held_out]
        unknown = torch.isin(labels, torch.tensor(self.held_out, dtype=labels.dtype))
        number = torch.full((10,), -1, dtype=torch.long)
        number[known] = torch.arange(len(known))
        inside, target = inputs[~unknown], number[labels[~unknown]]
        order = torch.randperm(len(inside), generator=torch.Generator().manual_seed(1))
        cut = round(self.test_fraction * len(inside))
        test, rest = order[:cut], order[cut:]
        self.test_set = Images(inside[test], target[test])
        train = Images(inside[rest], target[rest])
        self.take(train, train, len(train))
        if unknown.any():
            self.ood_sets = {"held_out": Images(inputs[unknown], labels[unknown])}
