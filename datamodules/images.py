"""Images in folders: a directory for each class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2
from tqdm.auto import tqdm

from brainet_pl._utils import checks
from brainet_pl.backbones.loading import Preset
from brainet_pl.datamodules.base import SampleSet, SplitData, check_share, check_statistics
from brainet_pl.datamodules.shifts import Shifts
from brainet_pl.features import identity
from brainet_pl.metrics.sets import check_set_names

HELD_OUT = "held_out"  # the set of classes that are not trained
SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
IMAGES = frozenset([".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"])
_LITTER = {"thumbs.db", "desktop.ini"}


Transform = Callable[[Tensor], Tensor]


class ImageFile(NamedTuple):
    """An image file, and the directory that names its class; "" where it has none."""

    path: Path
    kind: str


@identity.plain
class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images that are read when they are taken.

    Args:
        images: The image files.
        root: The folder that `files` are relative to.
        channels: 3 for colour, 1 for grey; any other image is converted.

    Attributes:
        files: The path of each image, relative to `root`.
        labels: The number of each image's class.
        prepare: The transform of an image (C, H, W) of bytes: `resize`, then `normalise`.
        resize: The transform to bytes of the size that the model takes; a corruption may follow it.
        normalise: The transform from these bytes to what the model reads.
    """

    def __init__(self, images: Sequence[ImageFile], root: Path, channels: int = 3) -> None:
        self.paths, self.kinds = [one.path for one in images], [one.kind for one in images]
        self.files = [os.path.relpath(path, root) for path in self.paths]
        self.labels = [0] * len(images)
        self.channels = channels
        self.prepare: Transform | None = None
        self.resize: Transform | None = None
        self.normalise: Transform | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = read_image(self.paths[i], self.channels)
        return (image if self.prepare is None else self.prepare(image)), self.labels[i]

    def raw(self, i: int) -> tuple[Tensor, int]:
        """One image as the model sees its size, in bytes, and its label."""
        image = read_image(self.paths[i], self.channels)
        return (image if self.resize is None else self.resize(image)), self.labels[i]

    def finish(self, x: Tensor) -> Tensor:
        """Bytes of that size → what the model reads."""
        return x if self.normalise is None else self.normalise(x)

    def number(self, classes: Sequence[str]) -> None:
        """Give each image the number of its class."""
        numbers = {name: i for i, name in enumerate(classes)}
        check_classes(self.kinds, classes)
        self.labels = [numbers[kind] for kind in self.kinds]

    def identity(self) -> dict[str, Any]:
        """What determines the samples: the bytes of the files, not their names."""
        bar = tqdm(self.paths, "hashing images", disable=None, delay=5, leave=False)
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in bar]
        return {"files": digests, "labels": self.labels, "channels": self.channels, "prepare": self.prepare}


