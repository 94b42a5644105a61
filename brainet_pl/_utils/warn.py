"""Warnings that name the user's own line, not one of this library or of those that call it."""

from __future__ import annotations

import sys
import warnings

# Whose lines are of no use to a user: this package, and what stands between it and the user's call.
OURS = {"brainet_pl", "contextlib", "functools", "threading"}
LIGHTNING = {"pytorch_lightning", "lightning", "lightning_fabric", "lightning_utilities", "jsonargparse"}
PASSED_OVER = OURS | LIGHTNING | {"torch", "torchmetrics", "sklearn", "joblib"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the nearest caller that is no library; Python shows each such warning once a line."""
    level, frame = 1, sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
