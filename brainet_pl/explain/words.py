"""What a verdict goes by, in a sentence for somebody who has never heard of a density."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
SEEN = ("fine detail", "texture", "what it shows")  # by early, middle and late stages of a network
OF_PREDICTION = ("energy", "joint_energy", "entropy", "one_minus_max_p", "mutual_information")
MOST_OF_IT = 0.5  # share of a sum above which a part is most of it


def percentile(score: float, reference: Tensor, what: str = "calibration samples") -> str:
    """How strange a score is among sorted scores (n,) of held-out data.

    >>> percentile(3.5, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    'stranger than 75 % of the 4 calibration samples'
    """
    n = len(reference)
    below = n if math.isnan(score) else int((reference < score).sum())
    if below == n:
        return f"stranger than all {n:,} {what}"
    if below == 0:
        return f"less strange than all {n:,} {what}"
    share = 100 * below / n
    return (
        f"stranger than {share:.0f} % of the {n:,} {what}"
        if share < 99 or n < 1000
        else (f"stranger than {share:.1f} % of the {n:,} {what}")
    )


def place_name(row: float, column: float) -> str:
    """A place, each of its coordinates from 0 to 1, in words.

    >>> place_name(0.1, 0.2), place_name(0.5, 0.5), place_name(0.5, 0.9)
    ('at the top left', 'in the middle', 'at the right')
    """
    vertical, across = ROWS[min(2, int(3 * row))], COLUMNS[min(2, int(3 * column))]
    if vertical == across == "middle":
        return "in the middle"
    return "at the " + " ".join(word for word in (vertical, across) if word != "middle")


def stage_name(number: int, count: int) -> str:
    """What a stage of a network sees, in words.

    >>> [stage_name(i, 5) for i in range(5)]
    ['fine detail', 'fine detail', 'texture', 'what it shows', 'what it shows']
    """
    return SEEN[min(2, int(3 * (number + 0.5) / count))]


def mostly(shares: Mapping[str, float]) -> str:
    """Which of the scores that a verdict joins it is due to; "" where no one is most of it, or where there is one."""
    total = sum(shares.values())
    if len(shares) < 2 or not total > 0:
        return ""
    name, value = max(shares.items(), key=lambda item: item[1])
    if value < MOST_OF_IT * total:
        return ""
    if name.startswith(OF_PREDICTION):
        return "mostly because the prediction is unsure"
    if name.startswith("knn"):
        return "mostly because no known sample is near"
    return "mostly because its features do not go together as they usually do"


def listed(reasons: Sequence[str]) -> str:
    """Parts of a sentence as one sentence.

    >>> listed(["stranger than 75 % of the 4 calibration samples", "", "most of it at the top left"])
    'Stranger than 75 % of the 4 calibration samples; most of it at the top left.'
    """
    text = "; ".join(reason for reason in reasons if reason)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def strongest_place(surprise: Tensor) -> tuple[float, float]:
    """A map (H, W) → where it is largest, each coordinate from 0 to 1."""
    place = int(surprise.nan_to_num(nan=-torch.inf).argmax())
    height, width = surprise.shape
    return (place // width + 0.5) / height, (place % width + 0.5) / width
