"""Predictions that fade as an input leaves the training data, by the density of its features.

    τ(x) = τ · u(x)^-κ

u(x) is the share of validation samples at least as strange as x: from 1 in the middle of the data to next to nothing
far outside. How fast predictions fade, κ, can't be learned from known data, among which the strange are rare and no
worse predicted than they seem: it is the fastest that known data can afford, at a price that one sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl.calibration.base import Calibrator
from brainet_pl.calibration.temperature import best_temperature
from brainet_pl.scores import Generative, ScoreSet, Stages
from brainet_pl.scores.reference import FEW, Surprise, fit_surprise
from brainet_pl.tasks import Classification, Regression, Task

FASTEST = 1.0  # κ at the most
SURE = 1.64  # standard errors that are added to the price: it holds in 95 of 100 cases
MOST = 1e4  # times the temperature in the middle of the data, at the most
LEAST_NLL = 0.05  # nats that the price is a share of at the least: a model without an error on validation data has 0


# -- pure functions ---------------------------------------------------------------------------------------------------


def fade(probs: Tensor, prior: Tensor, temperature: Tensor | float, factor: Tensor) -> Tensor:
    """Probabilities (B, C) → softmax(log p / (τ·f) + (1 - 1/f)·log π): at f = 1 scaled by τ, at f = ∞ the prior π.

    So that the answer stays, it has at least as much of the prior as any other class.

    Args:
        probs: (B, C).
        prior: (C,) shares of the classes, none of them 0.
        temperature: τ, a number.
        factor: (B,) f, at least 1.

    >>> fade(torch.tensor([[0.8, 0.2]]), torch.tensor([0.5, 0.5]), 1.0, torch.tensor([2.0]))
    tensor([[0.6667, 0.3333]])
    """
    logs, offset, answer = _parts(probs, prior, factor)
    faded = (logs / temperature + offset).softmax(dim=-1)
    # Rounding may make two classes equal that are nearly so: the answer keeps a last bit more.
    return faded * (1 + 2 * torch.finfo(faded.dtype).eps * answer)


def _parts(probs: Tensor, prior: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p / f, (1 - 1/f)·log π, and 1 for the answer and 0 for all else, each (B, C)."""
    logs = probs.clamp_min(torch.finfo(torch.float32).tiny).log()
    answer = F.one_hot(probs.argmax(dim=-1), probs.shape[-1]).to(probs.dtype)
    slower = 1.0 / factor[:, None].to(probs.dtype)
    prior = prior.to(probs.dtype)
    return logs * slower, (1.0 - slower) * (prior + answer * (prior.max() - prior)).log(), answer


def fit_faded(probs: Tensor, target: Tensor, prior: Tensor, factor: Tensor) -> tuple[float, Tensor]:
    """The best τ for given factors, as in `fit_temperature`, and the negative log-likelihood (N,) of each sample.

    Args:
        probs: (N, C).
        target: (N,) labels.
        prior: (C,).
        factor: (N,) at least 1.
    """
    logs, offset, _ = _parts(probs.double(), prior, factor)
    chosen = logs.gather(1, target.long()[:, None]).squeeze(1)

    def slope(beta: float) -> float:
        return float((chosen - ((beta * logs + offset).softmax(dim=1) * logs).sum(dim=1)).sum())

    tau = best_temperature(slope)
    return tau, F.cross_entropy(logs / tau + offset, target.long(), reduction="none")


def fit_widened(predicted: Tensor, target: Tensor, factor: Tensor) -> tuple[float, Tensor]:
    """The best τ, as in `fit_temperature`, and the NLL (N,) of each sample, for means and variances (N, 2).

    Variances are multiplied by (τ·f)².
    """
    mean, variance = predicted.double().unbind(dim=1)
    variance = variance * factor.double().square()
    squares = (target.double() - mean).square() / variance
    count, total = len(target), float(squares.sum())
    # With β = 1/τ the log-likelihood is N·log β - β²/2·Σ squares.
    tau = best_temperature(lambda beta: count / beta - beta * total)
    scale = tau**2
    return tau, 0.5 * (squares / scale + (2 * math.pi * scale * variance).log())


# -- the calibrator ---------------------------------------------------------------------------------------------------


