"""Isotonic calibration of an averaged prediction: a step-wise rising function of each class's probability."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.search import places
from brainet_pl.calibration.affine import finite_rows
from brainet_pl.calibration.base import Calibrator


def fit_isotonic(probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (N, C) and labels (N,) → knots (C, K) and their values (C, K); short curves repeat their last."""
    from sklearn.isotonic import IsotonicRegression  # half a second, which every other model can do without

    p, y = probs.double().cpu().numpy(), target.cpu().numpy()
    curves = []
    for c in range(p.shape[1]):
        fitted = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(p[:, c], (y == c).astype(float))
        curves.append((fitted.X_thresholds_, fitted.y_thresholds_))
    longest = max(len(x) for x, _ in curves)
    padded = [[np.pad(part, (0, longest - len(part)), mode="edge") for part in curve] for curve in curves]
    knots, values = (torch.tensor(np.stack([pair[i] for pair in padded]), dtype=torch.float32) for i in (0, 1))
    return knots, values


def interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Reads the curve of each class at (B, C): values (C, K) at knots (C, K), linear between and flat beyond them."""
    at = x.T.contiguous()
    right = places(knots, at).clamp(1, max(1, knots.shape[1] - 1)).clamp_max(knots.shape[1] - 1)
    left = (right - 1).clamp_min(0)
    x0, x1, y0, y1 = (t.gather(1, i) for t in (knots, values) for i in (left, right))
    share = ((at - x0) / (x1 - x0).clamp_min(torch.finfo(x.dtype).tiny)).clamp(0.0, 1.0)
    return (y0 + share * (y1 - y0)).T


class IsotonicScaling(Calibrator, DataSizedBuffers):
    """Isotonic regression of each class against the others (Zadrozny & Elkan 2002), brought to a sum of 1.

    It makes no assumption but order, and needs some thousand validation samples; answers may change. A share of
    1 / (N + 1) of the prediction stays as it was, so that nothing is ever impossible. It has no settings.
    """

    knots: Tensor
    values: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.empty(0, 0))
        self.register_buffer("values", torch.empty(0, 0))
        self.register_buffer("kept", torch.ones(()))

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None = None) -> dict[str, Tensor]:
        """Find a curve for each class, from probabilities (N, C) that are finite."""
        probs, target = finite_rows(predicted, target)
        if len(target):
            with torch.inference_mode(False):  # their size changes, and a checkpoint may be loaded into them later
                knots, values = fit_isotonic(probs.clone(), target.clone())
                self.knots, self.values = knots.to(self.kept.device), values.to(self.kept.device)
            self.kept.fill_(1.0 / (len(target) + 1))
        return {"knots": torch.tensor(float(self.knots.shape[1]))}

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Maps averaged probabilities (B, C) by the curve of each class, and norms them to (B, C)."""
        if not self.knots.numel():
            return predicted
        found = interpolate(predicted, self.knots.to(predicted), self.values.to(predicted))
        total = found.sum(dim=1, keepdim=True)
        even = torch.full_like(found, 1.0 / found.shape[1])  # as scikit-learn has it, where no class is possible
        scaled = torch.where(total > 0, found / total.clamp_min(torch.finfo(found.dtype).tiny), even)
        return torch.lerp(scaled, predicted, self.kept.to(predicted))

    def label(self) -> str:
        """Says in a few words, for figures, what was done to the prediction."""
        return "after isotonic calibration"
