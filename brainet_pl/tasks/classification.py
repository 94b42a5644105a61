"""Classification: one of C classes for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl import uncertainty
from brainet_pl._utils import checks
from brainet_pl._utils.precision import wide
from brainet_pl.metrics.labels import clamped, out_of_range
from brainet_pl.metrics.losses import confidence_loss, weighted_mean
from brainet_pl.metrics.measures import Measure, classification_measures
from brainet_pl.metrics.passes import PassTrace, trace_passes
from brainet_pl.metrics.shift import Sums, class_sums
from brainet_pl.tasks.base import Task
from brainet_pl.tasks.linear import SoftmaxLayer, fit_softmax, softmax_rows
from brainet_pl.tasks.passes import Passes


def check_class_names(names: Any, task: Task) -> tuple[str, ...] | None:
    """The names of a task's classes in the order of their numbers; None where there are none to name.

    Args:
        names: one text for each class, from a datamodule or a checkpoint; None or nothing where nobody named them.
        task: names belong to classes, or to several labels; any other task has none.

    >>> check_class_names(["cat", "dog"], Classification(2))
    ('cat', 'dog')
    """
    if names is None or not task.has_names:
        return None
    if not checks.are_texts(names):
        raise ValueError(
            f"expected class_names to be a list of texts, got {checks.shown(names)}: give one name for each class"
        )
    found = tuple(names)
    if not found:
        return None
    count = task.num_classes if isinstance(task, Classification) else task.out_features  # without a learned confidence
    if len(found) != count or len(set(found)) != len(found):
        listed = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise ValueError(
            f"expected {count} different names of classes, as num_classes says, got {len(set(found))} "
            f"({listed}): set num_classes to the number of classes in the data, or correct class_names"
        )
    return found


def same_classes(trained: Sequence[str], given: Sequence[str]) -> None:
    """Refuse data whose labels stand for other classes than those that were trained."""
    if list(trained) != list(given):
        raise ValueError(
            f"expected the classes that the model was trained for, {', '.join(trained)}, got {', '.join(given)}: "
            "labels would mean something else; give data with the same classes in the same order"
        )


def predictive_scores(probs: Tensor, logits: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Probabilities and logits (T, B, C) of one set of passes → every predictive score, each (B,)."""
    return {
        "one_minus_max_p": uncertainty.one_minus_max_p(probs, weights),
        "max_logit": uncertainty.max_logit(logits, weights),
        "energy": uncertainty.energy(logits, weights),
        "entropy": uncertainty.predictive_entropy(probs, weights),
        "expected_entropy": uncertainty.expected_entropy(probs, weights),
        "mutual_information": uncertainty.mutual_information(probs, weights),
    }


