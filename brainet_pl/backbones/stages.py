"""What one pass shows of a model's layers, and where its stages end."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

EVEN_STAGES = 4  # stages of a model whose blocks all give the same shape
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)  # they come in front of an activation
_ALONG = (nn.Conv1d, nn.BatchNorm1d, nn.AdaptiveAvgPool1d, nn.AvgPool1d, nn.MaxPool1d)  # (B, C, L) and not (B, T, D)


class LayerUse(NamedTuple):
    """How a layer was used in one pass."""

    shape: tuple[int, ...]  # shape of its output for one sample
    channels: int  # axis of the channels, as in `Tap`
    times: int  # number of times that it ran
    last: int  # position of its last use among the uses of all layers
    entered: int | None = None  # number of places (pixels, tokens) of its input; None if that is no tensor
    passed: bool = False  # whether it returned its input itself
    samples: int | None = None  # number of samples of its output if it differs from the batch, else None
    tensor: tuple[int, int] = (0, 0)  # what names the tensor that it gave: layers that hand one on give the same

    @property
    def places(self) -> int:
        """The number of pixels or tokens of its output."""
        return places_of(self.shape, self.channels)


def places_of(shape: tuple[int, ...], channels: int) -> int:
    """The number of pixels or tokens of an output of this shape; 1 for a vector."""
    if len(shape) < 2:
        return 1
    return int(torch.Size(shape[1:] if channels > 0 else shape[:-1]).numel())


class _TracedOutput(NamedTuple):
    """The output of a layer, which may be the input of another."""

    tensor: Tensor  # the output, kept so that no other tensor gets its id
    channels: int  # its axis of channels
    version: int  # number of operations in place on it

    def like(self, other: Tensor) -> int | None:
        """The axis of channels of a tensor that was made from this one, where it has as many axes and channels."""
        same = other.dim() == self.tensor.dim() and other.shape[self.channels] == self.tensor.shape[self.channels]
        return self.channels if same else None


def trace_layers(model: nn.Module, run: Any, samples: int) -> dict[str, LayerUse]:
    """Layer → its use while `run()` runs the model on so many samples; layers that give no tensor are omitted."""
    uses: dict[str, LayerUse] = {}
    known: dict[int, _TracedOutput] = {}
    handles = []

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensor, given = first_tensor(output), first_tensor([*args, *kwargs.values()])
            if tensor is None or tensor.dim() < 2:
                return
            before = known.get(id(given))
            shape, version = tuple(tensor.shape[1:]), 0 if tensor.is_inference() else tensor._version
            channels = channels_of(shape, module, None if before is None else before.like(tensor))
            entered = None
            if given is not None and given.dim() > 1:
                came = tuple(given.shape[1:])
                entered = places_of(came, channels_of(came, module) if before is None else before.channels)
            times = uses[name].times + 1 if name in uses else 1
            last = sum(use.times for use in uses.values())
            passed = tensor is given and before is not None and before.version == version
            other = None if len(tensor) == samples else len(tensor)
            uses[name] = LayerUse(shape, channels, times, last, entered, passed, other, (id(tensor), version))
            known[id(tensor)] = _TracedOutput(tensor, channels, version)

        return hook

    try:
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_hook(record(name), with_kwargs=True))
        run()
    finally:
        for handle in handles:
            handle.remove()
    return uses


def first_tensor(output: Any) -> Tensor | None:
    """The output of a layer if it is a tensor, or the first tensor in it."""
    if isinstance(output, Tensor):
        return output
    return next((found for part in output_parts(output).values() if (found := first_tensor(part)) is not None), None)


def output_parts(output: Any) -> dict[str, Any]:
    """The parts of a tuple, list, dictionary or dataclass by name or number; {} for anything else."""
    if isinstance(output, Mapping):
        return {str(name): part for name, part in output.items()}
    if isinstance(output, list | tuple):
        return {str(i): part for i, part in enumerate(output)}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return {}


_FIRST = ("out_channels", "num_features", "num_channels")  # widths of layers whose channels come first
_LAST = ("normalized_shape", "out_features")  # widths of layers whose channels come last, unless they are transposed


def channels_of(shape: tuple[int, ...], module: nn.Module | None = None, like: int | None = None) -> int:
    """The axis of the channels of an output (B, *shape): 1 for (B, C, H, W) and (B, C, L), -1 for tokens (B, T, D).

    It is the axis whose size is the width of the last layer inside `module` that has one; else `like`, the axis of the
    module's input; else maps have their channels first unless only their first two axes agree, as in (B, 7, 7, 768),
    and tokens have them last.
    """
    if len(shape) not in (2, 3):
        return 1
    leaves = [] if module is None else [m for m in module.modules() if not list(m.children())]
    for leaf in reversed(leaves):
        width = next((getattr(leaf, name) for name in _FIRST + _LAST if hasattr(leaf, name)), None)
        width = width[-1] if isinstance(width, tuple) and width else width
        comes_last = any(hasattr(leaf, name) for name in _LAST)
        if shape[0] != shape[-1] and (width == shape[0] or (comes_last and width == shape[-1])):
            return 1 if width == shape[0] else -1
    if like is not None:
        return like
    if len(shape) == 3:
        return -1 if shape[0] == shape[1] != shape[2] else 1
    return 1 if leaves and isinstance(leaves[-1], _ALONG) else -1


def find_stages(model: nn.Module, uses: Mapping[str, LayerUse]) -> list[str]:
    """The ends of a model's stages.

    A stage is all that a network of maps does at one number of places (pixels, tokens), give or take a third: edges
    without padding and class tokens make no new one. It ends with the layer that is used last in it, and not inside the
    block that leads to the next, nor with a normalisation whose activation can't be read, if a block comes before it.
    Stages with a single layer of weights (a stem) are left out where others have more. A model whose blocks all give
    one shape, such as a transformer, ends four stages at equal distances along its longest row of blocks.
    """
    stages: dict[str, int] = {}
    for names in _trunk(uses):
        heavy = [name for name in names if any(True for _ in model.get_submodule(name).parameters())]
        # Of a single place, a mean is the same again.
        end = heavy[-1] if heavy and uses[names[-1]].places == 1 else names[-1]
        if isinstance(model.get_submodule(end), _NORMS):
            end = ([name for name in names if _is_end(model.get_submodule(name))] or [end])[-1]
        stages[end] = len(_weighted(model, uses, names))
    several = [end for end, count in stages.items() if count > 1]
    chosen = several if several else [end for end, count in stages.items() if count]
    if len(chosen) > 1:
        return chosen
    row = _longest_row(model, uses)
    if row:
        picks = sorted({round((i + 1) * len(row) / EVEN_STAGES) - 1 for i in range(EVEN_STAGES)} - {-1})
        return [row[i] for i in picks]
    if chosen:
        return [end for end, count in stages.items() if count]
    raise ValueError(
        f"expected a model with stages of maps or blocks of tokens to tap by 'auto', got {type(model).__name__} "
        f"without any: name the layers, such as {', '.join(list(uses)[:3])}"
    )


def find_blocks(model: nn.Module, uses: Mapping[str, LayerUse]) -> list[str]:
    """The ends of a model's blocks and stages, in the order of use; [] for a model without maps or tokens.

    A block is a module with layers inside whose class the model uses more than once; what lies inside a block is left
    out. Outside blocks, rows of layers (VGG) are read after activations and pools, never in front of an activation.
    """
    trunk = {name for names in _trunk(uses) for name in names}
    rows = (nn.ModuleList, nn.ModuleDict)  # classes derived from these may compute
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]
    classes = Counter(kind for kind in kinds if kind not in rows)
    found: dict[tuple[int, int], str] = {}

    def walk(parent: str, module: nn.Module) -> None:
        for child, part in module.named_children():
            name = f"{parent}.{child}" if parent else child
            if classes[type(part)] < 2:
                walk(name, part)
            if name in trunk and _is_end(part) and (uses[name].places > 1 or any(True for _ in part.parameters())):
                found[uses[name].tensor] = name  # of layers that give the same tensor, the outermost

    walk("", model)
    return sorted(found.values(), key=lambda name: uses[name].last)


def _is_end(module: nn.Module) -> bool:
    """Whether the output of a module may end a block: it has layers inside, or is an activation or a pool."""
    dense = not list(module.children()) and any(p.dim() > 1 for p in module.parameters())
    skipped = (nn.Identity, nn.modules.conv._ConvNd, nn.modules.dropout._DropoutNd, *_NORMS)
    return not dense and not isinstance(module, skipped)


def _trunk(uses: Mapping[str, LayerUse]) -> list[list[str]]:
    """The layers of each stage in the order of use, without branches inside blocks; stages in the order of their ends.

    Omitted are layers with another number of places than the block around them, which keeps its own (windows,
    excitation), layers that increase the number of places, and layers inside a block that begins in their stage and
    ends in the next.
    """
    sizes: list[int] = []  # the largest number of places of each stage
    for places in sorted({p for use in uses.values() for p in (use.places, use.entered) if p}, reverse=True):
        if not sizes or places * 1.5 < sizes[-1]:
            sizes.append(places)

    def stage(places: int | None) -> int | None:
        return None if not places else max(i for i, size in enumerate(sizes) if places <= size)

    ours: dict[int, list[str]] = {}
    for name, use in sorted(uses.items(), key=lambda item: item[1].last):
        mine = stage(use.places)
        inside = any(stage(a.entered) == stage(a.places) != mine for a in _blocks_around(name, uses))
        maps = len(use.shape) == 3 or use.places > 1
        came = stage(use.entered)
        grows = came is not None and mine is not None and came > mine
        plain = use.times == 1 and use.samples is None and maps and not use.passed
        if plain and not inside and not grows and mine is not None:
            ours.setdefault(mine, []).append(name)
    order = sorted(ours)
    trunk = []
    for mine, after in zip_longest(order, order[1:]):
        leading = {  # inside a block that begins in this stage and ends in the one after it
            name
            for name in ours[mine]
            for a in _blocks_around(name, uses)
            if after is not None and stage(a.entered) == mine and stage(a.places) == after
        }
        trunk.append([name for name in ours[mine] if name not in leading] or ours[mine])
    return sorted(trunk, key=lambda names: uses[names[-1]].last)


def _blocks_around(name: str, uses: Mapping[str, LayerUse]) -> list[LayerUse]:
    parts = name.split(".")
    return [uses[block] for block in (".".join(parts[:i]) for i in range(1, len(parts))) if block in uses]


def _weighted(model: nn.Module, uses: Mapping[str, LayerUse], names: Sequence[str]) -> set[nn.Module]:
    """The layers with weights among those of a stage, and inside those that begin and end in it."""
    steady = [n for n in names if 2 * uses[n].places <= 3 * (uses[n].entered or 0) <= 4.5 * uses[n].places]
    inside = {part for name in steady for part in model.get_submodule(name).modules()}
    alone = {model.get_submodule(name) for name in names}
    return {part for part in alone | inside if any(p.dim() > 1 for p in part.parameters(recurse=False))}


def _longest_row(model: nn.Module, uses: Mapping[str, LayerUse]) -> list[str]:
    """The longest list of sibling layers of one class that give tokens or maps of one shape, in order of use."""
    best: list[str] = []
    for parent, module in model.named_modules():
        rows: dict[Any, list[str]] = {}
        for child, block in module.named_children():
            name = f"{parent}.{child}" if parent else child
            if name in uses and uses[name].times == 1 and len(uses[name].shape) > 1 and list(block.children()):
                rows.setdefault((type(block), uses[name].shape), []).append(name)
        for row in rows.values():
            if len(row) > max(1, len(best)):
                best = sorted(row, key=lambda name: uses[name].last)
    return best
