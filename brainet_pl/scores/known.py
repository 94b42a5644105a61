"""A few known samples that a new one can be compared with, by the features that a verdict reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils.data_sized import DataSizedBuffers

MOST_ROWS = 500  # training samples that are kept, a random choice of them
MOST_FEATURES = 64  # of each, a random choice of them: with 4 bytes each, 128 kB in a file
STEP = 1 / 1000  # of a standard deviation, to which features are rounded
LARGEST = 2**15 - 1  # steps from the mean, beyond which features count alike


class Resembled(NamedTuple):
    """The nearest known samples of B new ones.

    Attributes:
        numbers: (B, k) their places in the training data, the nearest first.
        distances: (B, k) root mean squared distance of a feature, in standard deviations of the known samples.
    """

    numbers: Tensor
    distances: Tensor


class KnownSamples(DataSizedBuffers):
    """Some training samples as whole numbers, which keep their size whatever the type of a model's weights.

    >>> known = KnownSamples().fit(torch.eye(3), torch.tensor([10, 20, 30]))
    >>> known(torch.tensor([[0.0, 2.0, 0.0]]), 1).numbers
    tensor([[20]])
    """

    may_be_missing = True
    columns: Tensor
    rows: Tensor
    numbers: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("columns", torch.empty(0, dtype=torch.long))
        self.register_buffer(
            "rows", torch.empty(0, 0, dtype=torch.int32)
        )  # of 16 bits can not be sent between processes
        self.register_buffer("numbers", torch.empty(0, dtype=torch.long))
        for name in ("centre", "scale"):
            self.register_buffer(name, torch.empty(0))

    def __len__(self) -> int:
        return len(self.numbers)

    @torch.no_grad()
    def fit(self, features: Tensor, numbers: Tensor | None = None) -> KnownSamples:
        """Keep some training features (N, d), and their places (N,) in the training data; None is in order."""
        drawn = torch.Generator().manual_seed(0)
        place = self.numbers.device
        rows = torch.randperm(len(features), generator=drawn)[:MOST_ROWS].sort().values
        columns = torch.randperm(features.shape[1], generator=drawn)[:MOST_FEATURES].sort().values
        x = features.cpu()[rows][:, columns].double()
        deviation = x.std(dim=0, correction=0)
        self.columns, self.centre = columns.to(place), x.mean(dim=0).float().to(place)
        self.scale = torch.where(deviation > 0, deviation, torch.ones_like(deviation)).float().to(place)
        self.rows = self._steps(features.to(place)[rows.to(place)])
        self.numbers = (rows if numbers is None else numbers.cpu()[rows]).to(place)
        return self

    def _steps(self, features: Tensor) -> Tensor:
        x = (features.index_select(1, self.columns).float() - self.centre) / (self.scale * STEP)
        return x.nan_to_num(nan=0.0).round().clamp(-LARGEST, LARGEST).to(torch.int32)

    @torch.no_grad()
    def forward(self, features: Tensor, count: int = 3) -> Resembled:
        """Features (B, d) of new samples → the `count` nearest known ones."""
        distances = torch.cdist(self._steps(features).float() * STEP, self.rows.float() * STEP)
        nearest = distances.topk(min(count, len(self)), dim=1, largest=False)
        return Resembled(self.numbers[nearest.indices], nearest.values / max(1, len(self.columns)) ** 0.5)
