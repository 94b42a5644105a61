"""What every process collected, on every process."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed
from torch import Tensor

T = TypeVar("T")
ByLoader = dict[int, dict[str, Tensor]]


def everyones(own: T) -> list[T]:
    """The object of each process, in the order of ranks; a collective, so all processes must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    found: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found  # type: ignore[return-value]


def joined(batches: dict[int, list[dict[str, Tensor]]], dim: int = 0) -> ByLoader:
    """Loader → batches of named tensors → loader → the same tensors of all batches and processes, along `dim`."""
    own = {i: {k: torch.cat([b[k] for b in parts], dim) for k in parts[0]} for i, parts in batches.items() if parts}
    parts = everyones(own)
    found: ByLoader = {}
    for i in sorted({i for part in parts for i in part}):
        have = [part[i] for part in parts if i in part]
        found[i] = {k: torch.cat([part[k] for part in have], dim) for k in have[0]}
    return found
