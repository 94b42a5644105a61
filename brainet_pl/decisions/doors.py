"""What decisions need of a model behind any door: its predictor, the settings of its head, its features and passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from brainet_pl.backbones import batches as batching
from brainet_pl.callbacks.any_module import predictor_of, swapped_layer
from brainet_pl.features.extraction import Extracted, extract
from brainet_pl.network import HeadSettings
from brainet_pl.prediction.inputs import InputReader
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.swap.data import labelled_batches
from brainet_pl.swap.in_place import LayerInputs
from brainet_pl.swap.layer import swapped_layers
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes


def predictor_behind(model: Any) -> Predictor:
    """What answers in a fitted model, whichever door it is; classes alone have decisions."""
    inner = getattr(model, "network_", model)  # of an estimator
    found = inner if isinstance(inner, Predictor) else None
    if found is None and isinstance(inner, nn.Module):
        found = predictor_of(inner)
    if found is None:
        raise ValueError(
            "expected a fitted BRAINet, model of swap_head, module with one swapped layer or estimator, got "
            f"{type(model).__name__}: fit it first"
        )
    if not isinstance(found.task, Classification):
        raise ValueError(
            f"expected a classification, got {type(found.task).__name__}: of numbers take intervals, `Conformal`"
        )
    return found


def settings_behind(model: nn.Module) -> HeadSettings:
    """The settings that the head of a torch model was built with."""
    layer = swapped_layer(model)
    found = getattr(model, "head_settings", None) or getattr(model, "settings", None) or (layer and layer.settings)
    assert isinstance(found, HeadSettings)
    return found


def read_features(model: nn.Module, data: Any, progress: bool = True) -> Extracted:
    """What the head of a torch model reads of inputs, and their labels; the model is run in evaluation mode."""
    columns = getattr(model, "columns", None)
    with torch.no_grad(), evaluation_mode(model):
        return extract(_reader(model), labelled_batches(data, "data"), progress=progress, columns=columns)


def passes_of(model: Any, x: Any) -> Iterator[Passes]:
    """Passes of inputs of any form, a batch at a time, in evaluation mode; rows of an estimator."""
    predictor, columns = predictor_behind(model), getattr(model, "columns", None)
    is_estimator = hasattr(model, "network_")
    reader = None if is_estimator else _reader(model)
    module = predictor if is_estimator else model
    images, takes_texts = getattr(model, "images", None), predictor.backbone.takes_texts
    rows = model.encoded_rows(x) if is_estimator else x
    for batch in InputReader(None, images, columns, takes_texts).batches(rows):
        inputs = batching.move(batch, device_of(module))
        with torch.no_grad(), evaluation_mode(module):
            yield predictor.passes(inputs if reader is None else reader(inputs, more=True))


def _reader(model: nn.Module) -> Any:
    """What gives the features of inputs: the backbone, or the model up to its swapped layer."""
    layers = list(swapped_layers(model))
    return LayerInputs(model, layers[0]) if layers else predictor_behind(model).backbone
