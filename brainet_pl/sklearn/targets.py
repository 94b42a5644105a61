"""What the estimators are to learn: checked, and told where nothing can be learned."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.warn import warn


def refuse_gaps(y: Any) -> None:
    """Refuse targets (N,) of which some are missing, such as None among names of classes."""
    if y is None:
        return  # scikit-learn says it in its own words
    array = np.asarray(y)
    if array.dtype.kind not in "OUS" or array.ndim != 1:
        return
    missing = [
        row for row, value in enumerate(array.tolist()) if value is None or value != value or str(value) == "<NA>"
    ]
    if missing:
        raise ValueError(
            f"expected a target in every row, got {len(missing):,} of {len(array):,} without one, the first in row "
            f"{missing[0]}. Input y contains NaN: drop these rows"
        )


def _is_gap(value: Any) -> bool:
    return value is None or (str(value) in ("nan", "<NA>", "NaT") and not isinstance(value, str))


def tell_constant(y: NDArray[Any]) -> None:
    """Warn of a number to be predicted that is the same in every row."""
    if len(y) and (y == y[0]).all():
        warn(f"every y is {y[0]:g}, so that there is nothing to learn but this number: check y")
