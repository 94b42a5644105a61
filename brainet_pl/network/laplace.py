"""A linear layer with a Laplace approximation of its weights: a Gaussian around the trained ones, fitted afterwards.

The precision of the Gaussian is H + δI: the Hessian H of the training loss and the precision δ of a prior N(0, I/δ).
Outputs are linear in the weights, so H is exact where the whole of it is kept, and the outputs' Hessian is all that it
takes of a task. Kept are eigenvectors of H and deviations along them, from which draws of weights are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import MOST_PASSES, NLL, HeadInputs, HeadSettings, Outputs
from brainet_pl.network.mlp import LinearHead
from brainet_pl.structure.ggt import GGT

Structure = Literal["auto", "full", "kron"]
AUTO_FULL = 1000  # weights up to which "auto" keeps the whole covariance: its eigenvectors take a fraction of a second
MOST_FULL = 5000  # weights of a whole covariance at the most: 100 MB in a checkpoint
MOST_SIDE = 8192  # features or outputs of a Kronecker factor at the most: 268 MB in a checkpoint
MOST_HELD = 2_000_000  # outputs of held-out samples that precisions are tried on
LEAST_PRECISION, MOST_PRECISION = 1e-6, 1e6
FACTORS = tuple(4.0**k for k in range(-3, 6))  # of the evidence's precision: those that are tried on held-out samples


class Curvature(NamedTuple):
    """The Hessian of the training loss in its eigenvectors, H = (left ⊗ right) · diag(values) · (left ⊗ right)ᵀ.

    Attributes:
        left: (O, O) eigenvectors on the side of the outputs; the whole Hessian has all (O·D, O·D) here.
        right: (D, D) eigenvectors on the side of the features; (1, 1) for the whole Hessian.
        values: (O, D) or (O·D, 1) eigenvalues, none below 0.
    """

    left: Tensor
    right: Tensor
    values: Tensor


def add_ones(x: Tensor) -> Tensor:
    """Features (N, d) → (N, D), D = d + 1, with a column of ones that the bias belongs to."""
    return F.pad(x, (0, 1), value=1.0)


def map_hessians(outputs: Tensor, target: Tensor, nll: NLL, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Second derivatives of the NLL by outputs (N, O): row o of each sample's Hessian, (N, O), reduced, for every o."""
    with torch.inference_mode(False), torch.enable_grad():
        at = outputs.detach().clone().requires_grad_()
        loss = nll(at.unsqueeze(0), None, target.clone()).sum()
        if not loss.requires_grad:
            raise ValueError(
                "expected a task with a likelihood for the head Laplace, got one whose NLL does not depend on the "
                "outputs: use another head, or give the task an nll"
            )
        (slope,) = torch.autograd.grad(loss, at, create_graph=True)
        rows = []
        for o in range(outputs.shape[1]):
            (row,) = torch.autograd.grad(slope[:, o].sum(), at, retain_graph=True)
            if not row.any():
                raise ValueError(
                    f"expected a loss that every output has a part in for the head Laplace, got none for output {o} of "
                    f"{outputs.shape[1]}: use loss='cross_entropy', or the head Bayes"
                )
            rows.append(reduce(row))
    return torch.stack(rows)


def full_curvature(phi: Tensor, outputs: Tensor, target: Tensor, nll: NLL) -> Curvature:
    """The exact Hessian Σ_n H_n ⊗ φ_n φ_nᵀ of the summed NLL, from features (N, D) and outputs (N, O)."""
    count, size = outputs.shape[1], outputs.shape[1] * phi.shape[1]

    def block(row: Tensor) -> Tensor:
        parts = [(phi * row[:, p : p + 1]).t() @ phi for p in range(count)]
        return torch.stack(parts, dim=1).flatten(1)  # (D, O·D)

    hessian = map_hessians(outputs, target, nll, block).view(size, size)
    values, vectors = torch.linalg.eigh((hessian + hessian.t()) / 2)
    return Curvature(vectors, vectors.new_ones(1, 1), values.clamp_min(0.0).unsqueeze(1))


