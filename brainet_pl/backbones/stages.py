"""What one pass shows of a model's layers, and where its stages end."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class _Tracer:
    """Watches the layers of a model during one pass, in which each sees so many samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.uses: dict[str, LayerUse] = {}
        self._known: dict[int, _TracedOutput] = {}
        self._count = 0  # uses of all layers so far

    def hook(self, name: str) -> Any:
        """A forward hook that writes down a use of the layer of this name."""

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensor, given = first_tensor(output), first_tensor([*args, *kwargs.values()])
            if tensor is not None and tensor.dim() > 1:
                self._record(name, module, given, tensor)

        return record

    def _record(self, name: str, module: nn.Module, given: Tensor | None, tensor: Tensor) -> None:
        before = self._known.get(id(given))
        shape, version = tuple(tensor.shape[1:]), 0 if tensor.is_inference() else tensor._version
        channels = channels_of(shape, module, None if before is None else before.like(tensor))
        passed = tensor is given and before is not None and before.version == version
        self.uses[name] = LayerUse(
            shape,
            channels,
            times=self.uses[name].times + 1 if name in self.uses else 1,
            last=self._count,
            entered=self._entered(module, given, before),
            passed=passed,
            samples=None if len(tensor) == self.samples else len(tensor),
            tensor=(id(tensor), version),
        )
        self._count += 1
        self._known[id(tensor)] = _TracedOutput(tensor, channels, version)

    @staticmethod
    def _entered(module: nn.Module, given: Tensor | None, before: _TracedOutput | None) -> int | None:
        """The number of places of a layer's input."""
        if given is None or given.dim() < 2:
            return None
        shape = tuple(given.shape[1:])
        return places_of(shape, channels_of(shape, module) if before is None else before.channels)


def trace_layers(model: nn.Module, run: Any, samples: int) -> dict[str, LayerUse]:
    """Layer → its use while `run()` runs the model on so many samples; layers that give no tensor are omitted."""
    tracer = _Tracer(samples)
    handles = []
    try:
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_hook(tracer.hook(name), with_kwargs=True))
        run()
    finally:
        for handle in handles:
            handle.remove()
    return tracer.uses


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
    axes = (_axis_of_width(shape, leaf) for leaf in reversed(leaves) if shape[0] != shape[-1])
    known = next((axis for axis in axes if axis is not None), like)
    if known is not None:
        return known
    if len(shape) == 3:
        return -1 if shape[0] == shape[1] != shape[2] else 1
    return 1 if leaves and isinstance(leaves[-1], _ALONG) else -1


def _axis_of_width(shape: tuple[int, ...], layer: nn.Module) -> int | None:
    """The axis of an output (B, *shape) that is as long as a layer is wide, first or last; None where neither is."""
    width = next((getattr(layer, name) for name in _FIRST + _LAST if hasattr(layer, name)), None)
    if isinstance(width, tuple) and width:
        width = width[-1]
    if width == shape[0]:
        return 1
    comes_last = any(hasattr(layer, name) for name in _LAST)
    return -1 if comes_last and width == shape[-1] else None


def find_stages(model: nn.Module, uses: Mapping[str, LayerUse]) -> list[str]:
    """The ends of a model's stages.

    A stage is all that a network of maps does at one number of places (pixels, tokens), give or take a third: edges
    without padding and class tokens make no new one. It ends with the layer that is used last in it, and not inside the
    block that leads to the next, nor with a normalisation whose activation can't be read, if a block comes before it.
    Stages with a single layer of weights (a stem) are left out where others have more. A model whose blocks all give
    one shape, such as a transformer, ends four stages at equal distances along its longest row of blocks.
    """
    stages: dict[str, int] = {}  # the end of a stage → its layers of weights
    for names in _trunk(uses):
        stages[_end_of(model, uses, names)] = len(_weighted(model, uses, names))
    several = [end for end, count in stages.items() if count > 1]
    weighted = [end for end, count in stages.items() if count]
    chosen = several or weighted
    if len(chosen) > 1:
        return chosen
    row = _longest_row(model, uses)
    if row:
        picks = sorted({round((i + 1) * len(row) / EVEN_STAGES) - 1 for i in range(EVEN_STAGES)} - {-1})
        return [row[i] for i in picks]
    if weighted:
        return weighted
    raise ValueError(
        f"expected a model with stages of maps or blocks of tokens to tap by 'auto', got {type(model).__name__} "
        f"without any: name the layers, such as {', '.join(list(uses)[:3])}"
    )


