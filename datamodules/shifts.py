"""The test set after a shift: corrupted on the fly, or from files in the form of CIFAR-10-C."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from brainet_pl._utils import checks
from brainet_pl.datamodules.corruptions import FIFTEEN, IMAGES, ROWS, SEVERITIES, corrupt_image, corrupt_row
from brainet_pl.metrics.shift import shift_name


@dataclass
class Shifts:
    """What is done to the test set, to see how predictions hold: corruptions × severities.

    Args:
        corruptions: Names of corruptions, or "all": the fifteen usual ones of images, or all of rows. With `folder`,
            the names of its files without their endings; "all" takes every file there is.
        severities: Severities from 1, hardly seen, to 5.
        limit: Number of samples of each shift, spread evenly over the test set; null takes all.
        seed: Seed of the noise; the noise of a sample depends on nothing else but its number.
        image_shape: Shape of inputs that are flattened images: [channels, height, width] or [height, width]. null
            takes vectors as rows of numbers.
        folder: Folder with `labels.npy` (N,) and, for each corruption, `<name>.npy`, images (5·N, H, W, C) as uint8,
            the N of severity 1 first, as CIFAR-10-C has it; labels (5·N,) are fine too. null corrupts the test set.
    """

    corruptions: str | list[str] = "all"
    severities: tuple[int, ...] = SEVERITIES
    limit: int | None = None
    seed: int = 0
    image_shape: tuple[int, ...] | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        self.severities = tuple(checks.whole("severities of shifts", s, 1, 5) for s in self.severities)
        if not self.severities or len(set(self.severities)) != len(self.severities):
            raise ValueError(f"expected different severities from 1 to 5, got {self.severities}: list each once")
        self.limit = checks.whole_or_none("limit of shifts", self.limit, 1, "null takes all samples")
        self.seed = checks.whole("seed of shifts", self.seed, 0)
        if self.image_shape is not None and len(self.image_shape) not in (2, 3):
            raise ValueError(f"expected image_shape to be (C, H, W) or (H, W), got {tuple(self.image_shape)}")
        if self.folder is None and self.corruptions != "all":
            for name in self.names:
                checks.one_of("corruptions of shifts", name, [*IMAGES, *ROWS])

    @property
    def names(self) -> list[str]:
        """The corruptions by name; one of several may be written without a list."""
        return [self.corruptions] if isinstance(self.corruptions, str) else list(self.corruptions)

    def sets(self, samples: Dataset[Any]) -> dict[str, Dataset[Any]]:
        """Name → set of each corruption and severity of a test set: `shift/<corruption>/<severity>`."""
        plain, places = _plain(samples)
        if self.folder is not None:
            return self._stored(Path(self.folder), plain.finish)
        shape = None if self.image_shape is None else (1, *self.image_shape)[-3:]
        images = shape is not None or not hasattr(plain, "x") or plain.x.dim() == 4
        names = self._corruptions(plain, IMAGES if images else ROWS, FIFTEEN if images else ROWS)
        chosen = [places[i] for i in _spread(len(places), self.limit)]
        others = None if images else plain.x[places].double().numpy()
        sets: dict[str, Dataset[Any]] = {}
        for name, severity in product(names, self.severities):
            sets[shift_name(name, severity)] = Shifted(plain, chosen, name, severity, self.seed, shape, others)
        return sets

    def _corruptions(self, samples: Any, known: Collection[str], usual: Iterable[str]) -> list[str]:
        """The names of the corruptions, all of them `known` for such samples."""
        names = list(usual) if self.corruptions == "all" else self.names
        wrong = [name for name in names if name not in known]
        if wrong:
            kind = "images (N, C, H, W)" if known is IMAGES else f"rows of numbers {tuple(samples.x.shape)}"
            raise ValueError(
                f"expected corruptions of {kind} ({', '.join(known)}), got {', '.join(wrong)}: take one of these, or "
                "give image_shape for flattened images"
            )
        return names

    def _stored(self, folder: Path, finish: Any) -> dict[str, Dataset[Any]]:
        files = {path.stem: path for path in sorted(folder.glob("*.npy")) if path.stem != "labels"}
        names = list(files) if self.corruptions == "all" else self.names
        absent = [name for name in names if name not in files]
        if absent or not names or not (folder / "labels.npy").is_file():
            raise FileNotFoundError(
                f"expected labels.npy and files of corruptions such as fog.npy in {folder}, got "
                f"{', '.join(files) or 'none'}{' without ' + ', '.join(absent) if absent else ''}: check folder"
            )
        labels = np.load(folder / "labels.npy")
        sets: dict[str, Dataset[Any]] = {}
        for name in names:
            images = np.load(files[name], mmap_mode="r")  # of CIFAR-10-C 150 MB each
            n = _check_stored(images, labels, files[name])
            for severity in self.severities:
                places = (severity - 1) * n + _spread(n, self.limit)
                sets[shift_name(name, severity)] = StoredImages(images, labels, places, finish)
        return sets


def _check_stored(images: NDArray[Any], labels: NDArray[Any], file: Path) -> int:
    """The number of images of each severity."""
    n = len(images) // 5
    if len(images) != 5 * n or len(labels) not in (n, 5 * n) or images.ndim not in (3, 4):
        raise ValueError(
            f"expected images (5·N, H, W, C) of severities 1 to 5 in {file} and N or 5·N labels, got "
            f"{images.shape} and {labels.shape}: check the files"
        )
    return n


class ShiftedSets(Dataset[tuple[Tensor, Any]]):
    """Sets of shifts, by name as `Shifts.sets` gives them, one behind the other for one loader.

    Attributes:
        parts: The size of each set by its name, in their order.
    """

    def __init__(self, sets: Mapping[str, Dataset[Any]]) -> None:
        self._all: Dataset[Any] = ConcatDataset(sets.values())
        self.parts = {name: len(part) for name, part in sets.items()}  # type: ignore[arg-type]

    def __len__(self) -> int:
        return sum(self.parts.values())

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        sample: tuple[Tensor, Any] = self._all[i]
        return sample


@dataclass(eq=False)
class Shifted(Dataset[tuple[Tensor, Any]]):
    """Samples after a corruption, which is made when a sample is taken."""

    samples: Any  # a set with functions `raw`, from a number to input and target, and `finish` of a corrupted input
    places: Sequence[int]  # numbers of the samples to take
    name: str  # of the corruption
    severity: int  # 1 to 5
    seed: int  # of the noise
    shape: Any  # (C, H, W) of inputs that are flattened images, or None
    others: Any  # all rows (N, d), where inputs are rows of numbers, or None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        place = int(self.places[i])
        x, y = self.samples.raw(place)
        if self.others is None:
            image = x if self.shape is None else x.view(self.shape)
            x = corrupt_image(image, self.name, self.severity, place, self.seed).view(x.shape)
        else:
            x = corrupt_row(x, self.name, self.severity, self.others, place, self.seed)
        return self.samples.finish(x), y


class StoredImages(Dataset[tuple[Tensor, Any]]):
    """Images (M, H, W, C) of a file that stays on disk, and their labels; those at the places given."""

    def __init__(self, images: NDArray[Any], labels: NDArray[Any], places: NDArray[Any], finish: Any) -> None:
        self.images, self.labels, self.places, self.finish = images, labels, places, finish

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        place = int(self.places[i])
        pixels = np.array(self.images[place])
        x = torch.from_numpy(pixels[..., None] if pixels.ndim == 2 else pixels).permute(2, 0, 1)
        return self.finish(x), int(self.labels[place % len(self.labels)])


def make_shifts(given: Any) -> Shifts | None:
    """Shifts from what a user may give: the settings, their dictionary, or nothing."""
    return Shifts(**given) if isinstance(given, Mapping) else given


def _spread(n: int, limit: int | None) -> NDArray[np.int64]:
    """At most so many places of n, evenly: a test set may be in the order of its classes."""
    count = n if limit is None else min(limit, n)
    return np.arange(count, dtype=np.int64) * n // count if count else np.arange(0)


def _plain(samples: Any) -> tuple[Any, list[int]]:
    """The samples whose raw inputs can be had, and which of them belong to a set."""
    if isinstance(samples, Subset):
        plain, places = _plain(samples.dataset)
        return plain, [places[i] for i in samples.indices]
    if not all(hasattr(samples, name) for name in ("raw", "finish")):
        raise ValueError(
            "expected a test set of Samples or ImageFiles, whose raw inputs can be corrupted, got "
            f"{type(samples).__name__}: let test_dataloader give loaders named shift/<corruption>/<severity> yourself"
        )
    return samples, list(range(len(samples)))
