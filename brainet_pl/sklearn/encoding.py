"""What stands before the networks of a table: columns that are kept, bins of them, and scales."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

RARE = 0.9  # share of one value above which a column counts as one that hardly varies
MOST_COLUMNS = 300  # up to which all are read: a structure of more takes long to learn, and few rows say little of each
SCREENED = 32  # columns that each fold keeps of more
DIRECTIONS = (
    24  # in which all columns vary most, read beside those: many weak columns may say more than few strong ones
)
MOST_GRAM = 2000  # rows by which they are found
ROUNDS = 4  # in which they are found, each by what the columns before it leave
RIDGE = 0.1  # share of the variance that a linear layer on them is charged with


class Screen(nn.Module):
    """Rows (N, d) → the columns that are kept and coordinates along a few directions, (N, k + p).

    Args:
        columns: k.
        inputs: d.
        directions: p.
    """

    kept: Tensor
    center: Tensor
    directions: Tensor

    def __init__(self, columns: int, inputs: int, directions: int = 0) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(columns))
        self.register_buffer("center", torch.zeros(inputs if directions else 0))
        self.register_buffer("directions", torch.zeros(inputs if directions else 0, directions))

    @staticmethod
    def learn(rows: Tensor, kept: Tensor) -> Screen:
        """Keep some columns of rows (N, d), and the directions in which all of them vary most, which know no target."""
        part = rows[torch.randperm(len(rows))[:MOST_GRAM]]
        scaling = Standardize(rows.shape[1]).fit(part)
        z = scaling(part)
        values, vectors = torch.linalg.eigh(z @ z.T)
        count = min(DIRECTIONS, len(part) - 1)
        found = z.T @ vectors[:, -count:] / values[-count:].clamp_min(1e-12).sqrt()
        made = Screen(len(kept), rows.shape[1], count)
        made.kept.copy_(kept)
        made.center.copy_(scaling.mean)
        made.directions.copy_(found / scaling.scale[:, None])
        return made

    @property
    def columns(self) -> int:
        """How many columns it gives."""
        return len(self.kept) + self.directions.shape[1]

    def forward(self, rows: Tensor) -> Tensor:
        """Picks the columns, and puts the coordinates beside them."""
        if not self.directions.shape[1]:
            return rows[:, self.kept]
        return torch.cat([rows[:, self.kept], (rows - self.center) @ self.directions], dim=1)


def screened(rows: Tensor, target: Tensor, count: int) -> Tensor:
    """The numbers (k,) of columns of rows (N, d) that say most of targets (N, O), by themselves or by their squares.

    They are found in a few rounds: each takes those that go best with what a linear layer on the ones before it leaves.
    """
    z = _standardised(rows)
    squares = _standardised(z.square())
    target = _standardised(target)
    left, found = target, torch.empty(0, dtype=torch.long)
    for _ in range(ROUNDS):
        said = torch.maximum((z.T @ left).square().sum(dim=1), (squares.T @ left).square().sum(dim=1))
        said[found] = -1.0
        found = torch.cat([found, said.topk(count // ROUNDS).indices])
        x = torch.cat([z[:, found], squares[:, found]], dim=1)
        charge = RIDGE * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
        left = target - x @ torch.linalg.solve(x.T @ x + charge, x.T @ target)
    return found.sort().values


def _standardised(values: Tensor) -> Tensor:
    deviation = values.std(dim=0, correction=0)
    return (values - values.mean(dim=0)) / torch.where(deviation > 1e-12, deviation, torch.ones_like(deviation))


def screen_folds(rows: Tensor, target: Tensor, folds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Columns (k,) that any fold keeps, and which of them each does, (F, k) of ones and zeros.

    Each fold chooses by the rows (n,) it learns from alone, so that the rows that vouch for it have no say.

    Args:
        rows: (N, d) numbers.
        target: (N, O) targets, classes as columns of zeros and ones.
        folds: numbers of the rows that each fold learns from.
    """
    scaled = Standardize(rows.shape[1]).fit(rows)(rows)
    chosen = [screened(scaled[train], target[train], SCREENED) for train in folds]
    kept = torch.cat(chosen).unique()  # type: ignore[no-untyped-call]
    return kept, torch.stack([torch.isin(kept, one) for one in chosen]).to(rows.dtype)


class Standardize(nn.Module):
    """Rows (N, d) as they come → in deviations from the mean of the training rows."""

    mean: Tensor
    scale: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("scale", torch.ones(columns))

    def fit(self, rows: Tensor) -> Standardize:
        """Take mean and deviation of rows (N, d); a column that does not vary keeps a scale of 1.

        A column that hardly varies, with one value in more than `RARE` of the rows, is scaled by how far the others lie
        from that value: else a rare category would count as a deviation of ten, and any noise as an event.
        """
        scale = rows.std(dim=0, correction=0)
        usual = rows.mode(dim=0).values
        away = (rows - usual).square()
        others = (rows != usual).sum(dim=0)
        rare = others < (1 - RARE) * len(rows)
        scale = torch.where(rare, (away.sum(dim=0) / others.clamp_min(1)).sqrt(), scale)
        varies = scale > 1e-12 * (1 + rows.abs().amax(dim=0))
        self.mean.copy_(rows.mean(dim=0))
        self.scale.copy_(torch.where(varies, scale, torch.ones_like(scale)))
        return self

    def forward(self, rows: Tensor) -> Tensor:
        """Scales rows (N, d) to deviations from the mean."""
        return (rows - self.mean) / self.scale


class Bins(nn.Module):
    """Rows (N, d) → the same, and for every bin of every column how far the row is through it, (N, d + P).

    A linear layer on such parts is any piecewise linear function of each column (Gorishniy et al. 2022): thresholds,
    which trees find at once and a network only slowly. Bins are quantiles of the training rows.
    """

    column: Tensor
    low: Tensor
    width: Tensor

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.register_buffer("column", torch.zeros(parts, dtype=torch.long))
        self.register_buffer("low", torch.zeros(parts))
        self.register_buffer("width", torch.ones(parts))

    @staticmethod
    def learn(rows: Tensor, bins: int) -> Bins:
        """Bins of the columns of rows (N, d); a column of one or two values has none."""
        shares = torch.linspace(0.0, 1.0, bins + 1, dtype=rows.dtype)
        found = []
        for number, values in enumerate(rows.T):
            edges = torch.unique(torch.quantile(values, shares))
            if len(edges) > 2:
                found += [(number, low, high - low) for low, high in itertools.pairwise(edges.tolist())]
        made = Bins(len(found))
        for buffer, values in zip((made.column, made.low, made.width), zip(*found, strict=True), strict=False):
            buffer.copy_(torch.tensor(values))
        return made

    def forward(self, rows: Tensor) -> Tensor:
        """Puts the parts, each from 0 to 1, beside the rows."""
        return torch.cat([rows, ((rows[:, self.column] - self.low) / self.width).clamp(0.0, 1.0)], dim=1)
