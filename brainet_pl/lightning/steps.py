"""What a step makes of a batch, as typed things that metrics and records read, and what steps ask of a trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from brainet_pl._utils.framework import CombinedLoader, pl, rank_zero_info, rank_zero_warn
from brainet_pl._utils.lightning_private import data_given
from brainet_pl.backbones import batches
from brainet_pl.calibration import Calibrator
from brainet_pl.evaluation.record import Role, SampleBatch
from brainet_pl.features.extraction import is_sized
from brainet_pl.features.training import SAMPLE_ROWS
from brainet_pl.metrics.measures import collect
from brainet_pl.metrics.shift import ShiftSums, parts_of, split_by_part
from brainet_pl.network.output import Skip
from brainet_pl.network.weights import LayerWeights
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.tasks import Task
from brainet_pl.tasks.classification import same_classes
from brainet_pl.tasks.passes import Passes

CLEAN = {"clean": sys.maxsize}  # the known test set among its shifts


class EvaluatedBatch(NamedTuple):
    """What a model made of the K samples of a batch that count.

    Attributes:
        numbers: (K,) the place of each sample in its set; K is 0 where a process was given nothing but copies.
        passes: of these samples.
        scores: name → (K,) of these samples.
        target: (K,) their targets, or None where there are none.
        final: (K, …) the calibrated prediction, or None where nobody needs it.
        conformal: name → (K, …) the conformal sets of these samples.
    """

    numbers: Tensor
    passes: Passes
    scores: dict[str, Tensor]
    target: Tensor | None
    final: Tensor | None = None
    conformal: Mapping[str, Tensor] = {}


def base_prediction(predictor: Predictor, passes: Passes) -> Tensor | None:
    """What the network predicts without the new head; None where it can't, or is no longer what it was."""
    logits = None if passes.backbone_output is None else passes.backbone_output.base_logits
    return predictor.task.base_predicted(logits) if logits is not None and predictor.backbone.frozen else None


def test_metrics(task: Task) -> dict[str, MetricCollection]:
    """Metrics of a test of a model without metrics of its own: as it is, calibrated, and of the removed layer."""
    return {prefix: collect(task.measures(), prefix, task.group) for prefix in ("test/", "test/scaled/", "test/own/")}


test_metrics.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks of the name


def measure(
    predictor: Predictor,
    passes: Passes,
    scores: dict[str, Tensor],
    numbers: Tensor,
    target: Tensor,
    metrics: Mapping[str, MetricCollection],
) -> EvaluatedBatch:
    """Update `test_metrics` by a batch of the known set; gives all that was made of the batch."""
    final, base = predictor.calibrated(passes, scores), base_prediction(predictor, passes)
    scaled = final if predictor.calibrates else None
    for prefix, predicted in (("test/", passes.predicted), ("test/scaled/", scaled), ("test/own/", base)):
        if predicted is not None:
            metrics[prefix].to(predicted.device).update(predicted, target)
    sets = {} if predictor.conformal is None else predictor.conformal(final)
    return EvaluatedBatch(numbers, passes, scores, target, final, sets)


def sample_batch(predictor: Predictor, batch: EvaluatedBatch, with_shifts: bool) -> SampleBatch:
    """What the record of a test keeps of a batch of a known or unknown set."""
    passes, target, task = batch.passes, batch.target, predictor.task
    answers: dict[str, Tensor] = {}
    if target is not None:
        answers = task.answers(passes.predicted, target)
        if batch.final is not None and predictor.calibrates:
            final = task.answers(batch.final, target)
            answers["calibrated"] = final.get("confidence", batch.final[:, -1])
        if predictor.conformal is not None and batch.conformal:
            answers |= predictor.conformal.answers(dict(batch.conformal), target)
    trace = task.trace(passes.outputs, passes.weights, target)
    shifts = shift_sums(predictor, batch, CLEAN) if target is not None and with_shifts else {}
    known_p, score = predictor.judge(batch.scores, passes.nan_rows(batch.final)).get("known_p"), None
    if known_p is not None:
        score = predictor.verdict_score(batch.scores)
    return SampleBatch(
        batch.scores,
        answers,
        trace,
        len(passes.outputs),
        batch.numbers,
        shifts,
        known_p,
        predictor.verdict.level,
        score,
        None if score is None else len(predictor.scores.reference[score]),
    )


