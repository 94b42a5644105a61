"""Images of a folder whose several labels stand in a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from brainet_pl._utils.missing import is_missing
from brainet_pl.datamodules.images import ImageFile, ImageFiles, PreparedImages, hold_out
from brainet_pl.tables.labels import label_matrix


class LabelledFiles(ImageFiles):
    """Images with a row of labels each, of 1, 0 and NaN.

    Args:
        images: The image files.
        root: The folder that `files` are relative to.
        channels: 3 for colour, 1 for grey.
        rows: The labels of each file.
        names: What they are called.
    """

    def __init__(
        self,
        images: Sequence[ImageFile],
        root: Path,
        channels: int,
        rows: Mapping[Path, Tensor],
        names: Sequence[str],
    ) -> None:
        super().__init__(images, root, channels)
        self.names, self.rows = tuple(names), [rows[path] for path in self.paths]
        self.labels: list[Any] = list(self.rows)

    def number(self, classes: Sequence[str]) -> None:
        """Put the labels in the order in which a model names them."""
        if set(classes) != set(self.names):
            raise ValueError(
                f"expected the labels {', '.join(classes)}, got {', '.join(self.names)}: give the labels of training"
            )
        order = [self.names.index(name) for name in classes]
        self.labels = [row[order] for row in self.rows]


class LabelledImages(PreparedImages):
    """Images with several labels each, from a folder and a CSV file: for `MultiLabel(num_labels)`.

    The first column of the file names an image, relative to `root`. Then comes either one column with the names of its
    labels, `;` between them, or a column for each label with 1, 0, or nothing where nobody knows.

    Args:
        root: The folder of the images.
        labels: The CSV file, relative to `root`.
        size: The side of the images, in pixels. None is what the weights of the backbone expect.
        mean: The mean of each channel of images that are scaled to [0, 1]. None is what the weights expect.
        std: The standard deviation of each channel, likewise.
        channels: 3 reads all images in colour, 1 in grey.
        augment: Whether training images are cropped and flipped at random.
        batch_size: The number of samples in a batch.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of the images that validates.
        test_fraction: The share of the images that tests, the same for every `seed`.
        seed: The seed of the validation split.
    """

    def __init__(
        self,
        root: str,
        labels: str = "labels.csv",
        size: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        channels: Literal[1, 3] = 3,
        augment: bool = False,
        batch_size: int = 64,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed, (), None)
        self.set_preparation(size, mean, std, channels, augment)
        self.root, self.table, self.test_fraction = Path(root), Path(root) / labels, test_fraction
        self._rows: dict[Path, Tensor] = {}
        self._names: tuple[str, ...] = ()

    def setup(self, stage: str) -> None:
        """Read the file of labels; no image is read."""
        self._rows, self._names = read_labels(self.table, self.root)
        self.class_names = self._names
        files = [ImageFile(path, "") for path in self._rows]
        rest, test = hold_out(files, self.test_fraction, 1)
        train, val = hold_out(rest, self.val_fraction, self.seed)
        self._take_parts({"train": train, "val": val, "test": test})
        self.predict_set = self._files(test)

    def _files(self, images: Sequence[ImageFile]) -> ImageFiles:
        return LabelledFiles(images, self.root, self.channels, self._rows, self._names)


def read_labels(table: Path, root: Path) -> tuple[dict[Path, Tensor], tuple[str, ...]]:
    """The labels of each image that a CSV file names, and what they are called."""
    if not table.is_file():
        raise FileNotFoundError(f"expected a CSV file of labels at {table}, found none: set root and labels")
    with table.open(encoding="utf-8-sig", newline="") as file:
        header, *rows = [row for row in csv.reader(file) if row] or [[]]
    if len(header) < 2 or not rows or any(len(row) != len(header) for row in rows):
        raise ValueError(
            f"expected a column of images and one or more of labels in {table}, as many cells in every row, got "
            f"{len(header)} columns and {len(rows)} rows: correct the file"
        )
    if len(header) == 2 and not all(_is_flag(row[1]) for row in rows):
        matrix, names = label_matrix([row[1] for row in rows])
    else:
        wrong = next((row for row in rows if not all(map(_is_flag, row[1:]))), None)
        if wrong is not None:
            raise ValueError(f"expected 1, 0 or nothing for every label in {table}, got {wrong[:4]}: correct the row")
        numbers = [[np.nan if is_missing(cell.strip()) else float(cell) for cell in row[1:]] for row in rows]
        matrix, names = label_matrix(np.array(numbers), header[1:])
    paths = [root / row[0] for row in rows]
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None or len(set(paths)) < len(paths):
        got = f"no file at {missing}" if missing is not None else "some twice"
        raise ValueError(f"expected each image of {table} once, in {root}, got {got}: correct the file")
    return dict(zip(paths, torch.from_numpy(matrix).float(), strict=True)), names


def _is_flag(cell: str) -> bool:
    return cell.strip() in ("0", "1") or is_missing(cell.strip())
