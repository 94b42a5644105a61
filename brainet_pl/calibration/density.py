"""Predictions that fade as an input leaves the training data, by the density of its features.

    τ(x) = τ · u(x)^-κ, and beyond all known data, u < u₀: τ · u^-κ · (u / u₀)^-ρ

u(x) is the share of validation samples at least as strange as x: from 1 in the middle of the data to next to nothing
far outside. How fast predictions fade, κ, can't be learned from known data, among which the strange are rare and no
worse predicted than they seem: it is the fastest that known data, and harmlessly perturbed known data, can afford, at a
price that one sets. The same holds for ρ, which acts where next to no known sample is, and so costs next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl.calibration.base import Calibrator
from brainet_pl.calibration.temperature import best_temperature, fit_temperature
from brainet_pl.distributed.epoch_buffer import EpochBuffer
from brainet_pl.metrics.measures import one_hot
from brainet_pl.scores import Generative, ScoreSet, Stages
from brainet_pl.scores.reference import FEW, TAIL, Surprise, fit_surprise
from brainet_pl.tasks import Classification, Regression, Task

FASTEST = 1.0  # κ and ρ at the most
BEYOND = 1.0  # nats beyond the surprise of which one known sample is expected, where ρ begins
FOLDS = 5
HARMLESS = 0.01  # rise of the error that a harmless perturbation may have
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
    answer = one_hot(probs.argmax(dim=-1), probs)
    slower = 1.0 / factor[:, None].to(probs.dtype)
    prior = prior.to(probs.dtype)
    return logs * slower, (1.0 - slower) * (prior + answer * (prior.max() - prior)).log(), answer


def fading_factor(surprise: Tensor, kappa: Tensor | float, rho: Tensor | float, beyond: Tensor) -> Tensor:
    """Surprises (B,) → f (B,), by which the temperature of each input is multiplied: u^-κ, and (u/u₀)^-ρ beyond u₀.

    >>> fading_factor(torch.tensor([0.0, 2.0, 6.0]), 0.1, 1.0, torch.tensor(5.0)).log()
    tensor([0.0000, 0.2000, 1.6000])
    """
    return (kappa * surprise + rho * (surprise - beyond).clamp_min(0.0)).exp().clamp_max(MOST)


def faded_losses(probs: Tensor, target: Tensor, prior: Tensor, temperature: Tensor, factor: Tensor) -> Tensor:
    """The negative log-likelihood (N,) of labels (N,) under `fade`, in 64 bits."""
    logs, offset, _ = _parts(probs.double(), prior, factor)
    return F.cross_entropy(logs / temperature + offset, target.long(), reduction="none")


def widened_losses(predicted: Tensor, target: Tensor, temperature: Tensor | float, factor: Tensor) -> Tensor:
    """The negative log-likelihood (N,) of targets (N,), means and variances (N, 2); variances are times (τ·f)²."""
    mean, variance = predicted.double().unbind(dim=1)
    variance = variance * (temperature * factor.double()).square()
    return 0.5 * ((target.double() - mean).square() / variance + (2 * math.pi * variance).log())


def fit_width(predicted: Tensor, target: Tensor) -> Tensor:
    """The τ () of the largest posterior by which deviations are multiplied, from means and variances (N, 2)."""
    mean, variance = predicted.double().unbind(dim=1)
    total = ((target.double() - mean).square() / variance).sum()
    # With β = 1/τ the log-likelihood is N·log β - β²/2·Σ squares.
    return best_temperature(lambda beta: len(target) / beta - beta * total)


def largest_affordable(affordable: Callable[[Tensor], Tensor], most: Tensor) -> Tensor:
    """The largest κ () up to `most` that is affordable, by bisection, or 0; nothing is read from the device."""
    low, high = torch.where(affordable(most), most, 0.0), most
    for _ in range(20):
        middle = 0.5 * (low + high)
        fine = affordable(middle)
        low, high = torch.where(fine, middle, low), torch.where(fine, high, middle)
    return low


def upper_mean(values: Tensor) -> Tensor:
    """The upper end () of what samples (N,) leave open about their mean; infinity for fewer than two."""
    if len(values) < 2:
        return values.new_tensor(math.inf)
    upper: Tensor = values.mean() + SURE * values.std() / len(values) ** 0.5
    return upper


def is_harmless(before: Tensor, after: Tensor) -> Tensor:
    """Errors (N,) of samples and of a perturbed copy of them → () whether the copy is not clearly harder.

    Errors are 0 and 1 for classes, and squared for numbers. The mean may rise by a point, or by a hundredth of itself
    for numbers, beyond one standard error.
    """
    rise = (after - before).double()
    limit = HARMLESS * (before.double().mean() if before.is_floating_point() else 1.0)
    lower: Tensor = rise.mean() - rise.std() / len(rise) ** 0.5
    return lower <= limit


def fit_tail(score: Tensor, start: float) -> Surprise:
    """The surprise of scores (N,), less `start` and not below 0."""
    surprise = fit_surprise(score)
    return surprise._replace(heights=(surprise.heights - start).clamp_min(0.0))


def surprise_of_others(score: Tensor, start: float) -> Tensor:
    """Scores (N,) → (N,) the surprise of each by the scores of other folds, as that of new samples will be."""
    if len(score) <= FOLDS:
        return fit_tail(score, start)(score)
    order = torch.randperm(len(score), generator=torch.Generator().manual_seed(0)).to(score.device)
    found = torch.empty(len(score), device=score.device)
    for fold in range(FOLDS):
        inside, others = order[fold::FOLDS], torch.cat([order[k::FOLDS] for k in range(FOLDS) if k != fold])
        found[inside] = fit_tail(score[others], start)(score[inside])
    return found


# -- the calibrator ---------------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """Predictions (N, C) or (N, 2) of some samples, their targets (N,) and the score (N,)."""

    predicted: Tensor
    target: Tensor
    score: Tensor

    def finite(self) -> Scored:
        """The samples whose prediction and score are finite."""
        fine = self.predicted.isfinite().all(dim=1) & self.score.isfinite()
        return Scored(self.predicted[fine], self.target[fine], self.score[fine].float())

    @property
    def errors(self) -> Tensor:
        """Whether each answer is wrong, or the squared error of a number, (N,)."""
        if self.target.is_floating_point():
            return (self.predicted[:, 0] - self.target).square()
        return (self.predicted.argmax(dim=1) != self.target).long()


def harmless_copies(columns: Mapping[str, Tensor]) -> list[Scored]:
    """Perturbed copies of samples that are predicted nearly as well as the samples, the copy 0, themselves.

    Args:
        columns: predicted, target and score of all copies, and the number of the copy of each row.
    """
    if not columns:
        return []
    numbers = range(int(columns["copy"].max()) + 1)
    rows = [columns["copy"] == number for number in numbers]
    first, *copies = (Scored(*(columns[name][chosen] for name in Scored._fields)) for chosen in rows)
    if not copies or len(first.target) < 2:
        return []
    harmless = torch.stack([is_harmless(first.errors, copy.errors) for copy in copies]).tolist()
    return [copy.finite() for copy, fine in zip(copies, harmless, strict=True) if fine]


class DensityScaling(Calibrator, DataSizedBuffers):
    """Probabilities fade towards the class prior, and variances widen, as inputs leave the training data.

    The temperature of an input is τ·u^-κ, u the share of validation samples at least as strange as it, with an
    exponential tail beyond the strangest tenth. κ is as large as validation data allow at the price `cost`, of which
    the upper end of a 95 % interval counts: few samples fade less. What is stranger than any known sample fades faster,
    with another exponent, ρ, which is chosen in the same way at half the price.

    Harmless noise fades next to nothing. Perturbed copies of the features of validation samples, as long as the model
    predicts them nearly as well, count among the validation samples; only what is stranger than nine tenths of all
    these fades, and κ must be affordable for each copy. Where the score reads other layers than the head, or the head
    adds to the logits of a removed layer, there are no such copies: then κ goes by validation samples alone, and noise
    that does no harm may fade predictions. The answer never changes.

    Works for every head, without unknown data, from the checkpoint alone. Before any validation data, predictions stay
    as they are.

    >>> scaling = DensityScaling(cost=0.04)
    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).repeat(150, 1)
    >>> labels = torch.tensor([0, 1]).repeat(150)
    >>> labels[::7] = 1 - labels[::7]  # every seventh answer is wrong
    >>> scaling.observe(probs, labels, {"generative": torch.linspace(0, 1, 300)})
    >>> _ = scaling.finalize()
    >>> scaling(probs[:2], {"generative": torch.tensor([0.0, 50.0])}).amax(1).round(decimals=2)  # usual, and far out
    tensor([0.9000, 0.5000])

    Args:
        cost: How much worse known inputs may be predicted than by temperature scaling: a share of its negative
            log-likelihood on validation data, or of one nat for a regression, where that number has no zero.
        score: Name of the score that tells how unlike the training data an input is; null is the density of the
            features of all stages of the backbone, or of the inputs where there is none, and adds it to the model.
    """

    tasks: ClassVar[tuple[type[Task], ...]] = (Classification, Regression)
    needs_validation: ClassVar[bool] = True
    learns_from_copies: ClassVar[bool] = True
    few_numbers: ClassVar[bool] = True
    tau: Tensor
    kappa: Tensor
    rho: Tensor
    beyond: Tensor
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
        self._observed_copies = EpochBuffer()
        self._copies: dict[str, Tensor] = {}  # of the last validation epoch
        for name, value in (("tau", 1.0), ("kappa", 0.0), ("rho", 0.0), ("beyond", 0.0), ("slope", 0.0)):
            self.register_buffer(name, torch.tensor(value))
        for name in ("prior", "knots", "heights"):
            self.register_buffer(name, torch.empty(0))

    @property
    def changes_predictions(self) -> bool:
        """Whether it has seen validation data."""
        return bool(len(self.knots))

    @property
    def score_name(self) -> str:
        """The score that it reads."""
        return self._own if self.score is None and self._own is not None else self.score or "generative"

    def add_required_scores(self, scores: ScoreSet, model: nn.Module | None) -> None:
        """Give the model a density to read, unless it has the score."""
        if self.score is not None:
            if self.score not in scores.before_calibration:
                known = ", ".join(scores.before_calibration)
                raise ValueError(
                    f"expected score of DensityScaling to be one of {known}, got {self.score!r}: add "
                    "the part that gives it to scores, or leave it out"
                )
            return
        own = make_density(model)
        if own.key not in scores:
            scores.add(own)
        self._own = own.name_in_model(next(iter(own.units)))

    def observe_copy(self, copy: int, predicted: Tensor, target: Tensor, scores: Mapping[str, Tensor]) -> None:
        """Keep what is predicted of a perturbed copy of validation samples."""
        if self.score_name not in scores:
            return
        numbers = torch.full_like(target, copy, dtype=torch.long)
        columns = {"predicted": predicted, "target": target, "score": scores[self.score_name], "copy": numbers}
        self._observed_copies.append(columns)

    def finalize(self) -> dict[str, Tensor]:
        """`fit` to all that was observed, and forget it; copies stay for refits to parts of the same samples."""
        found = self._observed_copies.collect()
        self._copies = {name: values.cpu() for name, values in found.items()} or self._copies
        return super().finalize()

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None) -> dict[str, Tensor]:
        """Find τ, κ and ρ from predictions (N, C) or (N, 2), targets (N,) and the score (N,)."""
        assert score is not None
        sets = [Scored(predicted, target, score).finite(), *harmless_copies(self._copies)]
        self._warn_of_scores(sets[0].score, len(score))
        every, sizes = Scored(*map(torch.cat, zip(*sets, strict=True))), [len(part.score) for part in sets]
        start = -math.log(TAIL) if len(sets) > 1 else 0.0  # copies tell what is harmless: it need not fade
        self.knots, self.heights, self.slope = (part.to(self.tau.device) for part in fit_tail(every.score, start))
        classes = predicted.shape[1] if not target.is_floating_point() else 0
        counts = torch.bincount(target.long(), minlength=classes) if classes else predicted.new_zeros(0)
        self.prior = ((counts + 1) / (counts + 1).sum()).to(self.tau)
        tau = fit_temperature(predicted, target) if classes else fit_width(predicted, target)
        strange = surprise_of_others(every.score, start)
        beyond = torch.full_like(tau, math.log(len(every.score)) + BEYOND - start)

        def losses(kappa: Tensor | float, rho: Tensor | float) -> tuple[Tensor, ...]:
            """The loss of every sample, known ones first, then those of each copy."""
            factor = fading_factor(strange, kappa, rho, beyond)
            if classes:
                found = faded_losses(every.predicted, every.target, self.prior, tau, factor)
            else:
                found = widened_losses(every.predicted, every.target, tau, factor)
            return torch.split(found, sizes)

        plain = losses(0.0, 0.0)
        limits = [self.cost * (loss.mean().clamp_min(LEAST_NLL) if classes else 1.0) for loss in plain]

        def affordable(kappa: Tensor | float, rho: Tensor, share: float) -> Tensor:
            triples = zip(losses(kappa, rho), plain, limits, strict=True)
            return torch.stack([upper_mean(faded - loss) <= share * limit for faded, loss, limit in triples]).all()

        most = torch.full_like(tau, FASTEST if bool((every.score != every.score[0]).any()) else 0.0)
        rho = largest_affordable(lambda value: affordable(0.0, value, 0.5), most)
        kappa = largest_affordable(lambda value: affordable(value, rho, 1.0), most)
        for buffer, value in ((self.tau, tau), (self.kappa, kappa), (self.rho, rho), (self.beyond, beyond)):
            buffer.copy_(value)
        price = (losses(kappa, rho)[0] - plain[0]).mean().float()
        return {"temperature": self.tau, "fading": self.kappa, "fading_beyond": self.rho, "cost": price}

    def _warn_of_scores(self, score: Tensor, count: int) -> None:
        """Say what is doubtful about finite scores (N,) of `count` validation samples."""
        if len(score) < count:
            self._warn(
                "nan scores",
                f"left out {count - len(score)} of {count} validation samples with NaN in {self.score_name}",
            )
        if len(score) < FEW:
            self._warn(
                "few scores",
                f"predictions fade by the strangest of {len(score)} validation samples: expected at least {FEW}; so "
                "few say only roughly how strange an input is, give more of them",
            )
        if len(score) and bool((score == score[0]).all()):
            self._warn("equal", f"nothing fades: {self.score_name} is the same for all {len(score)} validation samples")

    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Fades probabilities (B, C) to the prior; widens the variances of means and variances (B, 2)."""
        if not len(self.knots):
            return predicted
        surprise = Surprise(self.knots, self.heights, self.slope)(scores[self.score_name])
        factor = fading_factor(surprise, self.kappa, self.rho, self.beyond)
        if len(self.prior):
            return fade(predicted, self.prior, self.tau, factor)
        widened = predicted[:, 1] * (self.tau * factor).square().to(predicted.dtype)
        return torch.stack([predicted[:, 0], widened], dim=1)

    def label(self) -> str:
        """The temperature in the middle of the data, and how fast it rises."""
        return f"after scaling by density, τ = {float(self.tau):.3g}, κ = {float(self.kappa):.2g}"


def density_of(scores: ScoreSet) -> str | None:
    """The name of the score of a density among the scores of a model, that of all stages first; None where none is."""
    for kind in (Stages, Generative):
        for score in scores:
            if isinstance(score, kind):
                return score.name_in_model(next(iter(score.units)))
    return None


def make_density(model: nn.Module | None) -> Generative | Stages:
    """The density for a backbone: of all stages of a convolutional network, else of the features that the head reads.

    The last layer mostly finds unlikely what the prediction is unsure of anyway; early layers tell more.
    """
    if model is not None and any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return Stages()
    return Generative()