class Classification(Task):
    """C classes, from C logits; with the "confidence" loss one more output is the logit of a learned confidence.

    Args:
        num_classes: Number of classes C.
        loss: "cross_entropy", or "confidence" (DeVries & Taylor 2018), whose confidence becomes a further score.
        label_smoothing: Share of the label that either loss spreads over all classes.
        confidence_budget: The mean -log confidence that the price of a hint is steered to.
    """

    has_names: ClassVar[bool] = True
    group: ClassVar[str] = "cls"
    units: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("one_minus_max_p", "max_logit", "energy"), ""),
        **dict.fromkeys(("entropy", "expected_entropy", "mutual_information"), "nats"),
        "confidence": "",
    }
    kept_as: ClassVar[Mapping[str, str]] = {"loss": "loss_name"}
    price: Tensor

    def __init__(
        self,
        num_classes: int,
        loss: Literal["cross_entropy", "confidence"] = "cross_entropy",
        label_smoothing: float = 0.0,
        confidence_budget: float = 0.3,
    ) -> None:
        super().__init__()
        checks.one_of("loss of a classification", loss, ("cross_entropy", "confidence"))
        self.num_classes = checks.whole("num_classes", num_classes, 2, 10**7)
        self.label_smoothing = checks.share("label_smoothing", label_smoothing)
        self.confidence_budget = checks.above_zero("confidence_budget", confidence_budget)
        self.loss_name = loss
        self.confidence = loss == "confidence"
        self.out_features = self.num_classes + self.confidence
        self.register_buffer("price", torch.tensor(0.1))

    def check(self, target: Tensor) -> Tensor:
        """Labels (B,) from 0 to C - 1; whole numbers such as 2.0 are labels too."""
        y = target.long()
        if target.is_floating_point() and not torch.equal(y.to(target.dtype), target):
            odd = target[y.to(target.dtype) != target][0].item()
            raise ValueError(
                f"expected class labels to be whole numbers, got {odd:g}: number the classes from 0, or set "
                "task='Regression' for real numbers"
            )
        if y.dim() != 1:
            raise ValueError(
                f"expected one class label for each sample, (B,), got targets of shape {tuple(target.shape)}: give the "
                "number of the class, not one column for each class"
            )
        wrong = out_of_range(y, self.num_classes)
        if wrong is not None:
            raise ValueError(
                f"expected labels from 0 to {self.num_classes - 1}, got {wrong[0]} to {wrong[1]}: set num_classes to "
                "the number of classes, or renumber the labels"
            )
        return y

    def check_later(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Labels (B,) from 0 to C - 1 without a read of the device, and whether `check` would have refused them."""
        if target.is_floating_point() or target.dim() != 1 or not target.numel():
            return self.check(target), None
        return clamped(target.long(), self.num_classes)

    def base_fits(self, count: int) -> bool:
        """As many logits as classes."""
        return count == self.num_classes

    def base_helps(self, base_logits: Tensor, target: Tensor) -> bool:
        """Whether logits (N, C) are of these classes: their cross-entropy is less than that of the classes' shares."""
        shares = torch.bincount(target, minlength=self.num_classes).double() / len(target)
        return bool(F.cross_entropy(base_logits.double(), target) < -torch.special.xlogy(shares, shares).sum())

    def base_outputs(self, base_logits: Tensor) -> Tensor:
        """Logits (B, C) → (B, O): a learned confidence starts from nothing."""
        if not self.base_fits(base_logits.shape[1]):
            raise ValueError(
                f"expected {self.num_classes} base logits of the network, got {base_logits.shape[1]}: use "
                "skip='linear' for a network of other classes"
            )
        return F.pad(base_logits, (0, self.out_features - self.num_classes))

    def loss(self, outputs: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Cross-entropy, of samples that count by `weights` (B,) where given, or the learned-confidence loss.

        The price of a hint is steered towards the budget, and knows no weights.
        """
        if outputs.dim() == 3:
            target = target.repeat(len(outputs))
            weights = None if weights is None else weights.repeat(len(outputs))
            outputs = outputs.flatten(0, 1)
        if not self.confidence:
            if weights is None:
                return F.cross_entropy(outputs, target, label_smoothing=self.label_smoothing)
            each = F.cross_entropy(outputs, target, label_smoothing=self.label_smoothing, reduction="none")
            return weighted_mean(each, weights)
        hinted = torch.rand(len(target), device=outputs.device) < 0.5
        logits, confidence = outputs[:, :-1], outputs[:, -1]
        task, doubt = confidence_loss(logits, confidence, target, hinted, self.label_smoothing)
        if self.training:  # a hint gets cheaper while the network is surer than the budget, and dearer otherwise
            self.price *= torch.where(doubt.detach() < self.confidence_budget, 1 / 1.01, 1 / 0.99)
        return task + self.price.clone() * doubt

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Turns logits (T, B, O) into probabilities (T, B, C)."""
        return self._logits(outputs).softmax(dim=-1)

    def _logits(self, outputs: Tensor) -> Tensor:
        """The logits among outputs (…, O), in 32 bits at the least."""
        return wide(outputs[..., : self.num_classes])

    def predictive(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """Averages the probabilities of all passes, (B, C), before any scaling."""
        return uncertainty.predictive(self.probabilities(outputs), weights)

    def as_outputs(self, final: Tensor) -> Tensor:
        """Probabilities (B, C) as their logarithm, which stands for logits: `softmax` of it is what `predict` says."""
        return final.clamp_min(torch.finfo(torch.float32).tiny).log()

    def nll(self, predicted: Tensor, target: Tensor) -> Tensor:
        """-log of the probability of the label."""
        chosen = predicted.gather(1, target.long().unsqueeze(1)).squeeze(1)
        return -chosen.clamp_min(torch.finfo(torch.float32).tiny).log()

    def measures(self) -> list[Measure]:
        """Accuracy, NLL, Brier, calibration errors, selective prediction."""
        return classification_measures(self.num_classes)

    def scores(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """The predictive scores, and `confidence` where one is learned."""
        found = predictive_scores(self.probabilities(outputs), self._logits(outputs), weights)
        if self.confidence:
            found["confidence"] = 1.0 - uncertainty.predictive(outputs[..., -1].float().sigmoid(), weights)
        return found

    def scores_of_answer(self, final: Tensor, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The scores of probabilities, of the calibrated ones (B, C): what is said of an answer agrees with it.

        Its entropy is split into what every pass is unsure of and what they disagree about in the same proportion as
        the entropy of their average was before calibration. `energy` and `max_logit` are of the logits, and stay.
        """
        total = uncertainty.entropy(final)
        disagreed = (scores["mutual_information"] / scores["entropy"]).nan_to_num(nan=0.0).clamp(0.0, 1.0)
        return {
            "one_minus_max_p": 1.0 - final.amax(dim=-1),
            "entropy": total,
            "expected_entropy": total * (1.0 - disagreed),
            "mutual_information": total * disagreed,
        }

    def linear(self, x: Tensor, target: Tensor) -> SoftmaxLayer | None:
        """Fit a multinomial logistic regression to features (N, d) and labels (N,)."""
        return fit_softmax(x, self.check(target), self.num_classes)

    def linear_rows(self, features: int) -> int:
        """As many rows as a multinomial logistic regression of so many features takes."""
        return softmax_rows(features, self.num_classes)

    def base_predicted(self, base_logits: Tensor) -> Tensor | None:
        """Probabilities (B, C) of the network's own layer, where it has as many classes."""
        return base_logits.float().softmax(dim=-1) if base_logits.shape[1] == self.num_classes else None

    def predict(self, passes: Passes, final: Tensor) -> dict[str, Tensor]:
        """Gives `class` (B,), -1 where probabilities are NaN, and `probabilities` (B, C) of a final prediction."""
        return {"class": _most_probable(final), "probabilities": final}

    def answers(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The answer, the label, the probability of the answer, and whether it is wrong."""
        confidence, label = predicted.amax(dim=-1), _most_probable(predicted)
        return {"predicted": label, "label": target, "confidence": confidence, "wrong": (label != target).float()}

    def disagreement(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """Computes how often two passes of (T, B, O) answer differently, (B,)."""
        return uncertainty.disagreement(self.probabilities(outputs), weights)

    def sums(self, predicted: Tensor, target: Tensor) -> Sums:
        """For accuracy, NLL, Brier score and ECE."""
        return class_sums(predicted, target)

    def trace(self, outputs: Tensor, weights: Tensor | None, target: Tensor | None) -> PassTrace | None:
        """Metrics and scores of the mean of the first t passes."""
        return trace_passes(self.probabilities(outputs), weights, target)

    def classes(self, target: Tensor) -> tuple[Tensor, int]:
        """Gives the labels themselves, for scores that are fitted class by class."""
        return self.check(target), self.num_classes


def _most_probable(probabilities: Tensor) -> Tensor:
    """Probabilities (B, C) → the class (B,) of the largest; -1, which is no class, where one of them is NaN."""
    return probabilities.argmax(dim=-1).masked_fill(probabilities.isnan().any(dim=-1), -1)
