"""Files of tensors and plain values from others: checked before memory is taken for what they say they hold."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MOST_VALUES = 5 * 10**6  # numbers, texts, tensors, lists and dictionaries of a file
MOST_SHARED = 8  # tensors may lie in one storage, as tied weights do, but not for more than so many times its size
SPARE = 10**6  # numbers that a model may hold beyond twice those of its file
SIZES = ("num_params", "num_classes", "out_features", "in_features", "min_width")  # settings that a model grows with


class Oversized(ValueError):
    """A file asks for far more memory than its own size."""


def read_tensors(path: str | os.PathLike[str], mapped: bool = False) -> Any:
    """The content of a file that `torch.save` wrote: tensors and primitives, never code.

    Any error may come of a damaged file; one that would take far more memory than its own size is refused. With
    `mapped`, tensors stay in the file until they are looked at.
    """
    check_file(path)
    content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    check_content(content)
    return content


def check_file(path: str | os.PathLike[str]) -> None:
    """Refuse a compressed file, which could hold a thousand times its size; `torch.save` does not compress."""
    size = Path(path).stat().st_size
    if not zipfile.is_zipfile(path):
        raise ValueError(f"expected a file that torch.save wrote, got something else in {path}: take another copy")
    with zipfile.ZipFile(path) as archive:
        held = sum(entry.file_size for entry in archive.infolist())
    if held > size:
        raise Oversized(
            f"expected a file as torch.save writes it, got {path} with {held:,} bytes packed into {size:,}: it is "
            "compressed; take another copy"
        )


def check_content(content: Any) -> None:
    """Refuse more values than a checkpoint has, and tensors that are larger than the memory they lie in."""
    storages: dict[int, int] = {}
    total = 0
    for tensor in _tensors(content):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise Oversized(f"expected dense tensors in the file, got one of {tensor.layout}: take another copy")
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        storages[storage.data_ptr()] = held = storage.nbytes()
        total += size
        if size > held:
            raise Oversized(
                f"expected tensors as large as their memory, got one of {size:,} bytes in {held:,}: the file is not "
                "what brainet_pl writes; take another copy"
            )
    if total > MOST_SHARED * sum(storages.values()):
        raise Oversized(
            f"expected tensors of about {sum(storages.values()):,} bytes, as their memory, got {total:,}: the file is "
            "not what brainet_pl writes; take another copy"
        )


def _tensors(content: Any) -> Iterator[Tensor]:
    """All tensors in dictionaries and lists, which may hold each other without end."""
    waiting, seen = [content], 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise Oversized(
                f"expected at most {MOST_VALUES:,} values in the file, got lists or dictionaries nested without end: "
                "take another file"
            )
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set):
            waiting.extend(value)


def check_sizes(settings: Any, weights: Any) -> None:
    """Refuse settings that ask for a model much larger than the weights that come with them.

    Args:
        settings: Dictionaries and lists of settings, however deep.
        weights: The tensors of the model, by name.
    """
    most = most_numbers(weights)
    waiting = [settings]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend(value.values())
            for name in SIZES:
                _refuse_above(most, name, value.get(name))
        elif isinstance(value, list | tuple):
            waiting.extend(value)


def check_build(build: Callable[[], nn.Module], weights: Any) -> None:
    """Refuse a module much larger than the weights for it, before memory is taken: it is built without any."""
    try:
        with torch.device("meta"):
            held = sum(tensor.numel() for tensor in build().state_dict().values())
    except (RuntimeError, NotImplementedError):  # a head of the user's that looks at its numbers while it is built
        return
    _refuse_above(most_numbers(weights), "the size of the head", held)


def most_numbers(weights: Any) -> int:
    """How many numbers a model with these weights may hold."""
    held = weights.values() if isinstance(weights, Mapping) else ()
    return 2 * sum(value.numel() for value in held if isinstance(value, Tensor)) + SPARE


def _refuse_above(most: int, name: str, value: Any) -> None:
    if isinstance(value, int | float) and value > most:
        raise Oversized(
            f"expected settings that fit the weights in the file, {name} of at most {most:,}, got "
            f"{min(value, 10**18):,}: the file was changed; take another copy"
        )
