"""Temperature scaling of an averaged prediction: softmax(log p̄ / τ), with τ fitted on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from brainet_pl.calibration.base import Calibrator
from brainet_pl.metrics.measures import check_classes

LOWEST, HIGHEST = 0.05, 20.0
# Standard deviation of log τ before any data. A held-out set of 20 to 70 rows without an error would ask for τ = 0, and
# thousands of rows outweigh the prior. Chosen on six tables, shown on seven others (docs/battery.md).
PRIOR = 0.35
STEPS = 60  # between τ = 1 and its limit, in which the first maximum is looked for


def scale(probs: Tensor, temperature: Tensor | float) -> Tensor:
    """Maps probabilities (…, C) to softmax(log p / τ): τ above 1 makes them less certain, and zeros stay (almost) zero.

    >>> scale(torch.tensor([0.8, 0.2]), 2.0)
    tensor([0.6667, 0.3333])
    """
    logs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return torch.as_tensor((logs / temperature).softmax(dim=-1))


def best_temperature(slope: Callable[[float], float], prior: float | None = PRIOR) -> float:
    """The temperature of the largest posterior, from the slope of a log-likelihood that is concave in β = 1/τ.

    log τ is normal around 0 with the deviation `prior`. Of several maxima it is the one nearest to τ = 1.

    Args:
        slope: of the log-likelihood at β, the sum over samples.
        prior: None takes the largest likelihood.
    """
    sign = 1 if slope(1.0) > 0 else -1  # surer predictions, or less sure ones
    edge = math.log(1.0 / LOWEST if sign > 0 else HIGHEST)

    def rises(u: float) -> bool:
        beta = math.exp(sign * u)
        return sign * beta * slope(beta) > (0.0 if prior is None else u / prior**2)

    steps = [edge * i / STEPS for i in range(1, STEPS + 1)]
    high = next((u for u in steps if not rises(u)), edge)
    low = high - edge / STEPS
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rises(middle) else (low, middle)
    return math.exp(-sign * 0.5 * (low + high))


def fit_temperature(probs: Tensor, target: Tensor, prior: float | None = PRIOR) -> Tensor:
    """Finds the τ of the largest posterior, from probabilities (N, C) and labels (N,); see `best_temperature`.

    >>> sure = torch.tensor([[0.9, 0.1]]).repeat(4, 1)  # right three times of four
    >>> scale(sure[0], fit_temperature(sure, torch.tensor([0, 0, 0, 1]), prior=None))
    tensor([0.7500, 0.2500])
    >>> scale(sure[0], fit_temperature(sure, torch.tensor([0, 0, 0, 1])))  # so few say little
    tensor([0.8754, 0.1246])
    """
    check_classes(probs, target)
    if not len(probs) or not probs.isfinite().all():
        raise ValueError(
            f"expected at least one prediction and all of them finite, got {len(probs)} with "
            f"{int((~probs.isfinite()).sum())} NaN or infinite numbers: fit the temperature on validation data"
        )
    logs = probs.double().clamp_min(torch.finfo(torch.float32).tiny).log()
    chosen = logs.gather(1, target.long()[:, None]).squeeze(1)

    def slope(beta: float) -> float:
        return float((chosen - ((beta * logs).softmax(dim=1) * logs).sum(dim=1)).sum())

    return torch.tensor(best_temperature(slope, prior), dtype=torch.float32, device=probs.device)


class TemperatureScaling(Calibrator):
    """Temperature scaling (Guo et al. 2017) of the averaged prediction, fitted after every validation of a fit.

    Until then the temperature is 1, which changes nothing. It has no settings.
    """

    tau: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tau", torch.ones(()))

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None = None) -> dict[str, Tensor]:
        """Find the temperature of the largest posterior; NaN among predictions (N, C) is an error."""
        self.tau.copy_(fit_temperature(predicted, target))
        return {"temperature": self.tau}

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Maps averaged probabilities (B, C) to scaled ones (B, C); the answer never changes."""
        return scale(predicted, self.tau)

    def label(self) -> str:
        """Says in a few words, for figures, which temperature was found."""
        return f"after scaling, τ = {float(self.tau):.3g}"
