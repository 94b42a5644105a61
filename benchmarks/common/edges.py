"""How far probabilities of edges can be believed, from what is stored of them: counts and sums by bin.

`bins` are three lists, one entry a bin: how many pairs of variables, the sum of their probabilities, how many are true.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

Bins = Sequence[Sequence[float]]


def pooled(samples: Iterable[Bins]) -> Bins:
    """The bins of all pairs of several samples together: one sample has too few for a calibration error."""
    return [[sum(one) for one in zip(*parts, strict=True)] for parts in zip(*samples, strict=True)]


def calibration_error(bins: Bins) -> float:
    """The mean over pairs of the distance between their bin's mean probability and its share of true ones.

    Example:
        >>> calibration_error([[10, 10], [1.0, 9.0], [2, 9]])
        0.05
    """
    gap = sum(abs(p - true) for p, true in zip(bins[1], bins[2], strict=True))
    return gap / max(1.0, sum(bins[0]))


def error_by_chance(bins: Bins, draws: int = 400) -> float:
    """The calibration error that the same probabilities would have on average if they were exactly right."""
    dice, gap = random.Random(0), 0.0
    for count, total in zip(bins[0], bins[1], strict=True):
        for _ in range(draws if count else 0):
            gap += abs(sum(dice.random() < total / count for _ in range(int(count))) - total) / draws
    return gap / max(1.0, sum(bins[0]))
