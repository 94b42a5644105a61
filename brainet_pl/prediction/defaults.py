"""What a model learns from calibration data where a user names nothing: one default for every door.

Classes get a temperature, and confidence that fades on inputs unlike the training data, at a price of at most 1 % of
the NLL of calibration data (docs/howto/honest.md has the measurement that this was chosen by). The density that it
fades by is also the first part of the verdict.
"""

from __future__ import annotations

from brainet_pl.backbones import FeatureExtractor
from brainet_pl.calibration import Calibrator, DensityScaling, LabelScaling, TemperatureScaling
from brainet_pl.calibration.density import density_of, make_density
from brainet_pl.scores import Score, ScoreSet
from brainet_pl.tasks import Classification, MultiLabel, Task

AUTO_CALIBRATION = "auto"


def default_scores(backbone: FeatureExtractor) -> list[Score]:
    """A density: of all stages of a convolutional network, else of the features that the head reads."""
    return [make_density(None if backbone.raw else backbone.model)]


def default_calibrator(task: Task, scores: ScoreSet) -> Calibrator | None:
    """Fading by the density of a model of classes, a temperature where it has none; one for each of several labels."""
    if isinstance(task, MultiLabel):
        return LabelScaling()
    if not isinstance(task, Classification):
        return None
    density = density_of(scores)
    return TemperatureScaling() if density is None else DensityScaling(score=density)
