"""Inputs as people have them: tensors, arrays, images, texts, data sets, loaders and tables, in batches for a model.

`predict` of every model takes them by `InputReader`. `forward` takes tensors alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from brainet_pl._utils import checks
from brainet_pl._utils.texts import Texts, are_texts
from brainet_pl.backbones.batches import Columns, Sample, rows, size
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import inputs_of
from brainet_pl.serving.images import ImageSteps

BATCH = 256  # inputs that are predicted at a time
FILES = (str, Path)
KINDS = (
    "a tensor, an array, an image or the path of one, a list of these, a table, a dictionary of tensors, a dataset or "
    "a loader"
)


class InputReader:
    """Makes batches of inputs, and says what is wrong with them.

    Args:
        signature: name → shape and type of a training sample, "" for a single tensor; None where nobody knows them.
        images: how images were prepared in training; None where nobody knows.
        columns: the names of inputs, where batches have names that can't be guessed.
        takes_texts: whether a text is an input as it is, and no path of an image.
    """

    def __init__(
        self,
        signature: Mapping[str, Sample] | None,
        images: ImageSteps | None = None,
        columns: Columns | None = None,
        takes_texts: bool = False,
    ) -> None:
        single = signature is not None and list(signature) == [""]
        self.sample = signature[""] if signature is not None and single else None
        self.images, self.columns, self.takes_texts = images, columns, takes_texts

    def batches(self, x: Any) -> Iterator[Any]:
        """Inputs of any form → tensors (B, …), dictionaries of tensors or texts, of at most `BATCH` samples each."""
        if self.takes_texts and (isinstance(x, str) or are_texts(x)):
            yield from self._split(Texts([x] if isinstance(x, str) else x))
            return
        if isinstance(x, Dataset):
            x = DataLoader(x, batch_size=BATCH)
        if isinstance(x, DataLoader):
            yield from self._of_loader(x)
            return
        if isinstance(x, BackboneOutput):
            yield from self._split(x)
            return
        if isinstance(x, list | tuple) and len(x) and _are_images(x):
            for first in range(0, len(x), BATCH):
                yield self._stacked([self._prepared(one) for one in x[first : first + BATCH]])
            return
        yield from self._split(self._tensors(x))

    # -- forms --------------------------------------------------------------------------------------------------------

    def _of_loader(self, loader: Iterable[Any]) -> Iterator[Any]:
        count = 0
        for batch in loader:
            count += 1
            inputs = inputs_of(batch, self.columns)
            yield from self._split(inputs if isinstance(inputs, Texts) else self._tensors(inputs))
        if not count:
            raise ValueError("expected at least one input, got an empty data set: give some")

    def _split(self, x: Any) -> Iterator[Any]:
        count = size(x)
        if not count:
            raise ValueError("expected at least one input, got an empty batch: give some")
        for first in range(0, count, BATCH):
            yield x if count <= BATCH else rows(x, slice(first, first + BATCH))

    def _tensors(self, x: Any) -> Any:
        """Inputs of any form → a tensor (N, …) as in training, or a dictionary of tensors."""
        if isinstance(x, Mapping):
            return {name: _as_tensor(value) for name, value in x.items()}
        if isinstance(x, Image.Image | str | Path):
            return self._stacked([self._prepared(x)])
        if hasattr(x, "to_numpy") and hasattr(x, "columns"):
            return self.checked(_of_table(x))
        if isinstance(x, list | tuple):
            if not len(x):
                raise ValueError("expected at least one input, got an empty list: give some")
            return self._stacked([self._one(part) for part in x])
        if isinstance(x, np.ndarray) and x.dtype == np.uint8 and self._is_pixels(x):
            pictures = x[None] if x.ndim == 2 or (x.ndim == 3 and x.shape[-1] in (1, 3)) else x
            return self._stacked([self._prepared(_as_image(one)) for one in pictures])
        return self.checked(_as_tensor(x))

    def _one(self, part: Any) -> Tensor:
        """One sample of a list, without a dimension for the batch."""
        if isinstance(part, np.ndarray) and part.dtype == np.uint8 and self._is_pixels(part):
            return self._prepared(_as_image(part))
        return _as_tensor(part)

    def _is_pixels(self, x: NDArray[Any]) -> bool:
        """Whether whole numbers of 8 bits are images that were prepared in training."""
        expects_numbers = self.sample is None or not self.sample.dtype.startswith(("uint", "int"))
        return self.images is not None and x.ndim >= 2 and expects_numbers

    def _prepared(self, image: Any) -> Tensor:
        """An image or the path of one, prepared as in training."""
        if self.images is None:
            raise ValueError(
                f"expected a tensor, prepared as in training, got {checks.shown(image)}: this model does not know how "
                "its images were prepared; fit it on a data set whose transform resizes, crops in the middle and "
                "normalises, or prepare images yourself"
            )
        if isinstance(image, FILES):
            path = Path(image)
            if not path.is_file():
                raise FileNotFoundError(f"expected the path of an image, got {path}, where no file is: correct it")
            return torch.from_numpy(self.images(path.read_bytes()))
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        return torch.from_numpy(self.images(file.getvalue()))

    def _stacked(self, parts: list[Tensor]) -> Tensor:
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) > 1:
            first, second, *_ = sorted(shapes)
            raise ValueError(f"expected inputs of one shape, got {first} and {second}: bring all to one shape")
        return self.checked(torch.stack(parts))

    # -- checks -------------------------------------------------------------------------------------------------------

    def checked(self, x: Tensor) -> Tensor:
        """A tensor (N, …) as in training; one sample gets a dimension for the batch, a grey image one for its channel.

        Sizes of images may be others: many networks take any.
        """
        if self.sample is None:
            return x
        usual = self.sample.shape
        grey = len(usual) == 3 and usual[0] == 1
        if grey and x.shape[-2:] == usual[1:] and x.dim() in (2, 3) and tuple(x.shape) != usual:
            x = x.reshape(-1, *usual)
        if x.dim() == len(usual) and (not usual or x.shape[0] == usual[0]):
            x = x[None]
        is_text = not self.sample.dtype.startswith(("float", "bfloat"))  # token numbers, which have any length
        if len(usual) in (1, 3) and not is_text:
            self._check_shape(x, usual)
        whole = not x.is_floating_point() and not x.is_complex()
        if whole and len(usual) == 3 and self.sample.dtype.startswith(("float", "bfloat")):
            raise ValueError(
                f"expected {self.sample.dtype} inputs, scaled as in training, got {_kind(x)}: scale them, such as "
                "x.float() / 255, and normalise them if training did"
            )
        return x.float() if whole and self.sample.dtype.startswith(("float", "bfloat")) else x

    @staticmethod
    def _check_shape(x: Tensor, usual: tuple[int, ...]) -> None:
        wanted = f"(N{''.join(f', {side}' for side in usual)})"
        got = tuple(x.shape)
        if x.dim() == len(usual) + 1 and x.shape[1] == usual[0]:
            return
        if len(usual) == 1:
            raise ValueError(
                f"expected rows of {usual[0]} columns, {wanted}, got the shape {got}: give those of training"
            )
        if x.dim() == 4 and x.shape[-1] == usual[0]:
            raise ValueError(
                f"expected images with channels first, {wanted}, got {got}: move them, x.permute(0, 3, 1, 2)"
            )
        if x.dim() == 4 and x.shape[1] == 1:
            raise ValueError(
                f"expected images of {usual[0]} channels, {wanted}, got {got} with 1: repeat it, "
                f"x.expand(-1, {usual[0]}, -1, -1)"
            )
        if x.dim() == 4:
            raise ValueError(f"expected images of {usual[0]} channels, {wanted}, got {got}: convert them")
        raise ValueError(
            f"expected images of {usual[0]} channels, {wanted}, got the shape {got}: give one dimension for the batch "
            "and one for the channels"
        )


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _are_images(parts: Any) -> bool:
    return all(isinstance(part, Image.Image | str | Path) for part in parts)


def _as_image(pixels: NDArray[Any]) -> Image.Image:
    """Bytes (H, W), (H, W, C) or (C, H, W) as an image."""
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3) and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] != 3):
        raise ValueError(
            f"expected pixels of an image, (H, W) or (H, W, 3), got the shape {pixels.shape}: give one channel or three"
        )
    return Image.fromarray(np.ascontiguousarray(pixels))


def _as_tensor(x: Any) -> Tensor:
    """A tensor, or an array of numbers as one."""
    if isinstance(x, Tensor):
        return x
    if not isinstance(x, np.ndarray | np.generic | float | int):
        raise ValueError(f"expected inputs as {KINDS}, got {checks.shown(x)}: give one of these")
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"expected an array of numbers, got {array.dtype}: encode what is text first")
    array = array.astype(np.float32) if array.dtype.kind == "f" and array.dtype != np.float64 else array
    return torch.from_numpy(np.ascontiguousarray(array))


def _of_table(table: Any) -> Tensor:
    """A data frame of numbers as a tensor (N, d)."""
    texts = [str(name) for name, kind in table.dtypes.items() if getattr(kind, "kind", "O") not in "fiub"]
    if texts:
        listed = ", ".join(texts[:5])
        raise ValueError(f"expected columns of numbers, got text or dates in {listed}: encode them as in training")
    return torch.from_numpy(table.to_numpy(dtype=np.float32))
