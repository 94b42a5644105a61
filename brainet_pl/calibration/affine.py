"""Vector and Dirichlet scaling of an averaged prediction: softmax(W·log p̄ + b), fitted on validation data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl.calibration.base import Calibrator
from brainet_pl.calibration.temperature import fit_temperature
from brainet_pl.tasks import Classification, Task

Floats = NDArray[np.float64]
MIN_PROBABILITY = 1e-12  # a probability of 0 would be -∞, whatever the weights
# Prior deviation of a class's own weight and bias around temperature scaling; chosen on six tables, shown on seven
# others (docs/howto/calibration.md).
OWN_SPREAD = 0.1


def fit_affine(
    probs: Tensor, target: Tensor, spread: float | None, own_spread: float = OWN_SPREAD
) -> tuple[Tensor, Tensor]:
    """Probabilities (N, C) and labels (N,) → W (C, C) and b (C,) of the largest posterior.

    The prior is temperature scaling: the diagonal of W is Gaussian around 1/τ, b around 0, both with the deviation
    `own_spread`. What lies off the diagonal is Gaussian around 0 with the deviation `spread`, or is 0 where that is
    None. With many samples this is the largest likelihood; with few it is temperature scaling, which few samples leave
    near to what was predicted.
    """
    centre = 1.0 / float(fit_temperature(probs, target))
    logs, y = probs.double().clamp_min(MIN_PROBABILITY).log().cpu().numpy(), target.long().cpu().numpy()
    n, c = logs.shape
    hot = np.eye(c)[y]
    scale = np.where(np.eye(c) > 0, own_spread**-2, 1.0 if spread is None else spread**-2)

    def unpack(values: Floats) -> tuple[Floats, Floats]:
        weights = values[:-c].reshape(c, c) if spread is not None else np.diag(values[:-c])
        return weights, values[-c:]

    def objective(values: Floats) -> tuple[float, Floats]:
        weights, bias = unpack(values)
        logits = logs @ weights.T + bias
        loss = (logsumexp(logits, axis=1) - logits[np.arange(n), y]).sum()
        gap = softmax(logits, axis=1) - hot
        away = weights - centre * np.eye(c)
        loss += 0.5 * (scale * away**2).sum() + 0.5 * own_spread**-2 * (bias**2).sum()
        slope, slope_bias = gap.T @ logs + scale * away, gap.sum(axis=0) + own_spread**-2 * bias
        return loss, np.r_[slope.ravel() if spread is not None else np.diag(slope), slope_bias]

    start = np.r_[centre * np.eye(c).ravel() if spread is not None else np.full(c, centre), np.zeros(c)]
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-12})
    weights, bias = unpack(found.x)
    return torch.from_numpy(weights.copy()), torch.from_numpy(bias.copy())


class VectorScaling(Calibrator):
    """Vector scaling (Guo et al. 2017): softmax(w·log p̄ + b), a weight and a bias for each class, from validation data.

    Unlike a temperature it can correct one class and not another, and may change answers. A prior holds it near to
    temperature scaling, which some hundred samples of a class outweigh. It has no settings.
    """

    spread: float | None = None  # of weights off the diagonal; None has none
    weight: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(1))
        self.register_buffer("bias", torch.zeros(1))

    def check(self, task: Task) -> None:
        """Make room for the classes."""
        super().check(task)
        assert isinstance(task, Classification)
        self.weight, self.bias = torch.eye(task.num_classes), torch.zeros(task.num_classes)

    @property
    def changes_predictions(self) -> bool:
        """Whether the weights are others than those that leave predictions as they are."""
        eye = torch.eye(len(self.weight)).to(self.weight)
        return bool((self.weight != eye).any() or self.bias.any())

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None = None) -> dict[str, Tensor]:
        """Weights and biases of the largest posterior, from probabilities (N, C) that are finite."""
        weight, bias = fit_affine(predicted, target, self.spread)
        self.weight.copy_(weight)
        self.bias.copy_(bias)
        return {"weight": self.weight.diagonal().mean(), "bias": self.bias.abs().max()}

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Maps averaged probabilities (B, C) to scaled ones (B, C); the answer may change."""
        logs = predicted.clamp_min(MIN_PROBABILITY).log()
        return (logs @ self.weight.to(logs).T + self.bias.to(logs)).softmax(dim=-1)

    def label(self) -> str:
        """Says in a few words, for figures, what was done to the prediction."""
        return "after vector scaling"


class DirichletScaling(VectorScaling):
    """Dirichlet calibration (Kull et al. 2019): softmax(W·log p̄ + b), a matrix that can tell classes that are confused.

    Args:
        spread: Prior standard deviation of the weights off the diagonal; a larger one learns more, and needs more
            validation samples. It takes the place of the published penalty.
    """

    def __init__(self, spread: float = 0.03) -> None:
        super().__init__()
        self.spread = checks.above_zero("spread", spread)

    def label(self) -> str:
        """Says in a few words, for figures, what was done to the prediction."""
        return "after Dirichlet calibration"
