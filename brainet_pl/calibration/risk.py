"""Risk control: a model answers where it may, abstains elsewhere, and at most a chosen share of its answers is wrong.

Learn-then-test (Angelopoulos et al. 2021) of selective classification. A threshold of the confidence is tested by the
calibration rows that it would answer: n of them, k wrong. Were the true share of wrong answers above `error`, k or
fewer would come with a probability of at most P(Binomial(n, error) ≤ k), an exact p-value. Thresholds are fixed before
any data is seen and tested from the strictest on. Each has a part of `delta`, and what is rejected hands its part on to
the next (the fallback procedure, Wiens 2003): the probability that any threshold passes wrongly is at most `delta`,
whatever the model. The least strict threshold that passes is taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import bdtr
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.framework import rank_zero_warn

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]
ERROR, DELTA = 0.02, 0.05  # what is promised where nobody says otherwise
USUAL = (ERROR, 0.05, 0.1, 0.2)  # errors that are tried where nobody has chosen one
ON_CURVE = np.geomspace(0.002, 0.5, 25)  # errors of the curve in a report
STEPS = 8  # thresholds for each tenth of the doubt, 1 - confidence
DOUBTS = 10.0 ** (-np.arange(3 * STEPS, -1, -1) / STEPS)  # from 0.001 to 1, the strictest first
LIMITS = (1 - DOUBTS).astype(np.float32)  # the confidence from which on there is an answer
START = 14  # the threshold 0.944: an answer as sure as this is right often enough for most promises
START_PART = 0.5  # of delta, for this threshold; the others share the rest evenly
NEVER = math.inf  # the limit of what is not answered
UNKNOWN = -1.0  # the confidence of rows that the verdict calls unknown: below every limit
LARGEST = 0.99  # the largest error that is tried where a smaller one can't be promised


# -- tests ------------------------------------------------------------------------------------------------------------


def p_values(bad: NDArray[np.int64], counts: NDArray[np.int64], error: float) -> Floats:
    """P(Binomial(n, error) ≤ k) for k bad ones of n, (K,) each; 1 where there are none to test by.

    >>> p_values(np.array([0, 1]), np.array([149, 149]), 0.02).round(4)
    array([0.0493, 0.1991])
    """
    return np.where(counts > 0, bdtr(bad, np.maximum(counts, 1), error), 1.0)


def parts_of_delta() -> Floats:
    """The part of delta of each threshold; they add up to 1."""
    parts = np.full(len(LIMITS), (1 - START_PART) / (len(LIMITS) - 1))
    parts[START] = START_PART
    return parts


def passed(p: Floats, delta: float, parts: Floats) -> Booleans:
    """Which hypotheses (K,) are rejected, tested in their order, at a probability of `delta` for any wrong one.

    A rejected one hands its part of delta, and what was handed to it, on to the next; one that is not keeps it.

    >>> passed(np.array([0.03, 0.04, 0.01]), 0.05, np.array([0.5, 0.25, 0.25])).tolist()
    [False, False, True]
    >>> passed(np.array([0.02, 0.03, 0.05]), 0.05, np.array([0.5, 0.25, 0.25])).tolist()
    [True, True, True]
    """
    found, handed = np.zeros(len(p), dtype=bool), 0.0
    for place, part in enumerate(parts):
        found[place] = p[place] <= delta * (part + handed) * (1 + 1e-12)  # parts of 1 may add up to a little less
        handed = handed + part if found[place] else 0.0
    return found


def least_rows(error: float, delta: float) -> int:
    """The least number of answered calibration rows, all right, that allow a promise.

    >>> least_rows(0.02, 0.05), least_rows(0.01, 0.05), least_rows(0.05, 0.1)
    (183, 368, 59)
    """
    return math.ceil(math.log(START_PART * delta) / math.log1p(-error))


def find_limit(confidence: Floats, counted: Booleans, bad: Booleans, error: float, delta: float) -> float:
    """The lowest confidence (of `LIMITS`) from which on answers keep the promise; `NEVER` where none does.

    Args:
        confidence: (N,) of calibration rows.
        counted: (N,) whether a row counts once it is answered, or (N, K) whether it counts at each limit.
        bad: (N,) whether its answer is what the promise is about.
        error: the share of those counted that may be bad.
        delta: the probability with which the promise may fail.
    """
    answered = confidence[:, None] >= LIMITS
    counts = (counted if counted.ndim == 2 else counted[:, None] & answered).sum(axis=0)
    p = p_values((bad[:, None] & answered).sum(axis=0), counts, error)
    places = np.flatnonzero(passed(p, delta, parts_of_delta()))
    return float(LIMITS[places[-1]]) if len(places) else NEVER


# -- what is promised -------------------------------------------------------------------------------------------------


class Promise(NamedTuple):
    """What a model promises of its answers.

    Attributes:
        error: the largest share of answers that are wrong.
        delta: the probability, over calibration data, with which the promise is not kept.
        share: of the calibration rows that are answered.
        rows: number of calibration rows.
        per_class: whether it holds among the answers of each class.
        missed: the class of whose samples at most `error` are answered as another; None is about wrong answers.
        silent: number of classes that are never answered, where it holds for each class.
    """

    error: float
    delta: float
    share: float
    rows: int
    per_class: bool = False
    missed: int | None = None
    silent: int = 0

    def __str__(self) -> str:
        """One sentence for a user.

        >>> str(Promise(0.02, 0.05, 0.834, 500))
        'answers 83 % of inputs, at most 2 % wrong, 95 % sure'
        """
        what = "wrong" if self.missed is None else f"of class {self.missed} as another"
        if self.per_class:
            what += " among the answers of each class"
            what += f" ({self.silent} classes are never answered)" if self.silent else ""
        sure = percent(1 - self.delta)
        return f"answers {percent(round(self.share, 2))} of inputs, at most {percent(self.error)} {what}, {sure} sure"


def percent(share: float) -> str:
    """A share as people write it.

    >>> percent(0.02), percent(0.005), percent(0.834)
    ('2 %', '0.5 %', '83.4 %')
    """
    return f"{100 * share:.3g} %"


class CalibrationRows(NamedTuple):
    """What a model said of calibration rows, as a user would have got it.

    Attributes:
        confidence: (N,) the largest probability; `UNKNOWN` of rows that the verdict calls unknown.
        said: (N,) the most probable class.
        label: (N,) the right one.
    """

    confidence: Floats
    said: NDArray[np.int64]
    label: NDArray[np.int64]

    def limits(self, promise: Promise, classes: int) -> Floats:
        """The confidence (C,) from which on each class is answered, so that the promise is kept."""
        error, delta, wrong = promise.error, promise.delta, self.said != self.label
        if promise.missed is not None:
            ours = self.label == promise.missed
            counted = np.repeat(ours[:, None], len(LIMITS), axis=1)  # what is not answered is not missed either
            limits = np.full(classes, find_limit(self.confidence, counted, ours & wrong, error, delta))
            limits[promise.missed] = 0.0  # that answer misses none
            return limits if np.isfinite(limits).all() else np.full(classes, NEVER)
        if not promise.per_class:
            return np.full(classes, find_limit(self.confidence, np.ones_like(wrong), wrong, error, delta))
        limits = np.full(classes, NEVER)
        for c in range(classes):
            ours = self.said == c
            limits[c] = find_limit(self.confidence, ours, ours & wrong, error, delta / classes)
        return limits

    def answered(self, limits: Floats) -> Booleans:
        """Which rows (N,) are answered by these limits (C,)."""
        return np.asarray(self.confidence >= limits.astype(np.float32)[self.said])

    def tested(self, promise: Promise) -> int:
        """How many rows a promise can be tested by: of each class, the most that any has."""
        known = self.confidence > UNKNOWN
        if promise.missed is not None:
            return int((self.label == promise.missed).sum())
        return int(np.bincount(self.said[known], minlength=1).max()) if promise.per_class else int(known.sum())


# -- the part of a model ----------------------------------------------------------------------------------------------


class RiskControl(DataSizedBuffers):
    """What a model said of its calibration rows, and what it promises of its answers by them.

    The rows are kept whenever a model learns from calibration data, so that any promise can be made afterwards, also of
    a model that was saved and read. With a promise, predictions have `answered` (B,): true where the model is sure
    enough to be relied on and the verdict knows the input.

    Args:
        wanted: the error of a promise that is made as soon as there are calibration rows; None makes none.

    Attributes:
        promise: what is promised, or None.
    """

    may_be_missing: ClassVar[bool] = True  # a checkpoint without rows leaves nothing to promise by
    confidence: Tensor
    said: Tensor
    label: Tensor
    limits: Tensor
    listed: Tensor

    def __init__(self, wanted: float | None = None) -> None:
        super().__init__()
        self.wanted = None if wanted is None else checked_share("error", wanted, least_rows(0.01, DELTA))
        self.promise: Promise | None = None
        self._warned = ""
        self.register_buffer("confidence", torch.empty(0))
        self.register_buffer("said", torch.empty(0, dtype=torch.int32))
        self.register_buffer("label", torch.empty(0, dtype=torch.int32))
        self.register_buffer("limits", torch.empty(0))  # (C,) of the promise
        self.register_buffer("listed", torch.empty(0, dtype=torch.uint8))  # the promise, as JSON

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read the promise of a checkpoint; there is none where it has none."""
        text = bytes(stored["listed"].tolist()) if "listed" in stored else b""
        self.promise = Promise(**json.loads(text)) if text else None

    # -- learning -----------------------------------------------------------------------------------------------------

    def keep(self, final: Tensor, target: Tensor, known: Tensor | None = None) -> None:
        """Take what a model says of calibration rows from now on; what was promised by others is withdrawn.

        Args:
            final: (N, C) probabilities as a user gets them.
            target: (N,) labels.
            known: (N,) whether the verdict knows each row; None where there is no verdict.
        """
        confidence, said = final.float().max(dim=1)
        unknown = confidence.isnan() if known is None else confidence.isnan() | ~known
        home = self.confidence.device
        self.confidence = confidence.masked_fill(unknown, UNKNOWN).detach().clone().to(home)
        self.said, self.label = said.int().to(home), target.int().clone().to(home)
        before = self.promise
        self._set(None, final.shape[1])
        if before is not None or self.wanted is not None:
            self._promise_again(before or Promise(float(self.wanted or 0), DELTA, 0.0, 0))

    def _promise_again(self, promise: Promise) -> None:
        """Promise the same by the rows of now; where they do not allow it, nothing is answered, and a warning why."""
        try:
            self.control(promise.error, promise.delta, per_class=promise.per_class, missed=promise.missed)
        except ValueError as refusal:
            self._set(promise._replace(share=0.0, rows=len(self.label)), len(self.limits))
            if str(refusal) != self._warned:
                self._warned = str(refusal)
                rank_zero_warn(f"nothing is answered: {refusal}")

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load rows and promise; another error that was wanted since takes the place of what was promised."""
        super()._load_from_state_dict(*args)
        promised = None if self.promise is None else self.promise.error
        if self.wanted is not None and self.wanted != promised and len(self.label):
            self._promise_again(Promise(self.wanted, DELTA, 0.0, 0))

    def _set(self, promise: Promise | None, classes: int, limits: Floats | None = None) -> None:
        fields = b"" if promise is None else json.dumps(promise._asdict()).encode()
        home = self.limits.device
        self.promise = promise
        given = np.full(classes, NEVER) if limits is None else limits
        self.limits = torch.tensor(given, dtype=torch.float32, device=home)
        self.listed = torch.tensor(list(fields), dtype=torch.uint8, device=home)

    @property
    def rows(self) -> CalibrationRows:
        """The calibration rows that a promise is made by."""
        return CalibrationRows(
            self.confidence.cpu().numpy(), self.said.cpu().numpy().astype(int), self.label.cpu().numpy().astype(int)
        )

    # -- promising ----------------------------------------------------------------------------------------------------

    def control(
        self, error: float = ERROR, delta: float = DELTA, *, per_class: bool = False, missed: int | None = None
    ) -> Promise:
        """Promise that at most a share `error` of the answers is wrong; see `brainet_pl.risk_control`."""
        promise, limits = self.find(error, delta, per_class=per_class, missed=missed)
        self._set(promise, len(limits), limits)
        return promise

    def find(
        self, error: float = ERROR, delta: float = DELTA, *, per_class: bool = False, missed: int | None = None
    ) -> tuple[Promise, Floats]:
        """What `control` would promise, and the confidence (C,) from which on each class is answered."""
        wanted = self._wanted(error, delta, per_class, missed)
        rows, classes = self.rows, len(self.limits)
        self._check_rows(rows, wanted, classes if per_class else 1)
        limits = rows.limits(wanted, classes)
        silent = int(np.isinf(limits).sum())
        if silent == classes:
            raise ValueError(_too_many_wrong(rows, wanted, classes))
        share = float(rows.answered(limits).mean())
        return wanted._replace(share=share, rows=len(rows.label), silent=silent), limits

    def _wanted(self, error: float, delta: float, per_class: bool, missed: int | None) -> Promise:
        checked_share("error", error, least_rows(0.01, DELTA))
        checked_share("delta", delta, None)
        classes = len(self.limits)
        if not classes:
            raise ValueError(
                "expected a classification with calibration rows, got none: fit with held-out data, "
                f"{least_rows(error, delta)} rows or more for an error of {percent(error)}; of numbers take intervals, "
                "`Conformal`"
            )
        if missed is not None:
            checks.whole("missed", missed, 0, classes - 1)
            if checks.flag("per_class", per_class):
                raise ValueError("expected per_class or missed, got both: leave one out")
        return Promise(float(error), float(delta), 0.0, 0, bool(per_class), missed)

    @staticmethod
    def _check_rows(rows: CalibrationRows, wanted: Promise, shares: int) -> None:
        labels = np.unique(rows.label)
        if len(labels) == 1:
            raise ValueError(
                f"expected calibration rows of two classes at the least, got {len(rows.label)} of class {labels[0]} "
                "only: a promise would hold for that class alone; give held-out data of all classes"
            )
        least, there = least_rows(wanted.error, wanted.delta / shares), rows.tested(wanted)
        if there < least:
            which = " of a class" if wanted.per_class or wanted.missed is not None else ""
            could = 1 - (START_PART * wanted.delta / shares) ** (1 / max(1, there))
            raise ValueError(
                f"expected at least {least:,} calibration rows{which} that the verdict knows for an error of "
                f"{percent(wanted.error)} and delta {wanted.delta:g}, got {there:,}: give more held-out data, or an "
                f"error of at least {_upwards(could):g}"
            )

    def sentence(self) -> str | None:
        """What is promised, or what could be: of the usual errors the least that calibration rows allow; or None."""
        if self.promise is not None:
            return str(self.promise)
        possible = [error for error in USUAL if self.curve(np.array([error]))[0]]
        return str(self.find(possible[0])[0]) if possible else None

    def points(self) -> list[tuple[float, float]]:
        """Shares of inputs that may be answered, and at most how many of these answers are wrong: a curve to draw."""
        return list(zip(self.curve(ON_CURVE).tolist(), ON_CURVE.tolist(), strict=True))

    def curve(self, errors: Floats, delta: float = DELTA) -> Floats:
        """The share of inputs that may be answered at each error (K,); 0 where that can't be promised."""
        rows, classes, found = self.rows, len(self.limits), []
        if len(np.unique(rows.label)) < 2:
            return np.zeros(len(errors))
        for error in errors:
            limits = rows.limits(Promise(float(error), delta, 0.0, 0), classes)
            found.append(float(rows.answered(limits).mean()))
        return np.asarray(found)

    # -- answering ----------------------------------------------------------------------------------------------------

    def forward(self, final: Tensor, known: Tensor | None = None) -> dict[str, Tensor]:
        """Probabilities (B, C) and whether each is known (B,) → `answered` (B,), where something is promised."""
        if self.promise is None:
            return {}
        confidence, said = final.float().max(dim=1)
        answered = confidence >= self.limits[said]
        return {"answered": answered if known is None else answered & known}


