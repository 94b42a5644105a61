"""Taps: features out of any layers of any model, in one pass of it.

A tap is a layer and a way to pool its output: maps and tokens become one vector a sample. One pass over two real inputs
shows how often each layer is used and what it gives; afterwards hooks read the outputs, and the model is not changed.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.backbones.stages import LayerUse, find_blocks, find_stages, first_tensor

AUTO = "auto"
STAGES = "stages"  # the ends of the stages that a model has; scores call it "auto" too
LAST = "last"  # what the classification layer is given, among other layers
MOST_FEATURES = 20_000  # of one view: a structure needs a table of pairs of them
_GRID = re.compile(r"([1-9]\d{0,2})x([1-9]\d{0,2})")


@dataclass(frozen=True)
class Taps:
    """The layers of a model that a user wants to read; names and patterns are resolved with the first inputs.

    Attributes:
        layers: paths of layers, patterns such as "layer*", "stages" or "auto" for the ends of the stages that the model
            has, "last" for what its classification layer is given; a layer that is so named comes first.
        pools: one for each entry of `layers`, or one for all: "mean" over space or tokens, "mean_std" mean and
            deviation, a grid of means such as "4x4", "cls" the first token, "tokens" the mean over tokens, "flatten".
    """

    layers: tuple[str, ...]
    pools: tuple[str, ...] = ("mean",)

    @staticmethod
    def of(layers: str | Sequence[str] | None, pool: str | Sequence[str] | None = None) -> Taps | None:
        """Taps as a user writes them, checked; None where no layers are named."""
        if layers is None:
            _check_single_pool(pool)
            return None
        chosen = _as_list(layers)
        pools = ["mean"] if pool is None else _as_list(pool)
        if not chosen or not all(isinstance(layer, str) and layer for layer in chosen):
            raise ValueError(
                f"expected layers to be paths of layers, patterns or 'auto', got {checks.shown(layers)}: see the names "
                "of model.named_modules()"
            )
        for one in pools:
            check_pool(one)
        if len(pools) not in (1, len(chosen)):
            raise ValueError(
                f"expected one pool for all layers, or one for each of {len(chosen)}, got {len(pools)}: give as many "
                "pools as layers"
            )
        return Taps(tuple(chosen), tuple(pools))

    def __str__(self) -> str:
        pools = self.pools * len(self.layers) if len(self.pools) == 1 else self.pools
        return ", ".join(f"{layer} ({pool})" for layer, pool in zip(self.layers, pools, strict=True))


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def check_pool(pool: Any) -> None:
    """Raise an error for an unknown way to pool."""
    known = ("mean", "mean_std", "cls", "tokens", "flatten")
    if not isinstance(pool, str) or not (pool in known or _GRID.fullmatch(pool)):
        raise ValueError(
            f"expected pool to be one of {', '.join(known)} or a grid such as 4x4, got {checks.shown(pool)}: choose one"
        )


def _check_single_pool(pool: Any) -> None:
    """Raise an error for more than one pool, or an unknown one, where no layers are named; None is right."""
    if pool is None:
        return
    if not isinstance(pool, str):
        raise ValueError(
            f"expected one pool where no layers are named, got {checks.shown(pool)}: give layers, or one pool"
        )
    check_pool(pool)


class Tap(NamedTuple):
    """One layer of a model that is read."""

    layer: str  # path of the layer
    pool: str  # how its output is pooled
    shape: tuple[int, ...]  # shape of its output for one sample
    channels: int  # axis of the channels, counted with the batch: 1 in (B, C, H, W), -1 in (B, T, D)

    def names(self) -> list[str]:
        """A name for each feature: layer[channel], layer[channel]@(row, column), layer[channel]:std."""
        places = self._places()
        width = self.shape[self.channels - 1 if self.channels > 0 else -1]
        cells = [f"{self.layer}[{c}]" for c in range(width)]
        if self.pool == "mean_std" and len(self.shape) > 1:
            return cells + [f"{cell}:std" for cell in cells]
        if places is None:
            return cells
        if self.channels > 0:
            return [f"{cell}@{place}" for cell, place in product(cells, places)]
        return [f"{cell}@{place}" for place, cell in product(places, cells)]

    def _places(self) -> list[str] | None:
        """Where in space the features of a channel are, in order; None where there is one of each channel."""
        space = self.shape[1:] if self.channels > 0 else self.shape[:-1]
        grid = _GRID.fullmatch(self.pool)
        if grid and len(self.shape) == 3:
            return [f"({i},{j})" for i in range(int(grid[1])) for j in range(int(grid[2]))]
        if self.pool != "flatten" or not space:
            return None
        grids = torch.cartesian_prod(*(torch.arange(n) for n in space)).reshape(-1, len(space))
        return [f"({','.join(map(str, place))})" for place in grids.tolist()]


def width_of(tap: Tap) -> int:
    """The number of features that a tap gives.

    >>> width_of(Tap("layer2", "4x4", (32, 16, 16), 1))
    512
    """
    if len(tap.shape) == 1:
        return tap.shape[0]
    width = tap.shape[tap.channels - 1 if tap.channels > 0 else -1]
    grid = _GRID.fullmatch(tap.pool)
    if grid:
        return width * int(grid[1]) * int(grid[2])
    if tap.pool == "flatten":
        return int(torch.Size(tap.shape).numel())
    return 2 * width if tap.pool == "mean_std" else width


def pooled(output: Tensor, pool: str, channels: int = 1, mask: Tensor | None = None) -> Tensor:
    """The output of a layer (B, …) → features (B, d); an output (B, d) is copied.

    Args:
        output: (B, D), maps (B, C, H, W) or tokens (B, T, D), also with the channels elsewhere.
        pool: as in `Taps`.
        channels: the axis of the channels.
        mask: (B, T) 1 for tokens and 0 for padding; it is used where the output is such tokens.

    >>> pooled(torch.arange(8.0).reshape(1, 2, 2, 2), "mean")
    tensor([[1.5000, 5.5000]])
    """
    x = output if output.is_floating_point() else output.float()
    if x.dim() <= 2 or pool == "flatten":
        return x.flatten(1).clone() if x.dim() > 2 else x.clone()  # a later operation in place must not reach it
    if mask is not None and x.dim() == 3 and channels < 0 and mask.shape == x.shape[:2]:
        return _pooled_where(x, pool, mask)
    return x[:, 0].clone() if pool == "cls" else _pooled_over(x.movedim(channels, 1), pool)


def _pooled_over(x: Tensor, pool: str) -> Tensor:
    """Pools maps or tokens with the channels first (B, C, …) over all places, or over the cells of a grid."""
    grid = _GRID.fullmatch(pool)
    if grid:
        return F.adaptive_avg_pool2d(x, (int(grid[1]), int(grid[2]))).flatten(1)
    flat = x.flatten(2)  # (B, C, places)
    if pool == "mean_std":
        return torch.cat([flat.mean(dim=2), flat.std(dim=2, correction=0)], dim=1)
    return flat.mean(dim=2)


def _pooled_where(x: Tensor, pool: str, mask: Tensor) -> Tensor:
    """Pools tokens (B, T, D) without the padding that a mask (B, T) shows; "cls" is the first token."""
    counts = mask.to(torch.bool)
    if pool == "cls":
        first = counts.to(torch.uint8).argmax(dim=1)
        return x.gather(1, first[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
    share = counts.to(x.dtype) / counts.sum(dim=1, keepdim=True).clamp_min(1)
    kept = x.masked_fill(~counts[..., None], 0.0)  # whatever padding became, NaN included
    mean = torch.einsum("bt,btd->bd", share, kept)
    if pool != "mean_std":
        return mean
    variance = torch.einsum("bt,btd->bd", share, (kept - mean[:, None]).square())
    # The gradient of a root has no value at 0, where all tokens are alike.
    return torch.cat([mean, variance.clamp_min(torch.finfo(x.dtype).tiny).sqrt()], dim=1)


# -- finding taps -----------------------------------------------------------------------------------------------------


def find_taps(model: nn.Module, uses: Mapping[str, LayerUse], taps: Taps) -> list[Tap]:
    """Resolves a user's taps in a model whose layers were used as in `uses`."""
    found: dict[tuple[str, str], Tap] = {}
    pools = taps.pools * len(taps.layers) if len(taps.pools) == 1 else taps.pools
    for wanted, pool in zip(taps.layers, pools, strict=True):
        for layer in _matching(model, uses, wanted):
            use = uses[layer]
            if use.samples is not None:
                raise ValueError(
                    f"expected a layer that gives (batch, …), got {layer!r}, which gave {use.samples} rows for another "
                    "number of samples, such as windows of maps: tap the block around it"
                )
            if use.times > 1:
                raise ValueError(
                    f"expected a layer that is used once in a pass, got {layer!r}, which is used {use.times} times: "
                    "tap the block around it, or give every use a layer of its own"
                )
            check_fits(layer, use, pool)
            found[layer, pool] = Tap(layer, pool, use.shape, use.channels)
    chosen = list(found.values())
    check_size(chosen)
    return chosen


