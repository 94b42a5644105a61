"""What names a backbone and the data that it reads, so that stored features are never taken for those of another.

A name is a digest of all that features depend on and that can be told: weights and buffers, the code and the settings
of every layer, taps, the samples of a data set and the transforms in front of them. What can't be told of data has no
name; then the inputs themselves are compared as they stream by.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, SequentialSampler, Subset, TensorDataset, default_collate

from brainet_pl._utils import digest

_DEPTH = 20  # of settings within settings; what lies deeper counts by its class
_SIMPLE = (bool, int, float, str, bytes, type(None))
_BOOKKEEPING = set(vars(nn.Module()))  # of every module; weights and buffers among them are described by the whole

# Transforms whose result is told by their settings, and by the seed of torch's generator for those that draw.
_TRANSFORMS = {"Compose", "Identity", "Resize", "CenterCrop", "Pad", "Grayscale", "RGB", "ToDtype", "ToImage"}
_TRANSFORMS |= {"ToTensor", "PILToTensor", "ToPureTensor", "ConvertImageDtype", "Normalize", "ImageClassification"}
_RANDOM = {"RandomCrop", "RandomHorizontalFlip", "RandomVerticalFlip", "RandomResizedCrop", "RandomRotation"}
_RANDOM |= {"ColorJitter"}

_plain: set[type] = {TensorDataset, Subset, ConcatDataset}


class Unknown(Exception):
    """Something whose identity can't be told."""


def plain(cls: type) -> type:
    """Mark a class whose attributes alone determine what its objects give, or whose `identity()` does.

    Derived classes are not meant: they may do anything else.
    """
    _plain.add(cls)
    return cls


def of_model(backbone: Any, device: torch.device) -> str:
    """16 hexadecimal digits that name what a `FeatureExtractor` gives; its layers must have been found.

    Weights, buffers, the code and the settings of every layer, what is read of them, and torch's version. A change of
    code that none of these shows is for the store to find, by running a few inputs.
    """
    code = _Code()
    content = {
        "state": {**backbone.state_dict(), **dict(backbone.named_buffers())},
        "layers": [[name, code.layer(module)] for name, module in backbone.model.named_modules()],
        "read": code.of([backbone.raw, backbone.pool, backbone.removed, backbone.taps]),
        "views": code.of([view.taps for view in backbone.views]),
        "torch": [torch.__version__, device.type, _precision()],
    }
    return digest.fingerprint(content)[:16]


def of_batches(batches: Any, seed: int) -> str | None:
    """32 hexadecimal digits that name the batches of a loader, their order included; None where that can't be told.

    Args:
        batches: a `DataLoader` of a known kind of data set in a fixed order; anything else has no name.
        seed: at which torch's generator stands when the loader is read.
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
        content = data.of(batches.dataset)
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


class _Description:
    """Values as tensors and primitives that differ where the values do; objects are left to those who know them."""

    def of(self, value: Any, depth: int = 0) -> Any:
        """Describe a value that lies `depth` values deep in others."""
        if isinstance(value, Tensor) or type(value) in _SIMPLE:
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return ["array", value.dtype.str, list(value.shape), torch.from_numpy(flat)]
        if isinstance(value, complex | enum.Enum | torch.dtype | torch.device | range | np.generic):
            return f"{type(value).__qualname__} {value}"
        if isinstance(value, type):
            return _path(value)
        if depth > _DEPTH:
            return self.object(value, depth)
        if isinstance(value, Mapping):
            return ["mapping", [[self.of(k, depth + 1), self.of(v, depth + 1)] for k, v in value.items()]]
        if isinstance(value, list | tuple):
            if len(value) > 1000 and all(type(item) is int for item in value):
                return torch.tensor(value)  # rows of a subset: one by one they would take longer than their samples
            return [type(value).__name__, *(self.of(item, depth + 1) for item in value)]
        if isinstance(value, set | frozenset):
            return ["set", *sorted(repr(self.of(item, depth + 1)) for item in value)]
        return self.object(value, depth)

    def object(self, value: Any, depth: int) -> Any:
        """Describe anything that is no number, text, tensor or collection."""
        raise NotImplementedError


class _Data(_Description):
    """Data sets and transforms: known ones, or `Unknown`."""

    def __init__(self) -> None:
        self.random = False  # whether a transform draws random numbers

    def object(self, value: Any, depth: int) -> Any:
        cls = type(value)
        ours = cls in _plain
        torchvisions = cls.__module__.startswith("torchvision.transforms")
        if depth > _DEPTH or not (ours or (torchvisions and cls.__name__ in _TRANSFORMS | _RANDOM)):
            raise Unknown(_path(cls))
        self.random |= not ours and cls.__name__ in _RANDOM
        state = value.identity() if ours and hasattr(value, "identity") else vars(value)
        return [_path(cls), self.of({k: v for k, v in state.items() if k != "training"}, depth + 1)]


class _Code(_Description):
    """Layers, with their code and settings. What can't be told counts by its class; anything counts in full once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # and so alive, or another object could get the same number

    def _again(self, value: Any) -> bool:
        known = id(value) in self._seen
        self._seen[id(value)] = value
        return known

    def object(self, value: Any, depth: int) -> Any:
        path = _path(type(value))
        if depth > _DEPTH or isinstance(value, types.ModuleType) or self._again(value):
            return path
        if isinstance(value, functools.partial):
            return [path, *(self.of(part, depth + 1) for part in (value.func, value.args, value.keywords))]
        if isinstance(value, types.MethodType):
            return [path, self.of(value.__func__, depth + 1)]
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, nn.Module):  # outside the model's own tree of layers
            return [self.layer(value, depth), self.of({**value.state_dict(), **dict(value.named_buffers())}, depth + 1)]
        return [path, self._class(type(value)), self.of(getattr(value, "__dict__", None), depth + 1)]

    def layer(self, module: nn.Module, depth: int = 0) -> Any:
        """The code of a layer, its settings and hooks; not its weights."""
        settings = {k: v for k, v in vars(module).items() if k not in _BOOKKEEPING}
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]  # their keys are mere numbers
        code = module.code if isinstance(module, torch.jit.ScriptModule) else self._class(type(module))
        return [code, self.of(settings, depth + 1), self.of(hooks, depth + 1)]

    def _class(self, cls: type) -> Any:
        """The code of a class and of its bases, and the version of its package."""
        if self._again(cls):
            return _path(cls)
        found: list[Any] = [_version(cls.__module__.partition(".")[0])]
        for base in cls.__mro__:
            if base not in (nn.Module, object):
                found.append([_path(base), [[k, self._member(k, v)] for k, v in vars(base).items()]])
        return found

    def _member(self, name: str, member: Any) -> Any:
        if isinstance(member, property):
            member = member.fget
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        setting = type(member) in _SIMPLE and not name.startswith("__")  # not a docstring, or the number of a line
        return self.of(member) if setting or isinstance(member, types.FunctionType) else None

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        """The code of a function, its defaults, what it encloses, and functions and constants that it uses by name."""
        used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        used = {k: v for k, v in used.items() if isinstance(v, types.FunctionType) or type(v) in _SIMPLE[:-1]}
        parts = [_enclosed(function), used, function.__defaults__, function.__kwdefaults__]
        return [function.__qualname__, self._bytes(function.__code__), *(self.of(part, depth + 1) for part in parts)]

    def _bytes(self, code: types.CodeType) -> Any:
        constants = [self._bytes(c) if isinstance(c, types.CodeType) else self.of(c) for c in code.co_consts]
        return [code.co_code, list(code.co_names), constants]


def _enclosed(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not set yet
            found.append(None)
    return found


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))
