"""Calibrators: they learn from the validation data of a fit how to map averaged predictions to what a user gets.

`Conformal` comes after them: sets and intervals of what they give; `RiskControl` says which answers may be relied on.
"""

from brainet_pl.calibration.affine import DirichletScaling, VectorScaling
from brainet_pl.calibration.base import Calibrator
from brainet_pl.calibration.conformal import Conformal
from brainet_pl.calibration.density import DensityScaling
from brainet_pl.calibration.isotonic import IsotonicScaling
from brainet_pl.calibration.label_scaling import LabelScaling
from brainet_pl.calibration.risk import Promise, RiskControl
from brainet_pl.calibration.temperature import TemperatureScaling

__all__ = [
    "Calibrator",
    "Conformal",
    "DensityScaling",
    "DirichletScaling",
    "IsotonicScaling",
    "LabelScaling",
    "Promise",
    "RiskControl",
    "TemperatureScaling",
    "VectorScaling",
]
