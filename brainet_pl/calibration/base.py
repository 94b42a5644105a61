"""What every calibrator is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from brainet_pl._utils.parts import Part
from brainet_pl.scores import ScoreSet
from brainet_pl.tasks import Classification, Task


class Calibrator(Part, nn.Module, ABC):
    """Maps averaged predictions to better calibrated ones; what it learned are buffers and travel in checkpoints.

    Attributes:
        tasks: the kinds of task whose predictions it can map.
        needs_validation: whether a fit without validation data is refused.
    """

    tasks: ClassVar[tuple[type[Task], ...]] = (Classification,)
    needs_validation: ClassVar[bool] = False

    @property
    def score_name(self) -> str | None:
        """The score that it looks at, or None."""
        return None

    def bring(self, scores: ScoreSet, model: nn.Module | None) -> None:
        """Add a score that it needs to those of the model, whose backbone is a module or None."""

    def check(self, task: Task) -> None:
        """Refuse a task whose predictions it does not know."""
        if not isinstance(task, self.tasks):
            known = " or ".join(kind.__name__ for kind in self.tasks)
            raise ValueError(
                f"expected the task {known} for {type(self).__name__}, got {type(task).__name__}: leave calibration out"
            )

    @abstractmethod
    def observe(self, predicted: Tensor, target: Tensor, scores: Mapping[str, Tensor]) -> None:
        """See a batch of the validation data of a fit: averaged predictions, targets (B,), and all scores (B,)."""

    @abstractmethod
    def finalize(self) -> dict[str, Tensor]:
        """Learn from what was watched, and forget it; gives scalars to log as `val/cal/<name>`."""

    @abstractmethod
    def forward(self, predicted: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
        """Averaged predictions → calibrated ones of the same shape."""

    def label(self) -> str:
        """A few words for figures: what was done to the prediction."""
        return "after calibration"
