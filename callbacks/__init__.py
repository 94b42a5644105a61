"""Lightning callbacks: what is learned before fitting, what is evaluated while testing, files and figures."""

from brainet_pl.callbacks.features import FeatureCache
from brainet_pl.callbacks.generative import GenerativeFit
from brainet_pl.callbacks.logging import log_figure
from brainet_pl.callbacks.ood import OODEvaluation
from brainet_pl.callbacks.predictions import PredictionFile
from brainet_pl.callbacks.structure import StructureLearning

__all__ = ["FeatureCache", "GenerativeFit", "OODEvaluation", "PredictionFile", "StructureLearning", "log_figure"]
