"""How a backbone is chosen, made and loaded, and how a published one expects its images."""

from __future__ import annotations

import copy
import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl._utils.checks import UsageError
from brainet_pl.backbones.cifar import CIFAR
from brainet_pl.backbones.extractor import FeatureExtractor
from brainet_pl.backbones.taps import AUTO, MOST_FEATURES, LayerSearch, Taps, check_pool


@dataclass(frozen=True)
class Backbone:
    """The settings of a feature extractor.

    Args:
        model: a module (`TextEncoder` for texts), a name (`cifar_resnet20`, `torchvision/resnet18`, `timm/…`),
            `package.module:Class` for a class or a function of your own, or null for raw features.
        weights: a file of weights, or for torchvision and timm the name of published ones.
        head_layer: the classification layer to remove, by its path; null finds the dense layer that is used last, with
            the first inputs; "" removes nothing.
        freeze: keep the backbone as it is, batch-norm statistics included; false trains it with the head.
        lr: learning rate of a backbone that is not frozen; null is a tenth of the head's.
        options: arguments for the constructor of a named model.
        layers: the layers whose outputs are the features: paths, patterns such as "layer*", "stages" for the ends of
            the model's stages, "last" for what the classification layer was given; null is that alone. "auto" chooses
            blocks and pools by the labels of a sample of the training data, once a fit begins. Without labels, without
            blocks, or of a backbone that is trained, it is null.
        pool: how maps and tokens become features: "mean", "mean_std", a grid such as "4x4", "cls", "tokens" or
            "flatten"; one for all layers, or a list with one for each. null averages, except that tokens of the last
            layer are flattened where no `attention_mask` tells them from padding. With "auto", the pools to try.
        max_features: the largest number of features that "auto" chooses.
    """

    model: Any = None  # nn.Module | str | None; jsonargparse would list every module that there is
    weights: str | None = None
    head_layer: str | None = None
    freeze: bool = True
    lr: float | None = None
    options: dict[str, Any] | None = None
    layers: str | list[str] | None = AUTO
    pool: str | list[str] | None = None
    max_features: int = 2048

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
        checks.whole("max_features", self.max_features, 1, MOST_FEATURES)
        self._taps()

    def _taps(self) -> Taps | None:
        """The layers that were named; None for the last layer, and for those that are to be chosen."""
        if self.layers != AUTO:
            return Taps.of(self.layers, self.pool)
        for pool in self._pools():
            check_pool(pool)
        return None

    def _pools(self) -> list[str]:
        return [] if self.pool is None else [self.pool] if isinstance(self.pool, str) else list(self.pool)

    @property
    def is_random(self) -> bool:
        """Whether a model by its name keeps the random weights that it was made with: frozen, and none were given."""
        named = isinstance(self.model, str) and ":" not in self.model and not (self.options or {}).get("pretrained")
        return named and self.weights is None and self.freeze

    def build(self) -> FeatureExtractor:
        """The feature extractor of a copy of the model; the classification layer is removed with the first inputs."""
        model = copied(make_backbone(self.model, self.weights, self.options))
        taps = self._taps()
        pool = self.pool if taps is None and isinstance(self.pool, str) else None
        search = LayerSearch(tuple(self._pools()) or None, self.max_features)
        return FeatureExtractor(
            model,
            frozen=self.freeze or model is None,
            head_layer=getattr(model, "head_layer", None) if self.head_layer is None else self.head_layer,
            taps=taps,
            pool=pool,
            search=search if self.layers == AUTO and self.freeze else None,
        )


def copied(model: nn.Module | None) -> nn.Module | None:
    """A copy of a model, not compiled, whose tensors are detached."""
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
    """A module as it is, or by name: one of `CIFAR`, `torchvision/NAME`, `timm/NAME` or `package.module:Class`.

    `weights` is a file, or for torchvision and timm the name of published weights ("DEFAULT"), which are downloaded.
    `options` are arguments for the constructor of a named model.
    """
    if backbone is None:
        return None
    if isinstance(backbone, nn.Module):
        model, published = backbone, None
    else:
        model, published = _make_by_name(backbone, weights, dict(options or {}))
    if weights is not None and published is None:
        load_weights(model, weights)
    return model


