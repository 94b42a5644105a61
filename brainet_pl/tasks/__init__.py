"""Tasks: what the outputs of a head mean, `Classification`, `MultiLabel` or `Regression`."""

from brainet_pl.tasks.base import Task
from brainet_pl.tasks.classification import Classification
from brainet_pl.tasks.multilabel import MultiLabel
from brainet_pl.tasks.regression import Regression

__all__ = ["Classification", "MultiLabel", "Regression", "Task"]
