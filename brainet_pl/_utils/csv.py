"""Rows to a CSV file that is safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from typing import IO, Any

_AFTER_SPLIT = re.compile(r"([;\t\r\n][ \"]*)([=+\-@])")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what makes a spreadsheet compute a cell


def write_rows(file: IO[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write rows of numbers and texts; a text that a spreadsheet would take for a formula gets a ' in front of it.

    Names of sets, columns and classes come from files of others; `=cmd|…` as a name would run when the table is opened.
    """
    csv.writer(file).writerows([neutral(cell) for cell in row] for row in rows)


def neutral(cell: Any) -> Any:
    """A cell as it may stand in a file: a text that looks like a formula is marked as text."""
    if not isinstance(cell, str):
        return cell
    # Where a comma is the decimal sign, a spreadsheet splits rows at ; too, and what follows one begins a cell.
    marked = _AFTER_SPLIT.sub(r"\1'\2", cell)
    return f"'{marked}" if cell.startswith(_FORMULA) else marked
