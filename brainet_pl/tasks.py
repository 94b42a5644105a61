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
from brainet_pl.losses import confidence_loss, gaussian_nll
from brainet_pl.metrics import classification_metrics, regression_metrics
from brainet_pl.ood import predictive_scores

TaskName = Literal["classification", "regression"]
LossName = Literal["cross_entropy", "confidence", "gaussian"]


class Task(nn.Module):
    """The part that differs between kinds of targets; what it learns from data (a scale, a temperature) are buffers.

    Outputs are (B, O) or (M, B, O) while training and (T, B, O) with weights (T,) or None afterwards, O = out_features.
    """

    out_features: int

    @property
    def needs_targets(self) -> bool:
        """Whether `prepare` waits for the training targets."""
        return False

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

    def final(self, predicted: Tensor) -> Tensor:
        """What a user gets of `predictive`: the same, or calibrated on validation data where that is asked for."""
        return predicted

    def metrics(self, prefix: str) -> MetricCollection:
        """Metrics of `predictive` and target."""
        raise NotImplementedError

    def scores(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """(T, B, O) → measures of uncertainty (B,), each higher for a less certain sample."""
        raise NotImplementedError

    def predict(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """(T, B, O) → the answer for each sample, in the user's terms; `scores` come beside it."""
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

    def final(self, predicted: Tensor) -> Tensor:
        """(B, C), scaled where asked for."""
        return self.scaled(predicted) if self.temperature_scaling else predicted

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
        """Class and probabilities, scaled where asked for."""
        mean = self.final(self.predictive(outputs, weights))
        return {"class": mean.argmax(dim=-1), "probabilities": mean}


class Regression(Task):
    """A number, from two outputs: mean and raw variance of a Gaussian, in units of the standardised target.

    The variance is softplus(raw) + `min_variance`. Mean m and scale s of the training targets are learned once, by
    `prepare`, and are buffers: predictions, metrics and scores are in the units of the target, from a checkpoint alone.

    Args:
        min_variance: added to every variance, as a share of the variance of the training targets.
    """

    center: Tensor
    scale: Tensor
    prepared: Tensor

    def __init__(self, min_variance: float = 1e-6) -> None:
        super().__init__()
        if not min_variance > 0:
            raise ValueError(f"expected a min_variance above 0, got {min_variance}")
        self.out_features, self.min_variance = 2, min_variance
        self.register_buffer("center", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("prepared", torch.zeros((), dtype=torch.bool))

    @property
    def needs_targets(self) -> bool:
        """True until the scale is known, from training targets or from a checkpoint."""
        return not bool(self.prepared)

    def prepare(self, targets: Tensor) -> None:
        """Learn m and s; targets that are all the same keep a scale of 1."""
        y = self.check(targets).double()
        spread = y.std(correction=0)
        self.center.copy_(y.mean())
        self.scale.copy_(spread if spread > 1e-12 * (1 + y.abs().max()) else torch.ones_like(spread))
        self.prepared.fill_(True)

    def check(self, target: Tensor) -> Tensor:
        """(B,) or (B, 1) finite numbers → (B,)."""
        y = target.squeeze(1) if target.dim() == 2 and target.shape[1] == 1 else target
        if y.dim() != 1:
            raise ValueError(
                f"expected one number as target of each sample, (B,) or (B, 1), got {tuple(target.shape)}: fit a model "
                "for each column"
            )
        y = y if y.is_floating_point() else y.float()
        bad = int((~y.isfinite()).sum())
        if bad:
            raise ValueError(
                f"expected finite targets, got {bad} NaN or infinite of {len(y)}: drop these rows or mend them"
            )
        return y

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Gaussian negative log-likelihood of the standardised target; (M, B, 2) is the mean over members."""
        mean, variance = self._moments(outputs)
        return gaussian_nll(mean, variance, (target - self.center) / self.scale).mean()

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """(…, 2) → mean and variance (…), standardised; in 32 bits at the least."""
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        return outputs[..., 0], F.softplus(outputs[..., 1]) + self.min_variance

    def _parts(self, outputs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(T, B, 2) → mean, aleatoric and epistemic variance (B,), in the units of the target and their square."""
        mean, aleatoric, epistemic = uncertainty.total_variance(*self._moments(outputs), weights)
        return self.center + self.scale * mean, self.scale**2 * aleatoric, self.scale**2 * epistemic

    def predictive(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """(B, 2) mean and variance of the mixture of all passes: Var[y] = E_t[σ_t²] + Var_t[μ_t]."""
        mean, aleatoric, epistemic = self._parts(outputs, weights)
        return torch.stack([mean, aleatoric + epistemic], dim=1)

    def metrics(self, prefix: str) -> MetricCollection:
        """RMSE, MAE, NLL, coverage and sharpness of intervals."""
        return regression_metrics(prefix)

    def scores(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """Standard deviations: `std` of everything, `epistemic_std` of what the passes disagree about."""
        _, aleatoric, epistemic = self._parts(outputs, weights)
        return {"std": (aleatoric + epistemic).sqrt(), "epistemic_std": epistemic.sqrt()}

    def predict(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """Mean, and total, epistemic and aleatoric standard deviation, in the units of the target."""
        mean, aleatoric, epistemic = self._parts(outputs, weights)
        return {
            "mean": mean,
            "std": (aleatoric + epistemic).sqrt(),
            "epistemic_std": epistemic.sqrt(),
            "aleatoric_std": aleatoric.sqrt(),
        }


def make_task(name: TaskName, num_classes: int | None, settings: dict[str, Any]) -> Task:
    """The task of a name; `settings` are the module's: loss (None is the task's own), smoothing and scaling."""
    loss = settings["loss"]
    if name == "classification":
        if num_classes is None:
            raise ValueError("expected num_classes for classification, got none: set it, or task='regression'")
        return Classification(num_classes, **settings | {"loss": "cross_entropy" if loss is None else loss})
    if name != "regression":
        raise ValueError(f"expected task to be 'classification' or 'regression', got {name!r}")
    given = {"num_classes": num_classes, "loss": None if loss == "gaussian" else loss}
    given |= {k: settings[k] for k in ("label_smoothing", "temperature_scaling")}
    meaningless = [f"{k}={v!r}" for k, v in given.items() if v]
    if meaningless:
        raise ValueError(
            f"expected no settings of classification for regression, got {', '.join(meaningless)}: leave them out, or "
            "set task='classification'"
        )
    return Regression()
