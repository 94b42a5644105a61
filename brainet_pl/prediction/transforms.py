"""What a data set tells of its samples: the names of its classes, and how its images are prepared."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset, default_collate

from brainet_pl._utils import checks
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.serving.images import ImageSteps

CLOSE = 2.5 / 255  # of a pixel: Pillow and torch round the pixels of a resized image differently
TRIED = 8  # images that steps and a transform are compared on
# Class of a transform → what an `ImageSteps` calls its attributes; `ImageClassification` is `weights.transforms()`.
ATTRIBUTES = {
    "ImageClassification": {
        "resize": "resize_size",
        "crop": "crop_size",
        "interpolation": "interpolation",
        "mean": "mean",
        "std": "std",
    },
    "Resize": {"resize": "size", "interpolation": "interpolation"},
    "CenterCrop": {"crop": "size"},
    "Normalize": {"mean": "mean", "std": "std"},
    "Grayscale": {"channels": "num_output_channels"},
}


def class_names_of(data: Any, num_classes: int) -> tuple[str, ...] | None:
    """The names of the classes of a data set or its loader, from `classes`; None where it does not name each class."""
    source = _dataset(data)
    names: Any = getattr(source, "classes", None)
    if getattr(source, "target_transform", None) is not None or not checks.are_texts(names):
        return None
    return tuple(names) if len(set(names)) == len(names) == num_classes else None


def image_steps_of(data: Any) -> ImageSteps | None:
    """How the images of a data set or its loader are prepared, from `transform`; None where that can't be read."""
    transform = getattr(_dataset(data), "transform", None)
    return None if transform is None else read_transform(transform)


def read_transform(transform: Any) -> ImageSteps | None:
    """A transform of torchvision as steps that need no torch; None where these would give other pixels.

    >>> from torchvision.transforms import CenterCrop, Compose, RandomCrop, Resize, ToTensor
    >>> read_transform(Compose([Resize(16), CenterCrop(12), ToTensor()]))
    ImageSteps(resize=16, crop=12, mean=(), std=(), interpolation='bilinear', channels=3)
    >>> read_transform(Compose([Resize(16), RandomCrop(12), ToTensor()]))  # draws
    """
    try:
        steps = _read(transform)
    except (AttributeError, TypeError, ValueError):  # settings that no steps have
        return None
    return steps if steps is not None and _gives_the_same(steps, transform) else None


def _dataset(data: Any) -> Any:
    """The data set behind a loader and parts of it; None where the loader may change its samples."""
    if isinstance(data, DataLoader):
        if data.collate_fn is not default_collate:
            return None
        data = data.dataset
    while isinstance(data, Subset):
        data = data.dataset
    return data


def _read(transform: Any) -> ImageSteps | None:
    """The steps that the attributes of a transform name."""
    settings: dict[str, Any] = {"channels": 3, "mean": (), "std": ()}
    for part in _parts(transform):
        names = ATTRIBUTES.get(type(part).__name__, {})
        settings |= {name: getattr(part, attribute) for name, attribute in names.items()}
    if "resize" not in settings:
        return None
    resize = _plain(settings["resize"])
    crop = _plain(settings.get("crop", resize))
    side = crop if isinstance(crop, int) else crop[0]
    if crop not in (side, (side, side)):
        return None
    mean, std = tuple(map(float, settings["mean"])), tuple(map(float, settings["std"]))
    how = getattr(settings["interpolation"], "value", settings["interpolation"])
    return ImageSteps(resize, side, mean, std, how, settings["channels"])


def _plain(size: Any) -> int | tuple[int, ...]:
    """A size of torchvision: of the shorter side, or of both."""
    sides = (size,) if isinstance(size, int) else tuple(size)
    return int(sides[0]) if len(sides) == 1 else tuple(map(int, sides))


def _parts(transform: Any) -> Iterator[Any]:
    inside = getattr(transform, "transforms", None)
    if isinstance(inside, list | tuple):
        for part in inside:
            yield from _parts(part)
    elif isinstance(transform, torch.nn.Sequential):
        for part in transform:
            yield from _parts(part)
    else:
        yield transform


def _gives_the_same(steps: ImageSteps, transform: Any) -> bool:
    """Whether steps and transform agree on images, broad and high, larger and smaller; none that draws does on all."""
    scale = min(steps.std, default=1.0)
    for seed in range(TRIED):
        height, width = [(2 * steps.crop + 7, 3 * steps.crop), (steps.crop, steps.crop // 2 + 5)][seed % 2]
        small = np.random.default_rng(seed).integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height))
        file = io.BytesIO()
        image.save(file, "PNG")
        try:
            with isolated_rng(seed):
                given = np.asarray(transform(image if steps.channels == 3 else image.convert("L")), dtype=np.float32)
        except Exception:  # the user's own code, on an image that is not the user's: it may expect another
            return False
        ours = steps(file.getvalue())
        if given.shape != ours.shape or float(np.abs(given - ours).max()) > CLOSE / scale:
            return False
    return True
