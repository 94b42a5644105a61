"""Why a verdict is what it is: where in an image, which columns of a row, and what known samples it resembles.

Every door that gives a `Prediction` has `explain` beside `predict`; it gives an `Explanation`, in words and pictures.
"""

from brainet_pl.explain.columns import ColumnParts, Units
from brainet_pl.explain.explanation import Explanation

__all__ = ["ColumnParts", "Explanation", "Units"]