def _matching(model: nn.Module, uses: Mapping[str, LayerUse], wanted: str) -> list[str]:
    names = list(dict(model.named_modules()))[1:]  # the first is the model itself
    if wanted == AUTO or (wanted == STAGES and STAGES not in names):
        return find_stages(model, uses)
    if wanted == LAST and LAST not in names:
        return [LAST]
    matched = [wanted] if wanted in names else [name for name in names if _matches(name, wanted)]
    if not matched:
        near = difflib.get_close_matches(wanted, names, n=5, cutoff=0.3) or names[:5]
        raise ValueError(
            f"expected layers of {type(model).__name__}, got {wanted!r}, which is none: the nearest are "
            f"{', '.join(near)}"
        )
    return _in_order_of_use(matched, uses)


def _in_order_of_use(names: Sequence[str], uses: Mapping[str, LayerUse]) -> list[str]:
    """Those of some layers that were used; an error where none was."""
    used = [name for name in names if name in uses]
    if not used:
        raise ValueError(
            f"expected a layer that gives a tensor (batch, …) in a pass, got {names[0]!r}, which was not used or gave "
            "something else: tap a layer around it or after it"
        )
    return sorted(used, key=lambda name: uses[name].last)


def _matches(name: str, pattern: str) -> bool:
    """Whether a path fits a pattern whose "*" stays within one part of the path."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def check_fits(layer: str, use: LayerUse, pool: str) -> None:
    """Raise an error for a pool that does not fit the output of a layer."""
    axes = len(use.shape)
    if axes > 3:
        raise ValueError(
            f"expected a vector, maps or tokens for each sample from {layer!r}, got the shape {use.shape}: tap another "
            "layer"
        )
    wrong = {"cls": axes == 3, "tokens": axes == 3}.get(pool, bool(_GRID.fullmatch(pool)) and axes == 2)
    if wrong:
        kind = "maps" if axes == 3 else "tokens"
        fits = "mean, mean_std, a grid such as 4x4, or flatten" if axes == 3 else "mean, mean_std, cls, tokens, flatten"
        raise ValueError(f"expected a pool for {kind} of shape {use.shape} from {layer!r}, got {pool!r}: use {fits}")


def check_size(taps: Sequence[Tap]) -> None:
    """Raise an error for more features than a structure can be learned of, and name pools that give fewer."""
    total = sum(width_of(tap) for tap in taps)
    if total <= MOST_FEATURES:
        return
    largest = max(taps, key=width_of)
    ways = ["mean", "mean_std", *(["2x2", "4x4"] if len(largest.shape) == 3 else ["cls"])]
    counts = [f"{way} {width_of(largest._replace(pool=way)):,}" for way in ways] if len(largest.shape) > 1 else []
    advice = f"pool it: {', '.join(counts)}" if counts else "tap another layer"
    raise ValueError(
        f"expected at most {MOST_FEATURES:,} features, got {total:,}, of which {width_of(largest):,} from "
        f"{largest.layer!r} by {largest.pool!r}: {advice}"
    )


# -- candidates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSearch:
    """What `layers="auto"` may choose.

    Attributes:
        pools: ways to pool that are tried; None is all that fit: the mean, the mean and deviation, 2×2 and 4×4 cells of
            maps, the first token.
        max_features: largest number of features of all chosen layers together.
    """

    pools: tuple[str, ...] | None = None
    max_features: int = 2048


MOST_LAYERS = 16  # of a model, that are tried: the ends of stages, and blocks at equal distances
MOST_TRIED = 60_000  # features of all candidates together: of 1,000 samples they take 240 MB
_POOLS = {3: ("mean", "mean_std", "2x2", "4x4"), 2: ("mean", "mean_std", "cls"), 1: ("mean",)}  # by number of axes


def candidates(model: nn.Module, uses: Mapping[str, LayerUse], search: LayerSearch) -> list[Tap]:
    """The taps that `layers="auto"` tries, in the order of use; [] for a model without stages or blocks."""
    blocks = find_blocks(model, uses)
    try:
        ends = {uses[end].tensor for end in find_stages(model, uses)}
    except ValueError:
        ends = set()
    between = [name for name in blocks if uses[name].tensor not in ends]
    room = max(MOST_LAYERS - (len(blocks) - len(between)), 0)
    if len(between) > room:
        between = [between[round((i + 0.5) * len(between) / room - 0.5)] for i in range(room)]
    taps: list[Tap] = []
    for name in blocks:
        if name in between or uses[name].tensor in ends:
            taps += _taps_of(name, uses[name], search)
    while sum(map(width_of, taps)) > MOST_TRIED:
        taps.remove(max(taps, key=width_of))
    return taps


def _taps_of(name: str, use: LayerUse, search: LayerSearch) -> list[Tap]:
    """A layer by each way to pool that fits its output and gives no more features than wanted."""
    space = use.shape[1:] if use.channels > 0 else use.shape[:-1]
    taps = []
    for pool in search.pools or _POOLS.get(len(use.shape), ()):
        grid = _GRID.fullmatch(pool)
        fits = min(space, default=1) >= max(map(int, grid.groups())) if grid else use.places > 1 or pool == "mean"
        with contextlib.suppress(ValueError):  # a pool of tokens for maps
            check_fits(name, use, pool)
            tap = Tap(name, pool, use.shape, use.channels)
            if fits and width_of(tap) <= search.max_features:
                taps.append(tap)
    return taps


# -- reading taps -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Catcher:
    """The outputs of taps in the current pass; hooks fill it, and those of a copied model fill the copy's."""

    caught: dict[Tap, Tensor] = field(default_factory=dict)  # the pooled output of each tap
    mask: Tensor | None = None  # attention mask (B, T) of the current batch, as in `pooled`


