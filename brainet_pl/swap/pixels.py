"""A head for every pixel: cells of feature maps are the samples of `swap_head`, and its answers are folded back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl._utils import checks
from brainet_pl._utils.framework import rank_zero_info
from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.warn import warn
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.maps import FeatureMaps, resized
from brainet_pl.features.extraction import inputs_and_target, unshuffled
from brainet_pl.fitting.samples import SHARE
from brainet_pl.metrics.pixels import PixelSums
from brainet_pl.network import HeadSettings
from brainet_pl.prediction.inputs import InputReader
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.prediction import Prediction
from brainet_pl.prediction.transforms import class_names_of
from brainet_pl.swap.data import hash_rows, labelled_batches
from brainet_pl.swap.model import SwappedModel, swap_head

IGNORE = 255  # the value of void pixels in masks, as in PASCAL VOC and Cityscapes
PIXELS = 40_000  # cells that a fit looks at, those that are held out included
ROWS = 16_384  # cells that the head answers at a time
CELLS = 2**24  # numbers of feature maps that are in memory at a time: 64 MB
TRAINING: dict[str, Any] = {  # of so many rows that are alike: chosen by the NLL of scenes that no fit had
    "batch_size": 1024,
    "learning_rate": 3e-3,
    "input_dropout": 0.1,
    "max_epochs": 12,
    "patience": 3,
}
KEPT = 5_000  # pixels of an image that count in the measures of unknown pixels


class Cells(NamedTuple):
    """Cells of images: features (N, d), labels (N,), and the number of the image of each (N,)."""

    features: Tensor
    labels: Tensor
    image: Tensor

    def of(self, images: Tensor) -> Cells:
        """The cells of some images."""
        return Cells(*(part[torch.isin(self.image, images)] for part in self))


class PixelModel(nn.Module):
    """A frozen network with a new head for every pixel: images → log probabilities (B, C, H, W).

    The head answers for the cells of a grid; its answers are brought to the size of the images, probabilities and
    scores by bilinear interpolation, flags by the nearest cell. `swap_pixels` makes one, `fit` trains it.

    Args:
        maps: the network, images → features of cells.
        settings: what `swap_head` gets for the head on rows of features.
        num_classes: number of classes; None counts those of the masks.
        ignore_index: the value of void pixels in masks; they are neither trained on nor measured.
        columns: the names of images and masks, where batches have names.

    Attributes:
        rows: the model of single cells, features (N, d) → answers; it has all that is learned. None before `fit`.
    """

    rows: SwappedModel

    def __init__(
        self,
        maps: FeatureMaps,
        settings: Mapping[str, Any],
        num_classes: int | None = None,
        ignore_index: int = IGNORE,
        columns: Columns | None = None,
    ) -> None:
        super().__init__()
        self.maps, self.num_classes, self.columns = maps, num_classes, columns
        self.ignore_index = checks.whole("ignore_index", ignore_index, -(10**6), 10**6)
        self._settings, self._given = dict(settings), (None, None)
        self._numbers: dict[tuple[int, ...], int] = {}  # of the features of an image, by its shape
        self.register_module("rows", None)

    # -- fitting ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        train: Any = None,
        held: Any = None,
        *,
        pixels: int = PIXELS,
        seed: int = 0,
        progress: bool = True,
        **training: Any,
    ) -> PixelModel:
        """Sample cells of all images, learn their structure, train the head on them, calibrate. Returns itself.

        Pixels of one image are alike, so whole images are held out: they choose the epoch, and calibrate.

        Args:
            train: images (B, C, H, W) and masks (B, H, W) of class numbers: a loader, a dataset or a pair of tensors;
                None is what `swap_pixels` was given.
            held: the same of images that are not trained on; None holds 15 % of the training images back.
            pixels: cells that are looked at in all, the same number of each image.
            seed: of all that is drawn.
            progress: show progress bars.
            **training: further arguments of `SwappedModel.fit`, such as `conformal` or `max_epochs`.
        """
        if train is None:
            train, held = self._given[0], self._given[1] if held is None else held
        if train is None:
            raise ValueError("expected training data, got none: give images and masks, fit(train, held)")
        checks.whole("pixels", pixels, 100)
        loader = labelled_batches(train, "train")
        share = 1.0 if held is None else 1 - SHARE
        cells = self.sample_cells(loader, "train", int(share * pixels), seed)
        if held is None:
            numbers = torch.unique(cells.image)
            count = max(1, round(SHARE * len(numbers)))
            if len(numbers) < 2:
                raise ValueError("expected at least 2 images with labelled pixels, got 1: one is held out; give more")
            drawn = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))]
            held_out, cells = cells.of(drawn[:count]), cells.of(drawn[count:])
        else:
            held_out = self.sample_cells(labelled_batches(held, "held"), "held", int(SHARE * pixels), seed)
        held_out = _not_repeated(cells, held_out)
        head_layer = "classifier" if self.maps.classifier else ""
        rows = swap_head(
            self.maps.row_network().to(device_of(self.maps)),
            (cells.features, cells.labels),
            self.num_classes,
            held=(held_out.features, held_out.labels),
            head_layer=head_layer,
            layers=["features"],
            **self._settings,
        )
        rows.fit(seed=seed, progress=progress, **{**TRAINING, **training})
        self.rows = rows.to(device_of(self.maps))
        self.rows.class_names = class_names_of(train, self.rows.task.out_features)
        self._given = (None, None)
        return self.eval()

    def sample_cells(self, loader: Iterable[Any], name: str, pixels: int, seed: int) -> Cells:
        """Cells that are not void, as many of each image, until there are about so many.

        Args:
            loader: batches of images and masks.
            name: of the data, for messages.
            pixels: cells in all.
            seed: of the draw.
        """
        images = _count_images(loader, self.columns)
        per_image, generator = -(-pixels // images), torch.Generator().manual_seed(seed)
        parts: list[Cells] = []
        first = void = 0
        with isolated_rng(seed):
            for given, masks in self._labelled(loader, name):
                for maps, labels in zip(self._features(given), masks, strict=True):
                    grid = tuple(maps.shape[1:])
                    cell_labels = (
                        F.interpolate(labels[None, None].double(), grid, mode="nearest-exact").long().flatten()
                    )
                    there = (cell_labels != self.ignore_index).nonzero()[:, 0]
                    chosen = there[torch.randperm(len(there), generator=generator)[:per_image]]
                    rows = maps.flatten(1).t()[chosen].float().cpu()
                    parts.append(Cells(rows, cell_labels[chosen], torch.full((len(chosen),), first)))
                    void += not len(there)
                    first += 1
        if void == first:
            raise ValueError(
                f"expected labelled pixels in {name}, got {first} masks that are void ({self.ignore_index}) alone: "
                "check the masks, or give another ignore_index"
            )
        if void:
            warn(f"left out {void} of {first} images of {name}: all of their pixels are void ({self.ignore_index})")
        cells = Cells(*(torch.cat(part) for part in zip(*parts, strict=True)))
        rank_zero_info(f"{name}: {len(cells.labels):,} cells of {first - void} images")
        return cells

    def _labelled(self, loader: Iterable[Any], name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Few images at a time, and their checked masks (B, H, W)."""
        for batch in unshuffled(loader):
            images, masks = inputs_and_target(batch, self.columns)
            images = self._reader.checked(images)
            masks = check_masks(torch.as_tensor(masks), images, self.num_classes, self.ignore_index, name)
            step = self._images_at_a_time(images)
            yield from zip(torch.split(images, step), torch.split(masks.cpu(), step), strict=True)

    # -- answers ------------------------------------------------------------------------------------------------------

    @property
    def input_signature(self) -> dict[str, batching.Sample] | None:
        """Shape and type of the first image, by the name ""; None before there was one."""
        return self.maps.input_signature

    @property
    def _reader(self) -> InputReader:
        return InputReader(self.input_signature, columns=self.columns)

    def _images_at_a_time(self, images: Tensor) -> int:
        """How many images have at most `CELLS` numbers of features together; one pass for each new size tells."""
        size = tuple(images.shape[1:])
        if size not in self._numbers:
            with torch.no_grad():
                self._numbers[size] = self._features(images[:1]).numel()
        return max(1, CELLS // self._numbers[size])

    def _features(self, images: Tensor) -> Tensor:
        found: Tensor = self.maps(images.to(device_of(self.maps)))
        return found

    def require_rows(self) -> SwappedModel:
        """The model of single cells, or an error that says how to get one."""
        if self.rows is None:
            raise ValueError("expected a fitted model, got one without a head: fit it, fit(train), or load it")
        return self.rows

    def answer(self, images: Tensor, chunk: int | None = None) -> Prediction:
        """Images (B, C, H, W) → maps of all that is said of each pixel, with at most so many cells at a time."""
        rows, maps = self.require_rows(), self._features(images)
        cells = maps.movedim(1, -1).flatten(0, 2)
        parts = [cells] if chunk is None else torch.split(cells, chunk)
        said = Prediction.concat([rows.describe(rows.passes(part)) for part in parts])
        size = (images.shape[2], images.shape[3])
        found = {name: _folded(values, maps, size) for name, values in said.items() if values.dim()}
        final = found["probabilities"]
        flat = {name: values.flatten() for name, values in found.items() if name in rows.task.units}
        flat.setdefault("mutual_information", torch.zeros_like(flat["entropy"]))  # left out where all passes agree
        of_answer = rows.task.scores_of_answer(final.movedim(1, -1).flatten(0, 2), flat)
        found |= {name: values.view(final[:, 0].shape) for name, values in of_answer.items() if name in found}
        return Prediction(found | {"class": _classes(final)})

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) → the logarithm of calibrated probabilities (B, classes, H, W).

        The answer is given in evaluation mode, whatever mode the model is in.
        """
        rows = self.require_rows()
        with evaluation_mode(self):
            maps = self._features(images)
            final = rows.final(rows.passes(maps.movedim(1, -1).flatten(0, 2)))
            return rows.task.as_outputs(_folded(final, maps, (images.shape[2], images.shape[3])))

    @torch.no_grad()
    def predict(self, x: Any) -> Prediction:
        """Images → maps of all that is said of each pixel, by name.

        `probabilities` (B, classes, H, W), `class` (B, H, W), every score, `known_p` and `known` (B, H, W). Memory is
        that of few images and `ROWS` cells at a time, and of the answers.

        Args:
            x: images as a tensor or an array, (B, C, H, W) or one image; a dataset or a loader.
        """
        answers = []
        with evaluation_mode(self):
            for batch in self._reader.batches(x):
                for images in torch.split(batch, self._images_at_a_time(batch)):
                    answers.append(self.answer(batching.move(images, device_of(self.maps)), ROWS))
        return Prediction.concat(answers)

    def evaluate(self, data: Any, unknown: Sequence[int] = ()) -> dict[str, float]:
        """Measure the answers for images and masks at the size of the masks; gives measures by name.

        Args:
            data: images and masks that neither `train` nor `held` had.
            unknown: values in the masks of objects that the model has no class for: how well these pixels are told
                from the others, by each score, is measured; they count in nothing else.
        """
        return self.measure(data, unknown).compute()

    def measure(self, data: Any, unknown: Sequence[int] = ()) -> PixelSums:
        """What `evaluate` computes its measures from."""
        rows = self.require_rows()
        sums = PixelSums(rows.task.out_features, self.ignore_index, tuple(unknown), KEPT)
        for batch in unshuffled(labelled_batches(data, "data")):
            images, masks = inputs_and_target(batch, self.columns)
            masks = torch.as_tensor(masks)
            named = torch.isin(masks, torch.tensor(list(unknown), dtype=masks.dtype)) if unknown else masks != masks
            checked = check_masks(
                masks.masked_fill(named, self.ignore_index), images, rows.task.out_features, self.ignore_index, "data"
            )
            for image, mask, odd in zip(images, checked, named.reshape(checked.shape), strict=True):
                answer = {name: values[0].cpu() for name, values in self.predict(image[None]).items()}
                sums.update(answer, mask, odd)
        return sums

    def save(self, path: str | Path) -> None:
        """Write the model to a file of tensors and plain values, which `load_pixels` reads without running code."""
        from brainet_pl.swap.pixel_file import save_pixels

        save_pixels(self, path)

    def report(self, path: str | Path, data: Any, unknown: Sequence[int] = (), images: int = 4) -> dict[str, float]:
        """Test the model and write a page, or of a path that ends in .png a picture; gives the measures by name.

        Args:
            path: the file to write, such as page.html.
            data: images and masks that the model has never met.
            unknown: values in the masks of objects that the model has no class for.
            images: how many images are shown: spread evenly over the data.
        """
        from brainet_pl.swap.pixel_page import report_pixels

        return report_pixels(self, path, data, unknown, images)


def swap_pixels(
    network: nn.Module,
    data: Any = None,
    num_classes: int | None = None,
    *,
    held: Any = None,
    layers: Sequence[str] | None = None,
    grid: tuple[int, int] | None = None,
    ignore_index: int = IGNORE,
    head: HeadSettings | str | None = None,
    columns: Columns | None = None,
    **learn: Any,
) -> PixelModel:
    """A BRAINet head for every pixel on a frozen network: `swap_pixels(network, train).fit()` does it all.

    Of a network for segmentation, whose output is the resized output of its last 1×1 convolution, the head takes the
    place of that; where its classes are those of the masks, the network's own answer may count too. Of a classifier,
    the head reads the maps at the ends of its stages.

    Args:
        network: the network; it is copied, never changed.
        data: images and masks for `fit`: a loader, a dataset or a pair of tensors.
        num_classes: number of classes; None counts those of the masks.
        held: the same of images that are not trained on.
        layers: paths of layers with maps to read; None finds them.
        grid: rows and columns of the cells that are answered; None is the resolution of the features of a network for
            segmentation, and a quarter of the image's sides for a classifier.
        ignore_index: the value of void pixels in masks.
        head: settings of the new head; None is `Tree()`.
        columns: the names of images and masks, where batches have names that can't be guessed.
        **learn: settings of `learn_structure`.
    """
    if num_classes is not None:
        checks.whole("num_classes", num_classes, 2, 10**7)
    for side in () if grid is None else grid:
        checks.whole("a side of grid", side, 1, 10**5)
    maps = FeatureMaps(network, layers, grid)
    model = PixelModel(maps, {"head": head, **learn}, num_classes, ignore_index, columns)
    model._given = (data, held)
    return model


def check_masks(masks: Tensor, images: Tensor, num_classes: int | None, ignore_index: int, name: str) -> Tensor:
    """Masks (B, H, W) of class numbers for images (B, C, H, W), or an error that says what is wrong with them."""
    if masks.dim() == 4 and masks.shape[1] == 1:
        masks = masks[:, 0]
    wanted = (images.shape[0], *images.shape[2:])
    if tuple(masks.shape) != wanted:
        raise ValueError(
            f"expected masks of {name} with a class for each pixel of the images, {wanted}, got the shape "
            f"{tuple(masks.shape)}: resize masks as the images, by the nearest pixel"
        )
    if masks.is_floating_point() or masks.is_complex() or masks.dtype == torch.bool:
        raise ValueError(
            f"expected masks of {name} as whole numbers of classes, got {masks.dtype}: give masks.long(), numbers from "
            f"0 and {ignore_index} for void"
        )
    masks = masks.long()
    labels = torch.unique(masks[masks != ignore_index])
    most = 10**6 if num_classes is None else num_classes - 1
    wrong = labels[(labels < 0) | (labels > most)].tolist()
    if wrong:
        classes = "0 or more" if num_classes is None else f"from 0 to {most}"
        raise ValueError(
            f"expected classes {classes} and {ignore_index} for void in masks of {name}, got "
            f"{', '.join(map(str, wrong[:5]))}: renumber them, or set ignore_index to the value of void pixels"
        )
    return masks


def _at_cells(mask: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The classes of a mask (H, W) in the middle of each cell of a grid, row by row."""
    return F.interpolate(mask[None, None].double(), grid, mode="nearest-exact").long().flatten()


