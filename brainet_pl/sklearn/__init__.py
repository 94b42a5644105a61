"""Estimators with scikit-learn's interface: scaling, labels and saving around the same predictor.

Imports `model` and the rooms below it.
"""

from brainet_pl.sklearn.estimators import BRAINetClassifier, BRAINetRegressor

__all__ = ["BRAINetClassifier", "BRAINetRegressor"]
