"""Categories of a table that no training row had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHOWN = 3  # values of a column, and columns, that are listed


def about_unseen(cells: Mapping[str, Sequence[str]], where: str = "") -> str | None:
    """What to say of unseen categories: column → those of its cells, one for each row; None where there are none.

    >>> print(about_unseen({"size": [], "colour": ["red", "pink", "red"]}, " of new.csv"))
    expected categories of the training rows, got others in column 'colour' of new.csv: 'red', 'pink' (3 rows); such a \
value counts as none of the categories: correct it, or train with rows that have it
    """
    named = []
    for column, values in cells.items():
        if values:
            kinds = list(dict.fromkeys(values))
            more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
            count = f"{len(values):,} row{'s' if len(values) > 1 else ''}"
            listed = ", ".join(map(_clipped, kinds[:SHOWN]))
            named.append(f"in column {column!r}{where}: {listed}{more} ({count})")
    if not named:
        return None
    more = f", and in {len(named) - SHOWN} more columns" if len(named) > SHOWN else ""
    return (
        f"expected categories of the training rows, got others {', '.join(named[:SHOWN])}{more}; such a value counts "
        "as none of the categories: correct it, or train with rows that have it"
    )


def _clipped(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")
