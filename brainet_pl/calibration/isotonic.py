"""Isotonic calibration of an averaged prediction: a step-wise rising function of each class's probability."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.search import places
from brainet_pl.calibration.affine import MIN_PROBABILITY
from brainet_pl.calibration.base import Calibrator

FOLDS = 5
WEIGHTS = 11  # mixing weights that are tried, from 0 to 1
# How many samples the plain prediction is taken at its word for, and the standard errors by which a mixture must be
# better on all others; chosen on six tables, shown on seven others (docs/howto/calibration.md).
PLAIN_SAMPLES, STANDARD_ERRORS = 100, 2.0


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


def apply_curves(probs: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Probabilities (B, C) by the curve of each class, brought to a sum of 1."""
    mapped = interpolate(probs, knots.to(probs), values.to(probs))
    total = mapped.sum(dim=1, keepdim=True)
    even = torch.full_like(mapped, 1.0 / mapped.shape[1])  # as scikit-learn has it, where no class is possible
    return torch.where(total > 0, mapped / total.clamp_min(torch.finfo(mapped.dtype).tiny), even)


def choose_weight(probs: Tensor, target: Tensor) -> float:
    """The weight of the curves in a mixture with the plain prediction: 0 leaves it as it was.

    Each fold of the samples is mapped by curves of the other folds. A mixture counts by its gain in log-likelihood over
    the plain prediction, less `STANDARD_ERRORS` of it, less what it would lose on `PLAIN_SAMPLES` further samples whose
    labels come from the plain prediction. So few samples, or few errors among many, leave the prediction alone.
    """
    n, probs, target = len(target), probs.double(), target.long()
    if n < FOLDS:
        return 0.0
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(probs.device)
    weights = torch.linspace(0.0, 1.0, WEIGHTS, dtype=torch.double, device=probs.device)
    gains, losses = [], []
    for fold in range(FOLDS):
        inside, others = order[fold::FOLDS], torch.cat([order[k::FOLDS] for k in range(FOLDS) if k != fold])
        plain = probs[inside].clamp_min(MIN_PROBABILITY)
        curved = torch.lerp(apply_curves(plain, *fit_isotonic(probs[others], target[others])), plain, 1 / (n + 1))
        ratios = (torch.lerp(plain, curved, weight).log() - plain.log() for weight in weights)
        pairs = [(ratio.gather(1, target[inside, None])[:, 0], -(plain * ratio).sum(dim=1)) for ratio in ratios]
        gains.append(torch.stack([gain for gain, _ in pairs]))
        losses.append(torch.stack([loss for _, loss in pairs]))
    gain = torch.cat(gains, dim=1)  # (W, N)
    surplus = gain.sum(1) - STANDARD_ERRORS * n**0.5 * gain.std(1) - PLAIN_SAMPLES * torch.cat(losses, dim=1).mean(1)
    return float(weights[surplus.argmax()])


class IsotonicScaling(Calibrator, DataSizedBuffers):
    """Isotonic regression of each class against the others (Zadrozny & Elkan 2002), brought to a sum of 1.

    It makes no assumption but order, and needs some thousand validation samples; answers may change. It is mixed with
    the prediction as it was, with a weight that cross-validation within these samples chooses: few samples leave the
    prediction alone. At least a share of 1 / (N + 1) of it stays, so that nothing is ever impossible. It has no
    settings.
    """

    knots: Tensor
    values: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.empty(0, 0))
        self.register_buffer("values", torch.empty(0, 0))
        self.register_buffer("kept", torch.ones(()))

    @property
    def changes_predictions(self) -> bool:
        """Whether the curves have any weight."""
        return float(self.kept) < 1

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None = None) -> dict[str, Tensor]:
        """Find a curve for each class and the weight of all of them, from probabilities (N, C)."""
        with torch.inference_mode(False):  # their size changes, and a checkpoint may be loaded into them later
            knots, values = fit_isotonic(predicted.clone(), target.clone())
            self.knots, self.values = knots.to(self.kept.device), values.to(self.kept.device)
        self.kept.fill_(1.0 - choose_weight(predicted, target) * len(target) / (len(target) + 1))
        return {"knots": torch.tensor(float(self.knots.shape[1])), "weight": 1.0 - self.kept}

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Maps averaged probabilities (B, C) by the curve of each class, and norms them to (B, C)."""
        if not self.knots.numel():
            return predicted
        return torch.lerp(apply_curves(predicted, self.knots, self.values), predicted, self.kept.to(predicted))

    def label(self) -> str:
        """Says in a few words, for figures, what was done to the prediction."""
        return "after isotonic calibration"