def read_image(path: Path, channels: int = 3) -> Tensor:
    """Reads an image file as bytes (C, H, W), upright whatever its orientation says."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would cut all above 255
                raise ValueError(
                    f"expected an image of 8 bits a channel in {path}, got mode {image.mode}: convert it first"
                )
            upright = ImageOps.exif_transpose(image).convert("RGB" if channels == 3 else "L")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"expected an image in {path}, got a file that can't be read as one ({error}): repair it, or delete it"
        ) from error
    return torch.as_tensor(v2.functional.pil_to_tensor(upright))


def list_images(folder: Path) -> list[Path]:
    """All images below a folder, in the order of their names; anything else there is an error.

    Hidden files and the litter of file managers are passed over.
    """
    images = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_dir() or hidden or path.name.lower() in _LITTER:
            continue
        if path.suffix.lower() not in IMAGES:
            raise ValueError(
                f"expected images ({', '.join(sorted(IMAGES))}) in {folder}, got {path.relative_to(folder)}: move it "
                "away"
            )
        images.append(path)
    return images


def check_classes(found: Iterable[str], classes: Sequence[str]) -> None:
    """Refuse images of classes that the model does not learn."""
    strange = sorted(set(found) - set(classes))
    if strange:
        raise ValueError(
            f"expected directories of the classes {', '.join(classes)}, got {', '.join(strange)} too: name them in "
            "held_out, or move them away"
        )


def list_classes(folder: Path) -> dict[str, list[Path]]:
    """Directory → its images, for all directories in a folder; none may be empty."""
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."]
    classes = {path.name: list_images(path) for path in folders}
    empty = [name for name, images in classes.items() if not images]
    if not classes or empty:
        got = f"none in {', '.join(empty)}" if empty else "no directory"
        raise ValueError(f"expected directories with images, one for each class, in {folder}, got {got}")
    return classes


class PreparedImages(SplitData):
    """What data sets of image files share: how images become what the backbone of the model reads.

    Attributes:
        root, size, mean, std, channels, augment: as in `ImageFolder`.
    """

    root: Path
    size: int | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    channels: int
    augment: bool

    def set_preparation(
        self,
        size: int | None,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
        channels: int,
        augment: bool,
    ) -> None:
        """Keep how images are prepared; refuses what can't be."""
        if channels not in (1, 3):
            raise ValueError(f"expected channels to be 1 or 3, got {channels!r}: 3 is colour")
        check_statistics(mean, std)
        self.size = None if size is None else checks.whole("size", size, 1, 10**5)
        self.mean, self.std, self.channels, self.augment = mean, std, channels, checks.flag("augment", augment)

    @property
    def num_classes(self) -> int:
        """Classes that are trained, once the files were listed."""
        return len(self.class_names)

    def _files(self, images: Sequence[ImageFile]) -> ImageFiles:
        return ImageFiles(images, self.root, self.channels)

    def _take_parts(self, parts: Mapping[str, Sequence[ImageFile]]) -> None:
        """Make the sets of a stage of files by part; the structure is learned from those of training."""
        for name, files in parts.items():
            setattr(self, f"{name}_set", self._files(files))
        if "train" in parts:
            self.structure_set = self._files(parts["train"])

    def _labelled(self) -> list[Any]:
        """The sets whose images have classes."""
        return [getattr(self, f"{name}_set", None) for name in ("train", "structure", "val", "test")]

    def _loader(self, samples: SampleSet, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Any]:
        """Images are labelled and prepared only now, when the model may have classes and a preset from a checkpoint."""
        if isinstance(samples, ImageFiles):
            if any(samples is one for one in self._labelled()):
                # For a test, the classes of the model that was trained; while training, those of the folder.
                if self.trainer is not None and self.trainer.state.fn != "fit":
                    trained = getattr(self.trainer.lightning_module, "class_names", None)
                    self.class_names = tuple(trained or self.class_names)
                samples.number(self.class_names)
            sizing, finishing = self._steps(self.augment and shuffle)
            samples.resize, samples.normalise = v2.Compose(sizing), v2.Compose(finishing)
            samples.prepare = v2.Compose([*sizing, *finishing])
        return super()._loader(samples, shuffle, drop_last)

    def preparation(self, preset: Preset | None) -> Preset:
        """How images are prepared for a network whose weights expect `preset`; empty `mean` and `std` scale nothing."""
        if self.size is None and preset is None:
            raise ValueError(
                "expected a backbone of torchvision or timm, whose weights tell the size of images, or a size, got "
                "neither: set size, and mean and std if the backbone was trained with them"
            )
        known = Preset(0, 0, (), (), "bilinear") if preset is None else preset
        resize, crop = (known.resize, known.crop) if self.size is None else (self.size, self.size)
        given = preset if self.mean is None and preset is not None else self
        mean, std = given.mean, given.std
        if mean is None or std is None:
            return Preset(resize, crop, (), (), known.interpolation)
        if {len(mean), len(std)} - {1, self.channels}:
            raise ValueError(
                f"expected mean and std of {self.channels} channels, got {len(mean)} and {len(std)} numbers: set "
                "channels, or mean and std"
            )
        return Preset(resize, crop, tuple(mean), tuple(std), known.interpolation)

    def _steps(self, augmented: bool) -> tuple[list[Any], list[Any]]:
        """Bytes (C, H, W) of any size → bytes (C, size, size) → floats."""
        steps = self.preparation(
            getattr(None if self.trainer is None else self.trainer.lightning_module, "preset", None)
        )
        how = InterpolationMode(steps.interpolation)
        sizing: list[Any] = [v2.Resize(steps.resize, how, antialias=True), v2.CenterCrop(steps.crop)]
        if augmented:
            sizing = [v2.RandomResizedCrop(steps.crop, (0.5, 1.0), interpolation=how, antialias=True)]
            sizing.append(v2.RandomHorizontalFlip())
        finishing: list[Any] = [v2.ToDtype(torch.float32, scale=True)]
        if steps.mean:
            finishing.append(v2.Normalize(list(steps.mean), list(steps.std)))
        return sizing, finishing


