"""How published networks were given their images: size, crop, mean and deviation, from the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from brainet_pl._utils import checks

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")  # that work on tensors


@dataclass(frozen=True)
class Preset:
    """What a network expects of an image of values between 0 and 1.

    Attributes:
        resize: the shorter side of the image, in pixels.
        crop: the side of the square in its middle, in pixels.
        mean: of each channel.
        std: of each channel.
        interpolation: "nearest", "bilinear" or "bicubic".
    """

    resize: int
    crop: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"

    def to_dict(self) -> dict[str, Any]:
        """Gives the preset as primitives, for checkpoints."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @staticmethod
    def from_dict(stored: Any) -> Preset | None:
        """Out of a checkpoint, checked; None of None."""
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
        weights: the name of published weights of torchvision; for a file, or None, those are meant that torchvision
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
    except ValueError:  # no such model: whoever makes it says so
        return None
    named = None if weights is None or Path(weights).is_file() else weights.rpartition(".")[2]
    chosen = published["DEFAULT"] if named not in published.__members__ else published[named]
    prepare: Any = chosen.transforms()
    sizes: list[Any] = [getattr(prepare, name, None) for name in ("resize_size", "crop_size")]
    if not all(isinstance(size, list) and len(size) == 1 for size in sizes):  # of another task than classification
        return None
    return _preset(sizes[0][0], sizes[1][0], prepare.mean, prepare.std, prepare.interpolation.value)


def _of_timm(found: Any) -> Preset | None:
    if hasattr(found, "to_dict"):
        found = found.to_dict()
    if not isinstance(found, Mapping) or "input_size" not in found:
        return None
    side = int(found["input_size"][-1])
    resize = math.floor(side / (found.get("crop_pct") or 1.0))
    return _preset(resize, side, found["mean"], found["std"], found.get("interpolation", "bicubic"))


def _preset(resize: int, crop: int, mean: Sequence[float], std: Sequence[float], how: str) -> Preset:
    known = how if how in INTERPOLATIONS else "bicubic"
    return Preset(resize, crop, tuple(map(float, mean)), tuple(map(float, std)), known)