def kronecker_curvature(phi: Tensor, outputs: Tensor, target: Tensor, nll: NLL) -> Curvature:
    """The Hessian as N · mean H_n ⊗ mean φ_n φ_nᵀ, as if outputs and features had nothing to do with each other."""
    of_outputs = map_hessians(outputs, target, nll, lambda row: row.mean(dim=0))
    a, left = torch.linalg.eigh((of_outputs + of_outputs.t()) / 2)
    b, right = torch.linalg.eigh(phi.t() @ phi)  # a sum over the samples
    return Curvature(left, right, torch.outer(a.clamp_min(0.0), b.clamp_min(0.0)))


def evidence_precision(values: Tensor, weights: Tensor) -> float:
    """The prior precision δ with the largest marginal likelihood of the training data, within 1e-6 and 1e6.

    For eigenvalues λ of the Hessian and weights θ it is -½ (δ·‖θ‖² + Σ log(λ + δ) - P·log δ) but for a constant; its
    derivative is zero where Σ λ / (λ + δ) = δ·‖θ‖², of which the left side falls with δ and the right one rises.

    >>> round(evidence_precision(torch.full((4,), 1e9), torch.full((4,), 0.5)), 3)
    4.0
    """
    low, high = math.log(LEAST_PRECISION), math.log(MOST_PRECISION)
    squares = float(weights.square().sum())
    for _ in range(50):
        middle = math.exp((low + high) / 2)
        if float((values / (values + middle)).sum()) > middle * squares:
            low = math.log(middle)
        else:
            high = math.log(middle)
    return math.exp((low + high) / 2)


