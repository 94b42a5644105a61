"""Trains the members of all folds at once, and stops each by the rows of the other folds.

The rows that a fold holds back vouch for its members afterwards: calibration, sets, intervals and p-values go by what
these say of them. So nothing about a member may be chosen by these rows, its epoch least of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from brainet_pl._utils.warn import warn
from brainet_pl.network.stack import HeadStack
from brainet_pl.network.training import TrainingSettings, choose_batch_size, patience_for
from brainet_pl.tasks import Task

ROWS = 4096  # of each fold that are predicted at a time in a validation
SLOW = 5.0  # seconds after which a bar is shown


class Fold(NamedTuple):
    """Numbers of rows by what they do for the members of one fold.

    Attributes:
        train: what they learn from.
        select: what chooses the epoch; of several folds each has its own, and those of the others choose.
        held: what vouches for them; no choice about them is made by these.
    """

    train: Tensor
    select: Tensor
    held: Tensor


class Rows(NamedTuple):
    """The rows that a training reads, and what is known of them.

    Attributes:
        features: (N, d).
        target: (N,).
        weights: (N,) how much each row counts; None is all alike.
        masks: (F, 1, d) the features that each fold reads, as ones; None is all.
    """

    features: Tensor
    target: Tensor
    weights: Tensor | None
    masks: Tensor | None = None

    def of(self, numbers: Tensor) -> Tensor:
        """The features (F, B, d) of some rows (F, B) of each fold."""
        found = self.features[numbers]
        return found if self.masks is None else found * self.masks


class Trained(NamedTuple):
    """What is told of a training.

    Attributes:
        epochs: how many it took.
        losses: the NLL of the rows that select after each of them; empty where there are none.
    """

    epochs: int
    losses: list[float]


def train_folds(
    stack: HeadStack,
    task: Task,
    rows: Rows,
    folds: Sequence[Fold],
    settings: TrainingSettings,
    *,
    passes: int,
    deadline: float = math.inf,
    progress: bool = False,
) -> Trained:
    """Train the members of all folds, one each, step by step together; gives the epochs taken, and what they gained.

    Each ends with the weights of its best epoch. Without rows to choose it by, training takes a quarter of
    `max_epochs`.

    Args:
        stack: one member for each fold.
        task: gives the loss, and the NLL of rows that select.
        rows: all rows.
        folds: the roles of the rows.
        settings: epochs, batches and learning rate.
        passes: sub-networks that a validation averages.
        deadline: of `time.monotonic`, after which training ends, with a warning.
        progress: show a bar at once.
    """
    selects = all(len(fold.select) for fold in folds)
    most = settings.max_epochs if selects else max(1, settings.max_epochs // 4)
    schedule = _Schedule(stack, settings, min(len(fold.train) for fold in folds))
    validation = _Validation(rows, folds, passes) if selects else None
    epochs = 0
    curve: list[float] = []
    bar = tqdm(range(most), "fitting", disable=None if not progress else False, delay=0 if progress else SLOW)
    for _ in bar:
        epochs += 1
        _train_epoch(stack, task, rows, folds, schedule, deadline)
        if validation is not None:
            losses, weights = validation(stack, task)
            curve.append(float(losses.sum() / weights.sum()))
            if not schedule.step((losses, weights)):
                break
        if time.monotonic() >= deadline:
            warn(
                f"the time was over in epoch {epochs}, before training was done: raise max_seconds for better networks"
            )
            break
    bar.close()
    schedule.restore_best()
    stack.write()
    return Trained(epochs, curve)


def _train_epoch(
    stack: HeadStack, task: Task, rows: Rows, folds: Sequence[Fold], schedule: _Schedule, deadline: float
) -> None:
    """One pass over the rows of every fold, in batches of a new order, or what there is time for."""
    stack.train()
    for number, batch in enumerate(_batches(folds, schedule.batch_size)):
        if number and time.monotonic() >= deadline:
            break
        schedule.optimizer.zero_grad()
        outputs = stack(rows.of(batch), stack.draw(batch.shape[1]))
        loss = _loss(
            task, outputs.flatten(1, 2), rows.target[batch], None if rows.weights is None else rows.weights[batch]
        )
        (loss * len(folds)).backward()  # type: ignore[no-untyped-call]  # so that each has the gradient of its own mean
        schedule.optimizer.step()


def _batches(folds: Sequence[Fold], size: int) -> Sequence[Tensor]:
    """Numbers of rows (M, B) of the steps of an epoch: as many steps for all folds, in batches of even size.

    A fold with a few rows less than another repeats some of its own.
    """
    most = max(len(fold.train) for fold in folds)
    orders = []
    for fold in folds:
        order = fold.train[torch.randperm(len(fold.train))]
        orders.append(torch.cat([order, order[: most - len(order)]]))
    return torch.stack(orders).tensor_split(-(-most // size), dim=1)


def _loss(task: Task, outputs: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    """The mean loss over folds of outputs (V, M·B, O), targets (M, B, …) and weights (M, B)."""
    target = target.flatten(0, 1)
    if weights is None:
        return task.loss(outputs, target)
    least = torch.finfo(weights.dtype).tiny
    even = weights / weights.sum(dim=1, keepdim=True).clamp_min(least)  # a fold counts as much as any other
    return task.loss(outputs, target, even.flatten())  # type: ignore[call-arg]


class _Validation:
    """The NLL of the rows of each fold that select, under its member."""

    def __init__(self, rows: Rows, folds: Sequence[Fold], passes: int) -> None:
        self.passes = passes
        most = max(len(fold.select) for fold in folds)
        numbers = torch.stack([fold.select[torch.arange(most) % len(fold.select)] for fold in folds])
        weights = torch.ones(numbers.shape) if rows.weights is None else rows.weights[numbers]
        for number, fold in enumerate(folds):
            weights[number, len(fold.select) :] = 0.0
        self.parts = [
            (rows.of(part), rows.target[part], weight)
            for part, weight in zip(numbers.split(ROWS, dim=1), weights.split(ROWS, dim=1), strict=True)  # type: ignore[no-untyped-call]
        ]

    @torch.no_grad()
    def __call__(self, stack: HeadStack, task: Task) -> tuple[Tensor, Tensor]:
        """Sums (M,) of NLL and of weights."""
        stack.eval()
        losses, weights = torch.zeros(stack.count), torch.zeros(stack.count)
        for features, target, weight in self.parts:
            outputs, shares = stack.passes(features, self.passes)
            nll = task.nll(task.predictive(outputs, shares), target.flatten(0, 1))
            assert nll is not None
            losses += (nll.view_as(weight) * weight).sum(dim=1)
            weights += weight.sum(dim=1)
        return losses, weights


def of_the_others(losses: Tensor, weights: Tensor) -> Tensor:
    """For each fold (M,) the mean loss of the rows of all others; of an only one its own.

    >>> of_the_others(torch.tensor([1.0, 2.0, 6.0]), torch.ones(3))
    tensor([4.0000, 3.5000, 1.5000])
    """
    if len(losses) == 1:
        return losses / weights
    others = 1 - torch.eye(len(losses))  # sums without the own one, not all minus the own: that may be infinite
    kept = torch.where(others > 0, losses.expand(len(losses), -1), 0.0)
    return kept.sum(dim=1) / (others @ weights)


class _Schedule:
    """Optimizer and batch size of the next epoch, and the best weights of each member so far.

    A member waits where the others' rows have gained nothing for a while: its best weights stay. When all wait,
    training ends, or goes on from the best weights with a larger batch.

    Attributes:
        optimizer: of all members.
        batch_size: rows of each member in a step.
    """

    def __init__(self, stack: HeadStack, settings: TrainingSettings, rows: int) -> None:
        self.optimizer = torch.optim.Adam(stack.parameters(), lr=settings.learning_rate, fused=True)
        self.batch_size = choose_batch_size(rows) if settings.batch_size is None else settings.batch_size
        self._final_batch = min(settings.final_batch, rows)
        self._patience = patience_for(settings.patience, rows)
        self._stack = stack
        self._best = [values.clone() for values in stack.tensors()]
        self._best_loss = torch.full((stack.count,), math.inf)
        self._without_gain = torch.zeros(stack.count, dtype=torch.long)
        self._waits = torch.zeros(stack.count, dtype=torch.bool)

    def step(self, found: tuple[Tensor, Tensor]) -> bool:
        """Prepare the next epoch after a validation; gives whether there is to be one."""
        losses = of_the_others(*found).nan_to_num(nan=math.inf)
        better = (losses < self._best_loss) & ~self._waits
        self._best_loss = torch.where(better, losses, self._best_loss)
        for best, values in zip(self._best, self._stack.tensors(), strict=True):
            best[better] = values[better]
        self._without_gain = torch.where(better, 0, self._without_gain + 1)
        self._waits |= self._without_gain >= self._patience
        return not bool(self._waits.all()) or self._slow_down()

    def _slow_down(self) -> bool:
        """Go on from the best weights with a larger batch, where that is due."""
        if self._final_batch <= self.batch_size:
            return False
        self.restore_best()
        self.batch_size = self._final_batch
        self._without_gain.zero_()
        self._waits.zero_()
        return True

    @torch.no_grad()
    def restore_best(self) -> None:
        """Give each member the weights that validated best, if any did."""
        found = self._best_loss.isfinite()
        for best, values in zip(self._best, self._stack.tensors(), strict=True):
            values[found] = best[found]
