"""The nine UCI regression sets with their published splits (Hernández-Lobato & Adams 2015, Gal & Ghahramani 2016)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl.datamodules.base import Samples, SplitData
from brainet_pl.datamodules.shifts import Shifts

Floats = NDArray[np.float64]
UCIName = Literal["boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht"]

FOLDERS: dict[str, str] = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}


class Split(NamedTuple):
    """Inputs (N, d) and targets (N,) of training and test, as published."""

    x_train: Floats
    y_train: Floats
    x_test: Floats
    y_test: Floats


def read_split(root: str | Path, name: str, split: int) -> Split:
    """One published split of a set, from `root/<folder>/{data,index_*}.txt`."""
    checks.one_of("name", name, FOLDERS, "choose one of the list")
    folder = Path(root) / FOLDERS[name]
    if not (folder / "data.txt").is_file():
        raise FileNotFoundError(
            f"expected {folder / 'data.txt'}, found no such file: root must hold the folders of the UCI sets"
        )
    count = len(list(folder.glob("index_train_*.txt")))
    if not 0 <= split < count:
        raise ValueError(f"expected a split of {name} from 0 to {count - 1}, got {split}: choose one of them")
    data = np.loadtxt(folder / "data.txt", ndmin=2)
    inputs, target = _indices(folder / "index_features.txt"), _indices(folder / "index_target.txt")
    train, test = (_indices(folder / f"index_{part}_{split}.txt") for part in ("train", "test"))
    x, y = data[:, inputs], data[:, target[0]]
    return Split(x[train], y[train], x[test], y[test])


def _indices(path: Path) -> NDArray[np.int64]:
    return np.loadtxt(path, ndmin=1).astype(np.int64)


def standardise(train: Floats, *others: Floats) -> tuple[torch.Tensor, ...]:
    """Columns to mean 0 and variance 1 by the statistics of `train`, all as float32; a constant column becomes 0."""
    mean, std = train.mean(axis=0), train.std(axis=0)
    std = np.where(std > 0, std, 1.0)
    return tuple(torch.tensor((x - mean) / std, dtype=torch.float32) for x in (train, *others))


class UCI(SplitData):
    """A UCI regression set; inputs are standardised by the training rows, the target keeps its units.

    Args:
        name: The data set: boston, concrete, energy, kin8nm, naval, power, protein, wine or yacht.
        root: The folder with the sets, each a folder with `data.txt` and the published indices.
        split: The number of the published split, 0 to 19; of protein, 0 to 4.
        batch_size: The number of samples in a batch, at least 2 because batch norm can't train on one.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of training rows that is held out for validation, between 0 and 1.
        seed: The seed of the validation split; the test rows do not depend on it.
        shifts: The shifts of the test set to evaluate too: corruptions × severities; None has none.
    """

    def __init__(
        self,
        name: UCIName,
        root: str = "data/uci",
        split: int = 0,
        batch_size: int = 32,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
        shifts: Shifts | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed, shifts=shifts)
        checks.one_of("name", name, FOLDERS, "choose one of the list")
        self.dataset, self.root, self.split_number = name, root, split

    def setup(self, stage: str) -> None:
        """Read the split; validation rows come from its training part, and are not in the statistics."""
        rows = read_split(self.root, self.dataset, self.split_number)
        train, val = self.split(len(rows.x_train))
        inputs, x_val, x_test = standardise(rows.x_train[train], rows.x_train[val], rows.x_test)
        targets = torch.tensor(rows.y_train, dtype=torch.float32)
        self.train_set = self.structure_set = Samples(inputs, targets[train])
        self.val_set = Samples(x_val, targets[val])
        self.test_set = Samples(x_test, torch.tensor(rows.y_test, dtype=torch.float32))
