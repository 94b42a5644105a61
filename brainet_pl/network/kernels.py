"""Products, norms and gathers of a training step as a CPU does them fastest; compilers get plain operations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def is_traced() -> bool:
    """Whether a compiler or an export looks on: they know plain operations better."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def has_kernels(x: Tensor) -> bool:
    """Whether `x` is what the operations below are made for."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not is_traced()


class Place(NamedTuple):
    """Where K weights of the flat vector stand in a bucket of P places."""

    source: Tensor  # (P,) number of the weight at each place; that of all weights where none stands
    position: Tensor  # (K,) place of each of its weights
    number: Tensor  # (K,) their numbers, rising
    first: int | None  # the first number, where they follow each other
    whole: bool  # whether the bucket is these weights as they lie in the flat vector

    def run(self, flat: Tensor) -> Tensor:
        """Those of the flat vector (M, N) as a view (M, K), where they follow each other."""
        return flat.narrow(1, self.first or 0, len(self.position))


class _Placed(torch.autograd.Function):
    """Weights into blocks by a gather each way, as each has one place; a scatter takes three times as long."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, places: Sequence[Place]) -> tuple[Tensor, ...]:
        ctx.places, ctx.shape = places, flat.shape
        padded = torch.cat([flat, flat.new_zeros(len(flat), 1)], dim=1)
        return tuple(p.run(padded) if p.whole else padded.index_select(1, p.source) for p in places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        flat = grads[0].new_empty(ctx.shape)
        for grad, p in zip(grads, ctx.places, strict=True):
            if p.whole:
                p.run(flat).copy_(grad)
            elif p.first is not None and len(flat) == 1:
                torch.index_select(grad, 1, p.position, out=p.run(flat))
            else:
                flat.index_copy_(1, p.number, grad.index_select(1, p.position))
        return flat, None


def place(flat: Tensor, places: Sequence[Place]) -> Sequence[Tensor]:
    """Weights (M, N) → those of each bucket (M, P), zero where no weight stands."""
    if has_kernels(flat):
        return _Placed.apply(flat, places)  # type: ignore[no-any-return]
    found = []
    for p in places:
        weights = flat.index_select(1, p.number) if p.first is None else p.run(flat)
        found.append(
            weights if p.whole else flat.new_zeros(len(flat), len(p.source)).index_copy(1, p.position, weights)
        )
    return found


class _Bags(torch.autograd.Function):
    """Sums of bags of rows, each with its weight; the gradient of the weights alone is a sampled matrix product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, reads: Tensor) -> Tensor:
        ctx.save_for_backward(rows, reads)
        return F.embedding_bag(reads, rows, per_sample_weights=weight, mode="sum")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, reads = ctx.saved_tensors
        bags, size = reads.shape
        starts = torch.arange(0, bags * size + 1, size)
        pattern = _sparse(starts, reads.flatten(), rows.new_zeros(bags * size), (bags, len(rows)))
        found = torch.sparse.sampled_addmm(pattern, grads[0].contiguous(), rows.t(), beta=0.0)
        return found.values().view(bags, size), None, None


def _sparse(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse matrix by rows, without the warning that torch gives for the first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


def bags(weight: Tensor, rows: Tensor, reads: Tensor) -> Tensor:
    """Weights (G, I) and rows (R, B), of which bag g reads `reads` (G, I) → (G, B): a product of a sparse matrix."""
    if rows.requires_grad:
        return F.embedding_bag(reads, rows, per_sample_weights=weight, mode="sum")
    return torch.as_tensor(_Bags.apply(weight, rows, reads))


class _BatchNorm(torch.autograd.Function):
    """Batch norm of each row; torch's own takes most of its time for sums that it does not vectorise."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        mean = y.mean(dim=2)
        centred = y - mean.unsqueeze(2)
        mean, var = mean[0], torch.linalg.vecdot(centred, centred)[0] / y.shape[2]
        ctx.save_for_backward(y, scale, mean, torch.rsqrt(var + eps))
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var)
        return F.batch_norm(y, mean, var, scale, bias, False, 0.0, eps), mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        y, scale, mean, inverse = ctx.saved_tensors
        found = torch.ops.aten.native_batch_norm_backward(
            grads[0], y, scale, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        return *found, None


def batch_norm(
    y: Tensor, mean: Tensor, var: Tensor, scale: Tensor, bias: Tensor, momentum: float, eps: float
) -> Tensor:
    """Batch norm of (1, neurons, N) over N while training; the kept statistics `mean` and `var` (neurons,) move."""
    if not has_kernels(y):
        return F.batch_norm(y, mean, var, scale, bias, True, momentum, eps)
    out, here, spread = _BatchNorm.apply(y, scale, bias, eps)
    with torch.no_grad():
        mean.lerp_(here, momentum)
        var.lerp_(spread * (y.shape[2] / max(1, y.shape[2] - 1)), momentum)
    return torch.as_tensor(out)
