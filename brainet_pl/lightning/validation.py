"""The engine's last stage in the hooks of a Trainer: what each validation of a fit teaches a model.

`BRAINet` and the callback `SwapHead` call the same three steps: before a validation the head chooses what needs no
training, in each batch the model's answers are observed, at the end the verdict, calibration and sets are learned.
Every checkpoint that is written afterwards carries the result.

Of several validation sets the first selects and the second calibrates, as `brainet_pl.fitting.samples` has it: the
first gives the metrics that callbacks choose an epoch by, and the head's choices; the second gives calibration, verdict
and sets. A single one does both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.framework import CombinedLoader, TrainerFn, pl, rank_zero_info, rank_zero_warn
from brainet_pl._utils.lightning_private import train_loaders
from brainet_pl.features.extraction import Extracted
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.fitting.scores import fit_scores
from brainet_pl.fitting.settle import Answered, Settling
from brainet_pl.lightning import steps
from brainet_pl.network.base import MIN_VALIDATION
from brainet_pl.prediction.finite import finite_samples
from brainet_pl.prediction.predictor import Predictor

FEW_FOR_BOTH = 200  # validation samples that choose an epoch and then calibrate it, below which it shows


def teaches(trainer: pl.Trainer) -> bool:
    """Whether a running validation belongs to a fit, which alone may teach calibrators and scores.

    The sanity check sees a network that has not trained, and `trainer.validate` may be given any data, test data
    included.
    """
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def selects(dataloader_idx: int) -> bool:
    """Whether a validation set gives the metrics that an epoch is chosen by: the first does."""
    return dataloader_idx == 0


def calibrates(trainer: pl.Trainer, dataloader_idx: int) -> bool:
    """Whether a validation set gives calibration and verdict: the second does, or the only one."""
    return dataloader_idx == min(1, len(validation_loaders(trainer)) - 1)


def validation_loaders(trainer: pl.Trainer) -> list[Any]:
    """The loaders of the validation sets of a fit."""
    loaders: Any = trainer.val_dataloaders
    return [] if loaders is None else list(CombinedLoader(loaders, "sequential").flattened)


class ValidationTeacher:
    """Teaches one model by the validations of one fit.

    Args:
        predictor: the model.

    Attributes:
        head_facts: what the head chose before the last validation, by name.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.head_facts: dict[str, float] = {}
        self._settling = Settling(predictor)
        self._warned_of_few = False
        self._observed = self._calibrated_by = 0  # samples of this and the last validation that calibrated

    def before(self, trainer: pl.Trainer, features: TrainingFeatures) -> None:
        """Fit scores again where features move, and let the head choose by training and validation samples."""
        if not features.backbone.frozen:
            fit_scores(self.predictor, features, progress=False)
        head = self.predictor.head
        if head is None or not head.finalizes:
            return
        validation = validation_sample(trainer, features) if trainer.enable_validation else None
        training = training_sample(trainer, features)
        if head.needs_validation_data:
            self._warn_of_few(trainer, validation)
        size = steps.train_size(trainer) if math.isfinite(trainer.num_training_batches) else 0
        self.head_facts = self._settling.choose(training, validation, size)

    def _warn_of_few(self, trainer: pl.Trainer, validation: Extracted | None) -> None:
        count = 0 if validation is None else len(validation.targets)
        if count >= MIN_VALIDATION or self._warned_of_few or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._warned_of_few = True
        rank_zero_warn(
            f"expected at least {MIN_VALIDATION} validation samples to choose the temperature of the posterior by, "
            f"got {count}: it is the tempered default; give more validation data, or set Tree(temperature=…)"
        )

    def observe(self, answered: Answered) -> None:
        """See what the model says of a batch of validation data."""
        self._observed += len(answered.target)
        self._settling.observe(answered)

    def after(self) -> dict[str, Tensor | float]:
        """Learn from what was observed; gives numbers to log."""
        self._calibrated_by, self._observed = self._observed, 0
        numbers: dict[str, Tensor | float] = {}
        for name, value in self._settling.finish().items():
            numbers[f"val/{name}"] = value
        numbers |= self._estimated()
        for name, fact in self.head_facts.items():
            numbers[f"val/head/{name}"] = fact
        return numbers

    def _estimated(self) -> dict[str, float]:
        """What the verdict should notice, as numbers to log."""
        expected = self.predictor.expected
        if expected is None:
            return {}
        numbers = {"noticed": expected.noticed, "permuted": expected.permuted}
        numbers |= {"noticed_low": expected.low, "noticed_high": expected.high}
        return {f"verdict/{name}": value for name, value in numbers.items() if not math.isnan(value)}

    def share_choices(self, averages: Iterable[Predictor]) -> None:
        """Give what the head chose to the copies of the model that callbacks which average weights keep."""
        head = self.predictor.head
        for average in averages:
            if head is not None and average.head is not None:
                for name in head.not_averaged:
                    average.head.get_buffer(name).copy_(head.get_buffer(name))

    def share_scores(self, averages: Iterable[Predictor]) -> None:
        """Give them scores and a calibrator whose buffers grow with the data.

        Callbacks that average go through the buffers of two models, and both need the same.
        """
        for average in averages:
            average.scores = copy.deepcopy(self.predictor.scores)
            average.risk = copy.deepcopy(self.predictor.risk)
            if isinstance(self.predictor.calibration, DataSizedBuffers):
                average.calibration = copy.deepcopy(self.predictor.calibration)

    def report(self, trainer: pl.Trainer) -> None:
        """Say which score tells unknown inputs, and how many it is expected to notice."""
        self._warn_of_both_roles(trainer)
        expected = self.predictor.expected
        if expected is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not expected.unreliable:
            rank_zero_info(str(expected))
            return
        has_density = any(score.needs_fit for score in self.predictor.scores)
        hint = "; give the model a score of its features, scores=['Generative'] (--model.scores '[Generative]')"
        rank_zero_warn(str(expected) + ("" if has_density else hint))

    def _warn_of_both_roles(self, trainer: pl.Trainer) -> None:
        """Say that samples vouch for what they have chosen, where they are so few that it shows."""
        chosen = any(getattr(callback, "monitor", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        count = self._calibrated_by * trainer.world_size
        if not chosen or not 0 < count < FEW_FOR_BOTH or len(validation_loaders(trainer)) > 1:
            return
        rank_zero_warn(
            f"{count} validation samples chose the epoch and then calibrated it: what they promise is a little too "
            "good; give two validation sets, the first selects and the second calibrates, or one of "
            f"{FEW_FOR_BOTH} samples at the least"
        )


def training_sample(trainer: pl.Trainer, features: TrainingFeatures) -> Extracted:
    """What the backbone gives for a random choice of finite training samples, the same in all processes."""
    rows = steps.reach(trainer.num_training_batches, train_loaders(trainer), trainer.world_size)
    return finite_samples(features.sample(rows))


def validation_sample(trainer: pl.Trainer, features: TrainingFeatures) -> Extracted | None:
    """What the backbone gives for finite validation samples; None where a fit has none."""
    loaders = validation_loaders(trainer)
    if not loaders:
        return None
    first = loaders[0]
    batches = [*trainer.num_val_batches, 0]
    rows = steps.reach(batches[0], [first], trainer.world_size)
    return finite_samples(features.validation_sample(first, rows)) if rows else None
