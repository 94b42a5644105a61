"""The one record of a test: what every metric, figure, table, file and page of it is made from.

A model's `test_step` gives a `SampleBatch` for each batch: a few numbers a sample, never outputs (T, B, O). The record
keeps them by the name of the set, brings the parts of all processes together once, and from then on is only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor

from brainet_pl.distributed.samples import all_gather
from brainet_pl.metrics.curves import detection_risk, roc_area, separation
from brainet_pl.metrics.passes import PassSums, PassTrace
from brainet_pl.metrics.shift import ShiftResult, ShiftSums, add_sums, measures_of, parse_shift

Role = Literal["known", "near", "far", "shift"]
MEANS: Mapping[str, str] = {"near": "near_mean", "far": "far_mean"}  # role → name of the mean over sets of this role
NamedTensors = dict[str, Tensor]
Batch = tuple[Tensor, dict[tuple[str, str], Tensor]]  # numbers (B,) of samples, and (kind, name) → column (…, B)
MOST_TRACED = 20_000  # samples of a set whose running scores are kept: many numbers a sample, for a few curves
Measured = dict[str, dict[str, float]]  # score → measure → value


@dataclass(frozen=True)
class SampleBatch:
    """What a record keeps of a batch of a test: what a `test_step` returns.

    Attributes:
        scores: name → (B,), higher for an input more unlike the training data.
        answers: name → (B,) of labelled samples: what was predicted and what was right. `confidence` (the largest
            probability) and `wrong` (0 or 1) make the figures of a classification, `calibrated` is the confidence after
            calibration.
        trace: what another pass buys, or None.
        passes: T, or None where there are none to speak of.
        numbers: (B,) the place of each sample in its set, where the model leaves out the copies that several processes
            were dealt; None lets the callback number and leave out.
        shifts: name of a shift → sums over the samples after it; "clean" for the test set, where there are shifts.
        known_p: (B,) p-value of each sample being like validation data, or None where the model has no verdict.
        level: the p-value up to which a sample looks unknown.
        verdict_score: the name of the score behind known_p.
        verdict_samples: how many validation samples known_p compares with.
    """

    scores: NamedTensors
    answers: NamedTensors = field(default_factory=dict)
    trace: PassTrace | None = None
    passes: int | None = None
    numbers: Tensor | None = None
    shifts: Mapping[str, ShiftSums] = field(default_factory=dict)
    known_p: Tensor | None = None
    level: float | None = None
    verdict_score: str | None = None
    verdict_samples: int | None = None

    def first(self, n: int) -> SampleBatch:
        """The same of the first n samples; sums over samples stay as they are."""
        return replace(
            self,
            scores=_first(self.scores, n),
            answers=_first(self.answers, n),
            trace=None if self.trace is None else self.trace._replace(scores=_first(self.trace.scores, n)),
            numbers=None,
            known_p=None if self.known_p is None else self.known_p[:n],
        )


@dataclass
class SetRecord:
    """What is kept of one set of samples: columns of all batches, in the order of sample numbers once gathered."""

    name: str
    role: Role  # "known" for the test set; unknown sets are "near" or "far"
    numbers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # (N,) places in the set
    scores: NamedTensors = field(default_factory=dict)  # name → (N,)
    answers: NamedTensors = field(default_factory=dict)  # name → (N,), empty where there are no labels
    running: NamedTensors = field(default_factory=dict)  # name → (S, K), of the mean of t passes; K up to MOST_TRACED
    sums: PassSums | None = None  # over all samples, for the same numbers of passes
    known_p: Tensor | None = None  # (N,) p-values of the verdict

    def __len__(self) -> int:
        return len(self.numbers)

    def rankable(self) -> NamedTensors:
        """The scores that can be ordered: those without NaN."""
        return {name: values for name, values in self.scores.items() if not values.isnan().any()}


class SampleBuffer:
    """Columns of samples, kept batch by batch.

    Args:
        most: keep at most so many samples, chosen by their numbers alone, however they came. None keeps all.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._packed: list[Batch] = []
        self._fresh: list[Batch] = []

    def add(self, numbers: Tensor, columns: Mapping[tuple[str, str], Tensor]) -> None:
        """Add samples; now and then batches become one, because a tensor takes more memory than the numbers in it."""
        self._fresh.append((numbers, dict(columns)))
        if len(self._fresh) >= 256 or sum(len(n) for n, _ in self._fresh) >= 2 * MOST_TRACED:
            if self.most is None:
                self._packed.append(_joined(self._fresh))
            else:
                self._packed = [_chosen(_joined(self.batches), self.most)]
            self._fresh = []

    @property
    def batches(self) -> list[Batch]:
        """Gives all batches that were kept, in their order."""
        return [*self._packed, *self._fresh]


