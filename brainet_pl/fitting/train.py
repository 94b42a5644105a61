"""Trains a head on features in memory, and stops by the samples that select."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.threads import SMALL, limit_threads
from brainet_pl.metrics.losses import weighted_mean
from brainet_pl.network.base import Head, HeadInputs, run_head
from brainet_pl.network.training import MANY, HeadTraining, TrainingSettings, patience_for
from brainet_pl.tasks import Task

ROWS = 4096  # samples that are predicted at a time in a validation
HEAT = 3  # times patience: epochs before which no candidate is given up
BEHIND = 1.1  # times the loss of another after as many epochs: a candidate that is lost


def train(
    head: Head,
    task: Task,
    data: HeadInputs,
    select: HeadInputs | None,
    settings: TrainingSettings,
    *,
    passes: int,
    weights: Tensor | None = None,
    select_weights: Tensor | None = None,
    progress: bool = False,
) -> int:
    """Train a head; it ends with the weights of the epoch that predicts `select` best. Gives the number of epochs.

    Args:
        head: the head, on the device of the features.
        task: gives the loss, and the NLL of the samples that select.
        data: features (N, d) and checked targets of training samples.
        select: the same of samples that choose the epoch; None trains to the end.
        settings: epochs, batches and learning rate.
        passes: sub-networks that a validation averages.
        weights: (N,) how much each training sample counts; None is all alike.
        select_weights: the same of samples that select.
        progress: show a progress bar.
    """

    training = _prepare(head, task, data, select, settings, passes, weights, select_weights, progress)
    training.run()
    training.restore_best()
    return training.epochs


def _prepare(
    head: Head,
    task: Task,
    data: HeadInputs,
    select: HeadInputs | None,
    settings: TrainingSettings,
    passes: int,
    weights: Tensor | None = None,
    select_weights: Tensor | None = None,
    progress: bool = False,
) -> HeadTraining:
    """The training of `train`, before its first epoch."""

    def loss(outputs: Tensor, rows: Tensor) -> Tensor:
        weight = () if weights is None else (weights[rows],)  # a task of one's own may know of none
        return task.loss(outputs, data.target[rows], *weight)

    def validate() -> float:
        assert select is not None
        nll = _nll(head, task, select, passes)
        return float(nll.mean() if select_weights is None else weighted_mean(nll, select_weights))

    numbered = data._replace(target=torch.arange(len(data.x), device=data.x.device))
    return HeadTraining(head, numbered, settings, loss, None if select is None else validate, progress=progress)


def _nll(head: Head, task: Task, samples: HeadInputs, passes: int) -> Tensor:
    """The NLL (N,) of samples under a head in evaluation, with the same sub-networks each time."""
    parts = []
    for first in range(0, len(samples.x), ROWS):
        batch = samples.rows(slice(first, first + ROWS))
        with isolated_rng(0):
            outputs, weights = run_head(head, batch.x, passes, batch.base_logits)
        nll = task.nll(task.predictive(outputs, weights), batch.target)
        assert nll is not None
        parts.append(nll)
    return torch.cat(parts)


def train_best(
    head: Head,
    task: Task,
    data: HeadInputs,
    select: HeadInputs,
    candidates: Sequence[TrainingSettings],
    *,
    passes: int,
    progress: bool = False,
) -> int:
    """Train a head by each of some settings; it ends with the weights that predict `select` best of all.

    Each is trained until its patience ends for the first time. Then the best goes on to its end, and the others are
    given up: what a lower learning rate gains is about the same for all. Of more than `MANY` samples patience is
    shorter, see `patience_for`, and a candidate ends early that is far behind one with less dropout of inputs.

    Gives the number of epochs of the best. The arguments are those of `train`, with `candidates` in place of settings.
    """
    is_small = head.num_params <= SMALL and data.x.device.type == "cpu"
    start, is_large = copy.deepcopy(head.state_dict()), len(data.x) > MANY
    if is_large:
        patient = [replace(one, patience=patience_for(one.patience, len(data.x))) for one in candidates]
        candidates = sorted(patient, key=lambda one: one.input_dropout)
    trainings: list[HeadTraining] = []
    with limit_threads(1 if is_small else torch.get_num_threads()):
        for settings in candidates:
            head.load_state_dict(start)
            training = _prepare(head, task, data, select, settings, passes, progress=progress)
            training.run(pause=True, is_lost=partial(_is_behind, trainings[:]) if is_large else None)
            trainings.append(training)
        best = min(trainings, key=lambda training: training.best_loss)
        best.run()
    best.restore_best()
    return best.epochs


def _is_behind(others: Sequence[HeadTraining], training: HeadTraining) -> bool:
    """Whether a training has no hope of the least loss: far above what one of the others had after as many epochs."""
    if training.epochs < HEAT * training.settings.patience:
        return False
    return any(
        training.best_loss > BEHIND * other.best_losses[min(training.epochs, other.epochs) - 1] for other in others
    )
