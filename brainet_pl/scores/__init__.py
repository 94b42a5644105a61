"""Scores: numbers that are higher for an input more unlike the training data, for any head.

`Generative` (the density of a learned tree), `Stages` (one for each stage of a network), `KNN` and `Mahalanobis` read
features, `Own` the logits of the network whose classification layer was replaced, `Combined` adds scores up; the scores
of the prediction itself (`max_softmax`, `entropy`, `mutual_information` …) come with every task and need no setting.
"""

from brainet_pl.scores.base import JoinedScore, Score, ScoreContext, ScoreSet
from brainet_pl.scores.base_logits import Own
from brainet_pl.scores.combined import Combined
from brainet_pl.scores.density import TreeDensity
from brainet_pl.scores.generative import Generative
from brainet_pl.scores.mahalanobis import Mahalanobis
from brainet_pl.scores.neighbours import KNN
from brainet_pl.scores.reference import Verdict
from brainet_pl.scores.stages import Stages

GenerativeScore = TreeDensity  # its name until 0.2

__all__ = [
    "KNN",
    "Combined",
    "Generative",
    "GenerativeScore",
    "JoinedScore",
    "Mahalanobis",
    "Own",
    "Score",
    "ScoreContext",
    "ScoreSet",
    "Stages",
    "TreeDensity",
    "Verdict",
]
