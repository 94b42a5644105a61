"""Temperature scaling of an averaged prediction: softmax(log p̄ / τ), with τ fitted on validation data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from brainet_pl.calibration.base import Calibrator
from brainet_pl.metrics.measures import check_classes

LOWEST, HIGHEST = 0.05, 20.0  # a validation set without an error would ask for τ = 0


def scale(probs: Tensor, temperature: Tensor | float) -> Tensor:
    """Maps probabilities (…, C) to softmax(log p / τ): τ above 1 makes them less certain, and zeros stay (almost) zero.

    >>> scale(torch.tensor([0.8, 0.2]), 2.0)
    tensor([0.6667, 0.3333])
    """
    logs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return torch.as_tensor((logs / temperature).softmax(dim=-1))


def fit_temperature(probs: Tensor, target: Tensor) -> Tensor:
    """Finds the τ of the least negative log-likelihood, from probabilities (N, C) and labels (N,).

    The likelihood is concave in β = 1/τ, so its slope Σ_n (log p_n,y - E_softmax(β·log p)[log p_n]) has one zero, and
    bisection finds it whatever the data.

    >>> sure = torch.tensor([[0.9, 0.1]]).repeat(4, 1)  # right three times of four
    >>> tau = fit_temperature(sure, torch.tensor([0, 0, 0, 1]))
    >>> scale(sure[0], tau)
    tensor([0.7500, 0.2500])
    """
    check_classes(probs, target)
    if not len(probs) or not probs.isfinite().all():
        raise ValueError(
            f"expected at least one prediction and all of them finite, got {len(probs)} with "
            f"{int((~probs.isfinite()).sum())} NaN or infinite numbers: fit the temperature on validation data"
        )
    logs = probs.double().clamp_min(torch.finfo(torch.float32).tiny).log()
    chosen = logs.gather(1, target.long()[:, None]).squeeze(1)
    low, high = 1.0 / HIGHEST, 1.0 / LOWEST
    for _ in range(40):
        beta = 0.5 * (low + high)
        slope = (chosen - ((beta * logs).softmax(dim=1) * logs).sum(dim=1)).sum()
        low, high = (beta, high) if slope > 0 else (low, beta)
    return torch.tensor(2.0 / (low + high), dtype=torch.float32, device=probs.device)


class TemperatureScaling(Calibrator):
    """Temperature scaling (Guo et al. 2017) of the averaged prediction, fitted after every validation of a fit.

    Until then the temperature is 1, which changes nothing. It has no settings.
    """

    tau: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tau", torch.ones(()))

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None = None) -> dict[str, Tensor]:
        """Find the temperature of the least negative log-likelihood; NaN among predictions (N, C) is an error."""
        self.tau.copy_(fit_temperature(predicted, target))
        return {"temperature": self.tau}

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Maps averaged probabilities (B, C) to scaled ones (B, C); the answer never changes."""
        return scale(predicted, self.tau)

    def label(self) -> str:
        """Says in a few words, for figures, which temperature was found."""
        return f"after scaling, τ = {float(self.tau):.3g}"
