"""Conformal prediction: sets of classes and intervals of numbers that hold the truth with a chosen probability.

A nonconformity says how badly a label fits a prediction. The k-th smallest one of n validation samples,
k = ⌈(n + 1)·level⌉, is a threshold that the next sample's label stays below with a probability of at least `level`,
whatever the model, as long as that sample comes from where the validation samples came from (Vovk et al. 2005). Sets
are the labels up to the threshold.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl._utils.parts import Part
from brainet_pl.calibration.base import Calibrator
from brainet_pl.distributed.collectives import total
from brainet_pl.distributed.epoch_buffer import EpochBuffer
from brainet_pl.metrics.measures import (
    BoundCoverage,
    BoundWidth,
    Measure,
    SetCoverage,
    SetSize,
    WorstClassCoverage,
    check_classes,
    check_numbers,
)
from brainet_pl.metrics.multilabel import LabelsFound, LabelsInSet, share_found
from brainet_pl.tasks import Classification, MultiLabel, Regression, Task

Method = Literal["auto", "lac", "aps", "raps", "fnr", "scaled", "quantile"]
FOLDS = 5  # of the validation data, where a calibrator learns from them too
SETS, INTERVALS, LABELS = ("lac", "aps", "raps"), ("scaled", "quantile"), ("fnr",)


# -- thresholds -------------------------------------------------------------------------------------------------------


def place_of_threshold(n: int, level: float) -> int:
    """⌈(n + 1)·level⌉, with the level as it is written: 0.7 is seven tenths, not the float beside it.

    >>> place_of_threshold(9, 0.7), place_of_threshold(10, 0.9), place_of_threshold(8, 0.9)
    (7, 10, 9)
    """
    return math.ceil((n + 1) * Fraction(repr(level)))


def threshold(values: Tensor, level: float) -> Tensor:
    """Nonconformities (N,) → the ⌈(N + 1)·level⌉-th smallest, or infinity where there are fewer; NaN counts as largest.

    >>> threshold(torch.arange(10.0), 0.8), threshold(torch.arange(3.0), 0.8)
    (tensor(8.), tensor(inf))
    """
    place = place_of_threshold(len(values), level)
    if place > len(values):
        return values.new_tensor(math.inf)
    return values.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).kthvalue(place).values


def miss_threshold(values: Tensor, level: float) -> Tensor:
    """Minus the probabilities of the labels that N samples have, (N, L), NaN elsewhere → the limit () of a set.

    Conformal risk control (Angelopoulos et al. 2022) of the false-negative rate. A set holds the labels of at most the
    limit. A sample loses the share of its labels that its set misses; the limit is the smallest for which the mean loss
    of N + 1 samples, the unseen one losing all, is at most 1 - level.

    >>> miss_threshold(torch.tensor([[-0.9, -0.2], [-0.8, torch.nan], [-0.7, -0.6], [-0.5, torch.nan]]), 0.5)
    tensor(-0.6000)
    """
    has = ~values.isnan()
    values, has = values[has.any(dim=1)], has[has.any(dim=1)]
    share = (1.0 / has.sum(dim=1, keepdim=True).double()).expand_as(has)[has]
    room = (len(values) + 1) * (1 - Fraction(repr(level))) - 1
    if room < 0:
        return values.new_tensor(math.inf)
    ordered, order = values[has].sort(descending=True)
    missed = share[order].cumsum(0) - share[order]  # by sets of this limit, of labels that fit worse
    first = torch.searchsorted(ordered.neg(), ordered.neg())  # equal ones are missed together, or not at all
    return ordered[missed[first] <= float(room) + 1e-9].min()


def least_samples(level: float) -> int:
    """The smallest n for which the threshold is finite: ⌈(n + 1)·level⌉ ≤ n.

    >>> least_samples(0.9), least_samples(0.95)
    (9, 19)
    """
    return math.ceil(1 / (1 - Fraction(repr(level)))) - 1


# -- nonconformities --------------------------------------------------------------------------------------------------


def least_ambiguous(probs: Tensor) -> Tensor:
    """LAC (Sadinle et al. 2019): probabilities (B, C) → (B, C) minus the probability of the class.

    Sets hold all classes of at least a certain probability; they are the smallest on average.
    """
    return -probs.float()


def tie_breaker(ordered: Tensor) -> Tensor:
    """Probabilities (B, C), the largest first → (B, 1) a number in [0, 1) for each row, as good as drawn, but its own.

    It is the fraction of 100·log(p₁/p₂). Coverage holds whatever this number is, and the same input always gets the
    same set.

    >>> tie_breaker(torch.tensor([[0.7, 0.3], [0.6, 0.4]])).squeeze(1)
    tensor([0.7298, 0.5465])
    """
    least = torch.finfo(torch.float32).tiny
    return (100 * (ordered[:, :1].clamp_min(least).log() - ordered[:, 1:2].clamp_min(least).log())).frac()


def adaptive(probs: Tensor, penalty: float = 0.0, free: int = 0) -> Tensor:
    """APS (Romano et al. 2020), RAPS with a penalty (Angelopoulos et al. 2021): (B, C) → (B, C).

    Σ of the probabilities down to this class, minus u times its own, minus 1, plus penalty·max(0, place - free) for the
    place of the class, from 1. The first and the third are minus what the classes behind it have together: summed from
    the end, it keeps its digits where the model is almost certain. u is not drawn, see `tie_breaker`.

    >>> adaptive(torch.tensor([[0.5, 0.2, 0.3]]))  # u = 0.0826
    tensor([[-0.5413, -0.0165, -0.2248]])
    """
    ordered, order = probs.float().sort(dim=1, descending=True, stable=True)
    behind = ordered.flip(1).cumsum(1).flip(1)[:, 1:]
    behind = torch.cat([behind, torch.zeros_like(ordered[:, :1])], dim=1)
    place = torch.arange(1, probs.shape[1] + 1, device=probs.device)
    scores = penalty * (place - free).clamp_min(0) - behind - tie_breaker(ordered) * ordered
    return torch.empty_like(scores).scatter(1, order, scores)


def half_widths(method: str, variance: Tensor, limit: Tensor | float, level: float) -> Tensor:
    """Variances (B,) and a threshold → (B,) half the width of the interval around the mean.

    "scaled": limit·σ. "quantile": z·σ + limit, where ±z·σ holds `level` of a Gaussian.
    """
    deviation = variance.float().sqrt()
    if method == "scaled":
        return limit * deviation
    return NormalDist().inv_cdf((1 + level) / 2) * deviation + limit


def residuals(method: str, predicted: Tensor, target: Tensor, level: float) -> Tensor:
    """Means and variances (B, 2) and targets (B,) → (B,) the limit with which `half_widths` just reaches the target."""
    away = (target - predicted[:, 0]).float().abs()
    if method == "scaled":
        return away / predicted[:, 1].float().sqrt()
    return away - half_widths(method, predicted[:, 1], 0.0, level)


# -- the part ---------------------------------------------------------------------------------------------------------


class UncalibratedBatch(NamedTuple):
    """A batch of validation data whose calibrator is not fitted yet.

    Attributes:
        numbers: (B,) the place of each sample in its set.
        predicted: averaged predictions, (B, C) or (B, 2).
        target: (B,).
        scores: name → (B,).
    """

    numbers: Tensor
    predicted: Tensor
    target: Tensor
    scores: dict[str, Tensor]

    def take(self, chosen: Tensor) -> UncalibratedBatch:
        """The samples (B,) for which this is true."""
        scores = {name: values[chosen] for name, values in self.scores.items()}
        return UncalibratedBatch(self.numbers[chosen], self.predicted[chosen], self.target[chosen], scores)


def fold_of(numbers: Tensor) -> Tensor:
    """Numbers of samples (B,) → (B,) a fold for each, which depends on nothing else and follows no pattern."""
    return (numbers * 2654435769 % 2**32) * FOLDS // 2**32


def cross_fitted(calibration: Calibrator, batches: Sequence[UncalibratedBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Validation batches → predictions as a user gets them, and targets, each by a calibrator that did not see it.

    One that was fitted to these very samples fits them better than those to come, and the more so the more it learns:
    with a matrix of 10 × 10, fitted to 300 samples, sets made for 90 % hold 81 %. So copies of it learn from all folds
    but one, and map that one. A collective where there are several processes: all hold a part of every fold.
    """
    folds = [fold_of(batch.numbers) for batch in batches]
    counts = total(torch.bincount(torch.cat(folds or [torch.empty(0, dtype=torch.long)]), minlength=FOLDS))
    for fold in range(FOLDS):
        refitted = calibration
        if 0 < counts[fold] < counts.sum():
            refitted = copy.deepcopy(calibration).quiet()
            for batch, own in zip(batches, folds, strict=True):
                others = batch.take(own != fold)
                refitted.observe(others.predicted, others.target, others.scores)
            refitted.finalize()
        for batch, own in zip(batches, folds, strict=True):
            part = batch.take(own == fold)
            yield refitted(part.predicted, part.scores), part.target


