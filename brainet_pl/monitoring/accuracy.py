"""How accurate a model still is, without labels: from what it says of itself, as far as that can be trusted.

A calibrated model is right with the probability that it gives, so the mean of the largest probabilities estimates its
accuracy (confidence-based performance estimation). It is as good as the calibration is on these inputs: probabilities
that fade with the density of the inputs (`DensityScaling`) stay closer to the truth on changed ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brainet_pl._utils import checks

Floats = NDArray[np.float64]
MIN_HELD_OUT = 30  # held-out samples below which they say too little of the calibration


@dataclass(frozen=True)
class AccuracyEstimate:
    """The share of inputs whose most probable class is the true one, estimated without labels.

    Attributes:
        accuracy: the estimate.
        low: lower end of the interval.
        high: upper end.
        inputs: how many inputs it is about.
        level: the probability with which the interval holds the true share, while the calibration of these inputs is
            that of the held-out ones.
    """

    accuracy: float
    low: float
    high: float
    inputs: int
    level: float

    def __str__(self) -> str:
        return f"{self.accuracy:.1%} ({self.low:.1%} to {self.high:.1%})"


def estimate_accuracy(
    confidence: ArrayLike,
    held_confidence: ArrayLike | None = None,
    held_correct: ArrayLike | None = None,
    level: float = 0.95,
) -> AccuracyEstimate:
    """The largest probability (N,) of each input → the accuracy on them.

    The interval knows of two things that vary: which of the inputs happen to be right, and, with held-out samples, how
    far the model's confidence was from its accuracy there, which also moves the estimate.

    Args:
        confidence: of inputs without labels.
        held_confidence: (H,) the same of held-out samples.
        held_correct: (H,) whether they were predicted right.
        level: of the interval.

    >>> print(estimate_accuracy([0.9] * 400))
    90.0% (87.1% to 92.9%)
    """
    if not 0 < checks.share("level", level) < 1:
        raise ValueError(f"expected level between 0 and 1, got {level}: 0.95 is usual")
    p = _shares("confidence", confidence)
    bias, variance = 0.0, float((p * (1 - p)).sum()) / len(p) ** 2
    if (held_confidence is None) != (held_correct is None):
        raise ValueError("expected confidence and correctness of held-out samples, got one of the two: give both")
    if held_confidence is not None and held_correct is not None:
        held, correct = _shares("held_confidence", held_confidence), _shares("held_correct", held_correct)
        if len(held) != len(correct) or len(held) < MIN_HELD_OUT:
            raise ValueError(
                f"expected as many confidences as answers of at least {MIN_HELD_OUT} held-out samples, got {len(held)} "
                f"and {len(correct)}: give more, or leave both out"
            )
        gap = correct - held
        bias, variance = float(gap.mean()), variance + float(gap.var(ddof=1)) / len(gap)
    middle = min(1.0, max(0.0, float(p.mean()) + bias))
    reach = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt(variance)
    return AccuracyEstimate(middle, max(0.0, middle - reach), min(1.0, middle + reach), len(p), level)


def _shares(name: str, values: ArrayLike) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not len(found) or not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"expected {name} (N,) between 0 and 1, got others: give one number an input, and no NaN")
    return found
