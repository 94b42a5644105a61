"""What a head is trained for. A task turns outputs of T passes into a loss, a prediction, metrics and scores.

Heads and tasks are combined freely: a head gives `task.out_features` numbers for each sample, whatever they mean.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection

from brainet_pl import uncertainty
from brainet_pl.calibration import TemperatureFit, scale
from brainet_pl.losses import confidence_loss
from brainet_pl.metrics import classification_metrics
from brainet_pl.ood import predictive_scores

TaskName = Literal["classification", "regression"]
LossName = Literal["cross_entropy", "confidence"]


class Task(nn.Module):
    """The part that differs between kinds of targets; what it learns from data (a scale, a temperature) are buffers.

    Outputs are (B, O) or (M, B, O) while training and (T, B, O) with weights (T,) or None afterwards, O = out_features.
    """

    out_features: int

    def prepare(self, targets: Tensor) -> None:
        """See all training targets (N, …) once, before fitting."""

    def check(self, target: Tensor) -> Tensor:
        """Targets of a batch as the loss takes them, or an error that says what is wrong with them."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """A scalar; with outputs (M, B, O), the mean over members."""
        raise NotImplementedError

    def predictive(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """(T, B, O) → the averaged prediction that `metrics` take."""
        raise NotImplementedError

    def metrics(self, prefix: str) -> MetricCollection:
        """Metrics of `predictive` and target."""
        raise NotImplementedError

    def scores(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """(T, B, O) → measures of uncertainty (B,), each higher for a less certain sample."""
        raise NotImplementedError

    def predict(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """(T, B, O) → everything a user wants to know about each sample."""
        raise NotImplementedError


class Classification(Task):
    """C classes, from C logits; with the "confidence" loss one more output is the logit of a learned confidence.

    Args:
        num_classes: C.
        loss: "cross_entropy", or "confidence" (DeVries & Taylor 2018), whose confidence becomes a further score.
        label_smoothing: of either loss.
        confidence_budget: the mean -log confidence that the price of a hint is steered to.
        temperature_scaling: scale predictions by a temperature fitted on the validation data after every epoch.
    """

    tau: Tensor
    price: Tensor

    def __init__(
        self,
        num_classes: int,
        loss: LossName = "cross_entropy",
        label_smoothing: float = 0.0,
        confidence_budget: float = 0.3,
        temperature_scaling: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"expected num_classes of at least 2, got {num_classes}: for numbers, task='regression'")
        if loss not in ("cross_entropy", "confidence"):
            raise ValueError(f"expected loss to be 'cross_entropy' or 'confidence', got {loss!r}")
        self.num_classes, self.label_smoothing, self.budget = num_classes, label_smoothing, confidence_budget
        self.confidence = loss == "confidence"
        self.out_features = num_classes + self.confidence
        self.temperature_scaling = temperature_scaling
        self.temperature_fit = TemperatureFit()
        self.register_buffer("tau", torch.ones(()))
        self.register_buffer("price", torch.tensor(0.1))

    def check(self, target: Tensor) -> Tensor:
        """Labels (B,) from 0 to C - 1."""
        y = target.long()
        if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < self.num_classes:
            raise ValueError(
                f"expected labels from 0 to {self.num_classes - 1}, got {int(y.min())} to {int(y.max())}: set "
                "num_classes to the number of classes, or renumber the labels"
            )
        return y

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, or the learned-confidence loss with its price steered towards the budget."""
        if outputs.dim() == 3:
            target = target.repeat(len(outputs))
            outputs = outputs.flatten(0, 1)
        if not self.confidence:
            return F.cross_entropy(outputs, target, label_smoothing=self.label_smoothing)
        hinted = torch.rand(len(target), device=outputs.device) < 0.5
        logits, confidence = outputs[:, :-1], outputs[:, -1]
        task, doubt = confidence_loss(logits, confidence, target, hinted, self.label_smoothing)
        if self.training:  # a hint gets cheaper while the network is surer than the budget, and dearer otherwise
            self.price *= torch.where(doubt.detach() < self.budget, 1 / 1.01, 1 / 0.99)
        return task + self.price.clone() * doubt

    def probabilities(self, outputs: Tensor) -> Tensor:
        """(T, B, O) → (T, B, C)."""
        return outputs[..., : self.num_classes].float().softmax(dim=-1)

    def predictive(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """(B, C) mean probabilities, before any scaling."""
        return uncertainty.predictive(self.probabilities(outputs), weights)

    def scaled(self, probs: Tensor) -> Tensor:
        """(B, C) → the same at the fitted temperature."""
        return scale(probs, self.tau)

    def metrics(self, prefix: str) -> MetricCollection:
        """Accuracy, NLL, Brier, calibration errors, selective prediction."""
        return classification_metrics(self.num_classes, prefix)

    def scores(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """The predictive scores, and `confidence` where one is learned."""
        logits = outputs[..., : self.num_classes].float()
        found = predictive_scores(self.probabilities(outputs), logits, weights)
        if self.confidence:
            found["confidence"] = 1.0 - uncertainty.predictive(outputs[..., -1].float().sigmoid(), weights)
        return found

    def predict(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """Class, probabilities (scaled where asked for) and every measure of uncertainty."""
        mean = self.predictive(outputs, weights)
        mean = self.scaled(mean) if self.temperature_scaling else mean
        return {"class": mean.argmax(dim=-1), "probabilities": mean} | self.scores(outputs, weights)


def make_task(name: TaskName, num_classes: int | None, settings: dict[str, Any]) -> Task:
    """The task of a name; `settings` are those of its class."""
    if name == "classification":
        if num_classes is None:
            raise ValueError("expected num_classes for classification, got none: set it, or task='regression'")
        return Classification(num_classes, **settings)
    raise ValueError(f"expected task to be 'classification' or 'regression', got {name!r}")
