"""Feature extractors: any module becomes (B, d) features; CIFAR networks that load public weights."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl.backbones import batches
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.removal import HeadLayer, Reached, check_layer, chosen, find_head, quiet, remove_head
from brainet_pl.backbones.taps import (
    Catcher,
    Tap,
    Taps,
    Use,
    View,
    channels_of,
    check_fits,
    check_size,
    parts,
    pooled,
    trace_layers,
    width_of,
)
from brainet_pl.distributed.collectives import all_gather

# -- CIFAR networks ---------------------------------------------------------------------------------------------------


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions with a parameter-free shortcut (option A of He et al. 2016)."""

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.pad = (planes - in_planes) // 2
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(out + F.pad(shortcut, (0, 0, 0, 0, self.pad, self.pad)))


class _PreActBlock(nn.Module):
    """Norm and ReLU before each convolution (He et al. 2016b): a bottleneck, or the two 3×3 of a wide ResNet."""

    def __init__(self, in_planes: int, planes: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = planes * 4 if bottleneck else planes
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        strides = (1, stride, 1) if bottleneck else (stride, 1)
        sizes = (in_planes, planes, planes, out) if bottleneck else (in_planes, planes, planes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in sizes[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, s, k // 2, bias=False)
            for a, b, k, s in zip(sizes, sizes[1:], kernels, strides, strict=False)
        )
        same = in_planes == out and stride == 1
        self.shortcut = None if same else nn.Conv2d(in_planes, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        for i, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            x = F.relu(norm(x))
            if i == 0 and self.shortcut is not None:
                shortcut = self.shortcut(x)
            x = conv(x)
        return x + shortcut


class CifarResNet(nn.Module):
    """ResNet-20/32/44/56 for 32×32 images (He et al. 2016, section 4.2): depth = 6n + 2; 64 features."""

    def __init__(self, depth: int = 20, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"expected a depth of 6n + 2 (20, 32, 44, 56), got {depth}")
        n = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for i, (a, b) in enumerate(((16, 16), (16, 32), (32, 64)), start=1):
            blocks = [_BasicBlock(a if j == 0 else b, b, 2 if j == 0 and i > 1 else 1) for j in range(n)]
            self.add_module(f"layer{i}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (B, 3, 32, 32) to logits (B, num_classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        for i in (1, 2, 3):
            x = self.get_submodule(f"layer{i}")(x)
        return torch.as_tensor(self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class CifarPreActNet(nn.Module):
    """PreResNet (bottlenecks, depth = 9n + 2) and wide ResNet (depth = 6n + 4, `widen` times the planes)."""

    def __init__(self, depth: int = 164, widen: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        bottleneck = widen == 1
        step, extra = (9, 2) if bottleneck else (6, 4)
        if (depth - extra) % step:
            raise ValueError(f"expected a depth of {step}n + {extra}, got {depth}")
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        blocks: list[nn.Module] = []
        planes = 16
        for stage in range(3):
            out = 16 * 2**stage * widen
            for j in range((depth - extra) // step):
                blocks.append(_PreActBlock(planes, out, 2 if stage and j == 0 else 1, bottleneck))
                planes = out * 4 if bottleneck else out
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(planes)
        self.fc = nn.Linear(planes, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (B, 3, 32, 32) to logits (B, num_classes)."""
        x = F.relu(self.norm(self.blocks(self.conv1(x))))
        return torch.as_tensor(self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class CifarVGG(nn.Module):
    """VGG-13 or VGG-16 with batch norm for 32×32 images: 512 features and one dense layer."""

    STAGES: Mapping[int, tuple[int, ...]] = {13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3)}

    def __init__(self, depth: int = 13, num_classes: int = 10) -> None:
        super().__init__()
        if depth not in self.STAGES:
            raise ValueError(f"expected a depth of 13 or 16, got {depth}")
        layers: list[nn.Module] = []
        planes = 3
        for convolutions, out in zip(self.STAGES[depth], (64, 128, 256, 512, 512), strict=True):
            for _ in range(convolutions):
                layers += [nn.Conv2d(planes, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
                planes = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(512, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (B, 3, 32, 32) to logits (B, num_classes)."""
        return torch.as_tensor(self.classifier(self.features(x).flatten(1)))


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


CIFAR: dict[str, Callable[..., nn.Module]] = {
    **{f"cifar_resnet{depth}": partial(CifarResNet, depth) for depth in (20, 32, 44, 56)},
    "cifar_vgg13": partial(CifarVGG, 13),
    "cifar_vgg16": partial(CifarVGG, 16),
    "cifar_preresnet164": partial(CifarPreActNet, 164),
    "cifar_wrn28_10": partial(CifarPreActNet, 28, widen=10),
}


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a state dict in one of the usual layouts: bare, under `state_dict`, with a prefix `module.` or `model.`."""
    stored = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(stored, Mapping) and isinstance(stored.get(key), Mapping):
            stored = stored[key]
    stored = {k.removeprefix("module.").removeprefix("model."): v for k, v in stored.items()}
    ours = model.state_dict()
    wrong = [k for k, v in stored.items() if k not in ours or ours[k].shape != v.shape]
    missing = [k for k in ours if k not in stored and not k.endswith("num_batches_tracked")]
    if wrong or missing:
        raise ValueError(
            f"expected the weights of {type(model).__name__}, got a file with {len(wrong)} unknown or misshapen and "
            f"{len(missing)} missing tensors (first: {(wrong + missing)[0]}): choose the backbone it was saved from"
        )
    model.load_state_dict(stored, strict=False)
    return model


# -- any module to features -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backbone:
    """What a user chooses about the feature extractor.

    Args:
        model: a module, a name (`cifar_resnet20`, `torchvision/resnet18`, `timm/…`), `package.module:Class` for a class
            of your own, or null for raw features.
        weights: a file of weights, or for torchvision and timm the name of published ones.
        head_layer: the classification layer to remove, by its path; null finds the dense layer that is used last, with
            the first inputs; "" removes nothing.
        freeze: keep the backbone as it is, batch-norm statistics included; false trains it with the head.
        lr: learning rate of a backbone that is not frozen; null is a tenth of the head's.
        options: arguments for the constructor of a named model.
        layers: the layers whose outputs are the features: paths, patterns such as "layer*", or "auto" for the ends of
            the model's stages; null is what the classification layer was given.
        pool: how maps and tokens become features: "mean", "mean_std", a grid such as "4x4", "cls", "tokens" or
            "flatten"; one for all layers, or a list with one for each. null averages, except that tokens of the last
            layer are flattened where no `attention_mask` tells them from padding.
    """

    model: Any = None  # nn.Module | str | None; jsonargparse would list every module that there is
    weights: str | None = None
    head_layer: str | None = None
    freeze: bool = True
    lr: float | None = None
    options: dict[str, Any] | None = None
    layers: str | list[str] | None = None
    pool: str | list[str] | None = None

    def __post_init__(self) -> None:
        checks.flag("freeze", self.freeze)
        if self.lr is not None:
            checks.above_zero("lr of the backbone", self.lr)
        if not isinstance(self.head_layer, str | None):
            raise ValueError(
                f"expected head_layer to be the path of a layer, '' or None, got {checks.shown(self.head_layer)}: see "
                "the names of model.named_modules()"
            )
        if not isinstance(self.model, nn.Module | str | None):
            raise ValueError(
                f"expected a backbone to be a module, a name or None, got {type(self.model).__name__}: see Backbone"
            )
        Taps.of(self.layers, self.pool)

    def build(self) -> FeatureExtractor:
        """The feature extractor of a copy; the model's own classification layer goes with the first inputs."""
        model = _copied(make_backbone(self.model, self.weights, self.options))  # never the user's own
        taps = Taps.of(self.layers, self.pool)
        pool = self.pool if taps is None and isinstance(self.pool, str) else None
        return FeatureExtractor(
            model, frozen=self.freeze or model is None, head_layer=self.head_layer, taps=taps, pool=pool
        )


def _copied(model: nn.Module | None) -> nn.Module | None:
    """A copy of a model, of one that was compiled without what compiling added; what it keeps of a graph is cut off."""
    model = getattr(model, "_orig_mod", model)
    kept: dict[int, Any] = {}
    for part in [] if model is None else model.modules():
        for value in vars(part).values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, Tensor) and not tensor.is_leaf:  # a weight norm, a cache; it can't be copied
                    kept[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, kept)


def make_backbone(
    backbone: nn.Module | str | None, weights: str | None = None, options: Mapping[str, Any] | None = None
) -> nn.Module | None:
    """A module as it is, or by name: a CIFAR network above, `torchvision/NAME`, `timm/NAME` or `package.module:Class`.

    `weights` is a file, or for torchvision and timm the name of published weights ("DEFAULT"), which needs a network.
    `options` are arguments for the constructor of a named model.
    """
    more = dict(options or {})
    if backbone is None or isinstance(backbone, nn.Module):
        model = backbone
    elif backbone in CIFAR:
        model = CIFAR[backbone](**more)
    elif backbone.startswith("torchvision/"):
        from torchvision.models import get_model

        named = weights if weights and not Path(weights).is_file() else None
        model, weights = (
            get_model(backbone.removeprefix("torchvision/"), weights=named, **more),
            None if named else weights,
        )
    elif backbone.startswith("timm/"):
        try:
            import timm
        except ImportError as error:
            raise ImportError(f"{backbone} needs the package timm: pip install 'brainet_pl[timm]'") from error
        named_weights = bool(weights) and not Path(str(weights)).is_file()
        model = timm.create_model(backbone.removeprefix("timm/"), pretrained=named_weights, **more)
        weights = None if named_weights else weights
    elif ":" in backbone:
        module, _, name = backbone.partition(":")
        model = getattr(importlib.import_module(module), name)(**more)
    else:
        raise ValueError(
            f"expected a backbone to be a module, torchvision/NAME, timm/NAME, package.module:Class or one of "
            f"{', '.join(CIFAR)}; got {backbone!r}"
        )
    if weights is not None and model is not None:
        load_weights(model, weights)
    return model


_PUBLISHED = re.compile(r"(torchvision|timm)/[\w.-]+")  # not timm's "hf-hub:…" and "local-dir:…", which read elsewhere
_READS = re.compile("pretrained|checkpoint|weights|path|file|url|dir")  # options of theirs that name a file or address


def check_stored_backbone(stored: Any, imported: bool = True) -> None:
    """Refuse a backbone out of a checkpoint that would import or call more than a constructor of a known network.

    Args:
        stored: a name, or the settings of `Backbone` as a dictionary.
        imported: whether `package.module:Class` is fine if that module is loaded already and has such a module class.
    """
    settings = stored if isinstance(stored, Mapping) else {"model": stored}
    name, options = settings.get("model"), settings.get("options") or {}
    if settings.get("weights") is not None or not isinstance(options, Mapping):
        raise ValueError(
            "expected a checkpoint to hold the weights of its backbone, got the file of other weights, or options that "
            "are none: give the backbone yourself, BRAINet.load_from_checkpoint(path, backbone=module)"
        )
    if name is None or (isinstance(name, str) and name in CIFAR):
        return
    if isinstance(name, str) and _PUBLISHED.fullmatch(name) and not any(_READS.search(str(key)) for key in options):
        return
    if imported and isinstance(name, str) and ":" in name:
        module, _, attribute = name.partition(":")
        found = getattr(sys.modules.get(module), attribute, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return
    raise ValueError(
        f"expected the backbone of a checkpoint to be a known network or a module class that is imported already, got "
        f"{checks.shown(name)}: nothing is imported because a file names it; import the class first, or give the "
        "backbone, BRAINet.load_from_checkpoint(path, backbone=module)"
    )


class FeatureExtractor(nn.Module):
    """Any module, or none, as inputs (B, …) → features (B, d) of its last layer, or of any layers that are tapped.

    The classification layer is found and removed with the first inputs that come, because only a pass tells which layer
    is used last; it is kept aside for the model's own logits. A frozen extractor stays in evaluation mode, so that its
    batch-norm statistics do not drift, and needs no gradient.

    Args:
        model: a module, which is changed where it has a layer to remove, or None for raw features.
        frozen: keep it as it is.
        head_layer: the classification layer to remove; None finds it, "" removes nothing.
        taps: the layers that features come from; None is what the classification layer was given.
        pool: how maps or tokens of the last layer become features; None averages maps and flattens the rest.

    Attributes:
        removed: the layer that was removed, once inputs have come.
        base_layer: the removed layer itself.
        views: what is read of tapped layers, by whoever reads it; the head's comes first.
        takes: name → shape and type of a sample, of the first inputs that came; "" is the name of an only tensor.
    """

    reads = True  # it gives all that was asked for in one pass, `more=True`

    def __init__(
        self,
        model: nn.Module | None,
        *,
        frozen: bool = True,
        head_layer: str | None = "",
        taps: Taps | None = None,
        pool: str | None = None,
    ) -> None:
        super().__init__()
        if model is not None and head_layer:
            check_layer(model, head_layer)
        if model is None and (taps is not None or pool is not None):
            raise ValueError(
                "expected a backbone to read layers of, got none: give the model, or leave layers and pool out"
            )
        self.model = nn.Identity() if model is None else model
        self.raw, self.frozen, self.head_layer, self.pool = model is None, frozen, head_layer, pool
        self.removed: HeadLayer | None = None
        self.base_layer: nn.Module | None = None
        self.taps = taps
        self.views = nn.ModuleList() if taps is None else nn.ModuleList([View(taps)])
        self._catcher = Catcher()
        self._ran = model is None
        self.takes: dict[str, batches.Sample] | None = None
        self._headless = False  # no layer to remove was found, and none is needed
        if frozen:
            self.requires_grad_(False)
            self.eval()

    def add_view(self, taps: Taps) -> None:
        """Read these layers too, for somebody else than the head."""
        if self.raw:
            raise ValueError(f"expected a backbone to read {taps} of, got none: give the model, or leave layers out")
        if taps not in [view.taps for view in self.seen]:
            self.views.append(View(taps))

    @property
    def seen(self) -> list[View]:
        """The views, the head's first where it reads tapped layers."""
        return list(self.views)  # type: ignore[arg-type]

    def widths(self, taps: Taps | None) -> tuple[int, ...]:
        """The number of features of each layer of a view, once inputs have come; nothing for the last layer."""
        return tuple(width_of(tap) for view in self.seen if view.taps == taps for tap in view.found)

    def scales(self, taps: Taps | None) -> bool:
        """Whether a view, or what the head reads for None, is of taps, which are brought to one scale."""
        return (self.taps if taps is None else taps) is not None

    @property
    def waits(self) -> bool:
        """Whether there is a layer to remove, which waits for inputs."""
        return not self.raw and self.head_layer != "" and self.removed is None and not self._headless

    @property
    def unscaled(self) -> bool:
        """Whether the scale of tapped features waits for training data."""
        return any(not view.settled for view in self.seen)

    @property
    def names(self) -> list[str] | None:
        """The names of the head's features, once inputs have come; None where features have none."""
        return None if self.taps is None or not self.seen[0].found else self.seen[0].names

    def remove(self, head: HeadLayer) -> None:
        """Remove a layer that is known, from a checkpoint or from a pass, and keep it aside."""
        self.base_layer = self.model.get_submodule(head.name).requires_grad_(False)
        remove_head(self.model, head)
        self.removed = head

    def meet(self, x: Any) -> None:
        """Find tapped layers and the layer to remove with some inputs, where that has not happened yet."""
        self._prepare(self._as_weights(self._checked(x)))

    def trained(self) -> list[nn.Parameter]:
        """The parameters that an optimizer may change: all but those of the layer that was removed."""
        aside = set() if self.base_layer is None else set(self.base_layer.parameters())
        return [p for p in self.parameters() if p not in aside]

    def set_scale(self, found: list[BackboneOutput], shared: bool = False) -> list[BackboneOutput]:
        """Learn the scale of tapped features from those of the training data; the same, on that scale.

        Args:
            found: what was read of the training data before the scale was known.
            shared: whether other processes have some too, all together or none; then this is a collective.
        """
        # The head's view goes by None, as whoever reads it asks for it.
        waiting: list[tuple[Taps | None, View]] = [
            (None if i == 0 and self.taps is not None else view.taps, view)
            for i, view in enumerate(self.seen)
            if not view.settled
        ]
        sums = [_sums([part.view(taps) for part in found]) for taps, _ in waiting]
        shares = [share for share in all_gather(sums) if share[0] is not None] if shared else [sums]
        for i, (_, view) in enumerate(waiting):
            count, first, second = (sum(column) for column in zip(*(share[i] for share in shares), strict=True))
            mean = first / count
            view.set_scale(mean, (second / count - mean.square()).clamp_min(0).sqrt())
        scales = dict(waiting)

        def scaled(part: BackboneOutput) -> BackboneOutput:
            features = scales[None].scaled(part.features) if None in scales else part.features
            more = {taps: scales[taps].scaled(x) if taps in scales else x for taps, x in part.more.items()}
            return BackboneOutput(features, more, part.base_logits)

        return [scaled(part) for part in found]

    def train(self, mode: bool = True) -> FeatureExtractor:
        """Switches the mode as any module does, except that a frozen backbone stays in evaluation."""
        super().train(mode and not self.frozen)
        if self.base_layer is not None:
            self.base_layer.eval()
        return self

    def forward(self, x: Any, more: bool = False) -> Any:
        """Inputs, a tensor (B, …) or a dictionary of tensors, → features (B, d).

        With `more`, all that was asked for: features, those of every other view, and the model's own logits.
        """
        x = self._as_weights(self._checked(x))
        self._prepare(x)
        if self.takes is None:
            self.takes = batches.signature(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            last, caught = self._run(x)
            views = [view(caught) for view in self.seen]
            if not more:
                return views[0] if self.taps is not None else self._last(last, batches.size(x), mask_of(x))
            others = {view.taps: found for view, found in zip(self.seen, views, strict=True)}
            if self.taps is not None:
                features = others.pop(self.taps)
            else:
                features = self._last(last, batches.size(x), mask_of(x))
            return BackboneOutput(features, others, self._base_logits(last))

    def _base_logits(self, last: Any) -> Tensor | None:
        """The logits that the model itself would give, (B, C); None where it has none, or none for a whole sample."""
        last = chosen(last)
        if self.base_layer is None or not isinstance(last, Tensor) or last.dim() != 2:
            return None
        logits: Tensor = self.base_layer(last[:, :, None, None] if isinstance(self.base_layer, nn.Conv2d) else last)
        return logits.flatten(1)

    def _last(self, features: Any, samples: int, mask: Tensor | None) -> Tensor:
        """The features of the last layer (B, d)."""
        if not isinstance(features, Tensor):
            features = _chosen_output(features)
        if features.dim() < 2 or features.shape[0] != samples:
            raise ValueError(
                f"expected the backbone to return features of shape (batch, d), got {tuple(features.shape)} for a "
                f"batch of {samples}: wrap it in a module that keeps the batch first"
            )
        shape = tuple(features.shape[1:])
        if self.pool is not None and not self.raw:
            use = Use(shape, channels_of(shape), 1, 0)
            check_fits("the last layer", use, self.pool)
            check_size([Tap("the last layer", self.pool, shape, use.channels)])
            return pooled(features, self.pool, use.channels, mask)
        if mask is not None and mask.shape == features.shape[:2] and features.dim() == 3:
            return pooled(features, "mean", -1, mask)  # texts differ in length
        if features.dim() == 4 and not self.raw:
            return torch.as_tensor(features.mean(dim=(2, 3)))
        if len(shape) > 1 and not self.raw:
            check_size([Tap("the last layer", "flatten", shape, channels_of(shape))])
        flat = features.flatten(1)
        return torch.as_tensor(flat if flat.is_floating_point() else flat.float())

    def _checked(self, x: Any) -> Any:
        for tensor in x.values() if isinstance(x, Mapping) else (x,):
            if not isinstance(tensor, Tensor) or not tensor.dim() or tensor.is_complex():
                got = (
                    f"{tuple(tensor.shape)} of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
                )
                raise ValueError(f"expected inputs of shape (batch, …) in real numbers, got {got}: give a batch")
        return x

    def _prepare(self, x: Any) -> None:
        """With the first inputs: find the tapped layers, and the layer to remove."""
        if any(not view.found for view in self.seen):
            few = _two(x)
            with self._explained(x), quiet(self.model):
                uses = trace_layers(self.model, lambda: self._call(few), 2)
            for view in self.seen:
                if not view.found:
                    view.attach(self.model, uses, self._catcher)
                    self._check_kept(view)
        if self.waits:
            with self._explained(x):
                try:
                    self.remove(find_head(self.model, _two(x), self.head_layer))
                except ValueError:
                    if self.taps is None or self.head_layer is not None:
                        raise
                    self._headless = True  # features come from other layers: nothing needs to go
            self._catcher.caught = {}
            for view in self.seen:
                self._check_kept(view)

    def _check_kept(self, view: View) -> None:
        gone = None if self.removed is None else self.removed.name
        for tap in view.found:
            if gone is not None and (tap.layer == gone or tap.layer.startswith(f"{gone}.")):
                raise ValueError(
                    f"expected layers that stay, got {tap.layer!r}, the classification layer, which is removed: leave "
                    "it out of layers, or keep it, head_layer=''"
                )

    def _call(self, x: Any) -> Any:
        try:
            output = batches.call(self.model, x)
        except Reached as reached:
            return reached.features
        if self.removed is not None and self.removed.leave:  # it went on, as it does while it is exported
            place: Any = self.model.get_submodule(self.removed.name)
            output, place.features = place.features, None
        return output

    def _run(self, x: Any) -> tuple[Any, dict[Tap, Tensor]]:
        """What the model ends with, and what its taps caught on the way."""
        self._catcher.caught, self._catcher.mask = {}, mask_of(x)
        with self._explained(x):
            last = self._call(x)
        caught, self._catcher.caught, self._catcher.mask = self._catcher.caught, {}, None
        self._ran = True
        return last, caught

    @contextlib.contextmanager
    def _explained(self, x: Any) -> Iterator[None]:
        """In the first pass over data, an error of the model's own says what it was given."""
        try:
            yield
        except (RuntimeError, TypeError, IndexError) as error:
            if self._ran:
                raise
            got = {k: tuple(v.shape) for k, v in x.items()} if isinstance(x, Mapping) else f"shape {tuple(x.shape)}"
            kind = "" if isinstance(x, Mapping) else f" and {x.dtype}"
            raise ValueError(
                f"expected inputs that {type(self.model).__name__} takes, got a batch of {got}{kind}, at which it "
                f"stops ({error}): give inputs as in training"
            ) from error

    def _as_weights(self, x: Any) -> Any:
        """Floating-point inputs in the type of the weights: 64 bits from NumPy, or 32 for a model of 16."""
        weights = next((p for p in self.parameters() if p.is_floating_point()), None)  # the removed layer's too
        if weights is None:
            return x
        if isinstance(x, Mapping):
            return {k: v.to(weights.dtype) if v.is_floating_point() else v for k, v in x.items()}
        return x.to(weights.dtype) if x.is_floating_point() else x


def _two(x: Any) -> Any:
    """Two samples of inputs, or one of them twice: one alone does not tell which axis is that of the batch."""
    which = [0, 1] if batches.size(x) > 1 else [0, 0]
    return batches.rows(x, which)


def _sums(tables: list[Tensor]) -> tuple[int, Tensor, Tensor] | None:
    """Batches (n_i, d) → how many samples, their sum and the sum of their squares, each (d,); None of nothing."""
    if not tables:
        return None
    double = [part.double() for part in tables]
    stacked = torch.stack([torch.stack([x.sum(dim=0), x.square().sum(dim=0)]) for x in double]).sum(dim=0)
    return sum(map(len, tables)), stacked[0], stacked[1]


def mask_of(inputs: Any) -> Tensor | None:
    """Says which tokens of tokenised texts count, (B, T); None where the inputs do not tell."""
    found = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return found if isinstance(found, Tensor) and found.dim() == 2 else None


_OUTPUTS = ("logits", "pooler_output", "features", "last_hidden_state", "out", "x")  # features in outputs by name


def _chosen_output(output: Any) -> Tensor:
    """The features in an output with several parts, where it is clear which they are."""
    tensors = {name: part for name, part in parts(output).items() if isinstance(part, Tensor)}
    named = next((name for name in _OUTPUTS if name in tensors), None)
    if named is not None or len(tensors) == 1:
        return tensors[named if named is not None else next(iter(tensors))]
    listed = ", ".join(f"{name} {tuple(part.shape)}" for name, part in tensors.items()) or type(output).__name__
    raise ValueError(
        f"expected the backbone to return one tensor, got {listed}: name the layer that gives the features, layers=…, "
        "or wrap it in a module that returns them"
    )
