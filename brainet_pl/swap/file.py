"""The file of a swapped model: tensors and plain values, never code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from brainet_pl._utils.parts import make_part, primitive
from brainet_pl._utils.tensor_file import check_build, check_digest, check_sizes, read_saved, write_saved
from brainet_pl.backbones import Backbone
from brainet_pl.backbones.batches import Columns, Sample
from brainet_pl.backbones.removal import HeadLayer
from brainet_pl.backbones.taps import Taps
from brainet_pl.lightning.restoring import named_layers
from brainet_pl.network import HeadSettings
from brainet_pl.prediction.finite import first_bad_weight
from brainet_pl.serving.images import ImageSteps
from brainet_pl.structure import GGT
from brainet_pl.swap.model import SwappedModel
from brainet_pl.tasks.classification import check_class_names

FORMAT = 1
KIND = "SwappedModel"


def save_swapped(model: SwappedModel, path: str | Path) -> None:
    """Write a model with its head to a file, weights of the backbone included."""
    head, backbone = model.require_head(), model.backbone
    if model.settings is None:
        raise ValueError(
            "expected the settings of the head, to build it again, got none: give them, SwappedModel(…, settings=…)"
        )
    weight = first_bad_weight(model)
    if weight is not None:
        raise ValueError(f"expected finite weights, got NaN or infinity in {weight}: no file was written")
    takes = backbone.input_signature
    content = primitive(
        {
            "format": FORMAT,
            "kind": KIND,
            "network": type(backbone.model).__name__,
            "backbone": {"head_layer": backbone.head_layer, "freeze": backbone.frozen, "pool": backbone.pool},
            "removed": None if backbone.removed is None else backbone.removed._asdict(),
            "layers": {**named_layers(backbone.taps), "evidence": backbone.evidence},
            "takes": None if takes is None else {name: sample._asdict() for name, sample in takes.items()},
            "num_classes": model.task.num_classes,
            "in_features": model.in_features,
            "head": model.settings,
            "ggt": None if head.ggt is None else head.ggt.to_dict(),
            "scores": list(model.scores),
            "calibration": model.calibration,
            "conformal": model.conformal,
            "verdict": vars(model.verdict),
            "columns": None if model.columns is None else vars(model.columns),
            "passes": model.num_passes,
            "class_names": model.class_names,
            "images": None if model.images is None else model.images.to_dict(),
        }
    )
    content["weights"] = dict(model.state_dict())
    write_saved(path, content)


def load_swapped(path: str | Path, model: nn.Module) -> SwappedModel:
    """The model that `SwappedModel.save` wrote, ready to predict. No code of the file is run.

    Args:
        path: the file; one that is damaged or holds more than tensors and plain values is refused.
        model: a network of the class that was swapped; its weights come from the file, and it is copied, never changed.
    """
    stored = read_saved(path, "a swapped model", "SwappedModel.save")
    if stored.get("kind") != KIND or stored.get("format") != FORMAT:
        raise ValueError(
            f"expected a swapped model of format {FORMAT} in {path}, got something else: load it with its own class "
            "and version"
        )
    check_digest(stored, "the model", path)
    if type(model).__name__ != stored["network"]:
        raise ValueError(
            f"expected a network of the class {stored['network']}, got {type(model).__name__}: give one like that "
            "whose head was swapped"
        )
    try:
        return _rebuild(stored, model)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(
            f"expected a network like the one whose head was swapped for {path}, got one that its weights do not fit "
            f"({error}): build it with the same arguments"
        ) from error


def _rebuild(stored: Mapping[str, Any], model: nn.Module) -> SwappedModel:
    weights, features, classes = stored["weights"], stored["in_features"], stored["num_classes"]
    backbone = Backbone(model, layers=None, **stored["backbone"]).build()
    if stored["removed"] is not None:
        backbone.remove(HeadLayer(**stored["removed"]))
    layers = stored["layers"]
    taps = None if layers["layers"] is None else Taps.of(layers["layers"], layers["pool"])
    backbone.choose(taps, layers["evidence"])
    if stored["takes"] is not None:
        backbone.input_signature = {k: Sample(tuple(v["shape"]), v["dtype"]) for k, v in stored["takes"].items()}
    settings = make_part(HeadSettings, stored["head"], "head")
    check_sizes([settings.settings(), {"num_classes": classes, "in_features": features}], weights)
    tree = None if stored["ggt"] is None else GGT.from_dict(stored["ggt"])
    check_build(lambda: settings.build(features, classes, tree), weights)
    columns = None if stored["columns"] is None else Columns(**stored["columns"])
    made = SwappedModel(backbone, settings.build(features, classes, tree), classes, settings=settings, columns=columns)
    made.in_features, made.num_passes = features, stored["passes"]
    made.attach(stored["scores"], stored["calibration"], stored["conformal"], stored["verdict"])
    names, images = stored["class_names"], stored["images"]
    made.class_names = check_class_names(names, made.task)
    made.images = None if images is None else ImageSteps(**images)
    made.load_state_dict(weights)
    return made.eval()
