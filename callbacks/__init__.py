"""Lightning callbacks: what is learned before fitting, what is evaluated while testing, files and figures."""

from brainet_pl.callbacks.dashboard import Dashboard
from brainet_pl.callbacks.features import FeatureCache
from brainet_pl.callbacks.generative import GenerativeFit
from brainet_pl.callbacks.logging import log_figure, log_table
from brainet_pl.callbacks.ood import OODEvaluation
from brainet_pl.callbacks.predictions import PredictionFile
from brainet_pl.callbacks.structure import StructureLearning

__all__ = [
    "Dashboard",
    "FeatureCache",
    "GenerativeFit",
    "OODEvaluation",
    "PredictionFile",
    "StructureLearning",
    "log_figure",
    "log_table",
]
