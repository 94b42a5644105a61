"""Digests of the parts of a checkpoint, so that a damaged file is refused and does not predict something else.

A file of torch is not checked when it is read: one flipped bit in the bytes of a weight loads like any other weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

ENTRY = "digest"  # the key of the digests, inside the part that rebuilds the head


def digests(checkpoint: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """A SHA-256 of each of these parts of a checkpoint that is there: names, types, shapes and bytes."""
    return {key: fingerprint(_without_digests(checkpoint[key])) for key in keys if key in checkpoint}


def check_digests(checkpoint: Mapping[str, Any], stored: Any, keys: Iterable[str]) -> None:
    """Refuse a checkpoint whose parts are not those that were saved; one without digests is older, and is not checked.

    Args:
        checkpoint: what was read from the file.
        stored: the digests in it, or None.
        keys: the parts to check.
    """
    if stored is None:
        return
    wanted = {key: value for key, value in stored.items() if key in keys} if isinstance(stored, Mapping) else {"?": ""}
    found = digests(checkpoint, wanted)
    damaged = [key for key, value in wanted.items() if found.get(key) != value]
    if damaged:
        raise ValueError(
            f"expected the checkpoint as it was saved, got another {', '.join(damaged)}: the file is damaged, take "
            "another copy; if you changed it yourself, delete checkpoint['brainet']['digest'] before saving it"
        )


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


def _without_digests(part: Any) -> Any:
    """A digest can't cover itself."""
    return {key: value for key, value in part.items() if key != ENTRY} if isinstance(part, Mapping) else part


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
        for item in value:
            _feed(found, item)
    else:
        # Of anything else the type alone: its text could hold an address in memory, another one in every process.
        plain = value is None or isinstance(value, bool | int | float | str | bytes)
        found.update(f"{type(value).__name__} {value!r};".encode() if plain else f"{type(value).__name__};".encode())