def shift_sums(predictor: Predictor, batch: EvaluatedBatch, parts: Mapping[str, int]) -> dict[str, ShiftSums]:
    """Sums over the samples of a batch for each shift that has some of them, before and after calibration."""
    assert batch.target is not None
    predicted, task, sums = batch.passes.predicted, predictor.task, {}
    final = predictor.calibrated(batch.passes, batch.scores) if predictor.calibrates else None
    for name, chosen in split_by_part(batch.numbers, parts):
        rows = chosen.to(predicted.device)
        plain = task.sums(predicted[rows], batch.target[rows])
        if plain is not None:
            sums[name] = ShiftSums(plain, None if final is None else task.sums(final[rows], batch.target[rows]))
    return sums


def shift_parts(trainer: pl.Trainer, sets: Mapping[str, Role]) -> dict[int, dict[str, int]]:
    """The number of each test loader of shifted data → the sizes of the shifts that it holds."""
    loaders = CombinedLoader(trainer.test_dataloaders, "sequential").flattened
    return {
        i: parts_of(name, getattr(loader, "dataset", None))
        for i, (loader, (name, role)) in enumerate(zip(loaders, sets.items(), strict=True))
        if role == "shift"
    }


def train_size(trainer: pl.Trainer) -> int:
    """How many training samples an epoch has, for heads whose loss has a penalty."""
    count = float(trainer.num_training_batches)
    if count == float("inf"):
        raise ValueError(
            "expected training data of known size for a head whose loss has a penalty (Bayes), got a stream "
            "without a length: set limit_train_batches in the Trainer, or give the dataset a length"
        )
    size = getattr(trainer.train_dataloader, "batch_size", None) or 1
    return max(1, int(count * size * trainer.world_size))


def is_left_over(trainer: pl.Trainer, model: nn.Module, x: Any, batch_idx: int) -> bool:
    """Whether a batch is one sample that was left over at the end of an epoch, which batch norm can't train on.

    It is left out with a warning. A first batch of one sample means that all are, which is the head's error.
    """
    last = 0 < batch_idx == float(trainer.num_training_batches) - 1
    if not last or batches.size(x) != 1 or not any(map(_normalises, model.modules())):
        return False
    rank_zero_warn(
        "the last batch of each epoch is one sample, which batch norm can't train on, and is left out: use "
        "drop_last=True in the training loader, or another batch_size"
    )
    return True


def nothing_learned(trainer: pl.Trainer, model: nn.Module) -> Tensor | None:
    """What a training step gives that leaves a batch out.

    Several processes wait for each other's gradients, so that none of them can skip a step: theirs are zero.
    """
    if trainer.world_size == 1:
        return None
    return torch.stack([(p * 0.0).sum() for p in model.parameters() if p.requires_grad]).sum()


def _normalises(module: nn.Module) -> bool:
    """Whether a module has statistics of batches: batch norm, or a layer of a head that has it built in."""
    built_in = isinstance(module, LayerWeights | Skip) and module.norm is not None
    return built_in or isinstance(module, nn.modules.batchnorm._BatchNorm)


def missing_validation(calibrator: Calibrator, by_default: bool) -> None:
    """Refuse a fit without validation data where a calibrator can't do without; else say that it learns nothing."""
    name = type(calibrator).__name__
    what = (
        "give the datamodule a val_dataloader, or the fit val_dataloaders, and a limit_val_batches above 0; or leave "
        "calibration out"
    )
    if calibrator.needs_validation and not by_default:
        raise ValueError(f"expected validation data for {name}, got none: {what}")
    if type(calibrator).fit is not Calibrator.fit:
        tell = rank_zero_info if by_default else rank_zero_warn
        tell(f"{name} has no validation data to learn from, so predictions are not calibrated: {what}")


def refuse_empty(kind: str, loaders: Any) -> None:
    """Refuse loaders without a batch, which Lightning leaves out without a word."""
    for loader in CombinedLoader(loaders, "sequential").flattened if loaders is not None else ():
        if is_sized(loader) and not len(loader):
            raise ValueError(
                f"expected {kind} samples, got a loader without a batch: check the {kind} data (and drop_last, where "
                "there are fewer samples than a batch has), or leave that loader out"
            )


def reach(batches: float, loaders: Sequence[Any] | None, processes: int = 1) -> int:
    """How many samples to look at: `SAMPLE_ROWS`, or the fewer that a short run holds in all processes."""
    size = getattr(loaders[0], "batch_size", None) if loaders else None
    if loaders and is_sized(loaders[0]) and batches >= len(loaders[0]):
        return SAMPLE_ROWS  # a whole epoch: a last batch that is dropped is still data
    return SAMPLE_ROWS if size is None else int(min(SAMPLE_ROWS, batches * size * processes))


def check_labels(class_names: tuple[str, ...] | None, loop: Any) -> None:
    """Refuse data of a running loop whose labels stand for other classes than those that were trained."""
    names = getattr(data_given(loop), "class_names", None)
    if names and class_names:
        same_classes(class_names, tuple(names))
