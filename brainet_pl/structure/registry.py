"""Families of small algorithms: a member is a class that registers itself under its name when it is defined."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def register(known: dict[K, type[T]], key: K, member: type[T]) -> None:
    """Add `member` to `known`; a class defined anew (a cell run again, a module reloaded) takes its own place."""
    taken = known.get(key)
    if taken is not None and (taken.__module__, taken.__qualname__) != (member.__module__, member.__qualname__):
        raise ValueError(
            f"expected a name that is free for {member.__qualname__}, got {key!r}, which belongs to "
            f"{taken.__module__}.{taken.__qualname__}: choose another name"
        )
    known[key] = member
