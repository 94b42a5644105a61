"""All columns of a data frame at once: what each was read as is told, and what can't be read, in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from brainet_pl._utils.unseen import about_no_numbers, about_unseen
from brainet_pl._utils.warn import warn
from brainet_pl.tables.column import Column, Floats
from brainet_pl.tables.read import read_column


def is_frame(x: Any) -> bool:
    """Whether it is a table with named columns, of pandas or polars."""
    return hasattr(x, "columns") and hasattr(x, "dtypes")


def columns_of(frame: Any) -> dict[str, Any]:
    """The columns of a data frame by their names as text, which must differ."""
    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected columns with names that differ, got {twice[0]!r} twice: rename one of them")
    return {text: frame[name] for text, name in zip(names, frame.columns, strict=True)}


def read_frame(columns: Mapping[str, Any]) -> list[Column]:
    """How each column becomes numbers; all that can't be read is told in one error, what was decided in one warning."""
    found: list[Column] = []
    problems: list[str] = []
    for name, values in columns.items():
        try:
            found.append(read_column(name, values))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        many = f"{len(problems)} columns can't be read\n  " if len(problems) > 1 else ""
        raise ValueError(many + "\n  ".join(problems))
    notes = notes_of(found)
    if notes is not None:
        warn(notes)
    return found


def notes_of(columns: Sequence[Column]) -> str | None:
    """What was decided about columns and their owner may not expect; None for nothing."""
    notes = [f"column {column.name!r}: {column.note}" for column in columns if column.note]
    return "some columns were not read in the plainest way\n  " + "\n  ".join(notes) if notes else None


def encode_frame(columns: Sequence[Column], given: Mapping[str, Any]) -> Floats:
    """All columns of `fit` of a table as numbers side by side, (N, d)."""
    missing = [column.name for column in columns if column.name not in given]
    if missing:
        raise ValueError(f"expected the columns of fit, got none called {', '.join(missing)}: add them")
    encoded = [column.encode(given[column.name]) for column in columns]
    message = about_unread(columns, [one.unread for one in encoded])
    if message is not None:
        warn(message)
    return np.concatenate([one.numbers for one in encoded], axis=1)


def about_unread(columns: Sequence[Column], unread: Sequence[Sequence[str]], where: str = "") -> str | None:
    """What to say of cells that are none of the categories of `fit`, or no numbers; None where there are none."""
    categories: dict[str, Sequence[str]] = {}
    numbers: dict[str, Sequence[str]] = {}
    for column, texts in zip(columns, unread, strict=True):
        (categories if column.kind == "category" else numbers)[column.name] = texts
    parts = [about_unseen(categories, where), about_no_numbers(numbers, where)]
    return "; ".join(part for part in parts if part is not None) or None
