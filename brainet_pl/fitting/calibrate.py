"""Everything that a trained model learns without training: scores, posterior temperature, calibration, verdict."""

from __future__ import annotations

from brainet_pl.features.extraction import Extracted
from brainet_pl.features.training import SAMPLE_ROWS, TrainingFeatures
from brainet_pl.fitting.scores import fit_scores
from brainet_pl.fitting.settle import Settling, answer_rows, settle
from brainet_pl.prediction.finite import finite_samples
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.predictor import Predictor


def calibrate(
    predictor: Predictor, features: TrainingFeatures, held_out: Extracted, progress: bool = True
) -> dict[str, float]:
    """Fit the scores of a trained model to its training features, and learn from held-out samples; nothing is trained.

    Args:
        predictor: the model.
        features: of its training data.
        held_out: features and targets of samples that it was not trained on.
        progress: show progress bars.

    Returns:
        What was learned, by name; what the head chose under `head/<name>`.
    """
    with evaluation_mode(predictor):
        fit_scores(predictor, features, progress=progress)
        sample = features.sample()
        chosen = Settling(predictor).choose(finite_samples(sample), finite_samples(held_out.sample(SAMPLE_ROWS)))
        learned = settle(predictor, answer_rows(predictor, held_out))
    return {f"head/{name}": value for name, value in chosen.items()} | learned