def _make_by_name(name: str, weights: str | None, options: dict[str, Any]) -> tuple[nn.Module, str | None]:
    """A model, and the name of the published weights that it was made with, or None."""
    if name in CIFAR:
        return CIFAR[name](**options), None
    library, _, model = name.partition("/")
    if library in ("torchvision", "timm"):
        published = weights if weights and not Path(weights).is_file() else None
        make = _make_torchvision if library == "torchvision" else _make_timm
        return make(model, published, options), published
    if ":" in name:
        return _maker(name)(**options), None
    raise ValueError(
        f"expected a backbone to be a module, torchvision/NAME, timm/NAME, package.module:Class or one of "
        f"{', '.join(CIFAR)}; got {name!r}"
    )


def _make_torchvision(name: str, published: str | None, options: dict[str, Any]) -> nn.Module:
    from torchvision.models import get_model

    try:
        model: nn.Module = get_model(name, weights=published, **options)
    except URLError as error:
        raise UsageError(
            f"expected to download the weights {published} of torchvision/{name}, got {error.reason}: where there is "
            "no connection, give a file of weights in their place"
        ) from error
    return model


def _make_timm(name: str, published: str | None, options: dict[str, Any]) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"timm/{name} needs the package timm: pip install 'brainet_pl[timm]'") from error
    model: nn.Module = timm.create_model(name, pretrained=published is not None, **options)
    return model


def _maker(path: str) -> Callable[..., nn.Module]:
    """The class or function that `package.module:Class` names."""
    module, _, name = path.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise UsageError(
            f"expected a backbone to be package.module:Class that can be imported, got {path!r}: there is no module "
            f"{error.name!r} in {Path.cwd()} or among the installed packages"
        ) from error
    found: Callable[..., nn.Module] | None = getattr(loaded, name, None)
    if found is None:
        raise UsageError(f"expected a class or a function of {module} as the backbone, got {name!r}, which it lacks")
    return found


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a state dict in one of the usual layouts: bare, under `state_dict`, with a prefix `module.` or `model.`."""
    stored = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(stored, Mapping) and isinstance(stored.get(key), Mapping):
            stored = stored[key]
    stored = {name.removeprefix("module.").removeprefix("model."): values for name, values in stored.items()}
    shapes = {name: values.shape for name, values in model.state_dict().items()}
    wrong = [name for name, values in stored.items() if shapes.get(name) != values.shape]
    missing = [name for name in shapes.keys() - stored if not name.endswith("num_batches_tracked")]
    if wrong or missing:
        raise ValueError(
            f"expected the weights of {type(model).__name__}, got a file with {len(wrong)} unknown or misshapen and "
            f"{len(missing)} missing tensors (first: {(wrong + missing)[0]}): choose the backbone it was saved from"
        )
    model.load_state_dict(stored, strict=False)
    return model


_PUBLISHED = re.compile(r"(torchvision|timm)/[\w.-]+")  # not timm's "hf-hub:…" and "local-dir:…", which read elsewhere
_READS = re.compile("pretrained|checkpoint|weights|path|file|url|dir")  # options of theirs that name a file or address


def check_stored_backbone(stored: Any, imported: bool = True) -> None:
    """Refuse a backbone of a checkpoint that would import or call more than the constructor of a known network.

    Args:
        stored: a name, or the settings of `Backbone` as a dictionary.
        imported: allow `package.module:Class` if that module is imported already and has such a class.
    """
    settings = stored if isinstance(stored, Mapping) else {"model": stored}
    name, options = settings.get("model"), settings.get("options") or {}
    if settings.get("weights") is not None or not isinstance(options, Mapping):
        raise ValueError(
            "expected a checkpoint to hold the weights of its backbone, got the file of other weights, or options that "
            "are none: give the backbone yourself, BRAINet.load_from_checkpoint(path, backbone=module)"
        )
    if name is None:
        return
    if isinstance(name, str) and (_is_published(name, options) or (imported and _is_imported_module(name))):
        return
    raise ValueError(
        f"expected the backbone of a checkpoint to be a known network or a module class that is imported already, got "
        f"{checks.shown(name)}: nothing is imported because a file names it; import the class first, or give the "
        "backbone, BRAINet.load_from_checkpoint(path, backbone=module)"
    )


def _is_published(name: str, options: Mapping[Any, Any]) -> bool:
    """Whether a name is that of a network of a library, whose options name no file or address."""
    if name in CIFAR:
        return True
    return _PUBLISHED.fullmatch(name) is not None and not any(_READS.search(str(key)) for key in options)


def _is_imported_module(name: str) -> bool:
    """Whether `package.module:Class` is a class of modules that is imported already."""
    module, _, attribute = name.partition(":")
    there = getattr(sys.modules.get(module), attribute, None) if attribute else None
    return isinstance(there, type) and issubclass(there, nn.Module)


# -- presets -----------------------------------------------------------------------------------------------------------

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")  # that work on tensors


@dataclass(frozen=True)
class Preset:
    """How a network expects its images, whose values are between 0 and 1."""

    resize: int  # shorter side of the image, in pixels
    crop: int  # side of the square in its middle, in pixels
    mean: tuple[float, ...]  # mean of each channel, which is subtracted
    std: tuple[float, ...]  # standard deviation of each channel, by which is divided
    interpolation: str = "bilinear"  # "nearest", "bilinear" or "bicubic"

    def to_dict(self) -> dict[str, Any]:
        """Gives the preset as primitives, for checkpoints."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @staticmethod
    def from_dict(stored: Any) -> Preset | None:
        """The preset of a checkpoint, checked; None for None."""
        if stored is None:
            return None
        if not isinstance(stored, Mapping) or set(stored) != {"resize", "crop", "mean", "std", "interpolation"}:
            raise ValueError(
                f"expected the preset of a checkpoint to have resize, crop, mean, std and interpolation, got "
                f"{checks.shown(stored)}: the file was changed; take another copy"
            )
        if not all(isinstance(v, float) for name in ("mean", "std") for v in stored[name]):
            raise ValueError(f"expected numbers as mean and std of the preset, got {checks.shown(stored)}")
        resize, crop = (checks.whole(f"{name} of the preset", stored[name], 1, 10**5) for name in ("resize", "crop"))
        checks.one_of("interpolation of the preset", stored["interpolation"], INTERPOLATIONS)
        return Preset(resize, crop, tuple(stored["mean"]), tuple(stored["std"]), stored["interpolation"])


