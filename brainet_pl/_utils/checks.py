"""Checks of settings, all with one form of message: what was expected, what came, what to do.

Those that give something back give plain Python numbers, whatever came.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np


class UsageError(FileNotFoundError):
    """The command names something that is not there."""


PLAIN = frozenset((bool, int, float, str, bytes, type(None)))


def all_plain(values: Iterable[Any]) -> bool:
    """Whether these are numbers, texts and None alone: a list of them has nothing inside to look for."""
    return PLAIN.issuperset(map(type, values))


def whole(name: str, value: Any, least: int, most: int | None = None, hint: str = "") -> int:
    """A whole number between `least` and `most` as an `int`; 3.0 and NumPy's integers count as whole, True does not."""
    if not _is_number(value) or value != value or math.isinf(value) or value != int(value):
        raise ValueError(f"expected {name} to be a whole number, got {shown(value)}{_then(hint)}")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"at least {least} and at most {most}"
        raise ValueError(f"expected {name} of {bounds}, got {value}{_then(hint)}")
    return int(value)


def whole_or_none(name: str, value: Any, least: int, hint: str, most: int | None = None) -> int | None:
    """A whole number from `least` to `most`, or None."""
    return None if value is None else whole(name, value, least, most, hint=hint)


def number(name: str, value: Any, least: float, hint: str) -> float:
    """A finite number of at least `least` as a `float`."""
    if not _is_number(value) or not math.isfinite(value):
        raise ValueError(f"expected {name} to be a finite number, got {shown(value)}{_then(hint)}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}{_then(hint)}")
    return float(value)


def number_or_none(name: str, value: Any, least: float, hint: str) -> float | None:
    """A finite number of at least `least`, or None."""
    return None if value is None else number(name, value, least, hint)


def one_of(name: str, value: Any, choices: Iterable[Any], hint: str = "") -> None:
    """Refuse a value that is none of the choices."""
    known = list(choices)
    if value not in known:
        listed = ", ".join("None" if choice is None else repr(choice) for choice in known)
        raise ValueError(f"expected {name} to be one of {listed}, got {shown(value)}{_then(hint)}")


def at_least(name: str, value: float, least: float, hint: str = "") -> float:
    """A number of at least `least`, not NaN, as a `float`; infinity is fine."""
    if not _is_number(value) or not value >= least:
        raise ValueError(f"expected {name} of at least {least}, got {shown(value)}{_then(hint)}")
    return float(value)


def share(name: str, value: float) -> float:
    """A number of at least 0 and below 1 as a `float`."""
    if not _is_number(value) or not 0 <= value < 1:
        raise ValueError(f"expected a {name} of at least 0 and below 1, got {shown(value)}")
    return float(value)


def above_zero(name: str, value: float) -> float:
    """A positive and finite number as a `float`."""
    if not (_is_number(value) and value > 0 and math.isfinite(value)):
        raise ValueError(f"expected {name} to be a finite number above 0, got {shown(value)}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False; a string such as "no" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"expected {name} to be True or False, got {shown(value)}: give one of the two")
    return bool(value)


def file_name(name: str, value: Any) -> None:
    """Refuse what is not the bare name of a file: one with folders could overwrite any file. "" is fine."""
    if not isinstance(value, str) or value == ".." or any(mark in value for mark in "/\\\0"):
        raise ValueError(f"expected {name} to be the name of a file without folders, got {shown(value)}: give the name")


def are_texts(values: Any) -> bool:
    """Whether these are several texts that a file can hold; one text is not, nor half a pair of surrogates.

    >>> are_texts(["cat", "dog"]), are_texts("cat"), are_texts(7), are_texts(["\\ud800"])
    (True, False, False, False)
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        return False
    return all(isinstance(one, str) and one.encode("utf-8", "ignore").decode() == one for one in values)


def shown(value: Any) -> str:
    """A value as an error shows it: its type alone where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def _then(hint: str) -> str:
    return f": {hint}" if hint else ""
