"""Lightning callbacks: what is learned before fitting, what is evaluated while testing, files and figures."""

from brainet_pl.callbacks.baseline import BaselineComparison
from brainet_pl.callbacks.checkpoints import LastCheckpoint, WholeCheckpointIO
from brainet_pl.callbacks.drift import DriftAlarm
from brainet_pl.callbacks.evaluation import Evaluation
from brainet_pl.callbacks.features import FeatureCache
from brainet_pl.callbacks.logging import log_figure, log_table
from brainet_pl.callbacks.predictions import PredictionFile
from brainet_pl.callbacks.resume import ExactResume
from brainet_pl.callbacks.structure import StructureLearning
from brainet_pl.callbacks.swap import SwapHead
from brainet_pl.callbacks.threads import Threads
from brainet_pl.callbacks.tracking import Tracking
from brainet_pl.lightning.module import register_standard_callbacks

__all__ = [
    "BaselineComparison",
    "DriftAlarm",
    "Evaluation",
    "ExactResume",
    "FeatureCache",
    "LastCheckpoint",
    "PredictionFile",
    "StructureLearning",
    "SwapHead",
    "Threads",
    "Tracking",
    "WholeCheckpointIO",
    "log_figure",
    "log_table",
]

# Every run of a BRAINet has these; the last knows the random states after the others' hooks.
register_standard_callbacks([Threads, BaselineComparison, Tracking, ExactResume])
