"""Images that text files list, in the form of OpenOOD's benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader

from brainet_pl._utils import checks
from brainet_pl.datamodules.images import ImageFile, ImageFiles, PreparedImages, hold_out
from brainet_pl.datamodules.shifts import Shifts
from brainet_pl.metrics.sets import check_set_names
from brainet_pl.metrics.shift import shift_name


class ImageLists(PreparedImages):
    """Known, near, far and shifted images by text files with a line "path label" for each image.

    This is the form of OpenOOD's `benchmark_imglist`: with its lists and images in `root`, a test measures what its
    tables have. Labels of known images are the numbers of classes, from 0 on; those of unknown images are not read.

    Args:
        root: The folder that lists and folders of images are relative to.
        images: Folders in `root` that the lines are relative to; the first that has an image counts.
        train: The list of training images; None where a trained model is only tested.
        val: The list of validation images; None holds some of the training images out.
        test: The list of known test images.
        near: Lists of unknown images that resemble the training data, by the name of the set.
        far: Lists of other unknown images, by the name of the set.
        shifted: Lists of known images that look otherwise, with their labels, by the name of the set. Measures of
            unknown sets are then also given with these counted as known, `AUROC_full`.
        limit: Images of each list, spread evenly over it; None takes all.
        size: The side of the images, in pixels: the shorter side is brought to it, and the middle is cut out. None is
            what the weights of the backbone expect.
        mean: The mean of each channel of images that are scaled to [0, 1]. None is what the weights expect.
        std: The standard deviation of each channel, likewise.
        channels: 3 reads all images in colour, 1 in grey.
        augment: Whether training images are cropped and flipped at random.
        batch_size: The number of samples in a batch, at least 2 because batch norm can't train on one.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of training images that is held out for validation where there is no list for it.
        seed: The seed of the validation split.
        shifts: The shifts of the test images to evaluate too: corruptions × severities; None has none.
    """

    def __init__(
        self,
        root: str,
        test: str,
        train: str | None = None,
        val: str | None = None,
        near: Mapping[str, str] | None = None,
        far: Mapping[str, str] | None = None,
        shifted: Mapping[str, str] | None = None,
        images: Sequence[str] = ("images_classic", "images_largescale"),
        limit: int | None = None,
        size: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        channels: Literal[1, 3] = 3,
        augment: bool = False,
        batch_size: int = 64,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
        shifts: Shifts | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed, tuple(near or ()), shifts)
        check_set_names([*(near or ()), *(far or ())])
        self.set_preparation(size, mean, std, channels, augment)
        self.root, self.folders = Path(root), [Path(root) / name for name in images]
        self.lists = {"train": train, "val": val, "test": test}
        self.unknown_lists, self.shifted_lists = dict(near or {}) | dict(far or {}), dict(shifted or {})
        self.limit = checks.whole_or_none("limit", limit, 1, "null takes all images")
        self.shifted_sets: dict[str, ImageFiles] = {}

    def setup(self, stage: str) -> None:
        """Read the lists that a stage needs; no image is read."""
        parts = self._read_lists(("train", "val") if stage in ("fit", "validate") else ("test",))
        if "train" in parts and "val" not in parts:
            parts["train"], parts["val"] = hold_out(parts["train"], self.val_fraction, self.seed)
        if parts.keys() & {"train", "test"}:
            last = max(chain.from_iterable(parts.values()), key=lambda image: int(image.kind))
            self.class_names = tuple(map(str, range(int(last.kind) + 1)))
        self._take_parts(parts)
        if stage in ("fit", "test"):  # while fitting too: a missing file is an error now, not hours later
            self.ood_sets = {name: self._files(self._read(path, False)) for name, path in self.unknown_lists.items()}
            self.shifted_sets = {name: self._files(self._read(path)) for name, path in self.shifted_lists.items()}

    def _read_lists(self, names: Sequence[str]) -> dict[str, list[ImageFile]]:
        """The images of those lists that were given."""
        if "train" in names and self.lists["train"] is None:
            raise ValueError("expected a list of training images, got none: set train to its file in root")
        lists = {name: self.lists[name] for name in names}
        return {name: self._read(path) for name, path in lists.items() if path is not None}

    def test_dataloader(self) -> dict[str, DataLoader[Any]]:
        """Loaders by name: "test", each unknown set, and `shift/<name>/1` for each list of shifted images."""
        shifted = {shift_name(name, 1): self._loader(part) for name, part in self.shifted_sets.items()}
        return super().test_dataloader() | shifted

    def _labelled(self) -> list[Any]:
        return [*super()._labelled(), *self.shifted_sets.values()]

    def _read(self, name: str, labelled: bool = True) -> list[ImageFile]:
        """The images of a list, with their labels as classes; nothing where they are not labelled."""
        path = self.root / name
        if not path.is_file():
            raise FileNotFoundError(f"expected a list of images at {path}, found none: set root, or correct the name")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if self.limit is not None and len(lines) > self.limit:
            lines = [lines[i * len(lines) // self.limit] for i in range(self.limit)]
        found = [self._parse(line, path, labelled) for line in lines]
        if not found:
            raise ValueError(f"expected lines of images in {path}, got none: give a list with some")
        return found

    def _parse(self, line: str, source: Path, labelled: bool) -> ImageFile:
        name, _, label = line.strip().rpartition(" ")
        if not name or (labelled and not label.isdecimal()):
            wanted = "a path and the number of a class" if labelled else "a path and a label"
            raise ValueError(f"expected lines of {wanted} in {source}, got {line[:80]!r}: correct the line")
        places = [folder / name for folder in self.folders]
        place = next((path for path in places if path.is_file()), None)
        if place is None:
            raise FileNotFoundError(
                f"expected the image {name} of {source} in {' or '.join(map(str, self.folders))}, found none: set "
                "images to the folder that the lines are relative to"
            )
        return ImageFile(place, label if labelled else "")
