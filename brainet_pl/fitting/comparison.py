"""What a model gains: samples that nothing was chosen by, beside what a user would have had without it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from brainet_pl.features.extraction import Extracted
from brainet_pl.fitting.blend import describe_blend
from brainet_pl.fitting.build import base_logits_help
from brainet_pl.fitting.predictions import predict_rows, tempered_nll
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.tasks.linear import SoftmaxLayer

LEVEL = 5e-4  # nats of mean NLL: smaller differences are none, however small their standard error
TITLES = {"network": "the network's own layer", "linear": "a linear layer on the same features"}


class Comparison(NamedTuple):
    """The mean NLL of held-out samples by who predicts them, each at its best temperature, and what the model gains.

    Attributes:
        nll: name → mean NLL: "swapped", and where they could be had "network" (its own layer) and "linear" (a linear
            layer on the same features).
        gains: name of another → by how much the swapped model's NLL is lower, and the standard error of that.
        samples: number of held-out samples.
        used: what predictions are made of.
        missing: why there is no comparison with the network's own layer; nothing where there is one.
    """

    nll: dict[str, float]
    gains: dict[str, tuple[float, float]]
    samples: int
    used: str = "the new head alone"
    missing: str = ""

    def __str__(self) -> str:
        """One line for a user.

        >>> gains = {"linear": (0.012, 0.004)}
        >>> print(Comparison({"swapped": 0.25, "linear": 0.262}, gains, 300, missing="it has none"))
        predicts by the new head alone; NLL of 300 samples that nothing was chosen by, each at its best temperature: \
0.250, better by 0.012 ± 0.004 than a linear layer on the same features (0.262); the network's own layer is not \
compared: it has none
        """
        parts = [f"{self.nll['swapped']:.3f}"]
        for name, (gain, error) in self.gains.items():
            parts.append(f"{compare_words(gain, error)} {TITLES[name]} ({self.nll[name]:.3f})")
        text = f"NLL of {self.samples:,} samples that nothing was chosen by, each at its best temperature: "
        line = f"predicts by {self.used}; {text}{', '.join(parts)}"
        return f"{line}; the network's own layer is not compared: {self.missing}" if self.missing else line


def compare_words(gain: float, error: float) -> str:
    """Whether a gain is one, by its standard error.

    >>> compare_words(0.012, 0.004), compare_words(-0.012, 0.004), compare_words(0.003, 0.004)
    ('better by 0.012 ± 0.004 than', 'worse by 0.012 ± 0.004 than', 'level (± 0.004) with')
    """
    if abs(gain) <= max(error, LEVEL):
        return f"level (± {error:.3f}) with"
    return f"{'better' if gain > 0 else 'worse'} by {abs(gain):.3f} ± {error:.3f} than"


@torch.no_grad()
def compare(predictor: Predictor, layer: SoftmaxLayer | None, samples: Extracted) -> Comparison:
    """Compare a model on samples that nothing was chosen by with the network's own layer and with a linear layer."""
    task = predictor.task
    target = task.check(samples.targets)
    outputs = predict_rows(predictor, samples)
    predicted = {"swapped": task.predictive(outputs.values, outputs.weights)}
    missing = why_not_network(predictor, samples)
    if not missing and samples.output.base_logits is not None:
        network = task.base_predicted(samples.output.base_logits)
        assert network is not None
        predicted["network"] = network
    if layer is not None:
        predicted["linear"] = layer(samples.features)
    losses = {name: tempered_nll(task, values, target) for name, values in predicted.items()}
    gains = {}
    for name, loss in losses.items():
        if name != "swapped":
            gap = loss - losses["swapped"]
            gains[name] = float(gap.mean()), float(gap.std()) / math.sqrt(len(gap))
    mean_nll = {name: float(loss.mean()) for name, loss in losses.items()}
    return Comparison(mean_nll, gains, len(target), describe_blend(predictor.blend.weights), missing)


def why_not_network(predictor: Predictor, samples: Extracted) -> str:
    """Why the network's own layer can't be compared with, or nothing where it can."""
    logits, layer = samples.output.base_logits, predictor.backbone.base_layer
    if layer is None and logits is None:
        return "no layer was removed"
    if logits is None:
        kind = "a convolution" if isinstance(layer, nn.modules.conv._ConvNd) else f"a {type(layer).__name__}"
        return f"the removed layer is {kind} that gives no row of logits for each sample"
    if not predictor.task.base_fits(logits.shape[1]):
        return f"it has {logits.shape[1]:,} classes, the data {predictor.task.out_features:,}"
    if not base_logits_help(predictor.task, samples):
        return "its logits say no more of these classes than their shares do"
    return ""
