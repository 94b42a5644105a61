"""Samples by what they are used for, and the one rule by which data that was held out is dealt to these uses.

What chooses does not vouch. Data that was not trained on has two jobs: to *select* (the epoch, the dropout, the
temperature of the posterior, what predictions are made of), and to *calibrate* (the temperature of probabilities, the
reference of the verdict, conformal sets, the comparison with other layers). Rows that selected are predicted better
than new ones, so what they promise is not kept.

- From `LEAST_TO_SPLIT` held-out rows on, one half selects and the other calibrates, the same share of each class.
- Of fewer, all calibrate, and `SHARE` of the training rows are taken out of training to select.

Taking rows out of training costs more than halves do, which is why it is left for so few (three classes in eight
columns, three training rows for each held-out one, mean NLL less that of halves, paired): 0.010 ± 0.001 with 60
held-out rows (213 draws), 0.082 ± 0.018 with 160 (9 draws).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl.features.extraction import Extracted
from brainet_pl.features.ridge import deal_folds
from brainet_pl.network.base import MIN_VALIDATION

LEAST_HELD = 20  # held-out rows: with fewer neither a temperature nor a verdict at 5 % can be told
LEAST_TO_SPLIT = 2 * LEAST_HELD  # held-out rows
SHARE = 0.15  # of the rows of each class


class Samples(NamedTuple):
    """What one fit knows, by role.

    Attributes:
        train: samples that weights, structures and densities are fitted to.
        select: samples that choose the epoch, the dropout, the temperature of the posterior and the blend.
        calibrate: samples that probabilities, p-values and conformal sets go by.
    """

    train: Extracted
    select: Extracted
    calibrate: Extracted


class Taken(NamedTuple):
    """Numbers of training rows that are not trained on.

    Attributes:
        held_out: rows to hold out, where none were given.
        select: rows that select, where those held out are too few for it.
    """

    held_out: Tensor
    select: Tensor

    @property
    def all(self) -> Tensor:
        """The numbers of both kinds of rows."""
        return torch.cat([self.held_out, self.select])


def take_from_training(labels: Tensor, free: Tensor, given: int) -> Taken:
    """Choose the training rows that are not trained on.

    Args:
        labels: (N,) classes of all training rows.
        free: (N,) whether a row may be taken.
        given: number of held-out rows that there are already; 0 is none.
    """
    none = torch.empty(0, dtype=torch.int64)
    held_out = none if given else stratified_share(labels, free)
    if (given or len(held_out)) >= LEAST_TO_SPLIT:
        return Taken(held_out, none)
    left = free.clone()
    left[held_out] = False
    return Taken(held_out, stratified_share(labels, left, seed=1))


def strata(labels: Tensor) -> Tensor:
    """Classes (N,) as they are; of several labels (N, L) the rarest that each row has, from 1, and 0 of none, (N,).

    >>> strata(torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, torch.nan], [0.0, 0.0]]))
    tensor([1, 2, 1, 0])
    """
    if labels.dim() == 1:
        return labels
    has = labels == 1
    frequency = has.sum(dim=0).expand_as(has).masked_fill(~has, len(has) + 1)
    return torch.where(has.any(dim=1), frequency.argmin(dim=1) + 1, 0)


def stratified_share(labels: Tensor, free: Tensor, seed: int = 0) -> Tensor:
    """The numbers of `SHARE` of the rows of each class of labels (N,), among those that are free (N,)."""
    labels = strata(labels)
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in torch.unique(labels):
        members = ((labels == label) & free).nonzero()[:, 0]
        order = torch.randperm(len(members), generator=generator)
        chosen.append(members[order[: round(SHARE * len(members))]])
    return torch.cat(chosen).sort().values


def split_held_out(held_out: Extracted) -> tuple[Extracted, Extracted]:
    """Two halves of held-out samples with the same share of each class: one that selects, one that calibrates."""
    select, calibrate = (rows_of(held_out, rows) for rows in deal_folds(strata(held_out.targets), count=2))
    return select, calibrate


def rows_of(samples: Extracted, rows: Tensor) -> Extracted:
    """Some of the samples, by their numbers."""
    return Extracted(samples.output[rows], samples.targets[rows])


def enough_to_choose(samples: Extracted | None) -> Extracted | None:
    """The samples, or None where they are too few to choose anything by."""
    return samples if samples is not None and len(samples.targets) >= MIN_VALIDATION else None
