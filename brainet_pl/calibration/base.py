"""What every calibrator is."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl._utils.parts import Part
from brainet_pl.distributed.epoch_buffer import EpochBuffer
from brainet_pl.metrics.measures import check_classes
from brainet_pl.scores import ScoreSet
from brainet_pl.tasks import Classification, Task

FEW_SAMPLES = 20  # validation samples below which a user should hear that calibration rests on next to nothing


def reason_not_to_fit(predicted: Tensor, target: Tensor) -> str | None:
    """What validation samples, predictions (N, …) and targets (N,), lack for anything to be learned from them."""
    if not len(target):
        return "no validation sample with finite predictions"
    if target.is_floating_point():
        return None
    if predicted.shape[1] > 1 and bool((target == target[0]).all()):
        return f"validation samples of one class only ({len(target)} of class {int(target[0])})"
    if len(target) > 1 and bool((predicted == predicted[0]).all()):
        return f"{len(target)} validation samples with the same prediction for all of them"
    return None


class Calibrator(Part, nn.Module, ABC):
    """Maps averaged predictions to better calibrated ones; what it learned are buffers and travel in checkpoints.

    A class of one's own needs `forward`, and `fit` if it learns from validation data.

    Attributes:
        tasks: the kinds of task whose predictions it can map.
        needs_validation: whether a fit without validation data is refused.
        few_numbers: whether it learns so few numbers that it fits the samples it has seen no better than others.
        learns_from_copies: whether `observe_copy` wants predictions of perturbed copies of validation samples.
    """

    tasks: ClassVar[tuple[type[Task], ...]] = (Classification,)
    needs_validation: ClassVar[bool] = False
    learns_from_copies: ClassVar[bool] = False
    few_numbers: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._observed = EpochBuffer()
        self._warned: set[str] = set()
        self._quiet = False

    @property
    def score_name(self) -> str | None:
        """The score that it reads, or None."""
        return None

    @property
    def changes_predictions(self) -> bool:
        """Whether predictions are other than without it: many change nothing before they have seen validation data."""
        return True

    def add_required_scores(self, scores: ScoreSet, model: nn.Module | None) -> None:
        """Add a score that it needs to those of the model, whose backbone is a module or None."""

    def check(self, task: Task) -> None:
        """Refuse a task whose predictions it does not know."""
        if not isinstance(task, self.tasks):
            known = " or ".join(kind.__name__ for kind in self.tasks)
            raise ValueError(
                f"expected the task {known} for {type(self).__name__}, got {type(task).__name__}: leave calibration out"
            )

    def observe(self, predicted: Tensor, target: Tensor, scores: Mapping[str, Tensor]) -> None:
        """Keep a batch of the validation data of a fit: averaged predictions, targets (B,), and of all scores its own.

        Nothing is kept where the score that it reads is not there.
        """
        columns = {"predicted": predicted, "target": target}
        if self.score_name is None:
            self._observed.append(columns)
        elif self.score_name in scores:
            self._observed.append({**columns, "score": scores[self.score_name]})

    def observe_copy(self, copy: int, predicted: Tensor, target: Tensor, scores: Mapping[str, Tensor]) -> None:
        """Keep predictions of a perturbed copy of validation samples; the copy 0 is the samples as they are."""

    def finalize(self) -> dict[str, Tensor]:
        """`fit` to all that was observed, and forget it; without validation data nothing changes.

        Samples whose prediction is not finite are left out. Samples of one class only, or with one and the same
        prediction, tell nothing about others: the calibrator stays as it was, with a warning.
        """
        columns = {name: values.cpu() for name, values in self._observed.collect().items()}
        if not columns:
            return {}
        if not columns["target"].is_floating_point():
            check_classes(columns["predicted"], columns["target"])
        has_target = self.has_target(columns["target"])
        columns = {name: values[has_target] for name, values in columns.items()}
        finite = columns["predicted"].isfinite().all(dim=1)
        columns = {name: values[finite] for name, values in columns.items()}
        left_out, count = len(finite) - len(columns["target"]), len(columns["target"])
        if left_out:
            self._warn("nan", f"left out {left_out} of {len(finite)} validation samples with NaN in their predictions")
        reason = reason_not_to_fit(columns["predicted"], columns["target"])
        if reason is not None:
            self._warn("left", f"predictions are not calibrated: got {reason}; give other validation data")
            return {}
        if count < FEW_SAMPLES:
            self._warn(
                "few",
                f"calibrated on {count} validation samples: expected at least {FEW_SAMPLES}; so few hardly change "
                "predictions, and can't tell whether they are right; give more of them",
            )
        home = next((buffer.device for buffer in self.buffers()), torch.device("cpu"))
        given = columns["predicted"], columns["target"], columns.get("score")
        return self.fit(*given) if home.type == "cpu" else self.fit_on_cpu(*given)

    def has_target(self, target: Tensor) -> Tensor:
        """Which samples (N,) have a target to learn from."""
        return target.isfinite()

    def fit_on_cpu(self, predicted: Tensor, target: Tensor, score: Tensor | None) -> dict[str, Tensor]:
        """`fit` a copy on the CPU, and take over what it learned: a GPU would wait at each of many small steps."""
        twin = copy.deepcopy(self).cpu()
        twin._warned = self._warned
        learned = twin.fit(predicted, target, score)
        for name, part in self.named_modules():
            for key, value in twin.get_submodule(name)._buffers.items():
                own = part._buffers.get(key)
                if own is not None and value is not None and own.shape == value.shape:
                    own.copy_(value)  # in place: others may hold it
                else:
                    part._buffers[key] = value if value is None or own is None else value.to(own.device)
        return learned

    def quiet(self) -> Calibrator:
        """Say nothing more of what is doubtful, as it was said of another fit. Returns itself."""
        self._quiet = True
        return self

    def _warn(self, kind: str, message: str) -> None:
        """Say once what is doubtful."""
        if kind not in self._warned and not self._quiet:
            self._warned.add(kind)
            rank_zero_warn(f"{type(self).__name__}: {message}")

    def fit(self, predicted: Tensor, target: Tensor, score: Tensor | None) -> dict[str, Tensor]:
        """Learn from averaged predictions, targets (N,) and the score `score_name` (N,) of validation data.

        Gives scalars to log as `val/cal/<name>`.
        """
        return {}

    @abstractmethod
    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Averaged predictions → calibrated ones of the same shape."""

    def label(self) -> str:
        """A few words for figures: what was done to the prediction."""
        return "after calibration"
