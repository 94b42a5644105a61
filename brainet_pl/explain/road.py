"""The one road from inputs to an explanation, which every door walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from brainet_pl._utils.precision import wide
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.explain.columns import ColumnParts, Units, explain_columns, plain_units
from brainet_pl.explain.explanation import Explanation
from brainet_pl.explain.places import CaughtMaps, stages_of, tapped
from brainet_pl.features.extraction import run_backbone
from brainet_pl.prediction.finite import nan_rows
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import Combined, Generative, Score, Stages
from brainet_pl.scores.cells import PlaceMap
from brainet_pl.tasks.passes import Passes

USUAL_PLACES = 0.9  # share of the places of held-out images that are not coloured
USUAL_PEAKS = 0.95  # share of held-out images whose strangest place is less than the strongest colour
NO_STAGES = "the network has no stages of maps, so that no place is shown"
NO_MAPS = "too few images were there in the fit, so that no place is shown"
FEATURES_ALONE = "the head is given features in place of inputs, so that no place is shown"
HIDDEN = "the verdict reads features of a network, which have no names"
NO_DENSITY = "the verdict goes by no density, so that no part of the input is to blame"
LEVELS = "the density counts levels, so that no usual values are told"


@torch.no_grad()
def explain_batch(predictor: Predictor, x: Any, passes: int | None = None) -> Explanation:
    """Inputs (B, …), or what a backbone gave for them → why they look known or unknown; the backbone runs once."""
    score = stages_of(predictor)
    with evaluation_mode(predictor):
        if score is None or isinstance(x, BackboneOutput) or not score.maps.ready:
            return explain_passes(predictor, predictor.passes(x, passes), why_no_map=_why_no_map(predictor, x))
        predictor.backbone.trace(x)  # a model that was read from a file has met no input yet
        caught = CaughtMaps(tapped(predictor.backbone, score))
        with caught.catching(predictor.backbone):
            readings = run_backbone(predictor.backbone, x)
        found = predictor.passes(readings, passes)
        nan = nan_rows(x, len(found.predicted))
        return explain_passes(predictor, replace(found, nan_inputs=nan), places=score.maps(caught.collect()))


def _why_no_map(predictor: Predictor, x: Any) -> str:
    score = stages_of(predictor)
    if score is None:
        return "" if predictor.backbone.raw else NO_STAGES
    if isinstance(x, BackboneOutput):
        return FEATURES_ALONE
    return NO_MAPS if tapped(predictor.backbone, score) else NO_STAGES


@torch.no_grad()
def explain_passes(
    predictor: Predictor,
    passes: Passes,
    units: Sequence[Units] | None = None,
    places: PlaceMap | None = None,
    why_no_map: str = "",
    members: Sequence[Mapping[str, Tensor]] = (),
) -> Explanation:
    """What is said of passes that were run.

    Args:
        predictor: the model.
        passes: of a batch, in evaluation mode.
        units: the columns that the verdict's density reads; None where inputs are the columns, or a network reads them.
        places: where the images of the batch are strange.
        why_no_map: why there are none, in words.
        members: the scores (B,) of each of several members, whose mean the prediction has; nothing for a single one.
    """
    prediction = predictor.describe(passes)
    name = predictor.verdict_score(prediction.scores)
    density = density_of_verdict(predictor, name)
    columns, why_no_columns = None, ""
    if places is None:
        columns, why_no_columns = _columns(predictor, passes, density, units)
    known, nearest = predictor.scores.known, None
    if density is not None and len(known):
        nearest = known(wide(passes.with_features_of(density.taps).features))
    reference = torch.empty(0) if name is None else predictor.scores.reference[name]
    every = [shares_of(predictor, name, scores) for scores in members or [prediction]]
    shares = {part: torch.stack([one[part] for one in every]).mean(dim=0) for part in every[0]}
    missing = [reason for reason in (why_no_map, why_no_columns) if reason][:1]
    ends = (0.0, 1.0) if places is None else _ends(predictor)
    return Explanation(prediction, name, reference, shares, columns, places, ends, nearest, missing)


def density_of_verdict(predictor: Predictor, name: str | None) -> Score | None:
    """The density among the scores that a verdict goes by; None where there is none."""
    if name is None:
        return None
    names = predictor.scores.parts_of(name) or (name,)
    for score in predictor.scores:
        if (isinstance(score, Stages) or score.densities) and score.name_in_model(next(iter(score.units))) in names:
            return score
    return None


def _columns(
    predictor: Predictor, passes: Passes, density: Score | None, units: Sequence[Units] | None
) -> tuple[ColumnParts | None, str]:
    """Which columns are strange, or why that can't be said."""
    if density is None:
        return None, NO_DENSITY
    densities = [one for one in density.densities if isinstance(one, Generative)]
    if not densities:
        return None, ""
    features = wide(passes.with_features_of(density.taps).features)
    if units is None:
        if not predictor.backbone.raw:
            return None, HIDDEN
        names = None if predictor.ggt is None else predictor.ggt.names
        units = plain_units(features.shape[1], names if names and len(names) == features.shape[1] else None)
    found = explain_columns(densities, features, units)
    return found, "" if found is not None else LEVELS


def shares_of(predictor: Predictor, name: str | None, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What each score (B,) adds to the one that a verdict goes by, which they sum up to."""
    if name is None:
        return {}
    for joined in predictor.scores:
        if isinstance(joined, Combined) and joined.name_in_model("joint") == name:
            return joined.parts(scores)
    return {name: scores[name]}


def _ends(predictor: Predictor) -> tuple[float, float]:
    """From which summed surprise on a place is coloured, and from which it has the strongest colour."""
    score = stages_of(predictor)
    assert score is not None
    ends = [score.maps.held.quantile(USUAL_PLACES), score.maps.peaks.quantile(USUAL_PEAKS)]
    return float(ends[0]), float(ends[1])
