"""Batches of any form: which part is the input of a model, and which the target.

Batches are tensors, (inputs, targets) or any other tuple, dictionaries (`{"pixel_values": …, "labels": …}`, tokenised
text) or dataclasses. Inputs are then a tensor, texts, or a dictionary of tensors that the model takes by name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.texts import Texts, are_texts
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.stages import output_parts

TARGETS = ("labels", "label", "targets", "target", "y")  # what a target is called, in this order
INPUTS = ("pixel_values", "inputs", "input", "image", "images", "x", "features")  # what a single input may be called


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of the parts of a batch, where they can't be guessed.

    >>> Columns(inputs=["pixels", "age"], target="diagnosis")
    Columns(inputs=['pixels', 'age'], target='diagnosis')

    Attributes:
        inputs: what the model is given: one name or several; null is everything that its `forward` takes, or what is
            usually called an input.
        target: the target; null is "labels", "label", "targets", "target" or "y".
    """

    inputs: str | list[str] | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        names = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if names is not None and (not names or not all(isinstance(name, str) for name in names)):
            raise ValueError(
                f"expected inputs of columns to be names, got {checks.shown(self.inputs)}: give one or several"
            )
        if not isinstance(self.target, str | None):
            raise ValueError(f"expected target of columns to be a name, got {checks.shown(self.target)}: give a name")


class Split(NamedTuple):
    """A batch taken apart: inputs for a model, and the target or None."""

    inputs: Any
    target: Any


def split(batch: Any, columns: Columns | None = None) -> Split:
    """The inputs and the target of a batch of any of the forms that loaders give.

    Args:
        batch: a tensor, a tuple or list whose first two entries are inputs and target, a mapping, or a dataclass.
        columns: names of the parts of a mapping or dataclass; None guesses.

    >>> split({"pixel_values": torch.zeros(2, 3), "labels": torch.ones(2)}).target
    tensor([1., 1.])
    """
    columns = columns or Columns()
    if are_texts(batch):
        return Split(Texts(batch), None)
    named = as_mapping(batch, columns)
    if named is None:
        return _split_pair(batch, columns) if isinstance(batch, list | tuple) else Split(batch, None)
    target = columns.target or next((name for name in TARGETS if name in named), None)
    if columns.target is not None and columns.target not in named:
        _missing("target", columns.target, named)
    rest = {name: value for name, value in named.items() if name != target}
    return Split(_chosen(rest, columns, named), None if target is None else named[target])


def _split_pair(batch: Any, columns: Columns) -> Split:
    """The inputs and the target of a tuple or list, whose first two entries they are."""
    if not batch:
        raise ValueError("expected batches (inputs, targets), got an empty one: return both from the dataset")
    first = as_mapping(batch[0], columns)
    inputs = _with_texts(batch[0]) if first is None else _chosen(first, columns, first)
    return Split(inputs, batch[1] if len(batch) > 1 else None)


def _with_texts(inputs: Any) -> Any:
    return Texts(inputs) if are_texts(inputs) else inputs


def as_mapping(batch: Any, columns: Columns) -> dict[str, Any] | None:
    """A batch with named parts as a dictionary; None for any other.

    A named tuple is one only if `columns` or the names of its fields name the target; else it is (inputs, target).
    """
    if isinstance(batch, BackboneOutput | Tensor):
        return None
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        named = columns != Columns() or set(batch._fields) & set(TARGETS)
        return dict(zip(batch._fields, batch, strict=True)) if named else None
    has_names = isinstance(batch, Mapping) or (dataclasses.is_dataclass(batch) and not isinstance(batch, type))
    return output_parts(batch) if has_names else None


def _chosen(rest: dict[str, Any], columns: Columns, named: Mapping[str, Any]) -> Any:
    if columns.inputs is not None:
        return _named_inputs(columns.inputs, named)
    tensors = {name: value for name, value in rest.items() if isinstance(value, Tensor)}
    texts = [value for value in rest.values() if are_texts(value)]
    if not tensors and len(texts) == 1:
        return Texts(texts[0])
    if not tensors:
        listed = ", ".join(f"{name} ({type(value).__name__})" for name, value in named.items())
        raise ValueError(
            f"expected a tensor among the parts of a batch, got {listed or 'an empty batch'}: return tensors from the "
            "loader, or name them, columns=Columns(inputs=…, target=…)"
        )
    return tensors


