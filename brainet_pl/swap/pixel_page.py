"""The report of a model of pixels: image, answer, doubt and what is unlike the training data, side by side."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.atomic import atomic_write
from brainet_pl.features.extraction import inputs_and_target, unshuffled
from brainet_pl.metrics.pixels import PixelSums
from brainet_pl.swap.data import labelled_batches
from brainet_pl.swap.pixels import PixelModel

TITLES = ("image", "truth (void and unknown are white)", "answer", "entropy, nats", "unlike training data, 1 - p")
STYLE = (
    "body{font:15px sans-serif;margin:2em auto;max-width:75em}td,th{padding:.2em 1em;text-align:left}img{width:100%}"
)


class _Scene(NamedTuple):
    """One image with its mask (H, W), and what the model says of it."""

    image: Tensor
    mask: Tensor
    answer: Mapping[str, Tensor]


def report_pixels(
    model: PixelModel, path: str | Path, data: Any, unknown: Sequence[int], images: int
) -> dict[str, float]:
    """Write the page, or the picture alone where the path ends in .png; gives the measures by name."""
    checks.whole("images", images, 1, 100)
    sums = model.measure(data, unknown)
    measures = sums.compute()
    picture = _picture(model, _scenes(model, data, images), unknown)
    target = Path(path)
    with atomic_write(target) as temporary:
        if target.suffix == ".png":
            temporary.write_bytes(picture)
        else:
            temporary.write_text(_page(model, sums, measures, picture), encoding="utf-8")
    return measures


def _scenes(model: PixelModel, data: Any, count: int) -> list[_Scene]:
    """Images spread evenly over the data."""
    kept: list[tuple[Tensor, Tensor]] = []
    for batch in unshuffled(labelled_batches(data, "data")):
        images, masks = inputs_and_target(batch, model.columns)
        kept += zip(images, torch.as_tensor(masks).reshape(len(images), *images.shape[2:]), strict=True)
    chosen = np.unique(np.linspace(0, len(kept) - 1, count + 2)[1:-1].round().astype(int))
    found = []
    for number in chosen:
        image, mask = kept[number]
        answer = {name: values[0].cpu() for name, values in model.predict(image[None]).items()}
        found.append(_Scene(image.cpu(), mask.cpu(), answer))
    return found


def _picture(model: PixelModel, scenes: Sequence[_Scene], unknown: Sequence[int]) -> bytes:
    """The PNG of a row of panels for each scene."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    classes = model.rows.task.out_features
    colours = colormaps["tab20"].resampled(20)
    height, width = scenes[0].mask.shape
    figure = Figure(figsize=(3.0 * len(TITLES), 3.0 * len(scenes) * height / width + 0.9), layout="constrained")
    grid = figure.subplots(len(scenes), len(TITLES), squeeze=False)
    for row, scene in zip(grid, scenes, strict=True):
        void = (scene.mask == model.ignore_index) | torch.isin(
            scene.mask, torch.tensor([*unknown], dtype=scene.mask.dtype)
        )
        truth = np.ma.masked_array(scene.mask.numpy() % 20, void.numpy())
        shown = {"interpolation": "nearest", "vmin": 0, "vmax": 19, "cmap": colours}
        row[0].imshow(_visible(scene.image))
        row[1].imshow(truth, **shown)
        row[2].imshow(scene.answer["class"].numpy() % 20, **shown)
        row[3].imshow(scene.answer["entropy"].numpy(), cmap="magma", vmin=0, vmax=float(np.log(classes)))
        row[4].imshow(1 - scene.answer["known_p"].numpy(), cmap="magma", vmin=0, vmax=1)
        for axes in row:
            axes.set_axis_off()
    for axes, title in zip(grid[0], TITLES, strict=True):
        axes.set_title(title, fontsize=10)
    names = model.rows.class_names or tuple(map(str, range(classes)))
    patches = [
        figure.gca().scatter([], [], marker="s", color=colours(i % 20), label=n) for i, n in enumerate(names[:20])
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=11, fontsize=9, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return file.getvalue()


def _visible(image: Tensor) -> NDArray[np.float32]:
    """An image (C, H, W) of any scale as numbers from 0 to 1, (H, W, 3)."""
    low, high = image.amin(), image.amax()
    scaled = (image - low) / (high - low).clamp_min(1e-9)
    colour = scaled if len(scaled) == 3 else scaled.mean(dim=0, keepdim=True).expand(3, -1, -1)
    return colour.movedim(0, -1).float().numpy()


def _page(model: PixelModel, sums: PixelSums, measures: Mapping[str, float], picture: bytes) -> str:
    """One self-contained page: measures, classes, and the picture."""
    names = model.rows.class_names or tuple(map(str, range(model.rows.task.out_features)))
    overall = "".join(f"<tr><th>{html.escape(name)}<td>{value:,.4g}" for name, value in measures.items())
    shares = sums.confusion.sum(dim=1) / sums.confusion.sum()
    rows = zip(names, shares.tolist(), sums.iou.tolist(), strict=True)
    classes = "".join(f"<tr><th>{html.escape(n)}<td>{share:.1%}<td>{iou:.3f}" for n, share, iou in rows)
    image = base64.b64encode(picture).decode()
    return (
        f"<!doctype html><meta charset=utf-8><title>Pixels</title><style>{STYLE}</style><h1>Pixels</h1>"
        f"<table>{overall}</table><h2>Classes</h2><table><tr><th>class<th>share of pixels<th>IoU{classes}</table>"
        f'<h2>Scenes</h2><img alt="image, truth, answer, entropy, unlike training data" '
        f'src="data:image/png;base64,{image}">\n'
    )
