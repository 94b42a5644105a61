"""Logits of one drawn sub-network for each sample, through which a plain cross-entropy trains all that were drawn."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

SAME = 1e-3  # share by which weights and gradients of samples in a plain cross-entropy may be off
SURE = 1e-3  # probability of all other classes, below which a gradient is rounded too much to tell its weight


class _EveryBranch(torch.autograd.Function):
    """Outputs (M, B, C) of M draws → those of one of them for each sample, (B, C); the gradient trains all M.

    The gradient of w · cross-entropy in the logits z is w · (softmax(z) − e_y). Where the one that comes back has this
    form, with one w for all samples, label and w can be read from it, and each draw gets the gradient of its own
    cross-entropy, divided by M. Where it has not (smoothed labels, weights, other losses), the chosen draws alone get
    what came back. `seen` counts both kinds.
    """

    @staticmethod
    def forward(outputs: Tensor, chosen: Tensor, seen: Tensor | None) -> Tensor:
        return outputs[chosen, torch.arange(len(chosen), device=chosen.device)]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.seen = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        outputs, chosen = ctx.saved_tensors
        rows = torch.arange(len(chosen), device=chosen.device)
        probs, size = outputs.softmax(dim=2), grad.abs().amax(dim=1)
        own = probs[chosen, rows]
        # The label's gradient alone is below zero; where it was rounded to zero, the label is what the draw is sure of.
        which = torch.where(grad.amin(dim=1) < 0, grad.argmin(dim=1), own.argmax(dim=1))
        label = torch.zeros_like(grad).scatter_(1, which.unsqueeze(1), 1.0)
        wrong = (own * (1 - label)).sum(dim=1)  # probability of the other classes
        tells = (size > 0) & (wrong > SURE)  # of a sample that is ignored nothing comes back
        weights = (grad * (1 - label)).sum(dim=1) / wrong
        weight = torch.where(tells, weights, -torch.inf).amax()
        least = torch.where(tells, weights, torch.inf).amin()
        fits = (grad - weight * (own - label)).abs().amax(dim=1) <= 2 * SAME * size
        plain = (weight - least <= SAME * weight) & (fits | ~tells).all() & tells.any() & (least > 0)
        every = weight * (probs - label) * (size > 0).unsqueeze(1) / len(outputs)
        alone = torch.zeros_like(outputs)
        alone[chosen, rows] = grad
        if ctx.seen is not None:
            ctx.seen += torch.stack([plain, ~plain])
        return torch.where(plain, every, alone), None, None


class _EveryLabel(torch.autograd.Function):
    """Logits (M, B, L) of M draws → those of one of them for each sample, (B, L), of labels on their own.

    As `_EveryBranch`, by the gradient of w · binary cross-entropy, w · (σ(z) − y) in each logit; labels that a loss
    leaves out have none.
    """

    @staticmethod
    def forward(outputs: Tensor, chosen: Tensor, seen: Tensor | None) -> Tensor:
        return outputs[chosen, torch.arange(len(chosen), device=chosen.device)]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.seen = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        outputs, chosen = ctx.saved_tensors
        rows = torch.arange(len(chosen), device=chosen.device)
        probs, label = outputs.sigmoid(), (grad < 0).to(grad)
        away = probs[chosen, rows] - label
        tells = (grad != 0) & (away.abs() > SURE)
        weights = grad / away
        weight = torch.where(tells, weights, -torch.inf).amax()
        least = torch.where(tells, weights, torch.inf).amin()
        plain = (weight - least <= SAME * weight) & tells.any() & (least > 0)
        every = weight * (probs - label) * (grad != 0) / len(outputs)
        alone = torch.zeros_like(outputs)
        alone[chosen, rows] = grad
        if ctx.seen is not None:
            ctx.seen += torch.stack([plain, ~plain])
        return torch.where(plain, every, alone), None, None


def every_branch(outputs: Tensor, seen: Tensor | None = None, loss: str = "cross-entropy") -> Tensor:
    """Logits (B, C) or, of M draws, (M, B, C) → (B, C), of a draw by chance for each sample.

    The plain loss that trains all draws is a "cross-entropy", see `_EveryBranch`, or a "binary" one for each logit.
    """
    if outputs.dim() == 2:
        return outputs
    if len(outputs) == 1:
        return outputs[0]
    chosen = torch.randint(len(outputs), (outputs.shape[1],), device=outputs.device)
    function = _EveryBranch if loss == "cross-entropy" else _EveryLabel
    return cast(Tensor, function.apply(outputs, chosen, seen))
