"""Lightning callbacks: structure before fitting, cached features, tests on unknown data, a dashboard, predictions."""

from brainet_pl.callbacks.dashboard import Dashboard
from brainet_pl.callbacks.features import FeatureCache
from brainet_pl.callbacks.logging import log_figure, log_table
from brainet_pl.callbacks.ood import OODEvaluation
from brainet_pl.callbacks.predictions import PredictionFile
from brainet_pl.callbacks.structure import StructureLearning

__all__ = [
    "Dashboard",
    "FeatureCache",
    "OODEvaluation",
    "PredictionFile",
    "StructureLearning",
    "log_figure",
    "log_table",
]
