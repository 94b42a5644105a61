"""Chooses what a prediction is made of: a new head, the network's own layer, a linear layer on the same features."""

from __future__ import annotations

import torch
from torch import Tensor

from brainet_pl.features.extraction import Extracted
from brainet_pl.fitting.build import base_logits_help
from brainet_pl.fitting.predictions import predict_rows, tempered_nll
from brainet_pl.network.base import Outputs
from brainet_pl.network.finalization import best_value
from brainet_pl.prediction.blend import Weights
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.tasks import Task
from brainet_pl.tasks.linear import SoftmaxLayer

NETWORK, LINEAR, HEAD, BOTH = Weights(1, 0), Weights(0, 0, 1), Weights(0, 1), Weights(0, 1 / 2, 1 / 2)
BESIDE_NETWORK = tuple(Weights(1, weight) for weight in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4))
LEAST_GAIN = 1e-4  # nats of mean NLL: what gains less than that over the network is not worth running
ROWS = 2048  # samples that tell which is best


@torch.no_grad()
def choose_blend(predictor: Predictor, layer: SoftmaxLayer | None, select: Extracted) -> None:
    """Weigh the head against the logits of the removed layer, where these are of the same classes, and a linear layer.

    Predictions are sums of weighted logits, each with the temperature that is best for it. The network as it was, and
    where there is none the mean of head and linear layer, stay unless another predicts better by more than a standard
    error, sample by sample.

    Args:
        predictor: the model; it predicts by what was chosen from now on.
        layer: a linear layer on the features of the training samples; None where there is none.
        select: samples that nothing was trained on.
    """
    predictor.blend.set(*HEAD)
    task, select = predictor.task, select.sample(ROWS)
    outputs, target = predict_rows(predictor, select), task.check(select.targets)
    base = None
    if base_logits_help(task, select):
        assert select.output.base_logits is not None
        base = task.base_outputs(select.output.base_logits)
    linear = None if layer is None else task.base_outputs(layer.logits(select.features))
    tried = [*([] if linear is None else [BOTH, LINEAR]), HEAD]
    if base is not None:
        tried = [NETWORK, *BESIDE_NETWORK, *tried]
    losses = {}
    for number, weights in enumerate(tried):
        losses[float(number)] = tempered_nll(task, _predicted(task, weights, outputs, base, linear), target)
    best, mean_nll = best_value(losses, usual=0.0)
    if base is not None and mean_nll[0.0] - mean_nll[best] < LEAST_GAIN:
        best = 0.0
    predictor.blend.set(*tried[int(best)], layer)


def _predicted(task: Task, weights: Weights, head: Outputs, base: Tensor | None, linear: Tensor | None) -> Tensor:
    """What a sum of weighted logits predicts, (N, C)."""
    others = [w * part for w, part in ((weights.base, base), (weights.linear, linear)) if w and part is not None]
    if not weights.head:
        return task.predictive(sum(others[1:], others[0]).unsqueeze(0), None)
    values = weights.head * head.values
    return task.predictive(sum(others, values), head.weights)


def describe_blend(weights: Weights) -> str:
    """What predictions are made of, in a few words.

    >>> describe_blend(BOTH), describe_blend(NETWORK), describe_blend(Weights(1, 0.25))
    ('the new head and a linear layer, half each', "the network's own layer alone", "the network's own logits and 0.25 \
times those of the new head")
    """
    if weights.base and weights.head:
        return f"the network's own logits and {weights.head:g} times those of the new head"
    if weights.base:
        return "the network's own layer alone"
    if weights.linear and weights.head:
        return "the new head and a linear layer, half each"
    return "a linear layer alone" if weights.linear else "the new head alone"
