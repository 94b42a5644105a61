"""Image files as a network reads them, without torch: to the bit what `brainet_pl.datamodules.ImageFolder` makes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
MOST_PIXELS = 50_000_000  # of an image that is decoded


@dataclass(frozen=True)
class ImageSteps:
    """How an image becomes what a network reads: upright, resized, its middle cut out, scaled.

    Attributes:
        resize: the shorter side, in pixels; or both, height and width.
        crop: the side of the square in the middle.
        mean: what is subtracted from each channel, whose values are between 0 and 1; nothing where it is empty.
        std: what each channel is divided by.
        interpolation: "nearest", "bilinear" or "bicubic".
        channels: 3 is colour, 1 is grey.
    """

    resize: int | Sequence[int]
    crop: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    interpolation: str = "bilinear"
    channels: int = 3

    def to_dict(self) -> dict[str, Any]:
        """Primitives that `ImageSteps(**…)` takes."""
        return asdict(self)

    def __call__(self, file: bytes) -> NDArray[np.float32]:
        """The bytes of an image file → (C, crop, crop)."""
        return self.finish(center(resized(decode(file, self.channels), self.resize, self.interpolation), self.crop))

    def finish(self, image: Bytes) -> NDArray[np.float32]:
        """Scales the bytes (C, H, W) of an image to the numbers that the graph takes."""
        x = image.astype(np.float32) * np.float32(1 / 255)
        if not self.mean:
            return x
        mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (self.mean, self.std))
        found: NDArray[np.float32] = (x - mean) / std
        return found


def decode(file: bytes, channels: int = 3) -> Bytes:
    """The bytes of an image file → bytes (C, H, W), upright whatever its orientation says."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(file)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(
                    f"expected an image of at most {MOST_PIXELS:,} pixels, got {image.width} × {image.height}: make it "
                    "smaller"
                )
            if image.mode.startswith(("I", "F")):  # Pillow would cut all above 255
                raise ValueError(f"expected an image of 8 bits a channel, got mode {image.mode}: convert it first")
            upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB" if channels == 3 else "L"))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"expected an image, got bytes that can't be read as one ({error}): send another") from error
    return upright.transpose(2, 0, 1) if channels == 3 else upright[None]


def resized(image: Bytes, side: int | Sequence[int], how: str) -> Bytes:
    """Bytes (C, H, W) with the shorter side, or both, as long as asked, in the fixed-point arithmetic of torch."""
    height, width = image.shape[1:]
    if not isinstance(side, int):
        size = side[0], side[1]
    elif height <= width:
        size = side, int(side * width / height)
    else:
        size = int(side * height / width), side
    if size == (height, width):
        return image
    if how == "nearest":
        rows, columns = (
            np.floor(np.arange(n) * (m / n)).astype(int) for n, m in zip(size, (height, width), strict=True)
        )
        return image[:, rows][:, :, columns]
    across = _scaled(image, *_weights(width, size[1], how))
    return _scaled(across.swapaxes(1, 2), *_weights(height, size[0], how)).swapaxes(1, 2)


def _scaled(image: Bytes, weights: NDArray[np.int64], bits: int) -> Bytes:
    """Bytes (…, n) and weights (m, n) with so many bits behind the point → (…, m)."""
    sums = image.astype(np.float64) @ weights.T.astype(np.float64)  # whole numbers below 2^53: exact, and fast
    found: Bytes = np.clip((sums.astype(np.int64) + (1 << (bits - 1))) >> bits, 0, 255).astype(np.uint8)
    return found


@lru_cache(maxsize=128)
def _weights(before: int, after: int, how: str) -> tuple[NDArray[np.int64], int]:
    """(after, before) what each pixel gives to each new one, in whole numbers of 16 bits; and bits behind the point."""
    kernel, reach = _KERNELS[how]
    scale = before / after
    wide = max(scale, 1.0)
    found = np.zeros((after, before))
    for i in range(after):
        middle = scale * (i + 0.5)
        low, high = max(int(middle - reach * wide + 0.5), 0), min(int(middle + reach * wide + 0.5), before)
        part = kernel((np.arange(low, high, dtype=np.float64) - middle + 0.5) / wide)
        found[i, low:high] = part / part.sum()
    bits, most = 0, float(np.abs(found).max())
    while bits < 22 and int(0.5 + most * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return (found * (1 << bits) + np.where(found < 0, -0.5, 0.5)).astype(np.int64), bits


def _triangle(x: Floats) -> Floats:
    return np.clip(1.0 - np.abs(x), 0.0, None)


def _cubic(x: Floats) -> Floats:
    a, x = -0.5, np.abs(x)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_KERNELS: dict[str, tuple[Callable[[Floats], Floats], int]] = {"bilinear": (_triangle, 1), "bicubic": (_cubic, 2)}


def center(image: Bytes, side: int) -> Bytes:
    """The square (C, side, side) in the middle of an image; what it lacks is black."""
    height, width = image.shape[1:]
    if height < side or width < side:
        tall, broad = max(side - height, 0), max(side - width, 0)
        image = np.pad(image, ((0, 0), (tall // 2, (tall + 1) // 2), (broad // 2, (broad + 1) // 2)))
        height, width = image.shape[1:]
    top, left = round((height - side) / 2.0), round((width - side) / 2.0)
    return image[:, top : top + side, left : left + side]