class ImageFolder(PreparedImages):
    """Images in a directory for each class.

    Either `root` has directories `train`, `val` and `test` with the classes in them, of which the last two may be
    missing, or it has the classes themselves. What is missing is held out of the training images, class by class.

    Images are prepared as the weights of the backbone expect it, if it is one of torchvision or timm; the model's
    checkpoint keeps how. The settings size, mean and std are for other backbones, or to do otherwise.

    Args:
        root: The folder of the images, as above.
        predict: A folder of images to predict, or one image; they need no classes. None predicts the test images.
        held_out: The classes that are never trained on; they are the out-of-distribution set `held_out`, which is near.
        ood: Folders of images unlike the training data, by the name of the set; they need no classes.
        near: Those names of `ood` that resemble the training data; the others are far.
        size: The side of the images, in pixels: the shorter side is brought to it, and the middle is cut out. None is
            what the weights of the backbone expect.
        mean: The mean of each channel of images that are scaled to [0, 1]. None is what the weights expect.
        std: The standard deviation of each channel, likewise.
        channels: 3 reads all images in colour, 1 in grey.
        augment: Whether training images are cropped and flipped at random.
        batch_size: The number of samples in a batch, at least 2 because batch norm can't train on one.
        num_workers: The number of processes that load batches; 0 loads them in the main process.
        val_fraction: The share of training images that is held out for validation where there is no `val`.
        test_fraction: The share of images that is held out for the test where there is no `test`, the same for every
            `seed`.
        seed: The seed of the validation split.
        shifts: The shifts of the test images to evaluate too: corruptions × severities, of images of the size that the
            model takes; None has none.
    """

    def __init__(
        self,
        root: str,
        predict: str | None = None,
        held_out: Sequence[str] = (),
        ood: Mapping[str, str] | None = None,
        near: Sequence[str] = (),
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
        shifts: Shifts | None = None,
    ) -> None:
        if isinstance(held_out, str):  # else its letters would be the names
            raise ValueError(f"expected held_out to be a list of classes, got {held_out!r}: write [{held_out!r}]")
        names = [*([HELD_OUT] if held_out else []), *(ood or ())]
        near_sets = [*([HELD_OUT] if held_out else []), *near]
        super().__init__(batch_size, num_workers, val_fraction, seed, near_sets, shifts)
        check_share("test_fraction", test_fraction)
        check_set_names(names, near)
        self.set_preparation(size, mean, std, channels, augment)
        self.root, self.predict_folder = Path(root), None if predict is None else Path(predict)
        self.held_out, self.ood_folders = tuple(held_out), {name: Path(path) for name, path in (ood or {}).items()}
        self.test_fraction = test_fraction

    # -- files --------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """List the files that a stage needs; nothing is read."""
        if stage == "predict" and self.predict_folder is not None:
            self.predict_set = self._unlabelled(self.predict_folder)
            return
        parts, held = self._split(stage)
        labelled = parts.get("train") or chain.from_iterable(parts.values())
        classes = sorted({one.kind for one in labelled})
        if len(classes) < 2:
            beside = " beside those held out" if held else ""
            raise ValueError(
                f"expected directories of two or more classes in {self.root}, got {', '.join(classes) or 'none'}"
                f"{beside}: put the images of each class into a directory of its own"
            )
        self.class_names = tuple(classes)
        if stage == "fit":  # now, and not in the test after hours of work
            check_classes((one.kind for one in chain.from_iterable(parts.values())), classes)
        self._take_parts(parts)
        if "test" in parts:
            self.predict_set = self._files(parts["test"])
        self.ood_sets = {HELD_OUT: self._files(held)} if held else {}
        if stage in ("test", "fit"):
            self.ood_sets |= {name: self._unlabelled(folder) for name, folder in self.ood_folders.items()}

    def _unlabelled(self, folder: Path) -> ImageFiles:
        if folder.is_file():
            return ImageFiles([ImageFile(folder, "")], folder.parent, self.channels)
        paths = list_images(folder) if folder.is_dir() else []
        if not paths:
            raise FileNotFoundError(f"expected images in {folder}, found {'none' if folder.is_dir() else 'no folder'}")
        return ImageFiles([ImageFile(path, "") for path in paths], folder, self.channels)

    def _split(self, stage: str) -> tuple[dict[str, list[ImageFile]], list[ImageFile]]:
        """The files of training, validation and test, and those of classes that are held out."""
        if not self.root.is_dir():
            raise FileNotFoundError(f"expected a folder of images at {self.root}, found none: set root")
        given = self._listed()
        if "train" not in given and stage == "fit":
            raise FileNotFoundError(f"expected training images in {self.root / 'train'}, found no such folder")
        self._check_held_out(set(chain.from_iterable(given.values())))
        known: dict[str, list[ImageFile]] = {part: [] for part in given}
        held: list[ImageFile] = []
        for part, classes in given.items():
            for kind, paths in classes.items():
                files = held if kind in self.held_out else known[part]
                files += [ImageFile(path, kind) for path in paths]
        for part, share, seed in (("test", self.test_fraction, 1), ("val", self.val_fraction, self.seed)):
            if "train" in known and part not in known:
                known["train"], known[part] = hold_out(known["train"], share, seed)
        return known, held

    def _listed(self) -> dict[str, dict[str, list[Path]]]:
        """The files of each class in the folders of training, validation and test; of training alone without such."""
        listed = {}
        for part, names in SPLITS.items():
            folders = [self.root / name for name in names if (self.root / name).is_dir()]
            if folders:
                listed[part] = list_classes(folders[0])
        return listed or {"train": list_classes(self.root)}

    def _check_held_out(self, classes: set[str]) -> None:
        unknown = sorted(set(self.held_out) - classes)
        if unknown:
            raise ValueError(
                f"expected held_out to name classes in {self.root} ({', '.join(sorted(classes))}), got "
                f"{', '.join(unknown)}: correct the list"
            )


def hold_out(files: Sequence[ImageFile], share: float, seed: int) -> tuple[list[ImageFile], list[ImageFile]]:
    """Files without a random share of each class, and that share, both in the order of `files`.

    At least one image of a class is held out, and at least one is left.

    >>> files = [ImageFile(Path(f"{kind}{i}"), kind) for kind in "ab" for i in range(4)]
    >>> [one.path.name for one in hold_out(files, 0.25, seed=0)[1]]
    ['a0', 'b0']
    """
    generator = torch.Generator().manual_seed(seed)
    held: set[Path] = set()
    classes: dict[str, list[Path]] = {}
    for one in files:
        classes.setdefault(one.kind, []).append(one.path)
    for paths in classes.values():
        order = torch.randperm(len(paths), generator=generator).tolist()
        held |= {paths[i] for i in order[: min(max(1, round(share * len(paths))), len(paths) - 1)]}
    if not held:
        raise ValueError(
            f"expected enough images to hold out {share:g} of each class, got {len(files)} images, one of each: give "
            "more"
        )
    return [one for one in files if one.path not in held], [one for one in files if one.path in held]
