"""The least that a head should beat: a linear layer on the same features, fitted in seconds.

Features are centred and scaled, each by itself or all alike: columns of a table need the first, and pixels that hardly
ever vary the second. Which, and the weight of the penalty, is what predicts best: a fifth of the rows, held back, or of
numbers each row by all others, exact and free. No random number is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PredictFunction = Callable[[Tensor], Tensor]  # features (B, d) → what `Task.predictive` gives
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)  # of squared weights, beside the mean loss
MOST_WORK = 25 * 10**7  # rows · features · classes: more would take longer than some ten seconds on one core
SEARCH_WORK = 10**7  # the same of the rows that choose the scaling and the penalty, by eight fits
MOST_RIDGE_WORK = 5 * 10**9  # rows · features²
ROWS_PER_CLASS = 5


@dataclass(frozen=True)
class SoftmaxLayer:
    """A linear layer of logits: features (B, d) → probabilities (B, C).

    Attributes:
        center: (d,) what is subtracted from features.
        weight: (C, d).
        bias: (C,).
    """

    center: Tensor
    weight: Tensor
    bias: Tensor

    def logits(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to logits (B, C)."""
        return F.linear(x.to(self.center) - self.center, self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Features (B, d) → probabilities (B, C)."""
        return self.logits(x).softmax(dim=1)


@dataclass(frozen=True)
class Scaling:
    """Brings features to mean 0: subtracts a mean (d,) and multiplies by a scale (d,)."""

    mean: Tensor
    scale: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        """Features (B, d) → scaled ones."""
        return (values.to(self.mean) - self.mean) * self.scale


def scalings(x: Tensor) -> list[Scaling]:
    """What brings features (N, d) to mean 0 and variance 1: each by itself, constant ones to 0; all alike."""
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    each = torch.where(std > 1e-6 * (1 + mean.abs()), 1 / std.clamp_min(1e-30), torch.zeros_like(std))
    alike = (1 / std.square().mean().sqrt().clamp_min(1e-30)).expand_as(std)
    return [Scaling(mean, scale) for scale in (each, alike)]


def fit_softmax(x: Tensor, target: Tensor, classes: int) -> SoftmaxLayer | None:
    """Multinomial logistic regression on features (N, d) and labels (N,), by L-BFGS; gives probabilities (B, C).

    None where it would take too long, or where there are too few rows for so many classes.
    """
    rows = min(len(x), softmax_rows(x.shape[1], classes))
    if rows < ROWS_PER_CLASS * classes:
        return None
    x, target = _spread(x, rows).float(), _spread(target, rows)
    few = max(SEARCH_WORK // (x.shape[1] * classes), ROWS_PER_CLASS * classes, 1000)
    part, labels = _spread(x, few), _spread(target, few)
    held = torch.arange(len(part), device=x.device) % 5 == 4
    found: list[tuple[float, Scaling, float, Tensor]] = []
    for prepare in scalings(x):
        z = _with_one(prepare(part))
        weight = z.new_zeros(z.shape[1], classes)
        for penalty in reversed(PENALTIES):  # each starts where the stronger one ended
            weight = _descend(z[~held], labels[~held], penalty, weight)
            found.append((float(F.cross_entropy(z[held] @ weight, labels[held])), prepare, penalty, weight))
    _, best, penalty, start = min(found, key=lambda one: one[0])
    # A penalty stands for what is known without data: beside a mean over more rows it counts less.
    weight = _descend(_with_one(best(x)), target, penalty * len(part) / len(x), start)
    return SoftmaxLayer(best.mean, (best.scale[:, None] * weight[:-1]).t().contiguous(), weight[-1])


def softmax_rows(features: int, classes: int) -> int:
    """How many rows `fit_softmax` takes at the most."""
    return MOST_WORK // (features * classes)


def ridge_rows(features: int) -> int:
    """How many rows `fit_ridge` takes at the most."""
    return MOST_RIDGE_WORK // features**2


def _spread(values: Tensor, rows: int) -> Tensor:
    """At most so many rows of (N, …), spread evenly over all."""
    return values[:: -(-len(values) // rows)]


def _with_one(z: Tensor) -> Tensor:
    return F.pad(z, (0, 1), value=1.0)


def _descend(z: Tensor, target: Tensor, penalty: float, start: Tensor) -> Tensor:
    """The weights of least cross-entropy and penalty; the last row of weights is the bias and goes free."""
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(z @ weight, target) + penalty * weight[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach()


def fit_ridge(x: Tensor, target: Tensor) -> PredictFunction | None:
    """Ridge regression on features (N, d) and numbers (N,); gives mean and variance (B, 2).

    The penalty and the variance are those of leave-one-out errors. None where there are too few rows to tell.
    """
    if len(x) < 3:
        return None
    x, target = (_spread(values, ridge_rows(x.shape[1])).double() for values in (x, target))
    center = target.mean()
    y = target - center
    found: list[tuple[float, Scaling, Tensor]] = []
    for prepare in scalings(x):
        u, s, vt = torch.linalg.svd(prepare(x), full_matrices=False)
        along = u.t() @ y
        for penalty in (1e-6, *PENALTIES, 1.0, 10.0):
            shrink = s**2 / (s**2 + penalty * len(x))
            leverage = (u.square() @ shrink) + 1 / len(x)  # the mean is learned too
            errors = (y - u @ (shrink * along)) / (1 - leverage).clamp_min(1e-6)
            weight = vt.t() @ (torch.where(s > 0, shrink / s.clamp_min(1e-30), torch.zeros_like(s)) * along)
            found.append((float(errors.square().mean()), prepare, weight))
    variance, best, weight = min(found, key=lambda one: one[0])

    def predict(values: Tensor) -> Tensor:
        mean = center + best(values) @ weight
        return torch.stack([mean, torch.full_like(mean, max(variance, 1e-30))], dim=1)

    return predict