class Conformal(Part, DataSizedBuffers):
    """Sets of classes, or intervals of numbers, that hold the truth for at least `level` of the samples.

    Of several labels the sets hold at least the share `level` of the labels that a sample has, on average over samples
    that have some: conformal risk control of the false-negative rate.

    It learns from the validation data of a fit, after calibration, at the end of every validation. Predictions
    then have `set` (B, C), which always holds the most probable class, or `lower` and `upper` (B,). With too few
    validation samples for the level, sets hold all classes and intervals have no end. Without Lightning, `fit` it.

    >>> probs, labels = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).repeat(10, 1), torch.tensor([0, 1]).repeat(10)
    >>> sets = Conformal("lac", level=0.9).fit(probs, labels)
    >>> sets(torch.tensor([[0.95, 0.05], [0.65, 0.35]]))["set"]  # every class of at least the probability 0.6
    tensor([[ True, False],
            [ True, False]])

    Args:
        method: "lac", "aps" or "raps" for classes, "scaled" or "quantile" for numbers, "fnr" for several labels; "auto"
            is "lac", "scaled" or "fnr".
        level: The share of samples whose set or interval is to hold the truth, above 0 and below 1.
        per_class: A threshold for each class, from its own validation samples, so that the level holds for every class;
            sets are larger, and a class with few samples is in all of them.
        penalty: What "raps" adds for every place of a class behind the `free_places` most probable ones.
        free_places: Most probable classes that "raps" adds no penalty to.
    """

    may_be_missing: ClassVar[bool] = True  # a checkpoint without thresholds leaves them as they are
    limits: Tensor
    samples: Tensor

    def __init__(
        self,
        method: Method = "auto",
        level: float = 0.9,
        per_class: bool = False,
        penalty: float = 0.1,
        free_places: int = 1,
    ) -> None:
        super().__init__()
        checks.one_of("method of Conformal", method, ("auto", *SETS, *INTERVALS, *LABELS))
        self.method: Method = method
        self.level = checks.share("level", level)
        if not self.level:
            raise ValueError("expected a level above 0 and below 1, got 0: give the share to be covered, such as 0.9")
        self.per_class = checks.flag("per_class", per_class)
        self.penalty = checks.number("penalty", penalty, 0, "0 is the method aps")
        self.free_places = checks.whole("free_places", free_places, 0)
        self._observed = EpochBuffer()  # nonconformities and the thresholds that they belong to
        self._chosen: str = method
        self._uncalibrated: list[UncalibratedBatch] = []
        self._seen = False  # whether `samples` is known to be above 0
        self.register_buffer("limits", torch.full((1,), math.inf))
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """What was seen is what the checkpoint has."""
        self._seen = False

    def check(self, task: Task) -> None:
        """Refuse a task that the method is not made for; "auto" chooses by the task."""
        methods = {Classification: SETS, Regression: INTERVALS, MultiLabel: LABELS}
        known = next((found for kind, found in methods.items() if isinstance(task, kind)), ())
        if not known or self.method not in ("auto", *known):
            raise ValueError(
                f"expected a method of Conformal for {type(task).__name__} ({', '.join(known) or 'it has none'}), got "
                f"{self.method!r}: take one of these, or leave conformal out"
            )
        if self.per_class and known is not SETS:
            raise ValueError(
                f"expected per_class of Conformal for a classification, got a {type(task).__name__}: leave it out"
            )
        self._chosen = known[0] if self.method == "auto" else self.method
        if self.per_class and isinstance(task, Classification):
            self._widen(task.num_classes)

    def _widen(self, classes: int) -> None:
        """Make room for a threshold for each class."""
        if len(self.limits) != classes:
            self.limits = torch.full((classes,), math.inf, device=self.limits.device)

    # -- learning -----------------------------------------------------------------------------------------------------

    def nonconformity(self, final: Tensor, target: Tensor) -> Tensor:
        """Predictions as a user gets them, (B, C) or (B, 2), and targets (B,) → (B,) how badly they fit.

        Of several labels (B, L) with NaN for those that a sample has not, or that nobody knows.
        """
        if self._chosen in LABELS:
            return torch.where(target == 1, -final.float(), torch.nan)
        if self._chosen in SETS:
            check_classes(final, target)
            return self._of_classes(final).gather(1, target.long()[:, None]).squeeze(1)
        check_numbers(final, target)
        return residuals(self._chosen, final, target, self.level)

    def _of_classes(self, final: Tensor) -> Tensor:
        if self._chosen == "lac":
            return least_ambiguous(final)
        return adaptive(final, self.penalty if self._chosen == "raps" else 0.0, self.free_places)

    def observe(
        self, predicted: Tensor, target: Tensor, scores: Mapping[str, Tensor], numbers: Tensor | None = None
    ) -> None:
        """See a batch of the validation data of a fit.

        Args:
            predicted: (B, C) averaged probabilities, or (B, 2) means and variances.
            target: (B,).
            scores: all scores (B,), which a calibrator may want to know.
            numbers: (B,) the place of each sample in its set, where `finalize` will be given a calibrator; None where
                predictions are what a user gets.
        """
        if numbers is None:
            self._add(predicted, target)
        else:
            self._uncalibrated.append(
                UncalibratedBatch(numbers.to(target.device), predicted.detach(), target, dict(scores))
            )

    def _add(self, final: Tensor, target: Tensor) -> None:
        labels = target if self._chosen in SETS else target.new_zeros(len(target))
        self._observed.append({"values": self.nonconformity(final, target), "labels": labels.long()})

    def finalize(self, calibration: Calibrator | None = None) -> dict[str, Tensor]:
        """Take the thresholds of what was observed, and forget it; gives scalars to log as `val/conformal/<name>`."""
        batches, self._uncalibrated = self._uncalibrated, []
        for final, target in cross_fitted(calibration, batches) if calibration is not None else ():
            self._add(final, target)
        columns = self._observed.collect()
        if not columns:
            return {}
        values, labels = columns["values"], columns["labels"]
        parts = [values[labels == c] for c in range(len(self.limits))] if self.per_class else [values]
        # In place: a validation in inference mode would leave a tensor that nobody may write to later.
        limit_of = miss_threshold if self._chosen in LABELS else threshold
        self.limits.copy_(torch.stack([limit_of(part, self.level) for part in parts]))
        self.samples.fill_(len(values))
        self._seen = len(values) > 0
        endless = int(self.limits.isinf().sum())
        if endless:
            rank_zero_warn(self._few(min(int((part < math.inf).sum()) for part in parts), endless))
        elif self._chosen in SETS and len(labels) and bool((labels == labels[0]).all()):
            rank_zero_warn(
                f"expected validation samples of all classes for Conformal, got {len(labels)} of class "
                f"{int(labels[0])} only: the level is promised for that class alone; give other validation data"
            )
        return {"threshold": self.limits.max(), "samples": self.samples.float()}

    def _few(self, count: int, endless: int) -> str:
        what = "have no end" if self._chosen in INTERVALS else "hold all classes"
        if self.per_class:
            what = f"all hold the {endless} classes without a threshold"
        return (
            f"expected at least {least_samples(self.level)} validation samples{' of each class' * self.per_class} with "
            f"finite predictions for a level of {self.level:g}, got {count}: sets or intervals {what}; give more "
            "validation data, or a lower level"
        )

    def fit(self, final: Tensor, target: Tensor) -> Conformal:
        """Take the thresholds of predictions (N, C) or (N, 2) that a user gets, and targets (N,). Returns itself.

        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
        >>> sets = Conformal("lac", level=0.5).fit(probs, torch.tensor([0, 0, 0, 1]))
        >>> sets(torch.tensor([[0.95, 0.05]]))["set"]
        tensor([[ True, False]])
        """
        if self._chosen == "auto":
            raise ValueError(
                "expected a method of Conformal, got 'auto' outside a model: choose one of "
                f"{', '.join(SETS + INTERVALS)}"
            )
        if self.per_class and self._chosen in SETS:
            self._widen(final.shape[1])
        self._observed.reset()
        self._uncalibrated = []
        self._add(final, target)
        self.finalize()
        return self

    # -- predicting ---------------------------------------------------------------------------------------------------

    def forward(self, final: Tensor) -> dict[str, Tensor]:
        """Predictions as a user gets them → `set` (B, C) of them that are in it, or `lower` and `upper` (B,).

        What is not a number may be anything: the set of all classes, or an interval without an end.
        """
        if not torch.compiler.is_compiling() and not self._has_samples():
            rank_zero_warn(
                "expected Conformal to have seen validation data, got none: sets hold all classes, and intervals have "
                "no end; fit with validation data, or call Conformal.fit"
            )
        if self._chosen in LABELS:
            return {"set": ~(-final.float() > self.limits)}
        if self._chosen in SETS:
            inside = ~(self._of_classes(final) > self.limits)
            return {"set": inside.scatter(1, final.argmax(dim=1, keepdim=True), True)}
        half = half_widths(self._chosen, final[:, 1], self.limits, self.level).clamp_min(0.0)
        half = half.nan_to_num(nan=math.inf, posinf=math.inf)
        lower, upper = final[:, 0] - half, final[:, 0] + half
        return {
            "lower": lower.nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=math.inf),
            "upper": upper.nan_to_num(nan=math.inf, neginf=-math.inf, posinf=math.inf),
        }

    def _has_samples(self) -> bool:
        """Whether it has seen validation data; a GPU is asked until it has, and no more."""
        self._seen = self._seen or int(self.samples) > 0
        return self._seen

    # -- measuring ----------------------------------------------------------------------------------------------------

    def measures(self, task: Task) -> list[Measure]:
        """Fresh metrics of what `measured` gives and targets."""
        if isinstance(task, MultiLabel):
            return [LabelsFound(), LabelsInSet()]
        if isinstance(task, Classification):
            return [SetCoverage(), SetSize(), WorstClassCoverage(task.num_classes)]
        return [BoundCoverage(), BoundWidth()]

    @staticmethod
    def measured(found: Mapping[str, Tensor]) -> Tensor:
        """What `forward` gave as one tensor: sets (B, C), or bounds (B, 2)."""
        return found["set"] if "set" in found else torch.stack([found["lower"], found["upper"]], dim=1)

    @staticmethod
    def answers(found: Mapping[str, Tensor], target: Tensor) -> dict[str, Tensor]:
        """What `forward` gave as columns (B,) of a record: `set_size` and `covered`, or `lower` and `upper`."""
        if "set" not in found:
            return dict(found)
        if target.dim() == 2:
            return {"set_size": found["set"].sum(dim=1), "covered": share_found(found["set"], target).nan_to_num(1.0)}
        held = found["set"].gather(1, target.long()[:, None]).squeeze(1)
        return {"set_size": found["set"].sum(dim=1), "covered": held.float()}
