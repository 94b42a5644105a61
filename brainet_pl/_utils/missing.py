"""Ways to write that there is no value."""

from __future__ import annotations

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})  # in lower case


def is_missing(value: str) -> bool:
    """Whether a text stands for no value."""
    return value.lower() in MISSING
