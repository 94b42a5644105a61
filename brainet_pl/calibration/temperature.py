"""Temperature scaling of an averaged prediction: softmax(log p̄ / τ), with τ fitted on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from brainet_pl.calibration.base import Calibrator
from brainet_pl.metrics.measures import check_classes

HIGHEST = 20.0  # temperature; the lowest is 1 / HIGHEST
# Standard deviation of log τ before any data. A held-out set of 20 to 70 rows without an error would ask for τ = 0, and
# thousands of rows outweigh the prior. Chosen on six tables, shown on seven others (docs/benchmarks/battery.md).
PRIOR = 0.35
STEPS = 60  # between τ = 1 and its limit, in which the first maximum is looked for
AT_ONCE = 6  # steps that are taken before the device is read


def scale(probs: Tensor, temperature: Tensor | float) -> Tensor:
    """Maps probabilities (…, C) to softmax(log p / τ): τ above 1 makes them less certain, and zeros stay (almost) zero.

    >>> scale(torch.tensor([0.8, 0.2]), 2.0)
    tensor([0.6667, 0.3333])
    """
    logs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return torch.as_tensor((logs / temperature).softmax(dim=-1))


def best_temperature(slope: Callable[[Tensor | float], Tensor], prior: float | None = PRIOR) -> Tensor:
    """The temperature () of the largest posterior, from the slope of a log-likelihood that is concave in β = 1/τ.

    log τ is normal around 0 with the deviation `prior`. Of several maxima it is the one nearest to τ = 1. The search
    stays on the device of the slope, which is read a few times.

    Args:
        slope: of the log-likelihood at β, the sum over samples, a tensor without dimensions.
        prior: None takes the largest likelihood.
    """
    sign = torch.where(slope(1.0) > 0, 1.0, -1.0).double()  # surer predictions, or less sure ones
    step = math.log(HIGHEST) / STEPS

    def rises(u: Tensor) -> Tensor:
        beta = (sign * u).exp()
        return sign * beta * slope(beta) > (0.0 if prior is None else u / prior**2)

    high = torch.full_like(sign, step * STEPS)
    for first in range(1, STEPS + 1, AT_ONCE):
        falls = torch.stack([~rises(torch.full_like(sign, step * i)) for i in range(first, first + AT_ONCE)])
        if bool(falls.any()):
            high = step * (first + falls.int().argmax()).double()
            break
    low = high - step
    for _ in range(30):
        middle = 0.5 * (low + high)
        up = rises(middle)
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
    return (-sign * 0.5 * (low + high)).exp()


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

    def slope(beta: Tensor | float) -> Tensor:
        return (chosen - ((beta * logs).softmax(dim=1) * logs).sum(dim=1)).sum()

    return best_temperature(slope, prior).float()


class TemperatureScaling(Calibrator):
    """Temperature scaling (Guo et al. 2017) of the averaged prediction, fitted after every validation of a fit.

    Until then the temperature is 1, which changes nothing. It has no settings.
    """

    few_numbers: ClassVar[bool] = True
    tau: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tau", torch.ones(()))

    @property
    def changes_predictions(self) -> bool:
        """Whether the temperature is another than 1."""
        return float(self.tau) != 1

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None = None) -> dict[str, Tensor]:
        """Find the temperature of the largest posterior, from probabilities (N, C)."""
        self.tau.copy_(fit_temperature(predicted, target))
        return {"temperature": self.tau}

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Maps averaged probabilities (B, C) to scaled ones (B, C); the answer never changes."""
        return scale(predicted, self.tau)

    def label(self) -> str:
        """Says in a few words, for figures, which temperature was found."""
        return f"after scaling, τ = {float(self.tau):.3g}"
