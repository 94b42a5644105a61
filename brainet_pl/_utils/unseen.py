"""Cells of a table that are like none of the training rows: other categories, text in columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHOWN = 3  # values of a column, and columns, that are listed


def about_unseen(cells: Mapping[str, Sequence[str]], where: str = "") -> str | None:
    """What to say of unseen categories: column → those of its cells, one for each row; None where there are none.

    >>> print(about_unseen({"size": [], "colour": ["red", "pink", "red"]}, " of new.csv"))
    expected categories of the training rows, got others in column 'colour' of new.csv: 'red', 'pink' (3 rows); such a \
value counts as none of the categories: correct it, or train with rows that have it
    """
    named = _listed(cells, where)
    if not named:
        return None
    return (
        f"expected categories of the training rows, got others {named}; such a value counts as none of the categories: "
        "correct it, or train with rows that have it"
    )


def about_no_numbers(cells: Mapping[str, Sequence[str]], where: str = "") -> str | None:
    """What to say of text in columns of numbers: column → such cells, one for each row; None where there are none.

    >>> print(about_no_numbers({"cylinders": ["rotary"]}))
    expected numbers as in the training rows, got text in column 'cylinders': 'rotary' (1 row); such a value counts as \
missing: correct it, or train with rows that have it
    """
    named = _listed(cells, where)
    if not named:
        return None
    return (
        f"expected numbers as in the training rows, got text {named}; such a value counts as missing: correct it, or "
        "train with rows that have it"
    )


def _listed(cells: Mapping[str, Sequence[str]], where: str) -> str:
    """The columns with such cells, and their values."""
    named = []
    for column, values in cells.items():
        if values:
            kinds = list(dict.fromkeys(values))
            more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
            count = f"{len(values):,} row{'s' if len(values) > 1 else ''}"
            listed = ", ".join(map(_clipped, kinds[:SHOWN]))
            named.append(f"in column {column!r}{where}: {listed}{more} ({count})")
    more = f", and in {len(named) - SHOWN} more columns" if len(named) > SHOWN else ""
    return ", ".join(named[:SHOWN]) + more


def _clipped(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")
