"""Weights into blocks as a CPU does it fastest; compilers get plain operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
