"""What everything that rebuilds a model has in common: one format, one check of its fields, one kind of error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert

FORMAT = 7  # of checkpoints, swapped models and layers, estimators, hub folders, and the trees in them
ADVICE = "the file was changed, or another version wrote it; take another copy"

S = TypeVar("S")


class Stored(Struct, kw_only=True, forbid_unknown_fields=True):
    """What rebuilds something, as plain values.

    Attributes:
        kind: The class that is rebuilt.
        format: The number of the format.
    """

    kind: str
    format: int


def parse(schema: type[S], content: Any, what: str, advice: str = ADVICE) -> S:
    """Plain values as an object of a schema of msgspec; what does not fit is refused with its place.

    >>> parse(Stored, {"kind": "Tree", "format": "7"}, "a tree", "take another")
    Traceback (most recent call last):
    ValueError: expected a tree as brainet_pl writes it, got one with: Expected `int`, got `str` - at `$.format`; take another
    """  # noqa: E501
    try:
        return convert(content, schema)
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"expected {what} as brainet_pl writes it, got one with: {error}; {advice}") from error


@contextlib.contextmanager
def readable_errors(what: str, advice: str = ADVICE) -> Iterator[None]:
    """While something is rebuilt from a file: any error that does not say what was expected becomes one that does."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:
        if str(error).startswith("expected "):
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())  # torch lists shapes in many lines
        raise ValueError(
            f"expected {what} as brainet_pl writes it, got one that can't be rebuilt ({why}): {advice}"
        ) from error
