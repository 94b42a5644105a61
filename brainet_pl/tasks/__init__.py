"""Tasks: what the outputs of a head mean, `Classification` or `Regression`."""

from brainet_pl.tasks.base import Task
from brainet_pl.tasks.classification import Classification
from brainet_pl.tasks.regression import Regression

__all__ = ["Classification", "Regression", "Task"]
