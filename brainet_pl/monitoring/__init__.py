"""Watching a model in use, without labels: an alarm when its inputs are no longer those that it was validated on.

Imports `evaluation` for its charts, and neither torch nor the model: a server without torch watches too.
"""

from brainet_pl.monitoring.accuracy import AccuracyEstimate, estimate_accuracy
from brainet_pl.monitoring.drift import DriftMonitor, DriftState

__all__ = ["AccuracyEstimate", "DriftMonitor", "DriftState", "estimate_accuracy"]