class Hook:
    """Pools a layer's output at once: a later layer may work in place."""

    def __init__(self, catcher: Catcher, tap: Tap) -> None:
        self.catcher, self.tap = catcher, tap

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the pooled output."""
        tensor = first_tensor(output)
        assert tensor is not None
        self.catcher.caught[self.tap] = pooled(tensor, self.tap.pool, self.tap.channels, self.catcher.mask)


class View(nn.Module):
    """The features of some taps, side by side and each brought to mean 0 and deviation 1 over the training data.

    Args:
        taps: the layers to read.

    Attributes:
        resolved: the taps of the model, known after the first inputs.
        centre, scale: mean and deviation (d,) of the training features; empty before `set_scale`.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, taps: Taps) -> None:
        super().__init__()
        self.taps = taps
        self.resolved: list[Tap] = []
        self.register_buffer("centre", torch.empty(0))
        self.register_buffer("scale", torch.empty(0))

    @property
    def has_scale(self) -> bool:
        """Whether the scale of the features is known."""
        return len(self.scale) > 0

    @property
    def names(self) -> list[str]:
        """The name of each feature."""
        return [name for tap in self.resolved for name in tap.names()]

    def attach(self, model: nn.Module, uses: Mapping[str, LayerUse], catcher: Catcher) -> None:
        """Resolve the taps, and register hooks that read them; the last layer is read without."""
        self.resolved = find_taps(model, uses, self.taps)
        layers = dict(model.named_modules())
        for tap in self.resolved:
            if tap.layer not in layers:
                continue
            hooks: Iterable[Any] = layers[tap.layer]._forward_hooks.values()
            if not any(isinstance(hook, Hook) and hook.tap == tap for hook in hooks):
                layers[tap.layer].register_forward_hook(Hook(catcher, tap))

    def forward(self, caught: Mapping[Tap, Tensor]) -> Tensor:
        """Turns the outputs of the taps into features (B, d)."""
        missing = [tap.layer for tap in self.resolved if tap not in caught]
        if missing:
            raise ValueError(
                f"expected every tapped layer to be used, got no output of {missing[0]!r}: it comes after the "
                "classification layer, or is not used for every input; tap another layer"
            )
        return self.scaled(torch.cat([caught[tap] for tap in self.resolved], dim=1))

    def scaled(self, features: Tensor) -> Tensor:
        """Standardises features (B, d) by the training data, if its mean and deviation are known."""
        if not self.has_scale:
            return features
        if features.shape[1] != len(self.scale):
            raise ValueError(
                f"expected {len(self.scale)} features from {self.taps} as in training, got {features.shape[1]}: the "
                "inputs have another shape; bring them to that of the training data, or pool by mean or a grid"
            )
        return (features - self.centre.to(features.dtype)) / self.scale.to(features.dtype)

    def set_scale(self, mean: Tensor, deviation: Tensor) -> None:
        """Take mean and deviation (d,) of the training features; a feature that does not vary keeps its unit."""
        still = ~(deviation > 1e-6 * mean.abs().clamp_min(1e-6))
        self.centre = mean.to(self.centre)
        self.scale = deviation.masked_fill(still, 1.0).to(self.scale)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:  # type: ignore[no-untyped-def]
        """Give the buffers the length of what is loaded."""
        for name in ("centre", "scale"):
            stored = state_dict.get(prefix + name)
            if stored is not None:
                self._buffers[name] = getattr(self, name).new_empty(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