def _count_images(loader: Iterable[Any], columns: Columns | None) -> int:
    """The number of images that a loader gives."""
    data = getattr(loader, "dataset", None)
    if hasattr(data, "__len__") and not hasattr(getattr(loader, "sampler", None), "indices"):
        count = len(data)  # type: ignore[arg-type]
    else:
        count = sum(batching.size(inputs_and_target(batch, columns)[0]) for batch in unshuffled(loader))
    if not count:
        raise ValueError("expected images, got an empty loader: check the data")
    return count


def _not_repeated(train: Cells, held: Cells) -> Cells:
    """The held-out cells that differ from all training cells: flat areas, such as black borders, are alike anywhere."""
    known = set(hash_rows(train.features))
    fresh = torch.tensor([one not in known for one in hash_rows(held.features)], dtype=torch.bool)
    return Cells(*(part[fresh] for part in held))


def _folded(values: Tensor, maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Answers for cells (B·h·w, …) → maps (B, …, H, W): numbers by interpolation, flags by the nearest cell."""
    height, width = maps.shape[2:]
    found = values.reshape(-1, height, width, *values.shape[1:]).movedim((1, 2), (-2, -1))
    if (height, width) == size:
        return found
    flat = found if found.dim() == 4 else found.unsqueeze(1)
    if values.is_floating_point():
        flat = resized(flat, size)
    else:
        flat = F.interpolate(flat.float(), size, mode="nearest-exact").to(values.dtype)
    return flat if found.dim() == 4 else flat.squeeze(1)


def _classes(probabilities: Tensor) -> Tensor:
    """Numbers of the most probable classes (B, H, W) of probabilities (B, C, H, W), -1 where these are NaN."""
    return probabilities.argmax(dim=1).masked_fill(probabilities.isnan().any(dim=1), -1)
