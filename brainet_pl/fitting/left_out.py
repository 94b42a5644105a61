"""What a verdict will notice, estimated without unknown data: some classes play the unknown ones.

Nothing is fitted again. Of held-out samples a model says what it would say if it had no output and no density for a
class: its logit is taken away, and so are its density and its training samples. By scores of that kind the samples of
the class are compared with those of the other classes. A head that has learned a class makes the outputs of all others
small for its samples, so that the prediction notices too much of it: at the lower end of the range that is given, half
of its surprise counts. How wide the range is was chosen on real tasks, see `docs/howto/unknown.md`. Where there are
fewer than three classes, samples whose features are permuted, each column by itself, stand in.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.distributed.collectives import all_gather, exchange
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.predictor import Predictor, preferred_score
from brainet_pl.scores import AnswerScore
from brainet_pl.scores.combined import cross_fitted
from brainet_pl.scores.expectation import Expectation, least_held
from brainet_pl.scores.reference import fit_surprise, p_values
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes

MOST_ROWS = 2000  # held-out samples that are asked
MOST_GROUPS = 10  # classes, or groups of them, that are left out one at a time
CLASSES_IN_ALL = 50  # of more classes several are left out at a time: one of a thousand has next to no sample
LEAST_IN_GROUP = 5  # held-out samples below which the share of them that is noticed says nothing
LEAST_GROUPS = 2  # fewer give no range
PERMUTED = 500  # samples whose features are permuted
TARGET = "target of the sample"  # a column beside the scores, which no score is called
HALF = 0.5  # how much of the prediction's surprise counts at the lower end of the range
ODDS = 3.0  # times the odds of the class that is noticed most, at the upper end
HIDDEN = -1e9  # the logit of a class that is left out: it has the probability 0


class Asked(NamedTuple):
    """What was asked about some calibration samples.

    Attributes:
        draw: (B,) a random number from 0 to 1 of each sample.
        output: what the backbone gave for them.
        columns: score → (B, K) as if each group of classes had not been learned, and the targets (B,).
    """

    draw: Tensor
    output: BackboneOutput
    columns: dict[str, Tensor]

    def below(self, share: float) -> Asked:
        """The samples whose number is below `share`."""
        rows = (self.draw < share).nonzero()[:, 0]
        columns = {name: values[rows.to(values.device)] for name, values in self.columns.items()}
        return Asked(self.draw[rows], self.output[rows.to(self.output.features.device)], columns)

    def on_cpu(self) -> Asked:
        """The same in the memory of the host, where processes can exchange it."""
        columns = {name: values.cpu() for name, values in self.columns.items()}
        return Asked(self.draw, self.output.to(torch.device("cpu")), columns)


class LeftOut:
    """Collects what a model says of calibration samples as if it had not learned a class.

    Args:
        predictor: the model; its weights are trained, and its scores are fitted.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.hidden = groups_of(predictor.task.num_classes if isinstance(predictor.task, Classification) else 1)
        self._asked: list[Asked] = []
        self._failure = ""
        self._share = 1.0  # of the samples that are asked; it halves whenever there are too many

    @property
    def names(self) -> tuple[str, ...]:
        """The scores behind the verdict: those that it joins, or the only one; nothing where there is none."""
        scores = self.predictor.scores
        default = scores.default_score(self.predictor.verdict, preferred_score(self.predictor))
        return () if default is None else scores.parts_of(default) or (default,)

    @property
    def _of_prediction(self) -> set[str]:
        """The scores that read what the head says, and so have learned more of a class than its output."""
        scores = self.predictor.scores
        own = {score.name_in_model(next(iter(score.units))) for score in scores if isinstance(score, AnswerScore)}
        return own | set(self.predictor.task.units)

    @torch.no_grad()
    def observe(self, passes: Passes, target: Tensor, numbers: Tensor) -> None:
        """See a batch of calibration samples, of which a random choice is asked.

        Args:
            passes: of the batch.
            target: (B,).
            numbers: (B,) the place of each sample in its set, which decides whether it is asked, in any process.
        """
        if self._failure or not self.names:
            return
        try:
            self._ask(passes, target, draw_of(numbers))
        except Exception as error:  # an estimate is not worth a fit, whatever a score makes of it
            self._failure = str(error)

    def _ask(self, passes: Passes, target: Tensor, draw: Tensor) -> None:
        while int((draw < self._share).sum()) + sum(len(asked.draw) for asked in self._asked) > MOST_ROWS:
            self._keep(self._share / 2)
        rows = (draw < self._share).nonzero()[:, 0]
        if not len(rows):
            return
        there = rows.to(target.device)
        passes, target = _rows(passes, there), target[there]
        found = {} if not len(self.hidden) else scores_without(self.predictor, passes, self.hidden.to(target.device))
        columns = {name: found[name].t() for name in self.names if name in found}
        output = passes.backbone_output or BackboneOutput(passes.features)
        self._asked.append(Asked(draw[rows], output, columns | {TARGET: target}))

    def _keep(self, share: float) -> None:
        """Keep a share of all samples."""
        self._share = share
        self._asked = [asked.below(share) for asked in self._asked]

    @torch.no_grad()
    def estimate(self) -> Expectation | None:
        """What was seen, as shares, and forget it; a collective. Ask once the verdict's reference is known."""
        failure = next((other for other in all_gather(self._failure) if other), "")
        everyone = self._gather()
        self._asked, self._failure, self._share = [], "", 1.0
        columns = {} if everyone is None else everyone.columns
        output = None if everyone is None else everyone.output
        found = exchange(lambda: self._describe(columns, output, failure))
        return next((one for one in found if one is not None), None)

    def _gather(self) -> Asked | None:
        """What was asked in all processes, in an order that does not depend on their number; a collective."""
        self._keep(min(all_gather(self._share)))
        while sum(all_gather(sum(len(asked.draw) for asked in self._asked))) > MOST_ROWS:
            self._keep(self._share / 2)
        batches = []
        for share in all_gather([asked.on_cpu() for asked in self._asked if len(asked.draw)]):
            batches.extend(share)
        if not batches:
            return None
        draw = torch.cat([batch.draw for batch in batches])
        order = draw.argsort(stable=True)
        columns = {}
        for name in batches[0].columns:
            columns[name] = torch.cat([batch.columns[name] for batch in batches])[order]
        output = BackboneOutput.concat([batch.output for batch in batches])[order]
        return Asked(draw[order], output.to(device_of(self.predictor)), columns)

    def _describe(
        self, columns: Mapping[str, Tensor], output: BackboneOutput | None, failure: str
    ) -> Expectation | None:
        """The expectation, or one that says why there is no estimate; None where there is nothing to say."""
        scores, verdict = self.predictor.scores, self.predictor.verdict
        default = scores.default_score(verdict, preferred_score(self.predictor))
        if default is None or (output is None and not failure):
            return None
        found = Expectation(default, scores.parts_of(default), verdict.level)
        try:
            if output is not None and not failure:
                return self._judge(found, columns, output)
        except Exception as error:
            failure = str(error)
        rank_zero_warn(f"how many unknown inputs will be noticed is not known, the estimate failed: {failure}")
        return found._replace(doubt=f"the estimate failed: {failure}")

    def _judge(self, found: Expectation, columns: Mapping[str, Tensor], output: BackboneOutput) -> Expectation:
        """The expectation with the shares that samples (N,) of these columns say."""
        level, reference = found.level, self.predictor.scores.reference
        count = len(reference[found.score]) if found.score in reference else 0
        if count < least_held(level):
            few = f"by {count} held-out samples none can be called unknown, give at least {least_held(level)}"
            return found._replace(doubt=few)
        found = found._replace(permuted=self._permuted(output[:: -(-len(output) // PERMUTED)]))
        if not len(self.hidden):
            return found._replace(doubt="it takes three classes")
        missing = [name for name in self.names if name not in columns]
        if missing:
            return found._replace(doubt=f"{missing[0]} can't be computed as if a class were unknown")
        hidden = self.hidden.cpu()[:, columns[TARGET].long().cpu()]  # (K, N)
        asked = [columns[name].cpu() for name in self.names]
        if not all(bool(values.isfinite().all()) for values in asked):
            return found._replace(doubt="scores are NaN or infinite for some samples")
        halves = [HALF if name in self._of_prediction else 1.0 for name in self.names]
        halved, whole = [], []
        for group, inside in enumerate(hidden):
            if int(inside.sum()) >= LEAST_IN_GROUP and int((~inside).sum()) >= least_held(level):
                parts = [values[:, group] for values in asked]
                halved.append(noticed(parts, halves, inside, level))
                whole.append(noticed(parts, [1.0] * len(parts), inside, level))
        if len(whole) < LEAST_GROUPS:
            return found._replace(doubt=f"fewer than {LEAST_GROUPS} classes have {LEAST_IN_GROUP} held-out samples")
        low, high = range_of(halved, whole, level)
        return found._replace(low=low, high=high, noticed=statistics.median(whole))

    def _permuted(self, output: BackboneOutput) -> float:
        """The share of samples with permuted columns that is called unknown."""
        generator = torch.Generator().manual_seed(0)

        def shuffled(values: Tensor) -> Tensor:
            return values.gather(0, torch.rand(values.shape, generator=generator).argsort(dim=0).to(values.device))

        predictor = self.predictor
        answer = predictor.judge(predictor.all_scores(predictor.passes(output.map(shuffled))))
        return float((~answer["known"]).double().mean()) if answer else float("nan")


def draw_of(numbers: Tensor) -> Tensor:
    """Numbers of samples (B,) → (B,) a number from 0 to 1 for each, which depends on nothing else.

    >>> draw_of(torch.tensor([0, 1, 2])).round(decimals=2)
    tensor([0.0000, 0.6200, 0.2400], dtype=torch.float64)
    """
    return (numbers.cpu().long() * 2654435769 % 2**32).double() / 2**32  # Knuth's multiplicative hash


def _rows(passes: Passes, rows: Tensor) -> Passes:
    """The passes of some samples of the batch, without the scores of the prediction."""
    output = None if passes.backbone_output is None else passes.backbone_output[rows]
    predicted, features = passes.predicted[rows], passes.features[rows]
    return Passes(passes.outputs[:, rows], passes.weights, features, predicted, backbone_output=output)


def groups_of(num_classes: int) -> Tensor:
    """Which classes are left out at a time, (K, C) of booleans, none of them twice; no row for fewer than three."""
    if num_classes < 3:
        return torch.empty(0, num_classes, dtype=torch.bool)
    size = max(1, num_classes // CLASSES_IN_ALL)
    order = torch.randperm(num_classes, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(min(MOST_GROUPS, num_classes // size), num_classes, dtype=torch.bool)
    for row, group in zip(hidden, order.split(size), strict=False):  # type: ignore[no-untyped-call]
        row[group] = True
    return hidden


def scores_without(predictor: Predictor, passes: Passes, hidden: Tensor) -> dict[str, Tensor]:
    """Passes of B samples and groups of classes (K, C) → score → (K, B) as if each group had not been learned.

    Scores that can't tell are not among them.
    """
    task, found = predictor.task, []
    for group in hidden:
        outputs = passes.outputs.clone()
        outputs[..., : len(group)] = outputs[..., : len(group)].masked_fill(group, HIDDEN)
        predicted, scores = task.predictive(outputs, passes.weights), task.scores(outputs, passes.weights)
        found.append(scores | predictor.scores.of_answer_alone(replace(passes, outputs=outputs, predicted=predicted)))
    by_name = {name: torch.stack([one[name] for one in found]) for name in found[0]}
    return by_name | predictor.scores.without_classes(passes, hidden)


def noticed(parts: Sequence[Tensor], weights: Sequence[float], inside: Tensor, level: float) -> float:
    """Scores (N,) that are joined, and which samples (N,) are strange → the share of these that is called unknown.

    Of a score that counts by a weight below 1, the rest is as surprising as a known sample is on average, 1 nat.
    """
    known = [values[~inside] for values in parts]
    if list(weights) == [1.0]:
        reference, strange = known[0], parts[0][inside]
    else:
        reference, strange = cross_fitted(known), torch.zeros(int(inside.sum()))
        for usual, values, weight in zip(known, parts, weights, strict=True):
            strange = strange + weight * fit_surprise(usual)(values[inside]) + (1 - weight)
    return float((p_values(strange, reference.sort().values) <= level).double().mean())


def range_of(halved: Sequence[float], whole: Sequence[float], level: float) -> tuple[float, float]:
    """Shares of classes that are noticed, with half of what the prediction says and with all → the range to expect.

    From the lowest quarter of the first to the most of the second, at `ODDS` times the odds.

    >>> range_of([0.1, 0.2, 0.3, 0.4, 0.5], [0.3, 0.4, 0.5, 0.6, 0.75], 0.05)
    (0.2, 0.9)
    """
    low = statistics.quantiles(halved, n=4, method="inclusive")[0]
    most = max(*whole, level)
    return low, ODDS * most / (1 - most + ODDS * most)
