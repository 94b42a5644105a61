"""A temperature for each of several labels: σ(log-odds / τ_l), fitted on validation data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from brainet_pl.calibration.base import Calibrator
from brainet_pl.calibration.temperature import best_temperature
from brainet_pl.tasks import MultiLabel, Task
from brainet_pl.tasks.multilabel import log_odds


def fit_label_temperature(odds: Tensor, target: Tensor) -> Tensor:
    """The τ () of the largest posterior, from log-odds (N,) and targets (N,) of 0 and 1; see `best_temperature`.

    >>> fit_label_temperature(torch.tensor([2.0, 2.0, -2.0]), torch.tensor([1.0, 1.0, 0.0])) < 1  # all are right
    tensor(True)
    """
    odds, target = odds.double(), target.double()

    def slope(beta: Tensor | float) -> Tensor:
        return ((target - (beta * odds).sigmoid()) * odds).sum()

    return best_temperature(slope).float()


def scale_labels(predicted: Tensor, target: Tensor) -> Tensor:
    """Probabilities (N, L) at the one temperature that is best for these samples, whose targets are (N, L)."""
    odds, known = log_odds(predicted), ~target.isnan() & predicted.isfinite()
    return (odds / fit_label_temperature(odds[known], target[known]).to(odds)).sigmoid()


class LabelScaling(Calibrator):
    """A temperature that all labels share, and for each label one of its own, as far as its samples say so.

    The temperature of a label is a priori that of all: a label with few known samples keeps it. The order of samples
    under a label never changes. It has no settings.
    """

    tasks: ClassVar[tuple[type[Task], ...]] = (MultiLabel,)
    tau: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tau", torch.ones(1))

    def check(self, task: Task) -> None:
        """Make room for the labels."""
        super().check(task)
        assert isinstance(task, MultiLabel)
        self.tau = torch.ones(task.num_labels)

    @property
    def changes_predictions(self) -> bool:
        """Whether a temperature is another than 1."""
        return bool((self.tau != 1).any())

    def has_target(self, target: Tensor) -> Tensor:
        """Which samples (N,) have a known label."""
        return ~target.isnan().all(dim=1)

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None = None) -> dict[str, Tensor]:
        """Find the temperatures, from probabilities (N, L) and targets (N, L)."""
        odds, known = log_odds(predicted), ~target.isnan()
        shared = fit_label_temperature(odds[known], target[known])
        for label, rows in enumerate(known.T):
            own = fit_label_temperature(odds[rows, label] / shared, target[rows, label])
            self.tau[label] = shared * own
        return {"temperature": shared}

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Maps averaged probabilities (B, L) to scaled ones (B, L)."""
        return (log_odds(predicted) / self.tau.to(predicted)).sigmoid()

    def label(self) -> str:
        """Says in a few words, for figures, what was done to the prediction."""
        return f"after scaling, τ = {float(self.tau.min()):.3g} to {float(self.tau.max()):.3g}"
