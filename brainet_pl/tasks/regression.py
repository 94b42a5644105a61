"""Regression: one number for each sample, with its uncertainty, in its own units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl import uncertainty
from brainet_pl._utils import checks
from brainet_pl.metrics.losses import gaussian_nll, weighted_mean
from brainet_pl.metrics.measures import Measure, regression_measures
from brainet_pl.metrics.shift import Sums, number_sums
from brainet_pl.tasks.base import Task
from brainet_pl.tasks.linear import PredictFunction, fit_ridge, ridge_rows
from brainet_pl.tasks.passes import Passes


class Regression(Task):
    """A number, from two outputs: mean and raw variance of a Gaussian, in units of the standardised target.

    The variance is softplus(raw) + `min_variance`. Mean m and scale s of the training targets are learned once, by
    `prepare`, and are buffers: predictions, metrics and scores are in the units of the target, from a checkpoint alone.

    A sample that the likelihood calls noisy hardly moves the mean, so that large targets may never be fitted. With
    `beta`, each sample counts in training by its predicted variance to that power (Seitzer et al. 2022).

    Args:
        min_variance: Added to every variance, as a share of the variance of the training targets.
        beta: 0 trains by the likelihood itself; near 1, means are fitted as by least squares.
    """

    group: ClassVar[str] = "reg"
    units: ClassVar[Mapping[str, str]] = {"std": "units of the target", "epistemic_std": "units of the target"}
    center: Tensor
    scale: Tensor
    prepared: Tensor

    def __init__(self, min_variance: float = 1e-6, beta: float = 0.0) -> None:
        super().__init__()
        self.out_features, self.min_variance = 2, checks.above_zero("min_variance", min_variance)
        self.beta = checks.share("beta", beta)
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
        """Checks that targets (B,) or (B, 1) are finite numbers, and gives them as (B,)."""
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
                f"expected finite targets, got {bad} NaN or infinite of {len(y)}: drop or correct these rows"
            )
        return y

    def base_fits(self, count: int) -> bool:
        """Whether the network's own output, of `count` numbers, is one number."""
        return count == 1

    def base_helps(self, base_logits: Tensor, target: Tensor) -> bool:
        """Whether (N, 1) are predictions in the units of the target: closer to it than its mean is."""
        return bool((base_logits.squeeze(1) - target).square().mean() < target.var(correction=0))

    def base_outputs(self, base_logits: Tensor) -> Tensor:
        """Predictions (B, 1) in the units of the target → (B, 2), standardised, and a raw variance of 0."""
        if not self.base_fits(base_logits.shape[1]):
            raise ValueError(
                f"expected one output of the network, the mean, got {base_logits.shape[1]}: use skip='linear' for a "
                "network of other outputs"
            )
        return F.pad((base_logits - self.center) / self.scale, (0, 1))

    def loss(self, outputs: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Gaussian negative log-likelihood of the standardised target, times its variance to the power `beta`.

        (M, B, 2) is the mean over members. Samples count by `weights` (B,), where given.
        """
        mean, variance = self._moments(outputs)
        each = gaussian_nll(mean, variance, (target - self.center) / self.scale)
        if self.beta:
            each = each * variance.detach() ** self.beta
        return each.mean() if weights is None else weighted_mean(each, weights)

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """(…, 2) → mean and variance (…), standardised; in 32 bits at the least."""
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        mean, raw = outputs[..., 0], outputs[..., 1]
        if torch.compiler.is_exporting():  # by hand: ONNX runtimes have no softplus of 64 bits
            return mean, raw.clamp_min(0) + torch.log1p(torch.exp(-raw.abs())) + self.min_variance
        return mean, F.softplus(raw) + self.min_variance

    def _parts(self, outputs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(T, B, 2) → mean, aleatoric and epistemic variance (B,), in the units of the target and their square."""
        mean, aleatoric, epistemic = uncertainty.total_variance(*self._moments(outputs), weights)
        return self.center + self.scale * mean, self.scale**2 * aleatoric, self.scale**2 * epistemic

    def predictive(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """Gives mean and variance (B, 2) of the mixture of all passes: Var[y] = E_t[σ_t²] + Var_t[μ_t]."""
        mean, aleatoric, epistemic = self._parts(outputs, weights)
        return torch.stack([mean, aleatoric + epistemic], dim=1)

    def nll(self, predicted: Tensor, target: Tensor) -> Tensor:
        """-log of the density of a Gaussian with the predicted mean and variance."""
        return gaussian_nll(predicted[:, 0], predicted[:, 1], target)

    def measures(self) -> list[Measure]:
        """RMSE, MAE, NLL, coverage and sharpness of intervals."""
        return regression_measures()

    def scores(self, outputs: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """Standard deviations: `std` of everything, `epistemic_std` of what the passes disagree about."""
        _, aleatoric, epistemic = self._parts(outputs, weights)
        return {"std": (aleatoric + epistemic).sqrt(), "epistemic_std": epistemic.sqrt()}

    def predict(self, passes: Passes, final: Tensor) -> dict[str, Tensor]:
        """Mean, and total, epistemic and aleatoric standard deviation (B,), in the units of the target."""
        _, aleatoric, epistemic = self._parts(passes.outputs, passes.weights)
        return {
            "mean": final[:, 0],
            "std": final[:, 1].sqrt(),
            "epistemic_std": epistemic.sqrt(),
            "aleatoric_std": aleatoric.sqrt(),
        }

    def linear_rows(self, features: int) -> int:
        """As many rows as a ridge regression of so many features takes."""
        return ridge_rows(features)

    def linear(self, x: Tensor, target: Tensor) -> PredictFunction | None:
        """Fit a ridge regression to features (N, d) and numbers (N,)."""
        return fit_ridge(x, self.check(target))

    def answers(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The predicted mean and the target."""
        return {"predicted": predicted[:, 0], "target": target}

    def sums(self, predicted: Tensor, target: Tensor) -> Sums:
        """Adds up what RMSE and NLL need of a batch."""
        return number_sums(predicted, target)
