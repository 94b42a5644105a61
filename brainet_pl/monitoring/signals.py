"""Which numbers of an answer are watched: how strange an input is, how sure the model is, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
# Scores of a model, those first that tell most of strange inputs.
SCORES = ("joint", "combined", "generative", "mahalanobis", "knn", "own_energy", "energy", "entropy", "one_minus_max_p")
DOUBT = ("energy", "entropy", "one_minus_max_p", "std")
ANSWER = "answer"
READ = tuple(dict.fromkeys((*SCORES, *DOUBT, "class", "mean")))  # what `signals_of` reads


def signals_of(answers: Mapping[str, ArrayLike], score: str | None = None) -> dict[str, Floats]:
    """What a model said of N inputs, by name → at most three signals (N,) for `DriftMonitor`.

    The score by which inputs are judged, the doubt of the prediction, and `answer`: the predicted number, or the class
    and within it the score, in one order. That order is where a change of the classes' shares shows.

    Args:
        answers: `class` or `mean`, and scores.
        score: the one by which inputs are judged; None is the first of `SCORES` that is there.
    """
    leading = _first_of([score] if score is not None else [*SCORES, "std"], answers)
    signals: dict[str, Floats] = {}
    for name in (leading, _first_of(DOUBT, answers)):
        if name is not None:
            signals[name] = np.asarray(answers[name], dtype=np.float64)
    if "class" in answers:
        inside = 0.0 if leading is None else 0.5 + np.arctan(signals[leading]) / np.pi  # between 0 and 1, in its order
        signals[ANSWER] = np.asarray(answers["class"], dtype=np.float64) + inside
    elif "mean" in answers:
        signals[ANSWER] = np.asarray(answers["mean"], dtype=np.float64)
    if not signals:
        raise ValueError(
            f"expected a class, a mean or scores among what a model said, got {', '.join(answers) or 'nothing'}: name "
            "the columns to watch"
        )
    return signals


def _first_of(names: Sequence[str], answers: Mapping[str, ArrayLike]) -> str | None:
    """The first of these names that an answer has."""
    return next((name for name in names if name in answers), None)


def half_for_the_first(signals: Mapping[str, ArrayLike]) -> dict[str, float]:
    """Weights of `DriftMonitor`: half of α for the first signal, the rest evenly for the others."""
    return {name: 1.0 if i == 0 else 1.0 / (len(signals) - 1) for i, name in enumerate(signals)}