def _named_inputs(wanted: str | list[str], named: Mapping[str, Any]) -> Any:
    """The part of a batch of this name, or a dictionary of several."""
    names = [wanted] if isinstance(wanted, str) else wanted
    for name in names:
        if name not in named:
            _missing("inputs", name, named)
    return _with_texts(named[wanted]) if isinstance(wanted, str) else {name: named[name] for name in names}


def _missing(what: str, name: str, named: Mapping[str, Any]) -> None:
    raise ValueError(
        f"expected {what} {name!r} among the parts of a batch, got {', '.join(named)}: name one of these in columns"
    )


def size(inputs: Any) -> int:
    """The number of samples of inputs: of a tensor, of a dictionary of tensors, or of what a backbone gave."""
    if isinstance(inputs, Mapping):
        sizes = {name: value.shape[0] for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
        one: int | None = next(iter(sizes.values()), None)
        if one is None or any(count != one for count in sizes.values()):
            raise ValueError(
                f"expected inputs with one entry a sample, got {sizes}: name those of the model, columns=Columns(…)"
            )
        return one
    # Not len(): it would fix the size of the batch in an exported program.
    return inputs.shape[0] if isinstance(inputs, Tensor) else len(inputs)


class Sample(NamedTuple):
    """The shape of one sample of an input, and the name of its type, "float32"."""

    shape: tuple[int, ...]
    dtype: str


def signature(inputs: Any) -> dict[str, Sample]:
    """Name → shape and type of a sample; "" is the name of a single tensor."""
    named = inputs if isinstance(inputs, Mapping) else {"": inputs}
    return {
        name: Sample(tuple(value.shape[1:]), str(value.dtype).removeprefix("torch."))
        for name, value in named.items()
        if isinstance(value, Tensor)
    }


def example(samples: Mapping[str, Sample], batch: int) -> Any:
    """Inputs (batch, …) of a signature: random numbers, or zeros for types of whole numbers."""
    found = {}
    for name, (shape, kind) in samples.items():
        dtype = getattr(torch, kind)
        drawn = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(batch))
        found[name] = drawn.to(dtype) if dtype.is_floating_point else torch.zeros(batch, *shape, dtype=dtype)
    return found[""] if list(found) == [""] else found


def rows(inputs: Any, which: Any) -> Any:
    """Some samples of the inputs."""
    if isinstance(inputs, Mapping):
        return {name: value[which] for name, value in inputs.items()}
    return inputs[which]


def move(inputs: Any, device: torch.device) -> Any:
    """Gives the same inputs on another device."""
    if isinstance(inputs, Mapping):
        return {name: value.to(device) for name, value in inputs.items()}
    return inputs.to(device)


def cast_for(model: nn.Module, inputs: Any) -> Any:
    """Floating-point inputs in the type of a model's weights: 64 bits from NumPy, or 32 for a model of 16."""
    weights = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weights is None:
        return inputs
    if isinstance(inputs, Mapping):
        return {k: v.to(weights.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return inputs.to(weights.dtype) if inputs.is_floating_point() else inputs


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a tensor, or on those entries of a dictionary that its `forward` takes."""
    if not isinstance(inputs, Mapping):
        return model(inputs)
    takes = inspect.signature(model.forward).parameters
    given = {name: value for name, value in inputs.items() if name in takes}
    if given:
        return model(**given)
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return model(**inputs)
    usual = [name for name in INPUTS if name in inputs] or (list(inputs) if len(inputs) == 1 else [])
    if len(usual) == 1:
        return model(inputs[usual[0]])
    raise ValueError(
        f"expected inputs that {type(model).__name__} takes ({', '.join(takes)}), got {', '.join(inputs)}: name the "
        "input, columns=Columns(inputs=…)"
    )
