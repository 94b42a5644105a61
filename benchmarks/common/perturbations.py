"""Perturbations of validation images, by which settings are chosen; none of them is among the corruptions of a test."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from numpy.typing import NDArray
from scipy import ndimage

Images = NDArray[np.float64]  # (N, H, W, 3) between 0 and 1
Draw = np.random.Generator


def speckle(x: Images, severity: int, draw: Draw) -> Images:
    """Noise that grows with the brightness."""
    return x + x * draw.normal(scale=(0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1], size=x.shape)


def blur(x: Images, severity: int, draw: Draw) -> Images:
    """Soft focus."""
    sigma = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    return ndimage.gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest")  # type: ignore[no-any-return]


def saturate(x: Images, severity: int, draw: Draw) -> Images:
    """Paler, then stronger colours."""
    factor, more = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))[severity - 1]
    hsv = rgb_to_hsv(x)
    hsv[..., 1] = (hsv[..., 1] * factor + more).clip(0, 1)
    return hsv_to_rgb(hsv)


def drops(x: Images, severity: int, draw: Draw) -> Images:
    """Water on the lens."""
    least, share = ((1.6, 0.7), (1.4, 0.8), (1.2, 0.85), (1.0, 0.85), (0.8, 0.9))[severity - 1]
    heights = ndimage.gaussian_filter(draw.normal(size=x.shape[:3]), (0, 1.0, 1.0))
    mask = ((heights / heights.std() - least) * 2).clip(0, 1)[..., None] * share
    return x * (1 - mask) + np.array([0.7, 0.9, 0.9]) * mask  # type: ignore[no-any-return]


def rotate(x: Images, severity: int, draw: Draw) -> Images:
    """Turned."""
    angle = (6, 12, 18, 26, 36)[severity - 1]
    return ndimage.rotate(x, angle, axes=(2, 1), reshape=False, order=1, mode="reflect")  # type: ignore[no-any-return]


def occlude(x: Images, severity: int, draw: Draw) -> Images:
    """A grey square somewhere."""
    side, found = (5, 8, 11, 14, 17)[severity - 1], x.copy()
    for image in found:
        row, column = draw.integers(0, x.shape[1] - side + 1, 2)
        image[row : row + side, column : column + side] = 0.5
    return found


def posterize(x: Images, severity: int, draw: Draw) -> Images:
    """Few levels of each colour."""
    levels = (16, 8, 5, 4, 3)[severity - 1] - 1
    return np.round(x * levels) / levels


def hue(x: Images, severity: int, draw: Draw) -> Images:
    """Other colours."""
    hsv = rgb_to_hsv(x)
    hsv[..., 0] = (hsv[..., 0] + (0.05, 0.1, 0.2, 0.35, 0.5)[severity - 1]) % 1
    return hsv_to_rgb(hsv)


# -- images of nothing known ------------------------------------------------------------------------------------------


def jigsaw(x: Images, severity: int, draw: Draw) -> Images:
    """The sixteen quarters of quarters of an image change places."""
    n, side = len(x), x.shape[1] // 4
    tiles = x.reshape(n, 4, side, 4, side, 3).swapaxes(2, 3).reshape(n, 16, side, side, 3)
    tiles = np.stack([image[draw.permutation(16)] for image in tiles])
    return tiles.reshape(n, 4, 4, side, side, 3).swapaxes(2, 3).reshape(x.shape)


def blend(x: Images, severity: int, draw: Draw) -> Images:
    """The mean of an image and another one."""
    return 0.5 * x + 0.5 * x[draw.permutation(len(x))]


def scramble(x: Images, severity: int, draw: Draw) -> Images:
    """The frequencies of an image in other places: a texture."""
    spectrum = np.fft.rfft2(x, axes=(1, 2))
    shift = np.fft.rfft2(draw.normal(size=x.shape[:3]), axes=(1, 2))[..., None]
    shift[:, 0, 0] = 1.0
    return np.fft.irfft2(spectrum * shift / np.abs(shift), s=x.shape[1:3], axes=(1, 2))  # type: ignore[no-any-return]


PERTURBATIONS: dict[str, Callable[[Images, int, Draw], Images]] = {
    function.__name__: function for function in (speckle, blur, saturate, drops, rotate, occlude, posterize, hue)
}
STRANGE: dict[str, Callable[[Images, int, Draw], Images]] = {
    function.__name__: function for function in (jigsaw, blend, scramble)
}


def perturbed(images: NDArray[np.uint8], name: str, severity: int) -> NDArray[np.float32]:
    """(N, H, W, 3) bytes → perturbed ones between 0 and 1, the same in every run."""
    draw = np.random.default_rng([zlib.crc32(name.encode()), severity])
    return (PERTURBATIONS | STRANGE)[name](images / 255.0, severity, draw).clip(0, 1).astype(np.float32)
