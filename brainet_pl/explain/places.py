"""Where an image is strange: maps of the stages of a network, caught in the pass that also gives the prediction."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brainet_pl._utils.framework import rank_zero_warn
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.backbones import FeatureExtractor, batches
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.stages import first_tensor
from brainet_pl.backbones.taps import LAST, Tap
from brainet_pl.features.extraction import inference, inputs_of, run_backbone
from brainet_pl.features.training import TrainingFeatures, batches_of
from brainet_pl.prediction.network import device_of
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import Stages
from brainet_pl.scores.cells import coarse

MOST_IMAGES = 128  # training images that are read once more, two thirds for densities and one third to compare with
USUAL_IMAGES, LEAST_IMAGES = 64, 24  # of small training sets; fewer say nothing of how strange a place may be
SHARE = 8  # of large ones, one in so many: a fit gets no slower by more
BATCH = 16  # images at a time
HELD = 3  # every third image is held out of the densities


def tapped(backbone: FeatureExtractor, score: Stages) -> list[Tap]:
    """The layers that a score of stages reads, those alone that give maps or a square of tokens."""
    views = [view for view in getattr(backbone, "views", []) if view.taps == score.taps]
    taps = [tap for view in views[:1] for tap in view.resolved]
    return [tap for tap in taps if tap.layer != LAST and _is_map(tap)]


def _is_map(tap: Tap) -> bool:
    if len(tap.shape) == 3:
        return True
    return len(tap.shape) == 2 and tap.channels < 0 and _side(tap.shape[0]) > 1


def _side(tokens: int) -> int:
    """The side of the square that tokens make, with or without one for the class before them; 0 where they make none.

    >>> _side(196), _side(197), _side(77)
    (14, 14, 0)
    """
    for count in (tokens, tokens - 1):
        if count > 0 and math.isqrt(count) ** 2 == count:
            return math.isqrt(count)
    return 0


def as_map(output: Tensor, tap: Tap) -> Tensor:
    """The output of a layer as maps (B, C, H, W)."""
    if output.dim() == 4:
        return output.movedim(tap.channels, 1)
    side = _side(output.shape[1])
    tokens = output[:, -side * side :].transpose(1, 2)
    return tokens.reshape(*tokens.shape[:2], side, side)


class CaughtMaps:
    """Maps of some layers, filled while a backbone runs within `catching`; coarse, so that they take little memory."""

    def __init__(self, taps: list[Tap]) -> None:
        self.taps = taps
        self._found: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def catching(self, backbone: FeatureExtractor) -> Iterator[None]:
        """Within it, passes of the backbone fill the maps."""
        handles = []
        for tap in self.taps:
            layer = backbone.model.get_submodule(tap.layer)
            handles.append(layer.register_forward_hook(lambda module, args, output, tap=tap: self._take(tap, output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, tap: Tap, output: Any) -> None:
        tensor = first_tensor(output)
        assert tensor is not None
        self._found[tap.layer] = coarse(as_map(tensor.detach().float(), tap))

    def collect(self) -> list[Tensor]:
        """The maps of the last pass, those of each layer."""
        found, self._found = self._found, {}
        return [found[tap.layer] for tap in self.taps]


def stages_of(predictor: Predictor) -> Stages | None:
    """The score of stages that a verdict goes by; None where it goes by none."""
    return next((score for score in predictor.scores if isinstance(score, Stages)), None)


def learn_places(predictor: Predictor, features: TrainingFeatures, count: int) -> None:
    """Fit the densities of cells of a model's stages to a few of `count` training images, which are read once more."""
    score = stages_of(predictor)
    if score is None:
        return
    score.maps.forget()
    taps = tapped(predictor.backbone, score)
    if not taps:
        return
    caught = CaughtMaps(taps)
    fitted: list[list[Tensor]] = [[] for _ in taps]
    held: list[list[Tensor]] = [[] for _ in taps]
    seen = 0
    with isolated_rng(0), inference(predictor.backbone, features.device) as device, caught.catching(predictor.backbone):
        for inputs in _images(features, min(MOST_IMAGES, max(USUAL_IMAGES, count // SHARE))):
            run_backbone(predictor.backbone, batches.move(inputs, device))
            is_held = torch.arange(seen, seen + batches.size(inputs)) % HELD == HELD - 1
            for stage, maps in enumerate(caught.collect()):
                fitted[stage].append(maps.cpu()[~is_held])
                held[stage].append(maps.cpu()[is_held])
            seen += len(is_held)
    if seen < LEAST_IMAGES:
        return
    try:
        score.maps.to("cpu").fit(fitted, held)
    except ValueError as error:  # maps with NaN, or of one value
        score.maps.forget()
        rank_zero_warn(f"no map says where an image is strange: {error}")
    score.maps.to(device_of(predictor))


def _images(features: TrainingFeatures, rows: int) -> Iterator[Any]:
    """Few training images, a few at a time; nothing where the training data are features already."""
    for batch in batches_of(features.source, rows):
        inputs = inputs_of(batch, features.columns)
        if isinstance(inputs, BackboneOutput):
            return
        size = min(rows, batches.size(inputs))
        for first in range(0, size, BATCH):
            yield batches.rows(inputs, slice(first, min(first + BATCH, size)))
        rows -= size
        if rows <= 0:
            return
