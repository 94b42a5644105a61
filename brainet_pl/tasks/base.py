"""What a head is trained for. A task turns outputs of T passes into a loss, a prediction, metrics and scores.

Heads and tasks are combined freely: a head gives `task.out_features` numbers for each sample, whatever they mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from brainet_pl._utils.parts import Part
from brainet_pl.metrics.measures import Measure
from brainet_pl.metrics.passes import PassTrace
from brainet_pl.metrics.shift import Sums
from brainet_pl.tasks.linear import PredictFunction
from brainet_pl.tasks.passes import Passes


class Task(Part, nn.Module, ABC):
    """The part that differs between kinds of targets; what it learns from data, such as a scale, are buffers.

    Outputs are (B, O) or (M, B, O) while training and (T, B, O) with weights (T,) or None afterwards, O = out_features.

    Attributes:
        out_features: numbers that a head gives for each sample.
        group: where its metrics are logged, as in `test/<group>/NLL`.
        units: name → unit of each score that `scores` gives; a score is always higher for a less certain sample.
    """

    out_features: int
    group: ClassVar[str]
    units: ClassVar[Mapping[str, str]]

    has_names: ClassVar[bool] = False  # whether outputs are classes or labels, which may be named

    @property
    def needs_targets(self) -> bool:
        """Whether `prepare` waits for the training targets."""
        return False

    def prepare(self, targets: Tensor) -> None:
        """See all training targets (N, …) once, before fitting."""

    @abstractmethod
    def check(self, target: Tensor) -> Tensor:
        """Targets of a batch as the loss takes them, or an error that says what is wrong with them."""

    def check_later(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Targets that a loss can take, and a scalar on the device: whether `check` would refuse them; None is no."""
        return self.check(target), None

    def base_fits(self, count: int) -> bool:
        """Whether a network's own layer with `count` outputs can be one for this task."""
        return False

    def base_helps(self, base_logits: Tensor, target: Tensor) -> bool:
        """Whether what a network's own layer gave (N, C') says more of the targets (N,) than their frequencies do."""
        return False

    def base_outputs(self, base_logits: Tensor) -> Tensor:
        """What a network's own layer gave (B, C') as outputs (B, O) that a head can add to."""
        raise ValueError(f"expected a task whose outputs a network can have itself, got {self.describe()}: see skip")

    @abstractmethod
    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """A scalar; with outputs (M, B, O), the mean over members."""

    @abstractmethod
    def predictive(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """Averages the outputs of T passes (T, B, O) to the prediction that `measures` take."""

    def as_outputs(self, final: Tensor) -> Tensor:
        """A prediction as a user gets it, as what stands for outputs of a network; the prediction itself by default."""
        return final

    def nll(self, predicted: Tensor, target: Tensor) -> Tensor | None:
        """-log p (B,) of targets under what `predictive` gives, in nats; None where the task has no likelihood."""
        return None

    @abstractmethod
    def measures(self) -> list[Measure]:
        """Fresh metrics of `predictive` and target."""

    @abstractmethod
    def scores(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """Turns outputs (T, B, O) into measures of uncertainty (B,), each higher for a less certain sample."""

    def scores_of_answer(self, final: Tensor, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the `scores` (B,) that a calibrated average `final` says anew, in place of those of the passes."""
        return {}

    @abstractmethod
    def predict(self, passes: Passes, final: Tensor) -> dict[str, Tensor]:
        """The answer for each sample in the user's terms, from the passes and their calibrated average `final`."""

    @abstractmethod
    def answers(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The averaged prediction and the target as columns (B,) of a record."""

    def disagreement(self, outputs: Tensor, weights: Tensor | None) -> Tensor | None:
        """Outputs (T, B, O) of several passes → (B,) how often two answer differently; None where that says nothing."""
        return None

    def sums(self, predicted: Tensor, target: Tensor) -> Sums | None:
        """The averaged prediction and targets (B,) → sums that `measures_of` reads; None where the task has none."""
        return None

    def trace(self, outputs: Tensor, weights: Tensor | None, target: Tensor | None) -> PassTrace | None:
        """What another pass buys, from outputs (T, B, O); None where the task does not tell."""
        return None

    def linear(self, x: Tensor, target: Tensor) -> PredictFunction | None:
        """A linear layer on features (N, d), fitted in seconds, that gives what `predictive` gives, or None."""
        return None

    def linear_rows(self, features: int) -> int:
        """How many rows of so many features `linear` takes at the most, to be done in seconds."""
        return 2048

    def base_predicted(self, base_logits: Tensor) -> Tensor | None:
        """What the network's own layer gives, (B, C'), as `predictive` would give it; None where it is another task."""
        return None

    def classes(self, target: Tensor) -> tuple[Tensor, int]:
        """Labels (N,) and their number, for scores that keep something for each class; one class if there are none."""
        return target.new_zeros(len(target)).long(), 1
