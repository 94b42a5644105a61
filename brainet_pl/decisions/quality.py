"""How well a label fits what a model says of a sample that it was not trained on: pure functions of arrays."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks

Floats = NDArray[np.float64]
Method = Literal["self_confidence", "margin"]


def label_quality(probabilities: Floats, labels: NDArray[np.int64], method: Method = "self_confidence") -> Floats:
    """Out-of-fold probabilities (N, C) and labels (N,) → (N,) from 0, a label that looks wrong, to 1.

    "self_confidence" is the probability of the label, "margin" half of one more than it less the largest of another
    class. Both are those of confident learning (Northcutt et al. 2021).

    >>> label_quality(np.array([[0.9, 0.1], [0.9, 0.1]]), np.array([0, 1]), "margin").round(2)
    array([0.9, 0.1])
    """
    checks.one_of("method", method, ("self_confidence", "margin"))
    own = probabilities[np.arange(len(labels)), labels]
    if method == "self_confidence":
        return np.asarray(own)
    others = probabilities.copy()
    others[np.arange(len(labels)), labels] = -np.inf
    return np.asarray((1 + own - others.max(axis=1)) / 2)


def looks_wrong(probabilities: Floats, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which labels (N,) confident learning counts as wrong.

    A class is confident of a sample from the mean probability on that samples with its label have. A label is wrong
    where the most probable of the classes that are confident is another one.
    """
    classes = probabilities.shape[1]
    own = label_quality(probabilities, labels)
    counts = np.bincount(labels, minlength=classes)
    sums = np.bincount(labels, weights=own, minlength=classes)
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    confident = probabilities >= thresholds - 1e-6
    best = np.where(confident, probabilities, -1.0).argmax(axis=1)
    return np.asarray(confident.any(axis=1) & (best != labels))
