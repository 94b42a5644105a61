"""Estimators with scikit-learn's interface: scaling, labels and saving around the same predictor.

Imports `model` and the rooms below it.
"""

from brainet_pl.sklearn.estimators import BRAINetClassifier, BRAINetRegressor
from brainet_pl.sklearn.several import BRAINetMultiLabelClassifier

__all__ = ["BRAINetClassifier", "BRAINetMultiLabelClassifier", "BRAINetRegressor"]
