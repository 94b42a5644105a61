"""Scikit-learn's 8×8 digits: embedded, so that everything can be tried without a download."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from brainet_pl.datamodules.base import Samples, SplitData, check_share
from brainet_pl.datamodules.shifts import Shifts


def read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels (1797, 64) and digits (1797,) of the file that scikit-learn brings, without a second to import it."""
    found = find_spec("sklearn")
    assert found is not None, "a dependency"
    assert found.origin is not None, "a package with files"
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


class Digits(SplitData):
    """1,797 digits as 64 pixels between 0 and 1; some classes held out as the unknown.

    >>> data = Digits(held_out=(8, 9))
    >>> data.setup("fit")
    >>> data.num_classes, len(data.train_set), len(data.val_set), len(data.test_set), len(data.ood_sets["held_out"])
    (8, 858, 152, 433, 354)

    Args:
        held_out: The digits that are never trained on; they are the out-of-distribution set `held_out`. The others are
            renumbered from 0. Empty holds none out.
        test_fraction: The share of the known digits that is the test set, between 0 and 1.
        images: Whether samples are (1, 8, 8) images instead of 64 pixels.
        batch_size: The number of samples in a batch, at least 2 because batch norm can't train on one.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of training digits that is held out for validation, between 0 and 1.
        seed: The seed of the validation split; the test digits do not depend on it.
        shifts: The shifts of the test set to evaluate too: corruptions × severities; None has none.
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
        shifts: Shifts | None = None,
    ) -> None:
        near = ("held_out",) if held_out else ()
        super().__init__(batch_size, num_workers, val_fraction, seed, near, shifts)
        if not set(held_out) <= set(range(10)) or len(set(held_out)) > 8:
            raise ValueError(
                f"expected held_out to be digits from 0 to 9 that leave two or more to learn, got {tuple(held_out)}: "
                "correct the list"
            )
        check_share("test_fraction", test_fraction)
        self.held_out, self.test_fraction, self.images = tuple(held_out), test_fraction, images

    @property
    def num_classes(self) -> int:
        """The number of digits that are known, which is 10 less those held out."""
        return 10 - len(set(self.held_out))

    def setup(self, stage: str) -> None:
        """Split the known digits into training, validation and test sets."""
        x, y = read_digits()
        inputs = torch.tensor(x, dtype=torch.float32) / 16.0
        inputs = inputs.view(-1, 1, 8, 8) if self.images else inputs
        labels = torch.tensor(y)
        known = [digit for digit in range(10) if digit not in self.held_out]
        self.class_names = tuple(map(str, known))
        unknown = torch.isin(labels, torch.tensor(self.held_out, dtype=labels.dtype))
        number = torch.full((10,), -1, dtype=torch.long)
        number[known] = torch.arange(len(known))
        inside, target = inputs[~unknown], number[labels[~unknown]]
        order = torch.randperm(len(inside), generator=torch.Generator().manual_seed(1))
        cut = round(self.test_fraction * len(inside))
        test, rest = order[:cut], order[cut:]
        self.test_set = Samples(inside[test], target[test])
        train = Samples(inside[rest], target[rest])
        self.take(train, train, len(train))
        if unknown.any():
            self.ood_sets = {"held_out": Samples(inputs[unknown], labels[unknown])}
