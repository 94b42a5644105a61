"""Weighs a new head against the network's own classification layer on held-out samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from brainet_pl._utils.rng import isolated_rng
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.features.extraction import Extracted
from brainet_pl.fitting.build import base_logits_help
from brainet_pl.fitting.settle import BATCH
from brainet_pl.network.base import Outputs
from brainet_pl.network.finalization import best_value
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.tasks import Task

HEAD_WEIGHTS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, math.inf)  # beside base logits; ∞ is the head alone
LEAST_GAIN = 1e-4  # nats of mean NLL: a head that gains less is not worth running


@torch.no_grad()
def choose_blend(predictor: Predictor, held_out: Extracted) -> bool:
    """Weigh the head against the logits of the removed layer; gives whether there were such logits.

    Logits are (base + α · head) / τ, each α with the τ that is best for it. α is 0, the network with a temperature,
    unless another predicts better by more than a standard error, sample by sample.
    """
    predictor.blend.set(0.0, 1.0)
    task = predictor.task
    if not base_logits_help(task, held_out):
        return False
    assert held_out.output.base_logits is not None
    target = task.check(held_out.targets)
    base = task.base_outputs(held_out.output.base_logits)
    outputs = predict_rows(predictor, held_out)
    losses = {}
    for weight in HEAD_WEIGHTS:
        if weight == 0:
            predicted = task.predictive(base.unsqueeze(0), None)
        elif math.isinf(weight):
            predicted = task.predictive(outputs.values, outputs.weights)
        else:
            predicted = task.predictive(base + weight * outputs.values, outputs.weights)
        losses[weight] = tempered_nll(task, predicted, target)
    best, mean_nll = best_value(losses, usual=0.0)
    if mean_nll[0.0] - mean_nll[best] < LEAST_GAIN:
        best = 0.0
    if math.isinf(best):
        predictor.blend.set(0.0, 1.0)
    else:
        predictor.blend.set(1.0, best)
    return True


@torch.no_grad()
def predict_rows(predictor: Predictor, samples: Extracted) -> Outputs:
    """Outputs (T, N, O) of a model for extracted samples, before calibration, on the CPU."""
    device = device_of(predictor)
    values = []
    with evaluation_mode(predictor):
        for first in range(0, len(samples.targets), BATCH):
            with isolated_rng(0):  # the same sub-networks for all batches
                rows = samples.output[first : first + BATCH].to(device)
                outputs = predictor.head_outputs(rows, predictor.num_passes)
            values.append(outputs.values.cpu())
    weights = None if outputs.weights is None else outputs.weights.cpu()
    return Outputs(torch.cat(values, dim=1), weights)


def tempered_nll(task: Task, predicted: Tensor, target: Tensor) -> Tensor:
    """The NLL (N,) of probabilities (N, C) at their best temperature for these samples, in 64 bits."""
    if bool(predicted.isfinite().all()):
        predicted = scale(predicted, fit_temperature(predicted, target))
    nll = task.nll(predicted, target)
    assert nll is not None
    return nll.double()