class DensityScaling(Calibrator, DataSizedBuffers):
    """Probabilities fade towards the class prior, and variances widen, as inputs leave the training data.

    The temperature of an input is τ·u^-κ, u the share of validation samples at least as strange as it, with an
    exponential tail beyond the strangest tenth. κ is as large as validation data allow at the price `cost`, of which
    the upper end of a 95 % interval counts: few samples fade less; τ is fitted anew for every κ. The answer
    never changes. Works for every head, without unknown data, from the checkpoint alone; before any validation data,
    predictions stay as they are.

    >>> scaling = DensityScaling(cost=0.04)
    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).repeat(150, 1)
    >>> labels = torch.tensor([0, 1]).repeat(150)
    >>> labels[::7] = 1 - labels[::7]  # every seventh answer is wrong
    >>> scaling.observe(probs, labels, {"generative": torch.linspace(0, 1, 300)})
    >>> _ = scaling.finalize()
    >>> scaling(probs[:2], {"generative": torch.tensor([0.0, 50.0])}).amax(1).round(decimals=2)  # usual, and far out
    tensor([0.9200, 0.5000])

    Args:
        cost: How much worse known inputs may be predicted than by temperature scaling: a share of its negative
            log-likelihood on validation data, or of one nat for a regression, where that number has no zero.
        score: Name of the score that tells how unlike the training data an input is; null is the density of the
            features of all stages of the backbone, or of the inputs where there is none, and adds it to the model.
    """

    tasks: ClassVar[tuple[type[Task], ...]] = (Classification, Regression)
    needs_validation: ClassVar[bool] = True
    tau: Tensor
    kappa: Tensor
    prior: Tensor
    knots: Tensor
    heights: Tensor
    slope: Tensor

    def __init__(self, cost: float = 0.01, score: str | None = None) -> None:
        super().__init__()
        self.cost = checks.at_least("cost", cost, 0, "such as 0.01")
        if not isinstance(score, str | None):
            raise ValueError(f"expected score to be the name of one, got {checks.shown(score)}: give a name, or none")
        self.score = score
        self._own: str | None = None
        self._warned = False
        for name, value in (("tau", 1.0), ("kappa", 0.0), ("slope", 0.0)):
            self.register_buffer(name, torch.tensor(value))
        for name in ("prior", "knots", "heights"):
            self.register_buffer(name, torch.empty(0))

    @property
    def score_name(self) -> str:
        """The score that it reads."""
        return self._own if self.score is None and self._own is not None else self.score or "generative"

    def add_required_scores(self, scores: ScoreSet, model: nn.Module | None) -> None:
        """Give the model a density to read, unless it has the score."""
        if self.score is not None:
            if self.score not in scores.units:
                raise ValueError(
                    f"expected score of DensityScaling to be one of {', '.join(scores.units)}, got {self.score!r}: add "
                    "the part that gives it to scores, or leave it out"
                )
            return
        own = make_density(model)
        if own.key not in scores:
            scores.add(own)
        self._own = own.name_in_model(next(iter(own.units)))

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None) -> dict[str, Tensor]:
        """Find κ and τ from predictions (N, C) or (N, 2), targets (N,) and the score (N,)."""
        assert score is not None
        if len(target) < FEW and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"predictions fade by the strangest of {len(target)} validation samples: expected at least {FEW}; so "
                "few say only roughly how strange an input is, give more of them"
            )
        surprise = fit_surprise(score)
        self.knots, self.heights, self.slope = (part.to(self.tau.device) for part in surprise)
        classes = predicted.shape[1] if not target.is_floating_point() else 0
        counts = torch.bincount(target.long(), minlength=classes) if classes else predicted.new_zeros(0)
        self.prior = ((counts + 1) / (counts + 1).sum()).to(self.tau)
        strange = surprise(score)

        def losses(kappa: float) -> tuple[float, Tensor]:
            factor = (kappa * strange).exp().clamp_max(MOST)
            if classes:
                return fit_faded(predicted, target, self.prior, factor)
            return fit_widened(predicted, target, factor)

        _, plain = losses(0.0)
        limit = self.cost * (max(float(plain.mean()), LEAST_NLL) if classes else 1.0)

        def affordable(kappa: float) -> bool:
            """Whether the price stays below its limit, at the upper end of what these samples leave open."""
            price = losses(kappa)[1] - plain
            noise = float(price.std()) / len(price) ** 0.5 if len(price) > 1 else math.inf
            return float(price.mean()) + SURE * noise <= limit

        low, high = 0.0, FASTEST
        if affordable(high):
            low = high
        for _ in range(20 if low < high else 0):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if affordable(middle) else (low, middle)
        tau, faded = losses(low)
        self.tau.fill_(tau)
        self.kappa.fill_(low)
        return {"temperature": self.tau, "fading": self.kappa, "cost": (faded - plain).mean().float()}

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Fades probabilities (B, C) to the prior; widens the variances of means and variances (B, 2)."""
        if not len(self.knots):
            return predicted
        surprise = Surprise(self.knots, self.heights, self.slope)(scores[self.score_name])
        factor = (self.kappa * surprise).exp().clamp_max(MOST)
        if len(self.prior):
            return fade(predicted, self.prior, self.tau, factor)
        widened = predicted[:, 1] * (self.tau * factor).square().to(predicted.dtype)
        return torch.stack([predicted[:, 0], widened], dim=1)

    def label(self) -> str:
        """The temperature in the middle of the data, and how fast it rises."""
        return f"after scaling by density, τ = {float(self.tau):.3g}, κ = {float(self.kappa):.2g}"


def make_density(model: nn.Module | None) -> Generative | Stages:
    """The density for a backbone: of all stages of a convolutional network, else of the features that the head reads.

    The last layer mostly finds unlikely what the prediction is unsure of anyway; early layers tell more.
    """
    if model is not None and any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return Stages()
    return Generative()