def find_preset(model: Any, weights: str | None = None) -> Preset | None:
    """How the images of a published network were prepared, from its name or, for timm, the model; None if unknown.

    Args:
        model: `torchvision/NAME`, `timm/NAME`, or a model of timm.
        weights: the name of published weights of torchvision; a file or None stands for those that torchvision
            recommends.
    """
    if isinstance(model, str) and model.startswith("torchvision/"):
        return _of_torchvision(model.removeprefix("torchvision/"), weights)
    if isinstance(model, str) and model.startswith("timm/"):
        try:
            import timm
        except ImportError:
            return None
        return _of_timm(timm.get_pretrained_cfg(model.removeprefix("timm/")))
    return _of_timm(getattr(model, "pretrained_cfg", None)) if isinstance(model, nn.Module) else None


def _of_torchvision(name: str, weights: str | None) -> Preset | None:
    from torchvision.models import get_model_weights

    try:
        published: Any = get_model_weights(name)
    except ValueError:  # no such model: `make_backbone` says so
        return None
    named = None if weights is None or Path(weights).is_file() else weights.rpartition(".")[2]
    chosen = published["DEFAULT"] if named not in published.__members__ else published[named]
    prepare: Any = chosen.transforms()
    sizes: list[Any] = [getattr(prepare, name, None) for name in ("resize_size", "crop_size")]
    if not all(isinstance(size, list) and len(size) == 1 for size in sizes):  # not of classification
        return None
    return _preset(sizes[0][0], sizes[1][0], prepare.mean, prepare.std, prepare.interpolation.value)


def _of_timm(config: Any) -> Preset | None:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping) or "input_size" not in config:
        return None
    side = int(config["input_size"][-1])
    resize = math.floor(side / (config.get("crop_pct") or 1.0))
    return _preset(resize, side, config["mean"], config["std"], config.get("interpolation", "bicubic"))


def _preset(resize: int, crop: int, mean: Sequence[float], std: Sequence[float], how: str) -> Preset:
    known = how if how in INTERPOLATIONS else "bicubic"
    return Preset(resize, crop, tuple(map(float, mean)), tuple(map(float, std)), known)
