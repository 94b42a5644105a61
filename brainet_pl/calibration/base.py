"""What every calibrator is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from brainet_pl._utils.parts import Part
from brainet_pl.distributed.epoch_buffer import EpochBuffer
from brainet_pl.scores import ScoreSet
from brainet_pl.tasks import Classification, Task


class Calibrator(Part, nn.Module, ABC):
    """Maps averaged predictions to better calibrated ones; what it learned are buffers and travel in checkpoints.

    A class of one's own needs `forward`, and `fit` if it learns from validation data.

    Attributes:
        tasks: the kinds of task whose predictions it can map.
        needs_validation: whether a fit without validation data is refused.
    """

    tasks: ClassVar[tuple[type[Task], ...]] = (Classification,)
    needs_validation: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._observed = EpochBuffer()

    @property
    def score_name(self) -> str | None:
        """The score that it reads, or None."""
        return None

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

    def finalize(self) -> dict[str, Tensor]:
        """`fit` to all that was observed, and forget it; without validation data nothing changes."""
        columns = self._observed.collect()
        return self.fit(columns["predicted"], columns["target"], columns.get("score")) if columns else {}

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
