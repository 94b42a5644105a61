"""What to label next: samples that a model is unsure of, each unlike the others that are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl.decisions.doors import passes_of, predictor_behind

Floats = NDArray[np.float64]
POOL = 5  # times as many of the least sure samples as are asked for are candidates
NEAR = 1e-3  # cosine distance up to which two samples are the same to a person who labels them
INFORMATION = 0.25  # how much mutual information counts beside the margin: a quarter


def rank_for_labelling(model: Any, unlabelled: Any, k: int = 100) -> NDArray[np.int64]:
    """Choose the k samples that are worth most once they are labelled, the first ones first; gives their numbers.

    A sample is worth much where the two most probable classes are nearly level, where sub-networks disagree (mutual
    information), and where its features are unlike those that were chosen before it. Of near-duplicates one is chosen.

    Args:
        model: fitted, behind any door.
        unlabelled: inputs: an array or a tensor, a dataset or a loader, with or without labels; rows of an estimator.
        k: how many; fewer where fewer are different.
    """
    checks.whole("k", k, 1)
    predictor = predictor_behind(model)
    probabilities, information, features = [], [], []
    for passes in passes_of(model, unlabelled):
        scores = predictor.all_scores(passes)
        probabilities.append(predictor.calibrated(passes, scores).double().cpu().numpy())
        information.append(scores["mutual_information"].double().cpu().numpy())
        features.append(passes.features.float().flatten(1).cpu().numpy())
    doubts = doubt(np.concatenate(probabilities), np.concatenate(information))
    return choose_diverse(doubts, np.concatenate(features), k)


def doubt(probabilities: Floats, information: Floats) -> Floats:
    """Probabilities (N, C) and mutual information (N,) → (N,) from 0, sure, to 1: three quarters of it by the margin.

    >>> doubt(np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([0.2, 0.0])).round(2)
    array([1.  , 0.15])
    """
    top = np.sort(np.nan_to_num(probabilities), axis=1)[:, -2:]
    margin = 1 - (top[:, 1] - top[:, 0])
    most = max(float(np.nanmax(information)), 1e-12)
    return np.asarray((1 - INFORMATION) * margin + INFORMATION * np.nan_to_num(information) / most)


def choose_diverse(doubts: Floats, features: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Doubts (N,) and features (N, d) → numbers of at most k samples, each in doubt and far from those before it.

    Of the `POOL`·k samples in most doubt, the one in most doubt comes first. Each further one has the largest product
    of its doubt and its distance to the nearest of those that were chosen.

    >>> features = np.array([[1, 0], [1, 0], [0, 1], [1, 1]], dtype=np.float32)
    >>> choose_diverse(np.array([0.9, 0.8, 0.5, 0.1]), features + 0.0, 3).tolist()
    [0, 2, 3]
    """
    finite = np.flatnonzero(np.isfinite(features).all(axis=1))
    pool = finite[np.argsort(-doubts[finite], kind="stable")[: POOL * k]]
    centred = features[pool].astype(np.float64) - features[finite].mean(axis=0, dtype=np.float64)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    away = np.full(len(pool), np.inf)
    chosen: list[int] = []
    while len(chosen) < min(k, len(pool)):
        worth = doubts[pool] * (np.minimum(away, 2.0) if chosen else 1.0)
        worth[away <= NEAR] = -np.inf
        best = int(worth.argmax())
        if worth[best] == -np.inf:
            break  # the others are the same as one of those chosen
        chosen.append(best)
        away = np.minimum(away, 1 - unit @ unit[best])
    return pool[chosen]
