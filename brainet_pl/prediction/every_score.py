"""All scores of inputs unlike the training data that a model can have."""

from __future__ import annotations

from brainet_pl.backbones import FeatureExtractor
from brainet_pl.calibration.density import make_density
from brainet_pl.scores import (
    FDBD,
    GEN,
    KNN,
    RMDS,
    Generative,
    KLMatching,
    Mahalanobis,
    NNGuide,
    Own,
    Score,
    Shaped,
    Stages,
    ViM,
)


def every_score(backbone: FeatureExtractor, has_classes: bool) -> list[Score]:
    """All scores that a model can have, for a table of everything."""
    density = make_density(None if backbone.raw else backbone.model)
    scores: list[Score] = [Generative()]
    if isinstance(density, Stages):
        scores.append(density)
    scores += [KNN(), Mahalanobis()]
    if has_classes:
        scores += [RMDS(), GEN(), KLMatching()]
    has_last_layer = not backbone.raw and backbone.frozen and backbone.head_layer != ""
    if has_classes and has_last_layer:
        scores += [Own(), ViM(), FDBD(), NNGuide(), Shaped("scale"), Shaped("ash", 0.9, name="ash")]
    return scores
