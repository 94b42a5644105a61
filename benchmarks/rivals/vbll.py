"""Variational Bayesian last layer (Harrison, Willes & Snoek 2024), for classification.

Logits are z = Wφ + ε with a Gaussian over the weights of each class, W_k ~ N(w_k, S_k), and noise ε_k ~ N(0, σ_k²). The
expected log-likelihood has a bound without draws, Jensen's: E log p(y) ≥ m_y - log Σ_k exp(m_k + v_k / 2), with the
mean m_k = w_k·φ and the variance v_k = φᵀS_kφ + σ_k² of a logit. It is the cross-entropy of m but for a term that knows
no label, log Σ exp(m + v/2) - log Σ exp(m): so `forward` gives m, `output_variance` v, and `training_loss` adds the
term.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import MOST_PASSES, Head, HeadSettings, Outputs
from brainet_pl.structure.ggt import GGT
from brainet_pl.tasks import Classification, Task

Covariance = Literal["auto", "dense", "diagonal"]
AUTO_DENSE = 200_000  # numbers in dense covariances up to which "auto" takes them
MOST_DENSE = 10**8
WISHART_SCALE, WISHART_FREEDOM = 1.0, 1.0  # prior of the noise, as in the authors' code


class VBLLHead(Head):
    """One dense layer with a Gaussian over the weights of each output, trained by a bound without draws.

    Args:
        in_features: d, the number of features; D = d + 1 with the bias.
        out_features: O, the number of outputs.
        dense: Whether the weights of an output have a whole covariance (D, D), or deviations alone.
        prior_scale: Variance of the prior of each weight, times 2 / D; None is the variance that the bound is largest
            at, the mean square of the weights.
    """

    lower: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, dense: bool = True, prior_scale: float | None = None
    ) -> None:
        super().__init__()
        self.in_features, out_features = base.check_sizes(in_features, out_features)
        size = self.in_features + 1
        if dense and out_features * size**2 > MOST_DENSE:
            raise ValueError(
                f"expected at most {MOST_DENSE:,} numbers in the dense covariances of the head VBLL, got "
                f"{out_features * size**2:,} for {in_features:,} features and {out_features:,} outputs: use "
                "covariance='diagonal'"
            )
        self.prior_variance = None if prior_scale is None else 2.0 * prior_scale / size
        self.mean = nn.Parameter(torch.randn(out_features, size) * math.sqrt(2.0 / size))
        self.log_scale = nn.Parameter(1e-3 * torch.randn(out_features, size) - math.log(size))
        lower = 1e-3 * torch.randn(out_features, size, size) / size if dense else None
        self.register_parameter("lower", None if lower is None else nn.Parameter(lower))
        self.log_noise = nn.Parameter(torch.full((out_features,), -1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to the means (B, O) of the logits."""
        return F.linear(self._phi(x), self.mean)

    def output_variance(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to the variances (B, O) of the logits, noise included."""
        phi, noise = self._phi(x), self.log_noise.mul(2).exp()
        if self.lower is None:
            return F.linear(phi.square(), self.log_scale.mul(2).exp()) + noise
        along = torch.einsum("bd,ode->boe", phi, self._factors())  # φᵀL of every output
        return along.square().sum(dim=2) + noise

    def passes(self, x: Tensor, count: int) -> Outputs:
        """Maps features (B, d) to T draws of the logits of each sample, (T, B, O)."""
        mean, deviation = torch.as_tensor(self(x)), self.output_variance(x).sqrt()
        noise = torch.randn(
            checks.whole("passes", count, 1, MOST_PASSES), *mean.shape, dtype=mean.dtype, device=mean.device
        )
        return Outputs(mean + deviation * noise)

    def penalty(self) -> Tensor:
        """KL divergence of the weights from their prior, less the log-density of the noise under its own.

        The prior of the noise variances is an inverse Wishart; its constant is left out.
        """
        squares = self.mean.square().sum() + self.log_scale.mul(2).exp().sum()
        if self.lower is not None:
            squares = squares + self.lower.tril(-1).square().sum()
        count = self.mean.numel()
        variance = squares / count if self.prior_variance is None else squares.new_tensor(self.prior_variance)
        divergence = 0.5 * (squares / variance + count * (variance.log() - 1.0)) - self.log_scale.sum()
        freedom = (WISHART_FREEDOM + len(self.log_noise) + 1.0) / 2.0
        precision = self.log_noise.mul(-2).exp().sum()
        return divergence + 2.0 * freedom * self.log_noise.sum() + 0.5 * WISHART_SCALE * precision

    def _phi(self, x: Tensor) -> Tensor:
        return F.pad(base.as_features(x, self.in_features, self.mean), (0, 1), value=1.0)

    def _factors(self) -> Tensor:
        """Lower triangles L (O, D, D) of the covariances L·Lᵀ."""
        assert self.lower is not None
        return self.lower.tril(-1) + torch.diag_embed(self.log_scale.exp())


class VBLL(HeadSettings):
    """Variational Bayesian last layer (Harrison, Willes & Snoek 2024): one dense layer with Gaussian weights.

    It is trained by a bound on the expected log-likelihood that needs no draws, for classification with the
    cross-entropy; other tasks are refused.

    Args:
        covariance: "dense" for all pairs of the weights of a class, "diagonal" for their deviations alone; "auto" is
            "dense" up to 200,000 numbers.
        prior_scale: Variance of the prior of each weight, times 2 over the number of features; 1 is the authors', for
            features of mean square 1. "auto" follows the scale of the features: the variance with the largest bound.
    """

    def __init__(self, covariance: Covariance = "auto", prior_scale: float | Literal["auto"] = "auto") -> None:
        checks.one_of("covariance", covariance, get_args(Covariance))
        self.covariance = covariance
        self.prior_scale = base.above_zero_or_auto("prior_scale", prior_scale)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> VBLLHead:
        """Builds the dense layer for so many features and outputs."""
        in_features, out_features = base.check_sizes(in_features, out_features)
        small = out_features * (in_features + 1) ** 2 <= AUTO_DENSE
        dense = self.covariance == "dense" or (self.covariance == "auto" and small)
        return VBLLHead(in_features, out_features, dense, None if self.prior_scale == "auto" else self.prior_scale)


def training_loss(task: Task, head: Head, x: Tensor, target: Tensor) -> Tensor:
    """The task's loss of any head; of `VBLLHead`, Jensen's bound on the expected cross-entropy, see above.

    Args:
        task: What the head is trained for.
        head: The head, in training mode.
        x: Features (B, d).
        target: Targets (B,) as the task's loss takes them.
    """
    outputs = torch.as_tensor(head(x))
    if not isinstance(head, VBLLHead):
        return task.loss(outputs, target)
    if not isinstance(task, Classification) or task.confidence:
        raise ValueError(
            f"expected the task Classification with the loss cross_entropy for the head VBLL, got {task.describe()}: "
            "its expected loss has no bound without draws; use the head Laplace or Bayes"
        )
    widened = outputs + head.output_variance(x) / 2
    gap = torch.logsumexp(widened, dim=-1) - torch.logsumexp(outputs, dim=-1)
    return task.loss(outputs, target) + gap.mean()
