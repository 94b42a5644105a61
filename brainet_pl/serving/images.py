"""Image files as a network reads them, without torch: to the bit what `brainet_pl.datamodules.ImageFolder` makes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # other decoders of Pillow are never tried: some start programs
MOST_PIXELS = 50_000_000  # of an image, as it comes and after it was resized
MOST_WEBP = MOST_PIXELS // 2  # Pillow holds 16 bytes a pixel while it decodes WebP, 8 at most of all others: 400 MB
MOST_SIDE = 65_535  # pixels, of an image as it comes; JPEG knows no longer one
STRIP = 1_000_000  # pixels that are taken out of a decoded image at a time
BLOCK = 8  # new pixels that are computed from one stretch of old ones


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
        image = opened(file, self.channels)

        def read(box: Box) -> Bytes:
            part = np.asarray(image.crop((box.left, box.top, box.right, box.bottom)))
            return part.transpose(2, 0, 1) if self.channels == 3 else part[None]

        before = image.height, image.width
        size = new_size(before, self.resize)
        return self.finish(center(_resample(read, before, size, self.interpolation, self.crop), self.crop))

    def of_pixels(self, pixels: Bytes) -> NDArray[np.float32]:
        """Pixels (H, W, C) or, of grey images, (H, W), as decoders give them → (C, crop, crop)."""
        image = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels
        if image.dtype != np.uint8 or image.ndim != 3 or len(image) != self.channels:
            raise ValueError(
                f"expected pixels (H, W, {self.channels}) of uint8, got {pixels.shape} of {pixels.dtype}: decode the "
                f"image as {'RGB' if self.channels == 3 else 'L'}"
            )
        if 0 in image.shape:
            raise ValueError(f"expected an image with pixels, got {pixels.shape}: send another")
        return self.finish(center(resized(image, self.resize, self.interpolation), self.crop))

    def finish(self, image: Bytes) -> NDArray[np.float32]:
        """Scales the bytes (C, H, W) of an image to the numbers that the graph takes."""
        x = image.astype(np.float32) * np.float32(1 / 255)
        if not self.mean:
            return x
        mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (self.mean, self.std))
        found: NDArray[np.float32] = (x - mean) / std
        return found


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    bottom: int
    left: int
    right: int


class Line(NamedTuple):
    """How the pixels along one side of an image become those of a side of another length.

    Attributes:
        places: (m, k) the old pixels that each new one is made of.
        weights: (m, k) what each of them gives, in whole numbers.
        bits: of the weights, behind the point.
    """

    places: NDArray[np.int64]
    weights: NDArray[np.int64]
    bits: int


def opened(file: bytes, channels: int = 3) -> Image.Image:
    """The bytes of an image file → the image in colour or grey, upright whatever its orientation says."""
    from PIL import Image, ImageOps

    try:
        image: Image.Image = Image.open(io.BytesIO(file), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:  # decoders meet hostile bytes with errors of many kinds
        raise _unread(error) from error
    _check(image)
    try:
        ImageOps.exif_transpose(image, in_place=True)
        mode = "RGB" if channels == 3 else "L"
        return image if image.mode == mode else image.convert(mode)
    except MemoryError:
        raise
    except Exception as error:
        raise _unread(error) from error


def _unread(error: Exception) -> ValueError:
    from PIL import UnidentifiedImageError

    kinds = ", ".join(FORMATS)
    why = "of another format" if isinstance(error, UnidentifiedImageError) else str(error)
    return ValueError(f"expected an image ({kinds}), got bytes that can't be read as one ({why}): send another")


def _check(image: Image.Image) -> None:
    """Refuse an image that is too large, or of other pixels, before it is decoded."""
    most = MOST_WEBP if image.format == "WEBP" else MOST_PIXELS
    if image.width * image.height > most or max(image.size) > MOST_SIDE:
        raise ValueError(
            f"expected an image of at most {most:,} pixels, {MOST_SIDE:,} a side, got {image.width} × {image.height}: "
            "make it smaller"
        )
    if image.mode.startswith(("I", "F")):  # Pillow would cut all above 255
        raise ValueError(f"expected an image of 8 bits a channel, got mode {image.mode}: convert it first")


def resized(image: Bytes, side: int | Sequence[int], how: str) -> Bytes:
    """Bytes (C, H, W) with the shorter side, or both, as long as asked, in the fixed-point arithmetic of torch."""
    height, width = image.shape[1:]
    size = new_size((height, width), side)
    return _resample(lambda box: image[:, box.top : box.bottom, box.left : box.right], (height, width), size, how)


def new_size(before: tuple[int, int], side: int | Sequence[int]) -> tuple[int, int]:
    """Height and width that an image gets whose shorter side, or both, are to be so long."""
    height, width = before
    if not isinstance(side, int):
        size = side[0], side[1]
    elif height <= width:
        size = side, int(side * width / height)
    else:
        size = int(side * height / width), side
    if size[0] * size[1] > MOST_PIXELS:
        raise ValueError(
            f"expected an image of at most {MOST_PIXELS:,} pixels once its shorter side has {min(size)}, got one of "
            f"{width} × {height}, which is too thin: cut it"
        )
    return size


def _resample(
    read: Callable[[Box], Bytes], before: tuple[int, int], size: tuple[int, int], how: str, most: int | None = None
) -> Bytes:
    """The middle of a resized image, at most so many pixels high and wide; no more of it than that is computed.

    Args:
        read: gives a part (C, h, w) of the image.
        before: height and width of the image.
        size: height and width that it gets.
        how: the interpolation.
        most: pixels of each side that are wanted; None is all.
    """
    down, across = (_line(old, new, how, most) for old, new in zip(before, size, strict=True))
    top, bottom = int(down.places.min()), int(down.places.max()) + 1
    left, right = int(across.places.min()), int(across.places.max()) + 1
    across = across._replace(places=across.places - left)
    step = max(1, STRIP // (right - left))
    strips = [Box(row, min(row + step, bottom), left, right) for row in range(top, bottom, step)]
    narrow = np.concatenate([_along(read(strip), across) for strip in strips], axis=1)
    return _along(narrow.swapaxes(1, 2), down._replace(places=down.places - top)).swapaxes(1, 2)


def _along(image: Bytes, line: Line) -> Bytes:
    """Bytes (…, n) → (…, m): the last side becomes another."""
    found = np.empty((*image.shape[:-1], len(line.places)), dtype=np.uint8)
    half = (1 << line.bits) >> 1
    for begin in range(0, len(line.places), BLOCK):
        places, weights = line.places[begin : begin + BLOCK], line.weights[begin : begin + BLOCK]
        low = int(places.min())
        matrix = np.zeros((int(places.max()) + 1 - low, len(places)))
        np.add.at(matrix, (places - low, np.arange(len(places))[:, None]), weights)
        stretch = image[..., low : low + len(matrix)].astype(np.float64)
        sums = (stretch @ matrix).astype(np.int64)  # whole numbers below 2^53: exact, and fast
        found[..., begin : begin + BLOCK] = np.clip((sums + half) >> line.bits, 0, 255)
    return found


def _line(before: int, after: int, how: str, most: int | None = None) -> Line:
    """How one side becomes another, whose middle alone is wanted; weights are whole numbers of 16 bits, as in torch."""
    wanted = _middle(after, after if most is None else most)
    if how == "nearest":
        step = np.float32(before) / np.float32(after)  # in 32 bits, as torch: it decides which of two pixels is nearer
        rows = np.floor(np.arange(wanted.start, wanted.stop).astype(np.float32) * step).astype(np.int64)
        places = np.minimum(rows, before - 1)[:, None]
        return Line(places, np.ones_like(places), 0)
    kernel, reach = _KERNELS[how]
    scale = before / after
    wide = max(scale, 1.0)
    middles = scale * (np.arange(after) + 0.5)
    low = np.maximum((middles - reach * wide + 0.5).astype(np.int64), 0)
    high = np.minimum((middles + reach * wide + 0.5).astype(np.int64), before)
    places = low[:, None] + np.arange((high - low).max())
    parts = np.where(places < high[:, None], kernel((places - middles[:, None] + 0.5) / wide), 0.0)
    parts /= parts.sum(axis=1, keepdims=True)
    bits, largest = 0, float(np.abs(parts).max())  # of all pixels, wanted or not
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    places, parts = np.minimum(places[wanted], before - 1), parts[wanted]
    return Line(places, (parts * (1 << bits) + np.where(parts < 0, -0.5, 0.5)).astype(np.int64), bits)


def _triangle(x: Floats) -> Floats:
    return np.clip(1.0 - np.abs(x), 0.0, None)


def _cubic(x: Floats) -> Floats:
    a, x = -0.5, np.abs(x)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_KERNELS: dict[str, tuple[Callable[[Floats], Floats], int]] = {"bilinear": (_triangle, 1), "bicubic": (_cubic, 2)}


def _middle(length: int, side: int) -> slice:
    """The pixels of one side that the square in the middle keeps."""
    start = max(0, round((length - side) / 2.0))
    return slice(start, min(length, start + side))


def center(image: Bytes, side: int) -> Bytes:
    """The square (C, side, side) in the middle of an image; what it lacks is black."""
    height, width = image.shape[1:]
    image = image[:, _middle(height, side), _middle(width, side)]
    tall, broad = max(side - height, 0), max(side - width, 0)
    return np.pad(image, ((0, 0), (tall // 2, (tall + 1) // 2), (broad // 2, (broad + 1) // 2)))
