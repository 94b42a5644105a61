"""What names a backbone and the data that it reads, so that stored features are never taken for those of another.

A name is a digest of what features depend on: weights and buffers, the classes and settings of layers, taps, the
samples of a data set and the transforms in front of them. The code of a model is not part of its name: the store finds
a change of code by running a few inputs. Data of unknown classes has no name; then the inputs themselves are compared.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, SequentialSampler, Subset, TensorDataset, default_collate

from brainet_pl._utils import digest

_DEPTH = 20  # of settings within settings
_NAMED = (complex, enum.Enum, torch.dtype, torch.device, range, np.generic)  # values that their text tells apart
_BOOKKEEPING = set(vars(nn.Module()))  # of every module; weights and buffers among them are part of the state

# Transforms whose settings determine their result, with the seed of torch's generator for those that draw.
_TRANSFORMS = {"Compose", "Identity", "Resize", "CenterCrop", "Pad", "Grayscale", "RGB", "ToDtype", "ToImage"}
_TRANSFORMS |= {"ToTensor", "PILToTensor", "ToPureTensor", "ConvertImageDtype", "Normalize", "ImageClassification"}
_RANDOM = {"RandomCrop", "RandomHorizontalFlip", "RandomVerticalFlip", "RandomResizedCrop", "RandomRotation"}
_RANDOM |= {"ColorJitter"}

_plain: set[type] = {TensorDataset, Subset, ConcatDataset}


class Unknown(Exception):
    """Data that can't be named."""


def plain(cls: type) -> type:
    """Mark a class whose attributes alone determine what its objects give, or whose `identity()` does.

    Derived classes are not marked with it: they may do anything else.
    """
    _plain.add(cls)
    return cls


def of_model(backbone: Any, device: torch.device) -> str:
    """16 hexadecimal digits that name what a `FeatureExtractor` gives; its layers must have been found.

    They tell weights, buffers, the classes, settings and hooks of all layers, what is read of them, and versions.
    """
    layers = dict(backbone.model.named_modules())
    read = [backbone.removed, backbone.taps, *(view.taps for view in backbone.views)]
    content = {
        "state": {**backbone.state_dict(), **dict(backbone.named_buffers())},
        "layers": {name: _layer(module) for name, module in layers.items()},
        "read": [backbone.raw, backbone.pool, *map(repr, read)],
        "versions": {name: _version(name) for name in sorted({_path(m).partition(".")[0] for m in layers.values()})},
        "torch": [torch.__version__, device.type, _precision()],
    }
    return digest.fingerprint(content)[:16]


def _layer(module: nn.Module) -> list[Any]:
    """The class, the settings and the hooks of a layer. A setting that is no primitive counts by its name or class."""
    settings = {
        name: str(value) if isinstance(value, _NAMED) else _path(value) if callable(value) else value
        for name, value in vars(module).items()
        if name not in _BOOKKEEPING
    }
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]  # their keys are mere numbers
    return [_path(module), settings, [_path(hook) for hook in hooks]]


def of_batches(batches: Any, seed: int) -> str | None:
    """32 hexadecimal digits that name the batches of a loader, their order included; None where they have no name.

    A `DataLoader` of a known kind of data set in a fixed order has one. `seed` is that of torch when it is read.
    """
    if not isinstance(batches, DataLoader) or batches.collate_fn is not default_collate:
        return None
    order: Any = batches.batch_sampler
    if not isinstance(order, list):
        if type(batches.sampler) is not SequentialSampler or batches.batch_size is None:
            return None
        order = [batches.batch_size, batches.drop_last]
    data = _Data()
    try:
        content = data.describe(batches.dataset)
    except Unknown:
        return None
    versions = [_version(package) for package in ("torch", "torchvision", "numpy", "PIL")]  # of those that are used
    draws = [seed, batches.num_workers] if data.random else None  # workers have seeds of their own
    return digest.fingerprint([content, order, versions, draws])[:32]


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set in two ways that do not agree
        return "mixed"


class _Data:
    """Describes data sets and transforms by tensors and primitives; raises `Unknown` for other objects.

    Attributes:
        random: whether a transform draws random numbers.
    """

    def __init__(self) -> None:
        self.random = False

    def describe(self, value: Any, depth: int = 0) -> Any:
        """Describe a value that lies `depth` values deep in others."""
        if isinstance(value, Tensor) or type(value) in (bool, int, float, str, bytes, type(None)):
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return ["array", value.dtype.str, list(value.shape), torch.from_numpy(flat)]
        if isinstance(value, _NAMED):
            return f"{type(value).__qualname__} {value}"
        if isinstance(value, type):
            return _path(value)
        if depth > _DEPTH:
            raise Unknown(_path(value))
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._collection(value, depth)
        return self._object(value, depth)

    def _collection(self, value: Any, depth: int) -> Any:
        """Describe a mapping, a sequence or a set by its members."""
        if isinstance(value, Mapping):
            return ["mapping", [[self.describe(k, depth + 1), self.describe(v, depth + 1)] for k, v in value.items()]]
        if isinstance(value, list | tuple):
            if len(value) > 1000 and all(type(item) is int for item in value):
                return torch.tensor(value)  # rows of a subset: one by one they would take longer than their samples
            return [type(value).__name__, *(self.describe(item, depth + 1) for item in value)]
        return ["set", *sorted(repr(self.describe(item, depth + 1)) for item in value)]

    def _object(self, value: Any, depth: int) -> Any:
        cls = type(value)
        ours = cls in _plain
        torchvisions = cls.__module__.startswith("torchvision.transforms")
        if not (ours or (torchvisions and cls.__name__ in _TRANSFORMS | _RANDOM)):
            raise Unknown(_path(value))
        self.random |= not ours and cls.__name__ in _RANDOM
        state = value.identity() if ours and hasattr(value, "identity") else vars(value)
        return [_path(value), self.describe({k: v for k, v in state.items() if k != "training"}, depth + 1)]


def _path(value: Any) -> str:
    """The path of a class or function, or of the class of any other object."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))