def _end_of(model: nn.Module, uses: Mapping[str, LayerUse], names: Sequence[str]) -> str:
    """The layer of a stage that is read for it."""
    end = names[-1]
    if uses[end].places == 1:  # of a single place, a mean is the same again
        with_weights = [name for name in names if _has_weights(model.get_submodule(name))]
        end = with_weights[-1] if with_weights else end
    if isinstance(model.get_submodule(end), _NORMS):
        ends = [name for name in names if _is_end(model.get_submodule(name))]
        end = ends[-1] if ends else end
    return end


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def find_blocks(model: nn.Module, uses: Mapping[str, LayerUse]) -> list[str]:
    """The ends of a model's blocks and stages, in the order of use; [] for a model without maps or tokens.

    A block is a module with layers inside whose class the model uses more than once; what lies inside a block is left
    out. Outside blocks, rows of layers (VGG) are read after activations and pools, never in front of an activation.
    """
    trunk = {name for names in _trunk(uses) for name in names}
    found: dict[tuple[int, int], str] = {}
    for name, part in _outside_blocks("", model, _class_counts(model)):
        if name in trunk and _is_end(part) and (uses[name].places > 1 or _has_weights(part)):
            found[uses[name].tensor] = name  # of layers that give the same tensor, the outermost
    return sorted(found.values(), key=lambda name: uses[name].last)


def _class_counts(model: nn.Module) -> Counter[type]:
    """How often a model uses each class of modules; lists and dictionaries of modules only hold others."""
    holders = (nn.ModuleList, nn.ModuleDict)  # classes derived from these may compute
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]
    return Counter(kind for kind in kinds if kind not in holders)


def _outside_blocks(parent: str, module: nn.Module, classes: Counter[type]) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of all that is inside no block, inner modules first."""
    for child, part in module.named_children():
        name = f"{parent}.{child}" if parent else child
        if classes[type(part)] < 2:
            yield from _outside_blocks(name, part, classes)
        yield name, part


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
    stage = _stages_by_places(uses)
    layers: dict[int, list[str]] = {}  # stage → its layers
    for name, use in sorted(uses.items(), key=lambda item: item[1].last):
        number = stage(use.places)
        if number is not None and _is_on_trunk(name, uses, stage):
            layers.setdefault(number, []).append(name)
    order = sorted(layers)
    trunk = []
    for number, after in zip_longest(order, order[1:]):
        staying = layers[number]
        if after is not None:
            staying = [name for name in staying if not _leads(name, uses, stage, number, after)]
        trunk.append(staying or layers[number])
    return sorted(trunk, key=lambda names: uses[names[-1]].last)


def _stages_by_places(uses: Mapping[str, LayerUse]) -> Callable[[int | None], int | None]:
    """A number of places → the number of its stage, 0 for the one with the most; None → None."""
    sizes: list[int] = []  # the largest number of places of each stage
    for places in sorted({p for use in uses.values() for p in (use.places, use.entered) if p}, reverse=True):
        if not sizes or places * 1.5 < sizes[-1]:
            sizes.append(places)

    def stage(places: int | None) -> int | None:
        return max(i for i, size in enumerate(sizes) if places <= size) if places else None

    return stage


def _is_on_trunk(name: str, uses: Mapping[str, LayerUse], stage: Callable[[int | None], int | None]) -> bool:
    """Whether a layer gives maps or tokens, once, on the way from the inputs to the output and on no branch of it."""
    use = uses[name]
    if use.times > 1 or use.samples is not None or use.passed:
        return False
    if len(use.shape) != 3 and use.places < 2:
        return False
    number, came = stage(use.places), stage(use.entered)
    if came is not None and number is not None and came > number:
        return False  # it increases the number of places
    return not any(stage(block.entered) == stage(block.places) != number for block in _blocks_around(name, uses))


def _leads(
    name: str, uses: Mapping[str, LayerUse], stage: Callable[[int | None], int | None], number: int, after: int
) -> bool:
    """Whether a layer lies inside a block that begins in one stage and ends in the one after it."""
    blocks = _blocks_around(name, uses)
    return any(stage(block.entered) == number and stage(block.places) == after for block in blocks)


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
