"""The index of stored features: which arrays an entry has, their types, shapes and digests, and how they are mapped.

An entry may be damaged, of another version, or written by somebody else; whatever is wrong with it is a `ValueError`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from brainet_pl._utils import digest
from brainet_pl._utils.inside import find_inside, read_inside

FORMAT = 3  # of an entry
DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
INDEX = "index.json"


def read_index(folder: Path) -> dict[str, Any]:
    """The content of the index, checked against its digest."""
    index = json.loads(read_inside(folder, INDEX) or "null")
    index = index if isinstance(index, dict) else {}
    content = index.get("content")
    if not isinstance(content, dict) or digest.fingerprint(content) != index.get("digest"):
        raise ValueError(f"expected {INDEX} as it was written, got another")
    if content.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {content.get('format')} of another version")
    if content.get("name") != f"{folder.parent.name}/{folder.name}":
        raise ValueError(f"expected the features of {folder.name}, got those of {content.get('name')}")
    if not _is_sound(content):
        raise ValueError(f"expected {INDEX} as brainet_pl writes it, got another form")
    return content


def _is_sound(content: dict[str, Any]) -> bool:
    """Whether the content of an index says of every array and batch what it must."""
    arrays, taps, sizes, digests = (content.get(key) for key in ("arrays", "taps", "sizes", "digests"))
    if not isinstance(arrays, dict) or not isinstance(taps, list) or not _are_sizes(sizes):
        return False
    if not _is_texts(digests) or len(digests) != len(sizes):
        return False
    return bool(sizes) and _are_taps(taps) and _are_arrays(arrays, sum(sizes), len(taps))


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(size) is int and 0 < size < 2**40 for size in values)


def _are_taps(taps: list[Any]) -> bool:
    """Whether these are pairs of layers and pools, each once."""
    for pair in taps:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_texts, pair)):
            return False
    return len({(tuple(layers), tuple(pools)) for layers, pools in taps}) == len(taps)


def _are_arrays(arrays: dict[Any, Any], rows: int, taps: int) -> bool:
    """Whether these are arrays of so many rows: features, targets, those of each tap, and perhaps base logits."""
    named = {"features", "targets", *(f"more_{i}" for i in range(taps))}
    if set(arrays) - {"base_logits"} != named:
        return False
    if not all(_is_array(array, rows) for array in arrays.values()):
        return False
    return all(len(arrays[name]["shape"]) == 2 for name in arrays if name != "targets")


def _is_array(array: Any, rows: int) -> bool:
    return (
        isinstance(array, dict)
        and array.get("dtype") in DTYPES
        and _are_sizes(array.get("shape"))
        and array["shape"][:1] == [rows]
        and isinstance(array.get("sha256"), str)
    )


def _is_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def map_array(folder: Path, name: str, array: dict[str, Any]) -> Tensor:
    """The array in a file, mapped; changes to it stay in memory."""
    path = find_inside(folder, name)
    if path is None:
        raise ValueError(f"expected the file {name}, found none")
    dtype, shape = getattr(torch, array["dtype"]), torch.Size(array["shape"])
    if path.stat().st_size != shape.numel() * dtype.itemsize:
        raise ValueError(f"expected {shape.numel() * dtype.itemsize} bytes in {path.name}, got {path.stat().st_size}")
    flat = torch.from_file(str(path), shared=False, size=shape.numel(), dtype=dtype)
    if hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest() != array["sha256"]:
        raise ValueError(f"expected {path.name} as it was written, got another")
    return flat.reshape(shape)
