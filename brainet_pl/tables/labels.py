"""Several labels of each sample, as people write them, as a matrix of zeros, ones and gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl._utils.missing import is_missing

SEPARATOR = ";"  # between the names in a cell of a table


def label_matrix(labels: Any, names: Sequence[str] | None = None) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Labels (N, L) of 1 for a label that is there, 0 for one that is not and NaN where nobody knows, and their names.

    Args:
        labels: a matrix of these numbers; a data frame of them, whose columns are the labels; or the names of the
            labels of each sample, a list or a set each, or a text with `;` between them. None in the place of a list is
            a sample that nobody labelled.
        names: of all labels, in their order; None takes those that there are, sorted.

    >>> label_matrix([["hat", "coat"], [], ["hat"]])
    (array([[1., 1.],
           [0., 0.],
           [0., 1.]]), ('coat', 'hat'))
    """
    if hasattr(labels, "columns") and hasattr(labels, "to_numpy"):
        names = [str(name) for name in labels.columns] if names is None else names
        labels = labels.to_numpy(dtype=np.float64, na_value=np.nan)
    if hasattr(labels, "toarray"):  # sparse
        labels = labels.toarray()
    if getattr(labels, "ndim", None) == 2 or _are_rows_of_numbers(labels):
        matrix = np.asarray(labels, dtype=np.float64)
        return _checked(matrix, tuple(str(i) for i in range(matrix.shape[1])) if names is None else tuple(names))
    rows = [_names_of(row, place) for place, row in enumerate(labels)]
    there: set[str] = set()
    there.update(*(row for row in rows if row is not None))
    known = tuple(sorted(there)) if names is None else tuple(names)
    more = sorted(there - set(known))
    if more:
        raise ValueError(f"expected labels among {', '.join(known)}, got {more[0]!r} too: name it, or leave it out")
    place = {name: i for i, name in enumerate(known)}
    matrix = np.zeros((len(rows), len(known)))
    for row, found in zip(matrix, rows, strict=True):
        row[:] = np.nan if found is None else 0.0
        row[[place[name] for name in found or ()]] = 1.0
    return _checked(matrix, known)


def _are_rows_of_numbers(labels: Any) -> bool:
    """Whether these are a list of rows of numbers, and no names."""
    first = next((row for row in labels if isinstance(row, list | tuple | np.ndarray) and len(row)), None)
    return first is not None and not any(isinstance(cell, str) for cell in first)


def _names_of(row: Any, place: int) -> list[str] | None:
    """The names of the labels of one sample; None where nobody knows them."""
    if row is None or (isinstance(row, float) and row != row):
        return None
    if isinstance(row, str):
        return [part.strip() for part in row.split(SEPARATOR) if not is_missing(part.strip())]
    if not isinstance(row, Iterable):
        raise ValueError(f"expected the names of the labels of row {place}, got {checks.shown(row)}: give a list")
    return [str(name) for name in row]


def _checked(matrix: NDArray[np.float64], names: tuple[str, ...]) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    if matrix.ndim != 2 or not matrix.shape[1] or len(names) != matrix.shape[1] or len(set(names)) != len(names):
        raise ValueError(
            f"expected a column for each label, and a name of its own for each, got the shape {matrix.shape} and "
            f"{len(names)} names: give a row of zeros and ones for each sample, or the names of its labels"
        )
    odd = matrix[~(np.isnan(matrix) | (matrix == 0) | (matrix == 1))]
    if len(odd):
        raise ValueError(f"expected labels of 0, 1 or NaN, got {odd[0]:g}: write 1 for a label that is there")
    return matrix, names
