"""A table of samples to look at: as CSV, as one page with their pictures, and as one picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from brainet_pl._utils.atomic import atomic_write
from brainet_pl._utils.csv import write_rows
from brainet_pl.evaluation.doubtful import thumbnail

SHEET, ACROSS = 24, 6  # pictures of the sheet, and of one of its rows
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "td,th{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #ddd}img{height:64px;image-rendering:pixelated}"
)
Rows = Sequence[Mapping[str, Any]]


def write_pages(folder: Path, name: str, sentence: str, rows: Rows, pictures: Any, top: int) -> Path:
    """Write `<name>.csv` of all rows, and of the `top` first a page and a sheet of pictures; gives the page.

    Args:
        folder: is made where there is none.
        name: of the files.
        sentence: what the page says first.
        rows: cells by the names of columns; "sample" is the number of a picture.
        pictures: (N, C, H, W) or a function number → (C, H, W); None has none.
        top: rows on the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / f"{name}.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [list(rows[0]), *(list(row.values()) for row in rows)])
    shown = rows[:top]
    images = [None if pictures is None else _picture(pictures, int(row["sample"])) for row in shown]
    if any(image is not None for image in images):
        _write_sheet(folder / f"{name}.png", shown[:SHEET], images[:SHEET])
    page = folder / f"{name}.html"
    with atomic_write(page) as part:
        part.write_text(_page(name, sentence, shown, images), encoding="utf-8")
    return page


def _picture(pictures: Any, number: int) -> Any:
    """The pixels of a sample, uint8; None where it is no picture."""
    import torch

    found = pictures(number) if isinstance(pictures, Callable) else pictures[number]  # type: ignore[arg-type]
    return thumbnail(torch.as_tensor(found))


def _page(name: str, sentence: str, rows: Rows, images: Sequence[Any]) -> str:
    with_pictures = any(image is not None for image in images)
    columns = [*(["picture"] if with_pictures else []), *rows[0]]
    lines = []
    for row, image in zip(rows, images, strict=True):
        cells = [escape(f"{value:.3g}" if isinstance(value, float) else str(value)) for value in row.values()]
        if with_pictures:
            cells = ["" if image is None else f'<img alt="sample {row["sample"]}" src="{_embedded(image)}">', *cells]
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>'
        f"<h1>{escape(name.capitalize())}</h1><p>{escape(sentence)}.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></html>\n"
    )


def _embedded(pixels: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _write_sheet(path: Path, rows: Rows, images: Sequence[Any]) -> None:
    """Pictures in a grid, each with what is said of it."""
    from matplotlib.figure import Figure

    lines = -(-len(images) // ACROSS)
    figure = Figure(figsize=(1.7 * ACROSS, 2.1 * lines), layout="constrained")
    axes = np.atleast_1d(figure.subplots(lines, ACROSS, squeeze=False)).ravel()
    for place in axes:
        place.axis("off")
    for place, row, image in zip(axes, rows, images, strict=False):
        if image is not None:
            place.imshow(image, cmap="gray")
        said = f": {row['label']}\nrather {row['suggested']}" if "suggested" in row else ""
        place.set_title(f"{row['sample']}{said}", fontsize=9)
    with atomic_write(path) as part:
        figure.savefig(part, format="png", dpi=110)
