"""A Gaussian process on features, as SNGP puts one on a network's last layer: random features and a Laplace layer."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import NLL, HeadInputs, HeadSettings
from brainet_pl.network.laplace import MOST_SIDE, LaplaceHead
from brainet_pl.structure.ggt import GGT


class SNGPHead(LaplaceHead):
    """A dense layer on random Fourier features of a Gaussian kernel, with a Laplace approximation of its weights.

    Inputs are brought to mean 0 and deviation 1 in each sample, so that their distances are near √(2·d): the length of
    the kernel is `length`·√d. The random directions are buffers, and travel in the state dict.

    Args:
        in_features: d, the number of features.
        out_features: O, the number of outputs.
        num_random: R, the number of random features.
        length: length scale of the kernel, in units of √d.
        prior_precision: precision of the prior of each weight, or None to choose it in `finalize`.
    """

    not_averaged: ClassVar[tuple[str, ...]] = (*LaplaceHead.not_averaged, "directions", "phases")
    directions: Tensor
    phases: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_random: int = 1024,
        length: float = 1.0,
        prior_precision: float | None = None,
    ) -> None:
        super().__init__(num_random, out_features, "kron", prior_precision)
        self.in_features = base.check_sizes(in_features, out_features)[0]
        self.length = length
        self.register_buffer("directions", torch.randn(num_random, self.in_features))
        self.register_buffer("phases", 2 * math.pi * torch.rand(num_random))

    def map(self, x: Tensor) -> Tensor:
        """Features (B, d) → random features (B, R), √(2/R)·cos(W·x + b), whose products are near the kernel."""
        x = base.as_features(x, self.in_features, self.layers.weight)
        x = F.layer_norm(x, (self.in_features,)) if self.in_features > 1 else x
        waves = F.linear(x, self.directions / (self.length * math.sqrt(self.in_features)), self.phases)
        return math.sqrt(2.0 / len(self.phases)) * waves.cos()

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to outputs (B, O) at the trained weights."""
        return super().forward(self.map(x))

    def _draws(self, x: Tensor, steps: Tensor) -> Tensor:
        phi = self.map(x)
        return self._around(LaplaceHead.forward(self, phi), phi, steps)

    @torch.no_grad()
    def finalize(self, seen: HeadInputs, held: HeadInputs | None, nll: NLL, passes: int = 15) -> dict[str, float]:
        """Fit the Gaussian over weights to training samples, and choose the precision of the prior."""
        return super().finalize(seen._replace(x=self.map(seen.x)), held, nll, passes)


class SNGP(HeadSettings):
    """The head of SNGP (Liu et al. 2020) on features as they are: a Gaussian process by random Fourier features.

    A Laplace approximation gives the variance of its outputs, which grows with the distance from the training samples.
    The spectral norm that SNGP trains a network with is no part of a head: a frozen backbone has none.

    Args:
        num_random: Number of random features.
        length: Length scale of the kernel, in units of the square root of the number of features.
        prior_precision: Precision of the prior of each weight. "auto" is that with the largest marginal likelihood or,
            with 100 validation samples or more, that of its multiples which predicts them best.
    """

    def __init__(
        self, num_random: int = 1024, length: float = 1.0, prior_precision: float | Literal["auto"] = "auto"
    ) -> None:
        self.num_random = checks.whole("num_random", num_random, 1, MOST_SIDE - 1)
        self.length = checks.above_zero("length", length)
        self.prior_precision = base.above_zero_or_auto("prior_precision", prior_precision)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> SNGPHead:
        """Builds the head for so many features and outputs."""
        precision = None if self.prior_precision == "auto" else self.prior_precision
        return SNGPHead(in_features, out_features, self.num_random, self.length, precision)
