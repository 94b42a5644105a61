"""Numbers that keep 32 bits where the rest of a model is run with fewer."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast on a device: products of probabilities, distances and densities in 16 bits are mostly noise."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()  # an exported graph has nothing of it
    return torch.autocast(device.type, enabled=False)


def wide(x: Tensor) -> Tensor:
    """The same numbers in 32 bits, or in 64 where they have so many."""
    return x if not x.is_floating_point() or x.element_size() >= 4 else x.float()


def measurable(x: Tensor) -> Tensor:
    """The same numbers in at least 32 bits, where sums can have 64: on the CPU for MPS, which has none."""
    return wide(x.cpu() if x.device.type == "mps" else x)