class TestRecord:
    """All sets of a test by name; the first is the known one.

    Args:
        sets: name → role of each set, in the order of the loaders.
        units: name → unit of scores.
    """

    __test__ = False  # not a test, whatever pytest thinks of the name

    def __init__(self, sets: Mapping[str, Role], units: Mapping[str, str] | None = None) -> None:
        self.sets = {name: SetRecord(name, role) for name, role in sets.items() if role != "shift"}
        self.shift_sums: dict[str, ShiftSums | None] = {}
        self.shifted: NamedTensors = {}  # name → scores (N,) of known samples after shifts, up to MOST_TRACED
        self.units = dict(units or {})
        self.steps: list[int] = []
        self.passes: int | None = None
        self.level: float | None = None
        self.verdict_score: str | None = None
        self.verdict_samples: int | None = None
        self._rows = {name: SampleBuffer() for name in self.sets}
        self._traced = {name: SampleBuffer(MOST_TRACED) for name in self.sets}
        self._sums: dict[str, PassSums] = {}
        self._after_shifts = SampleBuffer(MOST_TRACED)
        self._first_of_loader = {name: i * 2**40 for i, (name, role) in enumerate(sets.items()) if role == "shift"}

    @property
    def known(self) -> SetRecord:
        """The record of the known test set."""
        return next(part for part in self.sets.values() if part.role == "known")

    @property
    def unknown(self) -> Iterator[SetRecord]:
        """The records of all other sets, in their order."""
        return (part for part in self.sets.values() if part.role != "known")

    def add(self, name: str, numbers: Tensor, batch: SampleBatch) -> None:
        """Keep a batch of the set `name`, whose samples have the numbers (B,); everything moves to the CPU.

        Of a shifted set, sums, and scores of a part of its samples.
        """
        for shift, more in batch.shifts.items():
            self.shift_sums[shift] = add_sums(self.shift_sums.get(shift), more)
        if name not in self.sets:
            self._after_shifts.add(numbers.cpu() + self._first_of_loader.get(name, 0), _kept("scores", batch.scores))
            return
        numbers, trace = numbers.cpu(), batch.trace
        self._note_model(batch)
        verdict = {} if batch.known_p is None else {"known_p": batch.known_p}
        columns = _kept("scores", batch.scores) | _kept("answers", batch.answers) | _kept("verdict", verdict)
        self._rows[name].add(numbers, columns)
        self._traced[name].add(numbers, {} if trace is None else _kept("running", trace.scores))
        if trace is not None:
            self.steps = trace.steps
            if trace.sums is not None:
                self._sums[name] = self._sums[name] + trace.sums if name in self._sums else trace.sums

    def _note_model(self, batch: SampleBatch) -> None:
        """What a batch says of the model: its passes and its verdict."""
        if batch.passes is not None:
            self.passes = batch.passes
        if batch.level is not None:
            self.level = batch.level
        if batch.verdict_score is not None:
            self.verdict_score, self.verdict_samples = batch.verdict_score, batch.verdict_samples

    def gather(self) -> TestRecord:
        """Bring all batches of all processes together; a collective, so all processes must call it. Returns itself."""
        self._gather_shifts()
        for name, part in self.sets.items():
            rows, traced = _batches_of_all(self._rows[name]), _batches_of_all(self._traced[name])
            sums = [own for own in all_gather(self._sums.pop(name, None)) if own is not None]
            self._rows[name], self._traced[name] = SampleBuffer(), SampleBuffer(MOST_TRACED)
            if not rows:
                continue
            part.numbers, columns = _ordered(_joined(rows))
            _, running = _ordered(_chosen(_joined(traced), MOST_TRACED))
            part.scores, part.answers = _kind("scores", columns), _kind("answers", columns)
            part.known_p = _kind("verdict", columns).get("known_p")
            part.running = _kind("running", running)
            part.sums = reduce(add, sums) if sums else None
        return self

    def _gather_shifts(self) -> None:
        """Sums after each shift, and scores after all of them; a collective."""
        total: dict[str, ShiftSums | None] = {}
        for own in all_gather(self.shift_sums):
            for name, sums in own.items():
                total[name] = add_sums(total.get(name), sums)
        self.shift_sums = total
        shifted = _batches_of_all(self._after_shifts)
        self._after_shifts = SampleBuffer(MOST_TRACED)
        if shifted:
            self.shifted = _kind("scores", _ordered(_chosen(_joined(shifted), MOST_TRACED))[1])

    def look_unknown(self, part: SetRecord) -> int | None:
        """How many samples of a set look unknown; None where the model has no verdict."""
        return None if part.known_p is None or self.level is None else int((part.known_p <= self.level).sum())

    def shifts(self) -> list[ShiftResult]:
        """What was measured on the test set, as "clean" of severity 0, and after each shift; empty without shifts."""
        results = []
        for name, sums in self.shift_sums.items():
            samples = 0 if sums is None else int(sums.predicted["samples"])
            if sums is not None and samples:
                final = None if sums.final is None else measures_of(sums.final)
                corruption, severity = parse_shift(name) or ("clean", 0)
                results.append(ShiftResult(corruption, severity, samples, measures_of(sums.predicted), final))
        return results if len(results) > 1 else []

    def separations(self) -> dict[str, Measured]:
        """Set → score → measure → value: how well each score tells each unknown set from the test set.

        A score with NaN in either set is left out. Beside the measures of `separation` there are `AUROC_full`, where
        known samples after shifts count as known too, and for classes `SCOD`, see `detection_risk`.
        """
        known = self.known.rankable()
        separations: dict[str, Measured] = {}
        for part in self.unknown:
            separations[part.name] = {}
            for score, values in part.rankable().items():
                if score in known:
                    separations[part.name][score] = self._separation(score, known[score], values)
        return separations

    def _separation(self, score: str, known: Tensor, unknown: Tensor) -> dict[str, float]:
        """The measures of one score (N,) of the test set and (M,) of an unknown one."""
        measures, wrong = separation(known, unknown), self.known.answers.get("wrong")
        shifted = self.shifted.get(score)
        if shifted is not None and not shifted.isnan().any():
            measures["AUROC_full"] = roc_area(torch.cat([known, shifted]), unknown)
        if wrong is not None:
            measures["SCOD"] = detection_risk(known, wrong, unknown)
        return measures


