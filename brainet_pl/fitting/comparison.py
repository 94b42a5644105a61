"""What a head gains: held-out samples as it predicts them, beside what a user would have had without it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl.features.extraction import Extracted
from brainet_pl.features.training import SAMPLE_ROWS
from brainet_pl.fitting.blend import predict_rows, tempered_nll
from brainet_pl.fitting.samples import enough_to_choose
from brainet_pl.fitting.train import train
from brainet_pl.network.base import HeadInputs
from brainet_pl.network.laplace import Laplace
from brainet_pl.network.training import TrainingSettings
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.tasks import Task

MOST_FOR_LAPLACE = 4096  # features up to which there is a Laplace approximation: its covariance is their square
TITLES = {
    "network": "the network's own layer",
    "linear": "linear layer on the same features",
    "laplace": "the same with a Laplace approximation",
}


class Comparison(NamedTuple):
    """The mean NLL of held-out samples by who predicts them, each at its best temperature, and what the head gains.

    Attributes:
        nll: name → mean NLL: "swapped", and where they could be had "network" (its own layer), and on the same features
            "linear" (a linear layer) and "laplace" (one with a Gaussian over its weights).
        gains: name of another → by how much the swapped model's NLL is lower, and the standard error of that.
        samples: number of held-out samples.
    """

    nll: dict[str, float]
    gains: dict[str, tuple[float, float]]
    samples: int

    def __str__(self) -> str:
        """One line for a user.

        >>> print(Comparison({"swapped": 0.25, "linear": 0.262}, {"linear": (0.012, 0.004)}, 300))
        NLL of 300 held-out samples, each at its best temperature: swapped 0.250; linear layer on the same features \
0.262 (gained 0.012 ± 0.004)
        """
        parts = [f"swapped {self.nll['swapped']:.3f}"]
        for name, (gain, error) in self.gains.items():
            verb = "gained" if gain >= 0 else "worse by"
            parts.append(f"{TITLES[name]} {self.nll[name]:.3f} ({verb} {abs(gain):.3f} ± {error:.3f})")
        return f"NLL of {self.samples:,} held-out samples, each at its best temperature: " + "; ".join(parts)


@torch.no_grad()
def compare(predictor: Predictor, training: Extracted, held_out: Extracted, has_base_logits: bool) -> Comparison:
    """Compare a model on held-out samples with the network's own layer, and linear layers on the same features."""
    task = predictor.task
    target = task.check(held_out.targets)
    outputs = predict_rows(predictor, held_out)
    predicted = {"swapped": task.predictive(outputs.values, outputs.weights)}
    if has_base_logits and held_out.output.base_logits is not None:
        network = task.base_predicted(held_out.output.base_logits)
        assert network is not None
        predicted["network"] = network
    linear = task.linear(training.features, training.targets)
    if linear is not None:
        predicted["linear"] = linear(held_out.features)
        if training.features.shape[1] <= MOST_FOR_LAPLACE:
            sample = training.sample(SAMPLE_ROWS)
            predicted["laplace"] = _predict_by_laplace(task, sample, held_out, predictor.num_passes)
    losses = {name: tempered_nll(task, values, target) for name, values in predicted.items()}
    gains = {}
    for name, loss in losses.items():
        if name != "swapped":
            gap = loss - losses["swapped"]
            gains[name] = float(gap.mean()), float(gap.std()) / math.sqrt(len(gap))
    mean_nll = {name: float(loss.mean()) for name, loss in losses.items()}
    return Comparison(mean_nll, gains, len(target))


def _predict_by_laplace(task: Task, training: Extracted, held_out: Extracted, passes: int) -> Tensor:
    """Probabilities (N, C) of held-out samples by a linear layer whose weights have a Gaussian, fitted to samples."""
    head = Laplace().build(training.features.shape[1], task.out_features)
    inside = HeadInputs(training.features, task.check(training.targets))
    outside = HeadInputs(held_out.features, task.check(held_out.targets))
    settings = TrainingSettings(max_epochs=100, patience=5, batch_size=128, learning_rate=3e-3)
    with torch.enable_grad():
        train(head, task, inside, outside, settings, passes=1)

    def nll(outputs: Tensor, weights: Tensor | None, targets: Tensor) -> Tensor:
        losses = task.nll(task.predictive(outputs, weights), targets)
        assert losses is not None
        return losses

    enough = None if enough_to_choose(held_out) is None else outside
    head.eval().finalize(inside, enough, nll, passes)
    outputs = head.passes(outside.x, passes)
    return task.predictive(outputs.values, outputs.weights)
