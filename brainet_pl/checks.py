"""Checks of settings, all with one form of message: what was expected, what came, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def one_of(name: str, value: Any, choices: Iterable[Any], hint: str = "") -> None:
    """Refuse a value that is none of the choices."""
    known = list(choices)
    if value not in known:
        listed = ", ".join("None" if choice is None else repr(choice) for choice in known)
        raise ValueError(f"expected {name} to be one of {listed}, got {value!r}" + (f": {hint}" if hint else ""))


def at_least(name: str, value: float, least: float, hint: str = "") -> None:
    """Refuse a number below `least`, and NaN."""
    if not value >= least:
        raise ValueError(f"expected {name} of at least {least}, got {value}" + (f": {hint}" if hint else ""))


def whole(name: str, value: Any, least: int, hint: str = "") -> None:
    """Refuse anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"expected {name} to be a whole number of at least {least}, got {value!r}")
    at_least(name, int(value), least, hint)


def share(name: str, value: float) -> None:
    """Refuse a number that is not at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"expected a {name} of at least 0 and below 1, got {value}")


def above_zero(name: str, value: float) -> None:
    """Refuse a number that is not positive and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"expected {name} to be a finite number above 0, got {value}")
