"""Images → a row of features for each cell of a grid, from maps of several layers of a frozen network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl.backbones import batches
from brainet_pl.backbones.loading import copied
from brainet_pl.backbones.removal import eval_without_grad
from brainet_pl.backbones.stages import LayerUse, find_stages, first_tensor, trace_layers

STRIDE = 4  # pixels of an image along a side of a cell, where stages are read and nobody names a grid
CLOSE = 1e-3  # relative difference by which a network's output may differ from its resized classifier's


class MapLayer(NamedTuple):
    """A layer whose maps are read: its path, and the axis of the channels of its output (B, …)."""

    name: str
    channels: int


class FeatureMaps(nn.Module):
    """A frozen network as images (B, C, H, W) → features (B, d, h, w) of the cells of a grid.

    Of a network that gives maps of classes, as those for segmentation do, the features are what its last 1×1
    convolution reads. Of any other they are the maps of several layers, each brought to the grid by bilinear
    interpolation, side by side.

    Args:
        network: the network; it is copied, never changed.
        layers: paths of the layers to read; None finds the last 1×1 convolution, or else the ends of the stages.
        grid: rows and columns of cells; None is the resolution of the convolution's input, or an image's sides
            divided by `STRIDE`.

    Attributes:
        read: the layers that are read; nothing before the first images.
        classifier: path of the 1×1 convolution whose place is taken; "" where there is none.
        input_signature: shape and type of the first image, by the name "".
    """

    def __init__(
        self, network: nn.Module, layers: Sequence[str] | None = None, grid: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        own = copied(network)
        assert own is not None
        self.network = own.eval().requires_grad_(False)
        self.named, self.grid = None if layers is None else tuple(layers), grid
        self.read: tuple[MapLayer, ...] = ()
        self.classifier = ""
        self.input_signature: dict[str, batches.Sample] | None = None

    def train(self, mode: bool = True) -> FeatureMaps:
        """A frozen network stays in evaluation mode."""
        super().train(False)
        return self

    def prepare(self, images: Tensor) -> None:
        """Find the layers to read with the first images (B, C, H, W)."""
        if self.read:
            return
        if images.dim() != 4:
            raise ValueError(f"expected images (B, C, H, W), got the shape {tuple(images.shape)}: give a batch")
        if not images.is_floating_point():
            raise ValueError(
                f"expected images of real numbers, scaled as the network had them, got {images.dtype}: scale them, "
                "such as x.float() / 255, and normalise them if its training did"
            )
        two = images[:1].expand(2, -1, -1, -1).contiguous()
        with eval_without_grad(self.network):
            if self.named is None:
                self.classifier = self._find_classifier(two)
            names = self.named or ()
            if not self.classifier:
                uses = trace_layers(self.network, lambda: self.network(two), 2)
                names = names or tuple(find_stages(self.network, uses))
                self.read = tuple(MapLayer(name, _map_axis(name, uses)) for name in names)
            else:
                self.read = (MapLayer(self.classifier, 1),)
        self.input_signature = batches.signature(images)

    def _find_classifier(self, images: Tensor) -> str:
        """The 1×1 convolution whose resized output is the network's output; "" where the output is no map."""
        given: dict[str, Tensor] = {}
        hooks = []
        for name, part in self.network.named_modules():
            if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1):
                hooks.append(part.register_forward_hook(partial(_keep_output, given, name)))
        try:
            output = first_tensor(self.network(images))
        finally:
            for hook in hooks:
                hook.remove()
        if output is None or output.dim() != 4 or max(output.shape[2:]) == 1 < max(images.shape[2:]):
            return ""
        for name, maps in reversed(given.items()):
            if maps.shape[1] == output.shape[1] and _is_resized(maps, output):
                return name
        raise ValueError(
            f"expected {type(self.network).__name__} to end with a 1×1 convolution whose output is resized, got maps "
            "that none of them gives: name the layers to read, layers=[…]"
        )

    def row_network(self) -> nn.Sequential:
        """A network on rows of features (N, d): what stands for the 1×1 convolution where there is one."""
        parts: OrderedDict[str, nn.Module] = OrderedDict(features=nn.Identity())
        if self.classifier:
            convolution: Any = self.network.get_submodule(self.classifier)
            layer = nn.Linear(convolution.in_channels, convolution.out_channels, convolution.bias is not None)
            layer.weight.data.copy_(convolution.weight.data.flatten(1))
            if convolution.bias is not None:
                layer.bias.data.copy_(convolution.bias.data)
            parts["classifier"] = layer
        return nn.Sequential(parts)

    def forward(self, images: Tensor) -> Tensor:
        """Turns images (B, C, H, W) into features (B, d, h, w) of their cells."""
        self.prepare(images)
        caught: dict[str, Tensor] = {}
        size = self.grid
        if size is None and not self.classifier:
            size = (-(-images.shape[2] // STRIDE), -(-images.shape[3] // STRIDE))
        hooks = []
        for layer in self.read:
            part = self.network.get_submodule(layer.name)
            if self.classifier:
                hooks.append(part.register_forward_pre_hook(partial(_keep_input, caught, layer, size)))
            else:
                hooks.append(part.register_forward_hook(partial(_keep_maps, caught, layer, size)))
        try:
            with torch.no_grad():
                self.network(batches.cast_for(self.network, images))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([caught[layer.name] for layer in self.read], dim=1)


def _keep_output(kept: dict[str, Tensor], name: str, part: nn.Module, given: Any, output: Tensor) -> None:
    kept.pop(name, None)  # the last use counts
    kept[name] = output


def _keep_input(
    kept: dict[str, Tensor], layer: MapLayer, size: tuple[int, int] | None, part: nn.Module, given: Any
) -> None:
    kept[layer.name] = resized(given[0], size)


def _keep_maps(
    kept: dict[str, Tensor], layer: MapLayer, size: tuple[int, int] | None, part: nn.Module, given: Any, output: Any
) -> None:
    tensor = first_tensor(output)
    assert tensor is not None
    kept[layer.name] = resized(tensor.movedim(layer.channels, 1), size)


def resized(maps: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Maps (B, C, h, w) of another size, by bilinear interpolation; a copy where they have it already."""
    if size is None or tuple(maps.shape[2:]) == tuple(size):
        return maps.clone()  # a later operation in place must not reach it
    return F.interpolate(maps, size, mode="bilinear", align_corners=False)


def _map_axis(name: str, uses: Mapping[str, LayerUse]) -> int:
    """The axis of the channels of a layer that gives maps once."""
    use = uses.get(name)
    if use is None or len(use.shape) != 3 or use.times > 1 or use.samples is not None:
        got = "is not used" if use is None else f"gives {use.shape} for an image in {use.times} uses"
        raise ValueError(
            f"expected layers that give maps (channels, rows, columns) once in a pass, got {name!r}, which {got}: name "
            "others, layers=[…]"
        )
    return use.channels


def _is_resized(maps: Tensor, output: Tensor) -> bool:
    """Whether an output is these maps, brought to its size."""
    size = tuple(output.shape[2:])
    for corners in (False, True):
        found = maps
        if tuple(maps.shape[2:]) != size:
            found = F.interpolate(maps, size, mode="bilinear", align_corners=corners)
        if torch.allclose(found, output, rtol=CLOSE, atol=CLOSE * float(output.abs().max())):
            return True
    return False
