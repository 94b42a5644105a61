"""The checkpoint of several processes, a folder with the share of each: read without running a pickle.

torch describes such a folder by a pickle, `.metadata`, and keeps what is no tensor as pickles too. Of the first, only
the classes of such a description are made; of the others, primitives.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from brainet_pl._utils.tensor_file import Oversized, read_tensors

META = "meta.pt"  # everything but weights and optimizers
WEIGHTS, STATES, OPTIMIZER = "state_dict", "optimizer_states", "optimizer_"
METADATA = ".metadata"
EXTRA = "_extra_state"  # the end of the names of what modules store beside tensors of theirs
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath", "WindowsPath"}, "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip


class _Description(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise ValueError(
                f"expected the description of a checkpoint in {METADATA}, got {module}.{name} in it: the folder is not "
                "what torch writes; take another copy"
            )
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads tensors as torch does, and the description of a folder without running it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path)
        metadata: Metadata = _Description(io.BytesIO((folder / METADATA).read_bytes())).load()
        files = {info.relative_path for info in (metadata.storage_data or {}).values()}
        if any(Path(name).name != name or (folder / name).is_symlink() for name in files):
            raise ValueError(f"expected the shares of a checkpoint in {folder}, got files elsewhere: take another copy")
        tensors = [e for e in metadata.state_dict_metadata.values() if isinstance(e, TensorStorageMetadata)]
        held = sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in tensors)
        size = sum((folder / name).stat().st_size for name in files)
        if held > size:
            raise Oversized(f"expected tensors of at most {size:,} bytes in {folder}, got {held:,}: take another copy")
        return metadata


class _Primitives(DefaultLoadPlanner):
    """Keeps what is no tensor aside, as primitives."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self._found = found

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._found[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def is_sharded_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a sharded checkpoint."""
    return (Path(path) / META).is_file()


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether there is something to read at a path: a file, or the folder of a sharded checkpoint."""
    return Path(path).is_file() or is_sharded_folder(path)


class FolderWeights(dict[str, Any]):
    """Weights of a folder of which not all are read: shares of this process, or tensors without numbers."""


Place = tuple[Any, ...]  # such as ("state_dict", name) or ("optimizer_0", "state", name, "exp_avg")
Room = Callable[[Place, TensorStorageMetadata], Tensor]


def room(place: Place, entry: TensorStorageMetadata) -> Tensor:
    """A tensor that takes all numbers of an entry."""
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def no_room(place: Place, entry: TensorStorageMetadata) -> Tensor:
    """A tensor without numbers, but where an entry says how a module is built."""
    device = "cpu" if str(place[-1]).endswith(EXTRA) else "meta"
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def read_whole(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a checkpoint, a file or a sharded folder, as one process would have written it to a file."""
    path = Path(path)
    return read_tensors(path) if path.is_file() else _read_folder(path, room)


def read_parts(path: str | os.PathLike[str], make: Room = no_room) -> dict[str, Any]:
    """The content of a checkpoint without holding all of it: a file stays on the disk until it is looked at.

    Args:
        path: a file, or a sharded folder.
        make: gives the tensor for an entry of a folder, whole or the share of this process; what is on the device
            `meta` is not read.
    """
    path = Path(path)
    if path.is_file():
        return read_tensors(path, mapped=True)  # type: ignore[no-any-return]
    content = _read_folder(path, make)
    return {**content, WEIGHTS: FolderWeights(content[WEIGHTS])}


def _read_folder(path: Path, make: Room) -> dict[str, Any]:
    content: dict[str, Any] = read_tensors(path / META)
    reader = _Reader(path)
    metadata = reader.read_metadata()
    found: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        found[key] = io.BytesIO()
        if isinstance(entry, TensorStorageMetadata):
            found[key] = make(metadata.planner_data[key], entry)
    primitives: dict[str, Any] = {}
    wanted = {key: value for key, value in found.items() if not getattr(value, "is_meta", False)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is asked to read alone
        load(wanted, storage_reader=reader, planner=_Primitives(primitives), no_dist=True)
    parts: dict[str, Any] = {WEIGHTS: {}}
    for key, value in (found | primitives).items():
        *above, last = metadata.planner_data[key]
        place = parts
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    states = [_listed(parts[f"{OPTIMIZER}{n}"]) for n in range(len(parts) - 1)]
    return {**content, WEIGHTS: parts[WEIGHTS], STATES: states}


def _listed(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, whose groups a folder has by number, as a file has it."""
    groups = state["param_groups"]
    return numbered({**state, "param_groups": [groups[n] for n in sorted(groups)]})


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by any names of parameters → by their numbers in its groups, as optimizers have it.

    >>> numbered({"state": {"b": {"step": 2}}, "param_groups": [{"params": ["a"]}, {"params": ["b"]}]})
    {'state': {1: {'step': 2}}, 'param_groups': [{'params': [0]}, {'params': [1]}]}
    """
    groups = state["param_groups"]
    numbers = {name: n for n, name in enumerate(name for group in groups for name in group["params"])}
    made = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    return {"state": {numbers[name]: values for name, values in state.get("state", {}).items()}, "param_groups": made}
