"""A model as one folder that needs no torch: graph, names, preparation of inputs, an example and a client."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.atomic import atomic_folder
from brainet_pl._utils.texts import Texts, are_texts
from brainet_pl.backbones import batches
from brainet_pl.backbones.texts import TextEncoder
from brainet_pl.export.graph import FEATURES, Model, example_of, export_onnx, input_names, predictor_of
from brainet_pl.lightning.module import BRAINet
from brainet_pl.monitoring.columns import Columns
from brainet_pl.monitoring.signals import signals_of
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.prediction.transforms import read_transform
from brainet_pl.serving import ExportedModel
from brainet_pl.serving.about import FORMAT
from brainet_pl.serving.folder import ABOUT, CLIENT, CLIENT_TEXT, EXAMPLE, GRAPH, MAPS, TOKENIZER, digest
from brainet_pl.serving.images import ImageSteps
from brainet_pl.serving.tables import Feature, features_of

BATCH = 256  # held-out samples that are predicted at a time
MOST_FEATURES = 512  # that the drift alarm watches; of more, each would have too small a part in α
MEANINGS = {
    "class": "number of the most probable class; -1 where there is none",
    "probabilities": "calibrated probability of each class",
    "labels": "labels that are said to be there",
    "set": "classes that hold the true one at the level of the conformal sets",
    "known_p": "share of held-out samples at least as strange; small is unlike the training data",
    "known": "whether known_p is above the level of the verdict",
    "answered": "whether the answer keeps what risk says, so that it may be relied on",
    "mean": "predicted number",
    "std": "standard deviation of the prediction",
    "epistemic_std": "part of it that sub-networks disagree about",
    "aleatoric_std": "part of it that they agree about",
    "lower": "lower end of the interval",
    "upper": "upper end of the interval",
}


def export_folder(
    model: Model,
    folder: str | Path,
    example: Any = None,
    *,
    class_names: Sequence[str] | None = None,
    images: ImageSteps | Callable[..., Any] | None = None,
    features: Sequence[Feature] | None = None,
    held: Any = None,
    passes: int | None = None,
    seed: int = 0,
) -> Path:
    """Write a model as a folder that `ExportedModel`, `brainet serve` and its own `client.py` run without torch.

    Args:
        model: with its head; it is left as it was.
        folder: is made, or replaced where it holds the files of an exported model alone.
        example: inputs of any batch size; None is made after the first inputs that the model ever got.
        class_names: names of the classes; None takes those that the model knows.
        images: how image files are prepared: steps, or a transform of torchvision that can be written as such. None is
            what the model knows: a swapped one from the data that it was fitted on, any other from its backbone's
            weights, where they say so.
        features: how rows of a table are prepared; None takes numbers.
        held: held-out inputs, or an iterable of batches of them. Their answers, and up to 512 features, are the
            reference of the drift alarm; None takes the scores of validation data that the model keeps, without classes
            and features.
        passes: sub-networks of a head that draws; None is the model's own number.
        seed: of their draw.
    """
    predictor = predictor_of(model)
    maps = not isinstance(model, BRAINet | Predictor)
    if maps and held is not None:
        raise ValueError("expected no held-out images of a model of maps, got some: no drift alarm watches maps")
    place = Path(folder)
    steps = _image_steps(model, images)
    names = class_names if class_names is not None else getattr(predictor if maps else model, "class_names", None)
    encoder = predictor.backbone.model
    texts = encoder.steps if isinstance(encoder, TextEncoder) else None
    with atomic_folder(place, (GRAPH, ABOUT, EXAMPLE, CLIENT, TOKENIZER)) as made:
        if texts is not None:
            (made / TOKENIZER).write_text(texts.tokenizer, encoding="utf-8")
        if isinstance(encoder, TextEncoder) and are_texts(held):
            held = encoder.tokens(Texts(held))
        given_held = None if held is None else list(_batches(held))
        narrow = held is not None and (predictor.in_features or 0) <= MOST_FEATURES
        outputs = export_onnx(model, made / GRAPH, example, passes=passes, seed=seed, features=narrow)
        given = example_of(model, example)
        about = {
            "format": FORMAT,
            "brainet_pl": str(getattr(sys.modules["brainet_pl"], "__version__", "")),
            "torch": str(torch.__version__),
            "sha256": digest(made / GRAPH),
            "task": MAPS if maps else type(predictor.task).__name__,
            "class_names": None if names is None else [str(name) for name in names],
            "inputs": _inputs(given, free=texts is not None),
            "outputs": [_output(predictor, name) for name in outputs],
            "verdict": {"score": _verdict_score(predictor), "level": predictor.verdict.level},
            "conformal": None if predictor.conformal is None else predictor.conformal.settings(),
            "risk": None if predictor.risk.promise is None else predictor.risk.promise._asdict(),
            "images": None if steps is None else steps.to_dict(),
            "features": None if features is None else [one.to_dict() for one in features],
            "texts": None if texts is None else {"max_tokens": texts.max_tokens, "pad": texts.pad},
            "held_out": None if maps else _reference(predictor),
        }
        _write(made / ABOUT, about)
        runs = ExportedModel(made, threads=1)
        if given_held is not None:
            about["held_out"] = _signals_of_inputs(runs, given_held)
            _write(made / ABOUT, about)
        first = {name: tensor[:2].cpu().numpy() for name, tensor in named(given).items()}
        shown: dict[str, Any] = first | {f"output_{name}": values for name, values in runs.predict(first).items()}
        np.savez(made / EXAMPLE, **shown)
        (made / CLIENT).write_text(CLIENT_TEXT, encoding="utf-8")
    return place


def _image_steps(model: Model, given: Any) -> ImageSteps | None:
    """How image files are prepared: as was asked for, or as the model knows."""
    if given is None and isinstance(model, BRAINet):
        return None if model.preset is None else ImageSteps(**model.preset.to_dict())
    if given is None or isinstance(given, ImageSteps):
        return getattr(model, "images", None) if given is None else given
    steps = read_transform(given)
    if steps is None:
        raise ValueError(
            f"expected images to be resizing, a crop in the middle and normalisation, got {checks.shown(given)}, which "
            "does something else, or draws: give ImageSteps(resize, crop, mean, std), or prepare images yourself"
        )
    return steps


def named(inputs: Any) -> dict[str, Tensor]:
    """Inputs by the names that the graph has for them."""
    return dict(zip(input_names(inputs), inputs.values() if isinstance(inputs, Mapping) else [inputs], strict=True))


def _inputs(given: Any, free: bool) -> list[dict[str, Any]]:
    """Name, type and shape of each input; `free` says that texts may have any number of tokens."""
    found = []
    for name, tensor in named(given).items():
        shape = [None, None] if free else [None, *tensor.shape[1:]]
        found.append({"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape})
    return found


def _output(predictor: Predictor, name: str) -> dict[str, Any]:
    """What one output is: higher scores are more unlike the training data."""
    if name == FEATURES:
        return {"name": name, "role": FEATURES, "meaning": "what the head reads, for the drift alarm"}
    if name in MEANINGS:
        return {"name": name, "role": "answer", "meaning": MEANINGS[name]}
    unit = predictor.scores.units.get(name, "")
    return {"name": name, "role": "score", "unit": unit, "higher": "more unlike the training data"}


def _verdict_score(predictor: Predictor) -> str | None:
    return predictor.verdict_score(predictor.scores.reference.names)


def _reference(predictor: Predictor) -> dict[str, list[float]] | None:
    """Scores of the validation data that the model keeps, as the drift alarm wants them."""
    reference = predictor.scores.reference
    known = {name: reference[name].double().cpu().numpy() for name in reference.names}
    return {n: v.tolist() for n, v in signals_of(known, _verdict_score(predictor)).items()} if known else None


def _batches(held: Any) -> Iterator[dict[str, Any]]:
    """Held-out inputs, or batches of them → arrays of at most `BATCH` samples, by the names of inputs."""
    for part in [held] if isinstance(held, Tensor | Mapping) else held:
        arrays = {name: tensor.cpu().numpy() for name, tensor in named(part).items()}
        for i in range(0, batches.size(part), BATCH):
            yield {name: array[i : i + BATCH] for name, array in arrays.items()}


def _signals_of_inputs(model: ExportedModel, held: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the drift alarm compares with; of features only the ends of bins."""
    parts = [model.predict(part) for part in held]
    outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    found: dict[str, Any] = {name: values.tolist() for name, values in model.scores_of(outputs).items()}
    if FEATURES not in outputs:
        return found
    return found | {FEATURES: Columns.of(FEATURES, outputs[FEATURES], np.random.default_rng(0)).to_dict()}


def _write(path: Path, about: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def features_of_table(data: Any) -> list[Feature]:
    """How a `Table` that was set up turns rows into numbers."""
    found = []
    for encoder in data.encoders:
        for feature in features_of(encoder.column):
            if feature.kind in ("number", "date"):
                feature = replace(feature, fill=encoder.center, center=encoder.center, scale=encoder.scale)
            found.append(feature)
        if encoder.marked:
            found.append(Feature(encoder.name, "missing"))
    return found