def checked_share(name: str, value: float, rows_for_a_hundredth: int | None) -> float:
    """A share above 0 and below 1; the message says what would do in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        shown = checks.shown(value)
        if rows_for_a_hundredth is None:
            raise ValueError(f"expected {name} above 0 and below 1, got {shown}: 0.05 is to be 95 % sure")
        raise ValueError(
            f"expected {name} above 0 and below 1, got {shown}: no number of rows promises that nothing is wrong; 0.01 "
            f"needs {rows_for_a_hundredth} calibration rows or more"
        )
    return float(value)


def _too_many_wrong(rows: CalibrationRows, wanted: Promise, classes: int) -> str:
    """Why nothing can be promised of these rows, and the error that could be."""
    surest = np.argsort(-rows.confidence, kind="stable")[: least_rows(wanted.error, wanted.delta)]
    wrong = int((rows.said != rows.label)[surest].sum())
    low, high = wanted.error, LARGEST
    if not np.isfinite(rows.limits(wanted._replace(error=high), classes)).any():
        return (
            f"expected answers of which some are right, got {wrong} wrong ones among the surest {len(surest)} of "
            f"{len(rows.label):,} calibration rows: not even an error of {LARGEST:g} would do; check the labels"
        )
    for _ in range(20):  # a larger error never allows less
        middle = (low + high) / 2
        enough = np.isfinite(rows.limits(wanted._replace(error=middle), classes)).any()
        low, high = (low, middle) if enough else (middle, high)
    return (
        f"expected an error that {len(rows.label):,} calibration rows can promise, got {percent(wanted.error)}, with "
        f"{wrong} wrong answers among the surest {len(surest)}: an error of {_upwards(high):g} would do, or more "
        "held-out data"
    )


def _upwards(value: float) -> float:
    """Two digits of a share, rounded up.

    >>> _upwards(0.0612), _upwards(0.25)
    (0.062, 0.25)
    """
    digits = 1 - math.floor(math.log10(value))
    scale = 10.0**digits
    return min(LARGEST, math.ceil(value * scale - 1e-9) / scale)