def group_means(separations: Mapping[str, Measured], sets: Sequence[SetRecord]) -> dict[str, Measured]:
    """Means over the near and over the far sets, as `near_mean` and `far_mean`; unknown samples are added up.

    There is a mean only where some sets are marked near and the group has at least two sets.
    """
    if not any(part.role == "near" for part in sets):
        return {}
    means: dict[str, Measured] = {}
    for role, mean in MEANS.items():
        group = [separations[part.name] for part in sets if part.role == role and part.name in separations]
        if len(group) > 1:
            means[mean] = _mean_of(group)
    return means


def _mean_of(group: Sequence[Measured]) -> Measured:
    """The mean of every measure of the scores that all sets of a group have."""
    means: Measured = {}
    for score, measures in group[0].items():
        if not all(score in scores for scores in group):
            continue
        means[score] = {}
        for measure in measures:
            total = sum(scores[score][measure] for scores in group)
            means[score][measure] = total if measure == "n_ood" else total / len(group)
    return means


def _first(columns: NamedTensors, n: int) -> NamedTensors:
    """The first n samples of columns (…, B)."""
    return {name: values[..., :n] for name, values in columns.items()}


def _batches_of_all(buffer: SampleBuffer) -> list[Batch]:
    """The batches of all processes; a collective."""
    batches: list[Batch] = []
    for own in all_gather(buffer):
        batches += own.batches
    return batches


def _kept(kind: str, columns: NamedTensors) -> dict[tuple[str, str], Tensor]:
    """The same on the CPU, floating numbers in 32 bits, under the name of their kind."""
    kept = {}
    for name, values in columns.items():
        cpu = values.detach().cpu()
        kept[(kind, name)] = cpu.float() if cpu.is_floating_point() else cpu
    return kept


def _kind(kind: str, columns: Mapping[tuple[str, str], Tensor]) -> NamedTensors:
    return {name: values for (of, name), values in columns.items() if of == kind}


def _joined(batches: Sequence[Batch]) -> Batch:
    """Batches → one, of the columns that all of them have."""
    names = [name for name in batches[0][1] if all(name in columns for _, columns in batches)]
    numbers = torch.cat([numbers for numbers, _ in batches])
    return numbers, {name: torch.cat([columns[name] for _, columns in batches], dim=-1) for name in names}


def _taken(batch: Batch, rows: Tensor) -> Batch:
    return batch[0][rows], {name: values[..., rows] for name, values in batch[1].items()}


def _ordered(batch: Batch) -> Batch:
    """By number; a sample that two processes saw counts once."""
    order = torch.argsort(batch[0], stable=True)
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = batch[0][order].diff() != 0
    return _taken(batch, order[first])


def _chosen(batch: Batch, most: int) -> Batch:
    """At most so many samples: those whose number times the golden ratio has the smallest fraction.

    They are spread evenly over the set, whatever the order of its samples, and depend on nothing but the numbers.
    """
    if len(batch[0]) <= most:
        return batch
    fraction = (batch[0] * 2654435769) % 2**32  # in units of 2^-32
    return _taken(batch, fraction.topk(most, largest=False).indices)