class LaplaceHead(LinearHead):
    """One dense layer whose passes draw weights from a Gaussian around the trained ones; before `finalize`, none.

    Args:
        in_features: d, the number of features.
        out_features: O, the number of outputs.
        structure: "full" for the whole Hessian, "kron" for a product of one of outputs and one of features.
        prior_precision: δ, or None to choose it in `finalize`.
    """

    finalizes: ClassVar[bool] = True
    not_averaged: ClassVar[tuple[str, ...]] = ("left", "right", "deviations", "precision")  # averages are no directions
    left: Tensor
    right: Tensor
    deviations: Tensor
    precision: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Literal["full", "kron"] = "full",
        prior_precision: float | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        size = (self.layers.out_features, self.layers.in_features + 1)
        self.structure, self.prior_precision = structure, prior_precision
        shape = (size[0] * size[1], 1) if structure == "full" else size
        _check_covariance(structure, shape)
        self.register_buffer("left", torch.zeros(shape[0], shape[0]))
        self.register_buffer("right", torch.zeros(shape[1], shape[1]))
        self.register_buffer("deviations", torch.zeros(shape))
        self.register_buffer("precision", torch.zeros(()))  # 0 until `finalize` has run

    @property
    def averages_one(self) -> bool:
        """Until `finalize` has run, all draws are the trained weights."""
        return not torch.compiler.is_compiling() and not bool(self.precision)

    def facts(self) -> dict[str, Any]:
        """Structure of the Hessian and the precision of the prior."""
        chosen = {"prior_precision": float(self.precision)} if self.precision else {}
        return {"structure": self.structure, **chosen}

    def passes(self, x: Tensor, count: int) -> Outputs:
        """Maps features (B, d) to the outputs (T, B, O) of T draws of the weights."""
        count = checks.whole("passes", count, 1, MOST_PASSES)
        noise = torch.randn(count, *self.deviations.shape, dtype=self.deviations.dtype, device=x.device)
        return Outputs(self._draws(x, noise * self.deviations))

    def _draws(self, x: Tensor, steps: Tensor) -> Tensor:
        """Outputs (T, B, O) at weights that are `steps` along the eigenvectors away from the trained ones."""
        return self._around(torch.as_tensor(self(x)), x, steps)

    def _around(self, outputs: Tensor, x: Tensor, steps: Tensor) -> Tensor:
        phi = add_ones(x.to(steps.dtype))
        if self.structure == "full":
            weights = (steps.squeeze(2) @ self.left.t()).view(len(steps), outputs.shape[1], phi.shape[1])
            return outputs + torch.matmul(phi, weights.transpose(1, 2))
        return outputs + (self.left @ (steps @ (phi @ self.right).t())).transpose(1, 2)

    @torch.no_grad()
    def finalize(self, seen: HeadInputs, held: HeadInputs | None, nll: NLL, passes: int = 15) -> dict[str, float]:
        """Fit the Gaussian to training samples, and choose the precision of the prior.

        The Hessian is that of the samples times the number of training samples that each stands for. The precision is
        the one with the largest marginal likelihood or, where there are samples to choose by, that of its multiples
        which predicts `held` best.
        """
        curvature = self._curvature(seen, nll)
        weights = torch.cat([self.layers.weight, self.layers.bias.unsqueeze(1)], dim=1)
        usual = self.prior_precision or evidence_precision(curvature.values, weights.double())
        self.left.copy_(curvature.left)
        self.right.copy_(curvature.right)
        self._set_precision(curvature, usual)
        if held is not None and self.prior_precision is None:
            self._set_precision(curvature, self._best_precision(curvature, usual, held, nll, passes))
        return {"prior_precision": float(self.precision)}

    def _curvature(self, seen: HeadInputs, nll: NLL) -> Curvature:
        x = base.as_features(seen.x, self.layers.in_features, self.layers.weight).double()
        outputs = F.linear(x, self.layers.weight.double(), self.layers.bias.double())
        fit = full_curvature if self.structure == "full" else kronecker_curvature
        found = fit(add_ones(x), outputs, seen.target, nll)
        return found._replace(values=found.values * seen.represents)

    def _set_precision(self, curvature: Curvature, precision: float) -> None:
        self.precision.fill_(precision)
        self.deviations.copy_((curvature.values + precision).rsqrt())

    def _best_precision(self, curvature: Curvature, usual: float, held: HeadInputs, nll: NLL, passes: int) -> float:
        held = held.first(MOST_HELD // (passes * self.layers.out_features))
        generator = torch.Generator(held.x.device).manual_seed(0)  # the same draws for every precision and process
        shape, dtype = (passes, *self.deviations.shape), self.deviations.dtype
        noise = torch.randn(shape, generator=generator, dtype=dtype, device=held.x.device)

        def loss(precision: float) -> float:
            deviations = (curvature.values + precision).rsqrt().to(dtype)
            return float(nll(self._draws(held.x, noise * deviations), None, held.target).double().mean())

        return min((usual * factor for factor in FACTORS), key=loss)


def _check_covariance(structure: str, shape: tuple[int, int]) -> None:
    most = MOST_FULL if structure == "full" else MOST_SIDE
    if max(shape) > most:
        what = "weights" if structure == "full" else "features or outputs"
        hint = "structure='kron'" if structure == "full" else "fewer features (pool or select them), or the head Linear"
        raise ValueError(
            f"expected at most {most:,} {what} for the head Laplace with structure={structure!r}, got {max(shape):,}: "
            f"its covariance would fill the memory; use {hint}"
        )


class Laplace(HeadSettings):
    """Last-layer Laplace approximation (Daxberger et al. 2021): a dense layer whose passes draw its weights.

    It is trained as `Linear` is. Before each validation of a fit, a Gaussian around the trained weights is fitted to
    training samples; a model of `swap_head` does so in `calibrate_head`. Until then it predicts as `Linear` does.

    Args:
        structure: Hessian of the loss that the Gaussian follows from: "full" for all pairs of weights, "kron" for a
            Kronecker product of one of outputs and one of features; "auto" is "full" up to 1,000 weights.
        prior_precision: Precision of the prior of each weight. "auto" is that with the largest marginal likelihood or,
            with 100 validation samples or more, that of its multiples which predicts them best.
    """

    def __init__(self, structure: Structure = "auto", prior_precision: float | Literal["auto"] = "auto") -> None:
        checks.one_of("structure", structure, get_args(Structure))
        self.structure = structure
        self.prior_precision = base.above_zero_or_auto("prior_precision", prior_precision)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> LaplaceHead:
        """Builds the dense layer for so many features and outputs."""
        in_features, out_features = base.check_sizes(in_features, out_features)
        small = (in_features + 1) * out_features <= AUTO_FULL
        chosen = self.structure if self.structure != "auto" else "full" if small else "kron"
        precision = None if self.prior_precision == "auto" else self.prior_precision
        return LaplaceHead(in_features, out_features, chosen, precision)
