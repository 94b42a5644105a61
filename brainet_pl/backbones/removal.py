"""A classifier without its classification layer.

The order in which layers are registered says nothing about the order in which they are used, so the layer is found by
running the model once on real inputs. From the output, the graph that autograd records is walked backwards until it
reaches the outputs of dense layers: those are the layers that reach the output last, whatever comes after them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brainet_pl.backbones import batches
from brainet_pl.backbones.stages import output_parts

# What may happen to the output of the layer without harm to features that take its place: new shapes of a vector, and
# means of maps or tokens, or the choice of one token. After anything else (softmax, a scale, another head) the model is
# left at the layer.
_SHAPES = {"Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "Unsqueeze", "UnsafeView", "View"}
_MEANS = {"AdaptiveAvgPool2D", "AvgPool2D", "Index", "Mean", "Permute", "Select", "Transpose"}
_RECTIFIED = {"Relu", "Threshold"}


class HeadLayer(NamedTuple):
    """The layer to remove, and whether the model must not go on after it."""

    name: str
    leave: bool


class FeaturesReached(Exception):
    """Ends the pass of a model at the place of its classification layer, with the input of that layer."""

    def __init__(self, features: Any) -> None:
        super().__init__("the features of a model were reached; call it through a FeatureExtractor")
        self.features = features


class Leave(nn.Module):
    """Replaces a classification layer after which the model would change the features, and ends the pass there.

    An exported program can't raise exceptions: there the pass goes on with the layer, and `features` is its input.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # a list: it is no part of the model any more
        self.features: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the features, the first argument, to the `FeatureExtractor`."""
        if not torch.compiler.is_exporting():
            raise FeaturesReached([*args, *kwargs.values()][0])
        self.features = [*args, *kwargs.values()][0]
        return self._layer[0](*args, **kwargs)


def find_head(
    model: nn.Module, sample: Any, layer: str | None = None, call: Callable[[nn.Module, Any], Any] = batches.call
) -> HeadLayer:
    """The dense layer that a model's whole output comes from, by a pass over `sample` (B, …) in evaluation mode.

    Args:
        model: any module; its parameters, buffers and modes are as before afterwards.
        sample: inputs as the model takes them, a tensor or a dictionary of tensors; two are enough.
        layer: the path of the layer, where it is known; None finds the dense layer that is used last.
        call: runs the model on the sample.
    """
    if layer is None:
        trace = _trace_dense_layers(model, sample, call)
        name = _only_layer(trace.front, type(model).__name__)
    else:
        check_layer(model, layer)
        trace = _trace(model, sample, {layer: model.get_submodule(layer)}, call)
        name = layer
    uses = trace.calls[name]
    if len(uses) != 1:
        raise ValueError(
            f"expected the classification layer {name!r} of {type(model).__name__} to be used once in a pass, got "
            f"{len(uses)} uses: name another layer (head_layer=...), or wrap the model in one that returns features "
            "(head_layer='')"
        )
    return HeadLayer(name, leave=not _may_go_on(trace, name))


def _trace_dense_layers(model: nn.Module, sample: Any, call: Callable[[nn.Module, Any], Any]) -> _Trace:
    """A pass that watches dense layers; of a model whose output comes from elsewhere, convolutions of single pixels.

    These are dense layers too, where they alone decide: nothing but means comes after them.
    """
    dense: dict[str, nn.Module] = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    trace = _trace(model, sample, dense, call)
    if trace.front.layers and not trace.front.around:
        return trace
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and set(module.kernel_size) == {1}:
            dense[name] = module
    other = _trace(model, sample, dense, call)
    alone = not other.front.around and other.front.after <= _SHAPES | _MEANS | _RECTIFIED
    return other if alone else trace


def _only_layer(front: _Front, kind: str) -> str:
    """The one layer that the whole output of a model of this class comes from."""
    layers = sorted(front.layers)
    if len(layers) > 1:
        raise ValueError(
            f"expected one classification layer in {kind}, got {len(layers)} whose outputs reach the output: "
            f"{' and '.join(map(repr, layers))}: name the one whose inputs are the features "
            f"(head_layer={layers[0]!r}), or pass a model that ends in features (head_layer='')"
        )
    if not layers or front.around:
        got = f"an output that comes from {', '.join(front.around[:3])} as well" if front.around else "none"
        raise ValueError(
            f"expected a dense classification layer that the whole output of {kind} comes from, got {got}: name the "
            "layer to remove (head_layer=...), or pass a model that already ends in features (head_layer='')"
        )
    return layers[0]


def _may_go_on(trace: _Trace, name: str) -> bool:
    """Whether a model whose layer is removed does no harm to the features that take its place."""
    front, use = trace.front, trace.calls[name][0]
    if not isinstance(trace.output, Tensor) or front.layers != [name] or front.around:
        return False
    harmless = _SHAPES | _MEANS if use.axes > 2 else _SHAPES
    return use.plain and front.after <= harmless


class _Trace(NamedTuple):
    """One pass: the output or its logits, the uses of each candidate, and what lies between."""

    output: Any
    calls: dict[str, list[_Call]]
    front: _Front


def _trace(
    model: nn.Module, sample: Any, candidates: Mapping[str, nn.Module], run: Callable[[nn.Module, Any], Any]
) -> _Trace:
    with _eval_with_grad(model), _recorded(candidates) as calls:
        inputs = {k: _leaf(v) for k, v in sample.items()} if isinstance(sample, Mapping) else _leaf(sample)
        output = logits_of(run(model, inputs))
        front = _walk(output, {call.node: name for name in calls for call in calls[name]}, model, inputs)
    return _Trace(output, calls, front)


def logits_of(output: Any) -> Any:
    """The logits of an output with a part of that name; any other output as it is."""
    logits = None if isinstance(output, Tensor) else output_parts(output).get("logits")
    return logits if isinstance(logits, Tensor) else output


def _leaf(tensor: Tensor) -> Tensor:
    """A copy that is a leaf of the graph, if its numbers can have a gradient."""
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def check_layer(model: nn.Module, layer: str) -> None:
    """Raise an error for a path that is not a layer of the model."""
    known = dict(model.named_modules())
    if not layer or layer not in known:
        names = ", ".join(name for name, _ in model.named_children())
        raise ValueError(f"expected head_layer to name a layer of the model ({names}), got {layer!r}: give its path")


class _Call(NamedTuple):
    """One use of a layer."""

    node: Any  # the node of the graph of its output; None without a graph
    plain: bool  # whether it took one argument and gave one tensor
    axes: int  # number of axes of its output


@contextlib.contextmanager
def _recorded(candidates: Mapping[str, nn.Module]) -> Iterator[dict[str, list[_Call]]]:
    """Record every use of the candidates, each with a node of its own in the graph."""
    calls: dict[str, list[_Call]] = {name: [] for name in candidates}

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, Tensor):
                calls[name].append(_Call(None, False, 0))
                return output
            copied = output.clone()  # a node of its own, which no operation in place can take out of the graph
            calls[name].append(_Call(copied.grad_fn, len(args) == 1, output.dim()))
            return copied

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in candidates.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def eval_without_grad(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; random numbers and modes are restored."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _eval_with_grad(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients of all weights; random numbers, modes and flags are restored."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with torch.inference_mode(False), eval_without_grad(model), torch.enable_grad():
            for p, _ in flags:
                p.requires_grad_(p.is_floating_point())
            yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


class _Front(NamedTuple):
    """What lies between the output and the candidates nearest to it."""

    layers: list[str]  # the candidates that reach the output
    after: set[str]  # the operations between them and the output
    around: list[str]  # weights, or the inputs, that reach the output past all candidates, by name


def _walk(output: Any, nodes: Mapping[Any, str], model: nn.Module, inputs: Any) -> _Front:
    """Go back from an output through the graph of autograd to the candidates, whose nodes have names."""
    names = {id(p): name for name, p in model.named_parameters() if p.dim() > 1}  # vectors only shift or scale
    for tensor in _tensors(inputs):
        names[id(tensor)] = "its inputs"
    layers: dict[str, None] = {}
    after: set[str] = set()
    around: dict[str, None] = {}
    stack: list[Any] = [tensor.grad_fn for tensor in _tensors(output)]
    seen = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in nodes:
            layers[nodes[node]] = None
        elif not hasattr(node, "variable"):
            after.add(type(node).__name__.partition("Backward")[0])
            stack += [below for below, _ in node.next_functions]
        elif id(node.variable) in names:  # a parameter or the inputs
            around[names[id(node.variable)]] = None
    return _Front(list(layers), after, list(around))


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of an output, in tuples and dictionaries too."""
    if isinstance(output, Tensor):
        yield output
    for part in output_parts(output).values():
        yield from _tensors(part)
