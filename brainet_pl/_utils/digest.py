"""Fingerprints of tensors and settings: the same content has the same one, in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from brainet_pl._utils.checks import all_plain


def fingerprint(value: Any) -> str:
    """64 hexadecimal digits that name tensors and primitives, however deep they sit in dictionaries and lists."""
    found = hashlib.sha256()
    try:
        _feed(found, value)
    except RecursionError:
        raise ValueError(
            "expected a checkpoint of tensors and settings, got lists or dictionaries nested without end: take another "
            "file"
        ) from None
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        found.update(f"dictionary {len(value)};".encode())
        for key, item in value.items():
            _feed(found, key)
            _feed(found, item)
    elif isinstance(value, list | tuple):
        found.update(f"list {len(value)};".encode())
        if all_plain(value):  # at once: a tree of thousands of features has a hundred thousand such items
            found.update("".join([f"{type(item).__name__} {item!r};" for item in value]).encode())
            return
        for item in value:
            _feed(found, item)
    else:
        # Of anything else the type alone: its text could hold an address in memory, another one in every process.
        plain = value is None or isinstance(value, bool | int | float | str | bytes)
        found.update(f"{type(value).__name__} {value!r};".encode() if plain else f"{type(value).__name__};".encode())
