"""Lightning callbacks: learn the structure before fitting, cache features of a frozen backbone."""

from brainet_pl.callbacks.features import FeatureCache
from brainet_pl.callbacks.logging import log_figure
from brainet_pl.callbacks.structure import StructureLearning

__all__ = ["FeatureCache", "StructureLearning", "log_figure"]
