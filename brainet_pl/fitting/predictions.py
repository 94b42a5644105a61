"""What a model predicts of extracted samples before calibration, and what that costs at the best temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from brainet_pl._utils.rng import isolated_rng
from brainet_pl.calibration.label_scaling import scale_labels
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.features.extraction import Extracted
from brainet_pl.network.base import Outputs
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.tasks import MultiLabel, Task

BATCH = 512  # samples predicted at a time


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
    if isinstance(task, MultiLabel):
        predicted = scale_labels(predicted, target)
    elif bool(predicted.isfinite().all()):
        predicted = scale(predicted, fit_temperature(predicted, target))
    nll = task.nll(predicted, target)
    assert nll is not None
    return nll.double()
