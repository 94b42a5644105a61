"""The file of a model of pixels: the network, what is read of it, and the model of single cells."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from torch import Tensor, nn

from brainet_pl._utils.stored import FORMAT, Stored, parse, readable_errors
from brainet_pl.backbones.batches import Columns, Sample
from brainet_pl.backbones.maps import FeatureMaps, MapLayer
from brainet_pl.storage.container import Size, read_file, write_file
from brainet_pl.swap.file import StoredSwap, content_of, rebuild
from brainet_pl.swap.pixels import PixelModel

KIND = "PixelModel"
Side = Annotated[int, Meta(ge=1, le=10**5)]


class StoredPixels(Stored):
    """The file of a model of pixels.

    Attributes:
        network: class of the network.
        read: layers that are read, and the axes of their channels.
        classifier: path of the 1×1 convolution whose place was taken; "" where there was none.
        image: shape and type of the first image.
        rows: the fields of `StoredSwap`, of the model of single cells.
        weights: of the network.
    """

    network: str
    read: list[tuple[str, Annotated[int, Meta(ge=-1, le=3)]]]
    classifier: str
    grid: tuple[Side, Side] | None
    image: tuple[list[Size], str]
    ignore_index: int
    columns: dict[str, Any] | None
    rows: dict[str, Any]
    weights: dict[str, Tensor]
    digest: str


def save_pixels(model: PixelModel, path: str | Path) -> None:
    """Write a fitted model with its network to a file."""
    maps, signature = model.maps, model.maps.input_signature
    rows = content_of(model.require_rows())
    assert signature is not None
    (image,) = signature.values()
    content = {
        "kind": KIND,
        "format": FORMAT,
        "network": type(maps.network).__name__,
        "read": [list(layer) for layer in maps.read],
        "classifier": maps.classifier,
        "grid": None if maps.grid is None else list(maps.grid),
        "image": [list(image.shape), image.dtype],
        "ignore_index": model.ignore_index,
        "columns": None if model.columns is None else vars(model.columns),
        "rows": rows,
    }
    write_file(path, content | {"weights": dict(maps.network.state_dict())})


def load_pixels(path: str | Path, network: nn.Module) -> PixelModel:
    """The model that `PixelModel.save` wrote, ready to predict. No code of the file is run.

    Args:
        path: the file; one that is damaged or holds more than tensors and plain values is refused.
        network: one of the class that was given to `swap_pixels`; its weights come from the file, and it is copied.
    """
    stored = read_file(path, StoredPixels, KIND, "a model of pixels")
    if type(network).__name__ != stored.network:
        raise ValueError(
            f"expected a network of the class {stored.network}, got {type(network).__name__}: give one like that of "
            "the fit"
        )
    with readable_errors(f"a network like that of {path}", "build it with the same arguments"):
        maps = FeatureMaps(network, None, stored.grid)
        maps.network.load_state_dict(stored.weights)
        maps.read = tuple(MapLayer(*layer) for layer in stored.read)
        maps.classifier = stored.classifier
        maps.input_signature = {"": Sample(tuple(stored.image[0]), stored.image[1])}
        columns = None if stored.columns is None else Columns(**stored.columns)
        rows = parse(StoredSwap, stored.rows, f"cells of {path}")
        model = PixelModel(maps, {}, rows.num_classes, stored.ignore_index, columns)
        model.rows = rebuild(rows, maps.row_network())
    return model.eval()
