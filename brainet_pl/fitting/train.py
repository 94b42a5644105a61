"""Trains a head on features in memory, and stops by the samples that select."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.threads import SMALL, limit_threads
from brainet_pl.metrics.losses import weighted_mean
from brainet_pl.network.base import Head, HeadInputs, run_head
from brainet_pl.network.training import TrainingSettings, fit_head
from brainet_pl.tasks import Task

ROWS = 4096  # samples that are predicted at a time in a validation


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

    def loss(outputs: Tensor, rows: Tensor) -> Tensor:
        weight = () if weights is None else (weights[rows],)  # a task of one's own may know of none
        return task.loss(outputs, data.target[rows], *weight)

    def validate() -> float:
        assert select is not None
        nll = _nll(head, task, select, passes)
        return float(nll.mean() if select_weights is None else weighted_mean(nll, select_weights))

    numbered = data._replace(target=torch.arange(len(data.x), device=data.x.device))
    return fit_head(head, numbered, settings, loss, None if select is None else validate, progress=progress)


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

    Gives the number of epochs of these. The arguments are those of `train`, with `candidates` in place of settings.
    """
    is_small = head.num_params <= SMALL and data.x.device.type == "cpu"
    start = copy.deepcopy(head.state_dict())
    best_nll, best_epochs, best_weights = math.inf, 0, start
    with limit_threads(1 if is_small else torch.get_num_threads()):
        for settings in candidates:
            head.load_state_dict(start)
            epochs = train(head, task, data, select, settings, passes=passes, progress=progress)
            head.eval()
            with torch.no_grad():
                nll = float(_nll(head, task, select, passes).mean())
            if nll < best_nll or best_epochs == 0:
                best_nll = math.inf if math.isnan(nll) else nll
                best_epochs, best_weights = epochs, copy.deepcopy(head.state_dict())
    head.load_state_dict(best_weights)
    return best_epochs
