"""Lightning callbacks: structure before fitting, cached features, out-of-distribution tests, predictions to a file."""

from brainet_pl.callbacks.features import FeatureCache
from brainet_pl.callbacks.logging import log_figure
from brainet_pl.callbacks.ood import OODEvaluation
from brainet_pl.callbacks.predictions import PredictionFile
from brainet_pl.callbacks.structure import StructureLearning

__all__ = ["FeatureCache", "OODEvaluation", "PredictionFile", "StructureLearning", "log_figure"]
