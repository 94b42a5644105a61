"""The only place where a model learns from held-out data: what it may promise, once its weights are trained.

In the order in which it is learned: the temperature of the posterior and the dropout of predictions (`choose`), then,
from what the model says of calibration samples (`observe`), its calibration, the reference of its verdict, its
conformal sets, and how much it will notice of unknown inputs (`finish`). Every door walks this road: `settle` does it
for extracted samples, a Trainer's validation batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils.framework import rank_zero_info
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.calibration import Calibrator
from brainet_pl.calibration.conformal import UncalibratedBatch, cross_fitted, fold_of
from brainet_pl.calibration.perturb import MOST_ROWS, perturbed_copies
from brainet_pl.distributed.epoch_buffer import EpochBuffer
from brainet_pl.features.extraction import Extracted
from brainet_pl.fitting.left_out import LeftOut
from brainet_pl.fitting.predictions import BATCH, tempered_nll
from brainet_pl.fitting.samples import enough_to_choose
from brainet_pl.network.base import Head
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import Own
from brainet_pl.tasks import Classification, MultiLabel
from brainet_pl.tasks.passes import Passes


class Answered(NamedTuple):
    """What a model said of a batch of calibration samples.

    Attributes:
        passes: of the batch.
        scores: name → (B,) of all scores.
        target: (B,) checked targets.
        numbers: (B,) the place of each sample in its set; None where batches come in order, in one process.
    """

    passes: Passes
    scores: Mapping[str, Tensor]
    target: Tensor
    numbers: Tensor | None = None


class Settling:
    """Teaches one model from held-out data, in the steps that a Trainer's validation leaves time for.

    Args:
        predictor: the model, whose weights are trained and whose scores are fitted.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self._left_out = LeftOut(predictor)
        self._kept: list[tuple[Tensor, Tensor]] = []  # features and targets, for perturbed copies of them
        self._rows = EpochBuffer()  # averaged predictions, targets and what the calibrator reads
        self._count = 0  # samples observed
        self._said_all_one = False

    def choose(self, train: Extracted, select: Extracted | None, size: int = 0) -> dict[str, float]:
        """Let the head choose what needs no training; gives what was chosen, by name.

        A `Tree` chooses the temperature of its posterior and the dropout of its predictions, and takes batch-norm
        statistics for its simultaneous pass; `Laplace` fits the Gaussian of its weights.

        Args:
            train: all training samples, or a sample of them.
            select: held-out samples; too few of them choose nothing.
            size: the number of training samples, where `train` are fewer.
        """
        predictor, head = self.predictor, self.predictor.require_head()
        enough = enough_to_choose(select)
        held_out = None if enough is None else predictor.head_inputs(enough)
        weight = max(1.0, size / max(1, len(train.targets)))
        inputs = predictor.head_inputs(train)._replace(represents=weight)
        chosen = head.finalize(inputs, held_out, self._nll, predictor.num_passes)
        if head.needs_validation_data and head.averages_one and not self._said_all_one:
            self._said_all_one = True
            rank_zero_info(
                "one sub-network has all of the posterior: predictions are its own, one pass in place of "
                f"{predictor.num_passes}, and mutual information says nothing"
            )
        return chosen

    def _nll(self, outputs: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
        """The NLL of each target under the average of outputs; all zero where the task has no likelihood.

        Probabilities that a calibrator will scale are scaled to their best temperature first. Without that, one sharp
        sub-network looks better than an average, which only lacks the temperature that it gets later.
        """
        predictor = self.predictor
        predicted = predictor.task.predictive(outputs, weights)
        if isinstance(predictor.task, Classification | MultiLabel) and predictor.calibration is not None:
            return tempered_nll(predictor.task, predicted, target)
        nll = predictor.task.nll(predicted, target)
        return predicted.new_zeros(len(target)) if nll is None else nll

    def observe(self, answered: Answered) -> None:
        """See what the model says of a batch of calibration samples."""
        predictor = self.predictor
        passes, target, numbers = answered.passes, answered.target, answered.numbers
        if numbers is None:
            numbers = torch.arange(self._count, self._count + len(target))
        self._count += len(target)
        self._left_out.observe(passes, target, numbers)
        scores = {**answered.scores, **passes.scores}  # those of the passes, before any calibration
        predictor.scores.observe(passes, scores)
        self._rows.append({"predicted": passes.predicted, "target": target})
        if predictor.calibration is not None:
            predictor.calibration.observe(passes.predicted, target, scores)
            self._keep_features(predictor.calibration, passes.features, target)
        if predictor.conformal is not None:
            places = None if predictor.calibration is None else numbers
            predictor.conformal.observe(passes.predicted, target, scores, places)

    def _keep_features(self, calibration: Calibrator, features: Tensor, target: Tensor) -> None:
        """Keep the features of the first samples, for a calibrator that learns from perturbed ones.

        Only the head is run again: where a score reads other layers, or logits of a removed layer count, none are kept.
        """
        if not calibration.learns_from_copies or self.predictor.needs_base_logits:
            return
        if any(score.taps is not None or isinstance(score, Own) for score in self.predictor.scores):
            return
        room = MOST_ROWS - sum(len(rows) for rows, _ in self._kept)
        if room > 0:
            self._kept.append((features[:room].detach(), target[:room]))

    @torch.no_grad()
    def _observe_copies(self, calibration: Calibrator) -> None:
        """Show the calibrator what is predicted of perturbed copies of the features that were kept, and forget them."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        head: Head = self.predictor.require_head()
        dtype = next((p.dtype for p in head.parameters()), torch.float32)
        features = torch.cat([rows for rows, _ in kept]).to(dtype)
        target = torch.cat([targets for _, targets in kept])
        finite = features.isfinite().flatten(1).all(dim=1)
        features, target = features[finite], target[finite]
        if len(target) < 2:
            return
        for number, copy in enumerate(perturbed_copies(features, target)):
            with isolated_rng(0):  # the same sub-networks for all copies
                passes = self.predictor.passes(BackboneOutput(copy))
                calibration.observe_copy(number, passes.predicted, target, self.predictor.scores.of_passes(passes))

    def finish(self) -> dict[str, Tensor]:
        """Learn from what was observed, and forget it; gives numbers to log, `cal/…` and `conformal/…`."""
        predictor, self._count = self.predictor, 0
        learned: dict[str, Tensor] = {}
        if predictor.calibration is not None:
            self._observe_copies(predictor.calibration)
            for name, value in predictor.calibration.finalize().items():
                learned[f"cal/{name}"] = value
        # After calibration, as conformal sets: it is about what a user gets.
        self._keep_outcomes(predictor.scores.finalize(predictor.finish))
        if predictor.conformal is not None:
            for name, value in predictor.conformal.finalize(predictor.calibration).items():
                learned[f"conformal/{name}"] = value
        self._expect()
        return learned

    def _keep_outcomes(self, said: tuple[Tensor, dict[str, Tensor]] | None) -> None:
        """Keep which answers to calibration samples were right, by final predictions and scores, for promises.

        A calibrator of a few numbers fits the samples that it has seen no better than others. One that learns more is
        fitted again without each fold of the samples, for this fold.
        """
        rows, predictor = self._rows.collect(), self.predictor
        if said is None or not isinstance(predictor.task, Classification):
            return
        final, scores = said
        calibration = predictor.calibration
        if calibration is not None and not calibration.few_numbers:
            numbers = torch.arange(len(final), device=final.device)
            batch = UncalibratedBatch(numbers, rows["predicted"], rows["target"], scores)
            final = final.clone()
            for fold, (part, _) in enumerate(cross_fitted(calibration, [batch])):
                final[fold_of(numbers) == fold] = part
        predictor.risk.keep(final, rows["target"], predictor.judge(scores).get("known"))

    def _expect(self) -> None:
        """Keep how many unknown inputs the verdict should notice, without unknown data; see `fitting.left_out`."""
        expectation = self._left_out.estimate()
        if expectation is not None:
            self.predictor.scores.expected.keep(expectation)


@torch.no_grad()
def settle(predictor: Predictor, answered: Iterable[Answered]) -> dict[str, float]:
    """Learn the verdict's reference, calibration and conformal sets from what a model says of calibration samples.

    Args:
        predictor: the model, trained, with its scores fitted.
        answered: what it says of calibration samples, batch by batch.

    Returns:
        What was learned, by name: `temperature` and the like.
    """
    settling = Settling(predictor)
    for batch in answered:
        settling.observe(batch)
    return {name.removeprefix("cal/"): float(value) for name, value in settling.finish().items()}


@torch.no_grad()
def answer_rows(predictor: Predictor, samples: Extracted) -> Iterator[Answered]:
    """What a model says of extracted samples, a batch at a time, as it will say it to a user."""
    device = device_of(predictor)
    for first in range(0, len(samples.targets), BATCH):
        rows = slice(first, first + BATCH)
        passes = predictor.passes(samples.output[rows].to(device))
        target = predictor.task.check(samples.targets[rows].to(device))
        yield Answered(passes, predictor.all_scores(passes), target)
