"""The file of a swapped model: tensors and plain values, never code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import to_builtins
from torch import Tensor, nn

from brainet_pl._utils.parts import make_part, primitive
from brainet_pl._utils.stored import readable_errors
from brainet_pl.backbones import Backbone
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.texts import TextEncoder, restored_encoder
from brainet_pl.network import HeadSettings
from brainet_pl.prediction.finite import first_bad_weight
from brainet_pl.serving.images import ImageSteps
from brainet_pl.storage.container import StoredBackbone, StoredPredictor, read_file, write_file
from brainet_pl.swap.layer import described, stored_task
from brainet_pl.swap.model import SwappedModel
from brainet_pl.tasks.classification import check_class_names

KIND = "SwappedModel"


class StoredSwap(StoredPredictor):
    """The file of a swapped model.

    Attributes:
        build: The arguments of `Backbone` that are no choices of its own.
        columns: The arguments of `Columns`.
        images: The arguments of `ImageSteps`.
    """

    backbone: StoredBackbone
    build: dict[str, Any]
    columns: dict[str, Any] | None
    images: dict[str, Any] | None
    class_names: list[str] | None
    weights: dict[str, Tensor]
    digest: str | None = None


def save_swapped(model: SwappedModel, path: str | Path) -> None:
    """Write a model with its head to a file, weights of the backbone included."""
    write_file(path, content_of(model))


def content_of(model: SwappedModel) -> dict[str, Any]:
    """What rebuilds a model with its head: the fields of `StoredSwap`, but for the digest."""
    model.require_head()
    if model.settings is None:
        raise ValueError(
            "expected the settings of the head, to build it again, got none: give them, SwappedModel(…, settings=…)"
        )
    weight = first_bad_weight(model)
    if weight is not None:
        raise ValueError(f"expected finite weights, got NaN or infinity in {weight}: no file was written")
    backbone = model.backbone
    content = described(model, model.settings, KIND) | primitive(
        {
            "backbone": to_builtins(StoredBackbone.of(backbone)),
            "build": {"head_layer": backbone.head_layer, "freeze": backbone.frozen, "pool": backbone.pool},
            "columns": None if model.columns is None else vars(model.columns),
            "images": None if model.images is None else model.images.to_dict(),
            "class_names": model.class_names,
        }
    )
    return {**content, "weights": dict(model.state_dict())}


def load_swapped(path: str | Path, model: nn.Module | None = None) -> SwappedModel:
    """The model that `SwappedModel.save` wrote, ready to predict. No code of the file is run.

    Args:
        path: the file; one that is damaged or holds more than tensors and plain values is refused.
        model: a network of the class that was swapped; its weights come from the file, and it is copied, never changed.
            None is for a `TextEncoder` of `transformers`, which the file itself can build.
    """
    stored = read_file(path, StoredSwap, KIND, "a swapped model")
    if model is None and stored.backbone.network == TextEncoder.__name__:
        with readable_errors(f"the encoder in {path}", "take another copy"):
            model = restored_encoder(stored.weights)
    if type(model).__name__ != stored.backbone.network:
        raise ValueError(
            f"expected a network of the class {stored.backbone.network}, got {type(model).__name__}: give one like "
            "that whose head was swapped"
        )
    assert model is not None
    with readable_errors(f"a network like that of {path}", "build it with the same arguments"):
        return rebuild(stored, model)


def rebuild(stored: StoredSwap, model: nn.Module) -> SwappedModel:
    """The model that a checked content describes, on a network like that whose head was swapped."""
    features, classes = stored.in_features, stored.num_classes
    backbone = Backbone(model, layers=None, **stored.build).build()
    stored.backbone.restore_removal(backbone)
    backbone.choose(stored.backbone.taps, stored.backbone.evidence)
    stored.backbone.restore_inputs(backbone)
    settings = make_part(HeadSettings, stored.head, "head")
    tree = stored.checked_tree(
        lambda tree: settings.build(features, classes, tree), settings.settings() | stored.sizes, stored.weights
    )
    columns = None if stored.columns is None else Columns(**stored.columns)
    head, task = settings.build(features, classes, tree), stored_task(stored)
    made = SwappedModel(backbone, head, task, settings=settings, columns=columns)
    made.in_features, made.num_passes = features, stored.passes
    made.attach(**stored.parts)
    made.class_names = check_class_names(stored.class_names, made.task)
    made.images = None if stored.images is None else ImageSteps(**stored.images)
    made.load_state_dict(stored.weights)
    return made.eval()
