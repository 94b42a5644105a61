"""What the experiments of the paper report of a prediction."""

from __future__ import annotations

from torch import Tensor

from brainet_pl import uncertainty
from brainet_pl.metrics import curves
from brainet_pl.metrics.measures import classification_measures, collect
from brainet_pl.tasks.classification import predictive_scores
from common.store import Cell

COLUMNS = {
    "one_minus_max_p": "max p",
    "entropy": "entropy",
    "mutual_information": "MI",
    "expected_entropy": "exp. entropy",
}


def quality(logits: Tensor, y: Tensor) -> Cell:
    """Error in %, NLL, Brier and ECE of the averaged prediction, from logits (T, N, C) and labels (N,)."""
    return quality_of(uncertainty.predictive(logits.float().softmax(-1)), y)


def quality_of(probs: Tensor, y: Tensor) -> Cell:
    """The same of probabilities (N, C)."""
    metrics = collect(classification_measures(probs.shape[1]), "", "cls")
    metrics.update(probs, y)
    found = {name: float(value) for name, value in metrics.compute().items()}
    renamed = {"nll": "cls/NLL", "brier": "cls/Brier", "ece": "cal/ECE"}
    return {"err": 100 * (1 - found["cls/Acc"])} | {name: found[key] for name, key in renamed.items()}


def separation(known: Tensor, unknown: dict[str, Tensor]) -> Cell:
    """AUROC and AUPR-out in %, by set and score, from logits (T, N, C) of test and unknown inputs."""
    inside = predictive_scores(known.softmax(-1), known)
    found = {}
    for name, logits in unknown.items():
        for score, values in predictive_scores(logits.softmax(-1), logits).items():
            measured = curves.separation(inside[score], values)
            found[f"{name}/{score}/AUROC"] = 100 * measured["AUROC"]
            found[f"{name}/{score}/AUPR"] = 100 * measured["AUPR_out"]
    return found
