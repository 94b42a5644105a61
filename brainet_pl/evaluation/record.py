"""The one record of a test: what every metric, figure, table, file and page of it is made from.

A model's `test_step` gives a `SampleBatch` for each batch: a few numbers a sample, never outputs (T, B, O). The record
keeps them by the name of the set, brings the parts of all processes together once, and from then on is only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor

from brainet_pl.evaluation.curves import separation
from brainet_pl.evaluation.passes import PassSums, PassTrace
from brainet_pl.ranks import everyones

Role = Literal["known", "near", "far"]
MEANS: Mapping[str, str] = {"near": "near_mean", "far": "far_mean"}  # role → name of the mean over sets of this role
Columns = dict[str, Tensor]
Measured = dict[str, dict[str, float]]  # score → measure → value


@dataclass(frozen=True)
class SampleBatch:
    """What a model tells a record about a batch of a test.

    Attributes:
        scores: name → (B,), higher for an input more unlike the training data.
        answers: name → (B,) of labelled samples: what was predicted and what was right. `confidence` (the largest
            probability) and `wrong` (0 or 1) make the figures of a classification, `calibrated` is the confidence after
            calibration.
        trace: what another pass buys, or None.
        passes: T, or None where there are none to speak of.
        numbers: (B,) the place of each sample in its set, where the model leaves out the copies that several processes
            were dealt; None lets the callback number and leave out.
    """

    scores: Columns
    answers: Columns = field(default_factory=dict)
    trace: PassTrace | None = None
    passes: int | None = None
    numbers: Tensor | None = None

    def first(self, n: int) -> SampleBatch:
        """The same of the first n samples; sums over samples stay as they are."""
        trace = self.trace
        if trace is not None:
            trace = trace._replace(scores={name: values[:, :n] for name, values in trace.scores.items()})
        scores, answers = ({name: v[:n] for name, v in part.items()} for part in (self.scores, self.answers))
        return SampleBatch(scores, answers, trace, self.passes)


@dataclass
class SetRecord:
    """What is kept of one set of samples: columns of all batches, in the order of sample numbers once gathered.

    Attributes:
        name: of the set.
        role: "known" for the test set; unknown sets are "near" or "far".
        numbers: (N,) place of each sample in its set.
        scores: name → (N,).
        answers: name → (N,), empty where there are no labels.
        running: name → (S, N) scores of the mean of the first t passes.
        sums: over the samples, for the same numbers of passes, or None.
    """

    name: str
    role: Role
    numbers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    scores: Columns = field(default_factory=dict)
    answers: Columns = field(default_factory=dict)
    running: Columns = field(default_factory=dict)
    sums: PassSums | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def rankable(self) -> Columns:
        """The scores that can be ordered: those without NaN."""
        return {name: values for name, values in self.scores.items() if not values.isnan().any()}


class TestRecord:
    """All sets of a test by name; the first is the known one.

    Args:
        sets: name → role of each set, in the order of the loaders.
        units: name → unit of scores.
    """

    __test__ = False  # not a test, whatever pytest thinks of the name

    def __init__(self, sets: Mapping[str, Role], units: Mapping[str, str] | None = None) -> None:
        self.sets = {name: SetRecord(name, role) for name, role in sets.items()}
        self.units = dict(units or {})
        self.steps: list[int] = []
        self.passes: int | None = None
        self._batches: dict[str, list[tuple[Tensor, SampleBatch]]] = {name: [] for name in sets}

    @property
    def known(self) -> SetRecord:
        """The test set."""
        return next(part for part in self.sets.values() if part.role == "known")

    @property
    def unknown(self) -> Iterator[SetRecord]:
        """The other sets."""
        return (part for part in self.sets.values() if part.role != "known")

    def add(self, name: str, numbers: Tensor, batch: SampleBatch) -> None:
        """Keep a batch of the set `name`, whose samples have the numbers (B,); everything moves to the CPU."""
        trace = batch.trace
        if trace is not None:
            self.steps = trace.steps
            trace = trace._replace(scores=_kept(trace.scores))
        self.passes = batch.passes if batch.passes is not None else self.passes
        kept = SampleBatch(_kept(batch.scores), _kept(batch.answers), trace)
        self._batches[name].append((numbers.cpu(), kept))

    def gather(self) -> TestRecord:
        """Bring all batches of all processes together; a collective, so all processes must call it. Returns itself."""
        for name, part in self.sets.items():
            batches = [pair for own in everyones(self._batches[name]) for pair in own]
            self._batches[name] = []
            if not batches:
                continue
            numbers = torch.cat([n for n, _ in batches])
            order = torch.argsort(numbers, stable=True)
            first = torch.ones(len(order), dtype=torch.bool)  # a sample that two processes saw counts once
            first[1:] = numbers[order].diff() != 0
            order = order[first]
            part.numbers = numbers[order]
            part.scores = _joined([b.scores for _, b in batches], order)
            part.answers = _joined([b.answers for _, b in batches], order)
            traces = [b.trace for _, b in batches if b.trace is not None]
            part.running = _joined([t.scores for t in traces], order) if len(traces) == len(batches) else {}
            sums = [t.sums for t in traces if t.sums is not None]
            part.sums = reduce(add, sums) if sums else None
        return self

    def separations(self) -> dict[str, Measured]:
        """Set → score → measure → value: how well each score tells each unknown set from the test set.

        A score with NaN in either set is left out.
        """
        known = self.known.rankable()
        return {
            part.name: {
                score: separation(known[score], values) for score, values in part.rankable().items() if score in known
            }
            for part in self.unknown
        }


def group_means(found: Mapping[str, Measured], sets: Sequence[SetRecord]) -> dict[str, Measured]:
    """Means over the near and over the far sets, as `near_mean` and `far_mean`; unknown samples are added up.

    There is a mean only where some sets are marked near and the group has at least two sets.
    """
    means: dict[str, Measured] = {}
    marked = any(part.role == "near" for part in sets)
    for role, mean in MEANS.items():
        names = [part.name for part in sets if part.role == role and part.name in found]
        if marked and len(names) > 1:
            shared = [score for score in found[names[0]] if all(score in found[n] for n in names)]
            means[mean] = {
                score: {
                    measure: sum(found[n][score][measure] for n in names) / (1 if measure == "n_ood" else len(names))
                    for measure in found[names[0]][score]
                }
                for score in shared
            }
    return means


def _kept(columns: Columns) -> Columns:
    """The same on the CPU, floating numbers in 32 bits."""
    cpu = {name: values.detach().cpu() for name, values in columns.items()}
    return {name: values.float() if values.is_floating_point() else values for name, values in cpu.items()}


def _joined(parts: Sequence[Columns], order: Tensor) -> Columns:
    """Batches of columns (…, B) → columns (…, N) in this order, of the names that all batches have."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts], dim=-1)[..., order] for name in names}
