"""Corruptions of images and of rows of numbers, in five severities: what the world does to inputs after training.

Images are corrupted as in CIFAR-10-C (Hendrycks & Dietterich 2019), with its constants for 32 × 32 pixels; lengths grow
with the image. Its frost is cut out of photographs; here ice is drawn. Every draw is a function of seed, corruption,
severity and the number of the sample: the same in every process, order and run.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from torch import Tensor

Pixels = NDArray[np.float64]  # (H, W, C), between 0 and 1
SEVERITIES = (1, 2, 3, 4, 5)


def _side(x: Pixels) -> float:
    """How much larger the image is than those that the constants are for."""
    return float(min(x.shape[:2])) / 32


# -- noise ------------------------------------------------------------------------------------------------------------


def gaussian_noise(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Adds Gaussian noise of the same deviation to every pixel."""
    return x + rng.normal(scale=(0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1], size=x.shape)


def shot_noise(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Counts photons, fewer of them at higher severities, by a Poisson draw for each pixel."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return rng.poisson(x * photons) / photons


def impulse_noise(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Values that are 0 or 1 instead."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    return np.where(rng.random(x.shape) < share, rng.integers(0, 2, x.shape).astype(float), x)


def speckle_noise(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Noise that grows with the brightness."""
    return x + x * rng.normal(scale=(0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1], size=x.shape)


# -- blur -------------------------------------------------------------------------------------------------------------


def _convolve(x: Pixels, kernel: Pixels) -> Pixels:
    return ndimage.convolve(x, (kernel / kernel.sum())[:, :, None], mode="reflect")  # type: ignore[no-any-return]


def gaussian_blur(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Blurs the image evenly, as a soft focus does."""
    sigma = _side(x) * (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    return ndimage.gaussian_filter(x, (sigma, sigma, 0))  # type: ignore[no-any-return]


def defocus_blur(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Every point becomes a disk with soft edges."""
    radius, soft = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity - 1]
    radius, soft = _side(x) * radius, max(_side(x), 1.0) * soft
    reach = math.ceil(radius + 3 * soft)
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = (rows**2 + columns**2 <= radius**2).astype(float)
    return _convolve(x, ndimage.gaussian_filter(disk, soft))


def glass_blur(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Pixels change places with their neighbours, behind a soft blur."""
    share, times = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    sigma, reach = _side(x) * share, max(1, round(_side(x)))
    blurred = ndimage.gaussian_filter(x, (sigma, sigma, 0))
    height, width = x.shape[:2]
    for _ in range(times):
        rows, columns = np.mgrid[:height, :width]
        rows = (rows + rng.integers(-reach, reach + 1, rows.shape)).clip(0, height - 1)
        columns = (columns + rng.integers(-reach, reach + 1, rows.shape)).clip(0, width - 1)
        blurred = blurred[rows, columns]
    return ndimage.gaussian_filter(blurred, (sigma, sigma, 0))  # type: ignore[no-any-return]


def _motion_kernel(radius: float, sigma: float, angle: float) -> Pixels:
    """A ray from the middle in the direction of the angle, fading as a Gaussian."""
    reach = math.ceil(radius)
    steps = np.linspace(0, radius, 4 * reach + 1)
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for step, weight in zip(steps, np.exp(-((steps / sigma) ** 2) / 2), strict=True):
        kernel[reach + round(step * math.sin(angle)), reach + round(step * math.cos(angle))] += weight
    return kernel


def motion_blur(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Smears the image along a line, as a camera that moved does."""
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    return _convolve(x, _motion_kernel(_side(x) * radius, _side(x) * sigma, rng.uniform(-np.pi / 4, np.pi / 4)))


def _zoomed(x: Pixels, factor: float) -> Pixels:
    """The middle, enlarged to the size of the whole."""
    centre = (np.array(x.shape[:2]) - 1) / 2
    scale = np.array([1 / factor, 1 / factor, 1.0])
    offset = np.append(centre * (1 - 1 / factor), 0.0)
    return ndimage.affine_transform(x, scale, offset, order=1, mode="nearest")  # type: ignore[no-any-return]


def zoom_blur(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """A camera that moved towards the object."""
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)[1:]
    return (x + np.sum([_zoomed(x, factor) for factor in factors], axis=0)) / (len(factors) + 1)  # type: ignore[no-any-return]


# -- weather ----------------------------------------------------------------------------------------------------------


def snow(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Flakes that fall, and a world that is whiter."""
    mean, spread, zoom, least, radius, sigma, share = (
        (0.1, 0.2, 1.0, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    flakes = _zoomed(rng.normal(mean, spread, (*x.shape[:2], 1)), zoom)
    flakes = np.where(flakes < least, 0.0, flakes).clip(0, 1)
    angle = rng.uniform(-3 * np.pi / 4, -np.pi / 4)
    flakes = _convolve(flakes, _motion_kernel(_side(x) * radius, _side(x) * sigma, angle))
    pale = np.maximum(x, _grey(x) * 1.5 + 0.5)
    return share * x + (1 - share) * pale + flakes + flakes[::-1, ::-1]


def _grey(x: Pixels) -> Pixels:
    weights = np.array([0.299, 0.587, 0.114]) if x.shape[2] == 3 else np.full(x.shape[2], 1 / x.shape[2])
    return (x @ weights)[:, :, None]  # type: ignore[no-any-return]


def _plasma(size: int, decay: float, rng: np.random.Generator) -> Pixels:
    """(size, size) clouds between 0 and 1 by the diamond-square algorithm on a torus; size is a power of 2."""
    heights = np.zeros((size, size))
    step, wobble = size, 100.0
    while step >= 2:
        half = step // 2

        def around(total: Pixels, wobble: float = wobble) -> Pixels:
            return total / 4 + wobble * rng.uniform(-1, 1, total.shape)

        corners = heights[::step, ::step]
        across = corners + np.roll(corners, -1, 0)
        heights[half::step, half::step] = around(across + np.roll(across, -1, 1))
        middle = heights[half::step, half::step]
        heights[::step, half::step] = around(middle + np.roll(middle, 1, 0) + corners + np.roll(corners, -1, 1))
        heights[half::step, ::step] = around(middle + np.roll(middle, 1, 1) + corners + np.roll(corners, -1, 0))
        step, wobble = half, wobble / decay
    heights -= heights.min()
    return heights / heights.max()  # type: ignore[no-any-return]


def frost(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Ice on the lens, in veins: where clouds are of middle height."""
    kept, ice = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    size = 2 ** max(1, math.ceil(math.log2(max(x.shape[:2]))))
    veins = 1 - np.abs(2 * _plasma(size, 2.0, rng)[: x.shape[0], : x.shape[1], None] - 1)
    colour = np.array([0.8, 0.9, 1.0]) if x.shape[2] == 3 else np.full(x.shape[2], 0.9)
    return kept * x + ice * veins**2 * colour  # type: ignore[no-any-return]


def fog(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Lays clouds of fractal noise over the object."""
    thickness, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    size = 2 ** max(1, math.ceil(math.log2(max(x.shape[:2]))))
    clouds = _plasma(size, decay, rng)[: x.shape[0], : x.shape[1], None]
    brightest = x.max()
    return (x + thickness * clouds) * brightest / (brightest + thickness)  # type: ignore[no-any-return]


def brightness(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Adds the same light to all pixels, to the value of colours."""
    more = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    if x.shape[2] != 3:
        return x + more
    hsv = rgb_to_hsv(x)
    hsv[:, :, 2] = (hsv[:, :, 2] + more).clip(0, 1)
    return hsv_to_rgb(hsv)


# -- cameras and files ------------------------------------------------------------------------------------------------


def contrast(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Everything nearer to the mean of its channel."""
    mean = x.mean(axis=(0, 1), keepdims=True)
    return (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] + mean  # type: ignore[no-any-return]


def saturate(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Paler, then stronger colours; images need three channels."""
    factor, more = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))[severity - 1]
    if x.shape[2] != 3:
        raise ValueError(f"expected images with three channels for saturate, got {x.shape[2]}: leave saturate out")
    hsv = rgb_to_hsv(x)
    hsv[:, :, 1] = (hsv[:, :, 1] * factor + more).clip(0, 1)
    return hsv_to_rgb(hsv)


def elastic_transform(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """A sheet of rubber: a random affine map and smooth displacements."""
    strength, smooth, affine = (
        (0.0, 0.0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    )[severity - 1]
    height, width = x.shape[:2]
    side = min(height, width)
    centre, third = np.array([height, width]) / 2, side / 3
    corners = np.array([centre + third, centre + np.array([third, -third]), centre - third])
    moved = corners + rng.uniform(-affine * side, affine * side, corners.shape)
    matrix = np.linalg.solve(np.c_[moved, np.ones(3)], corners)  # of an output place to an input place
    rows, columns = np.mgrid[:height, :width].astype(float)
    places = np.stack([rows, columns, np.ones_like(rows)], axis=-1) @ matrix  # (H, W, 2)
    if strength:
        draws = rng.uniform(-1, 1, (height, width, 2))
        places += strength * side * ndimage.gaussian_filter(draws, (smooth * side, smooth * side, 0), truncate=3)
    at = np.moveaxis(places, -1, 0)
    parts = [ndimage.map_coordinates(x[:, :, c], at, order=1, mode="reflect") for c in range(x.shape[2])]
    return np.stack(parts, axis=-1)


def _picture(x: Pixels, name: str) -> Any:
    if x.shape[2] not in (1, 3):
        raise ValueError(f"expected images with one or three channels for {name}, got {x.shape[2]}: leave {name} out")
    bytes_ = (x.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(bytes_[:, :, 0] if x.shape[2] == 1 else bytes_)


def _pixels(picture: Any) -> Pixels:
    x = np.asarray(picture, dtype=np.float64) / 255
    return x[:, :, None] if x.ndim == 2 else x


def pixelate(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Makes the image smaller and then larger again, so that pixels are few and large."""
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    height, width = x.shape[:2]
    small = _picture(x, "pixelate").resize(
        (max(1, int(width * share)), max(1, int(height * share))), Image.Resampling.BOX
    )
    return _pixels(small.resize((width, height), Image.Resampling.BOX))


def jpeg_compression(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """A file that was made small."""
    file = io.BytesIO()
    _picture(x, "jpeg_compression").save(file, "JPEG", quality=(80, 65, 58, 50, 40)[severity - 1])
    return _pixels(Image.open(file))


def rotation(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Turned by 15, 30, 45, 60 or 90 degrees, to either side."""
    angle = (15, 30, 45, 60, 90)[severity - 1] * (1 if rng.random() < 0.5 else -1)
    return ndimage.rotate(x, angle, reshape=False, order=1, mode="nearest")  # type: ignore[no-any-return]


# -- rows of numbers --------------------------------------------------------------------------------------------------


def noise(x: Pixels, severity: int, rng: np.random.Generator, others: Pixels) -> Pixels:
    """Row (d,) and all rows (N, d): noise of 0.1 to 2 standard deviations of each column."""
    return x + (0.1, 0.25, 0.5, 1.0, 2.0)[severity - 1] * others.std(axis=0) * rng.normal(size=x.shape)  # type: ignore[no-any-return]


def missing(x: Pixels, severity: int, rng: np.random.Generator, others: Pixels) -> Pixels:
    """Values that were lost: the column's mean stands in for 5 to 50 % of them."""
    share = (0.05, 0.1, 0.2, 0.35, 0.5)[severity - 1]
    return np.where(rng.random(x.shape) < share, others.mean(axis=0), x)


def swap(x: Pixels, severity: int, rng: np.random.Generator, others: Pixels) -> Pixels:
    """Values of other rows in the place of 5 to 50 % of them: each column stays, what belongs together does not."""
    share = (0.05, 0.1, 0.2, 0.35, 0.5)[severity - 1]
    other = others[rng.integers(len(others), size=x.shape), np.arange(x.shape[-1])]
    return np.where(rng.random(x.shape) < share, other, x)


IMAGES: dict[str, Callable[[Pixels, int, np.random.Generator], Pixels]] = {
    function.__name__: function
    for function in (
        gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur, snow, frost, fog,
        brightness, contrast, elastic_transform, pixelate, jpeg_compression, speckle_noise, gaussian_blur, saturate,
        rotation,
    )
}  # fmt: skip
ROWS: dict[str, Callable[[Pixels, int, np.random.Generator, Pixels], Pixels]] = {
    function.__name__: function for function in (noise, missing, swap)
}
FIFTEEN = tuple(IMAGES)[:15]  # the usual ones; the others are free to choose settings by


def generator(seed: int, name: str, severity: int, number: int) -> np.random.Generator:
    """The random numbers of one sample."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), severity, number])


def corrupt_image(x: Tensor, name: str, severity: int, number: int = 0, seed: int = 0) -> Tensor:
    """An image (C, H, W), uint8 or between 0 and 1 → the same, corrupted; a function of its arguments alone.

    >>> corrupt_image(torch.full((1, 4, 4), 200, dtype=torch.uint8), "contrast", 5)[0, 0]
    tensor([200, 200, 200, 200], dtype=torch.uint8)
    """
    whole = x.dtype == torch.uint8
    if x.dim() != 3 or not (whole or x.is_floating_point()):
        raise ValueError(
            f"expected an image (C, H, W) as uint8 or as numbers from 0 to 1, got {tuple(x.shape)} of {x.dtype}: give "
            "image_shape for flattened images"
        )
    low, high = float(x.min()), float(x.max())
    if not whole and not (low >= -1e-6 and high <= 1 + 1e-6):
        raise ValueError(
            f"expected an image of numbers from 0 to 1 to corrupt, got {low:.3g} to {high:.3g}: corrupt before images "
            "are normalised"
        )
    pixels = x.permute(1, 2, 0).double().numpy() / (255 if whole else 1)
    corrupted = IMAGES[name](pixels.clip(0, 1), severity, generator(seed, name, severity, number)).clip(0, 1)
    tensor = torch.from_numpy(np.ascontiguousarray(np.moveaxis(corrupted, -1, 0)))
    return (tensor * 255).round().to(torch.uint8) if whole else tensor.to(x.dtype)


def corrupt_row(x: Tensor, name: str, severity: int, others: Pixels, number: int = 0, seed: int = 0) -> Tensor:
    """Row (d,) and all rows (N, d) of its set, which tell means and deviations of columns → the row, corrupted."""
    corrupted = ROWS[name](x.double().numpy(), severity, generator(seed, name, severity, number), others)
    return torch.from_numpy(corrupted).to(x.dtype)
