"""Scores: numbers that are higher for an input more unlike the training data, for any head.

`Generative` (the density of a learned tree), `Stages` (one for each stage of a network), `KNN`, `Mahalanobis` and
`RMDS` read features, `GEN` and `KLMatching` the prediction, `Own`, `ViM`, `FDBD`, `NNGuide` and `Shaped` what the
network whose classification layer was replaced makes of an input; `Combined` adds scores up. The scores of the
prediction itself (`one_minus_max_p`, `entropy`, `mutual_information` …) come with every task and need no setting.
"""

from brainet_pl.scores.base import AnswerScore, JoinedScore, Score, ScoreContext, ScoreSet
from brainet_pl.scores.base_logits import Own
from brainet_pl.scores.boundary import FDBD
from brainet_pl.scores.combined import Combined
from brainet_pl.scores.density import TreeDensity
from brainet_pl.scores.generative import Generative
from brainet_pl.scores.guided import NNGuide
from brainet_pl.scores.mahalanobis import RMDS, Mahalanobis
from brainet_pl.scores.neighbours import KNN
from brainet_pl.scores.prediction import GEN, KLMatching
from brainet_pl.scores.reference import Verdict
from brainet_pl.scores.shaped import Shaped
from brainet_pl.scores.stages import Stages
from brainet_pl.scores.vim import ViM

__all__ = [
    "FDBD",
    "GEN",
    "KNN",
    "RMDS",
    "AnswerScore",
    "Combined",
    "Generative",
    "JoinedScore",
    "KLMatching",
    "Mahalanobis",
    "NNGuide",
    "Own",
    "Score",
    "ScoreContext",
    "ScoreSet",
    "Shaped",
    "Stages",
    "TreeDensity",
    "Verdict",
    "ViM",
]
