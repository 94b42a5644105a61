"""An order of rows and columns that depends on the content of a table alone.

Resampling rows needs a numbering of the rows, and breaking ties needs a numbering of the columns. Taking both from the
content instead of from the storage order makes every result independent of how the user happened to store the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Table = NDArray[np.float64] | NDArray[np.float32] | NDArray[np.int64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 22  # values hashed at a time: bounds the memory of the temporary 64-bit words


class CanonicalOrder(NamedTuple):
    """`rows` (N,) and `columns` (d,) sort the table; `digest` names its content whatever the storage order."""

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    digest: str


def canonical_order(values: Table) -> CanonicalOrder:
    """Sort rows and columns of `values` (N, d) by 64-bit hashes that no permutation can change.

    A column's first hash is a sum over its values, a row's hash a sum over (column hash, value). Two different columns
    with equal value counts share the first hash; they are told apart by hashing the columns again with the rows'
    hashes, and so on, as in Weisfeiler–Leman colour refinement, for as long as that tells more columns apart.
    Identical rows or columns keep equal hashes, and swapping them changes nothing.
    """
    row_hash, column_hash = refine(
        lambda row_hash: column_sums(values, row_hash), lambda column_hash: row_hashes(values, column_hash)
    )
    return in_order(row_hash, column_hash)


def refine(sums: Callable[[Words | None], Words], rows: Callable[[Words], Words]) -> tuple[Words, Words]:
    """The hashes of rows (N,) and columns (d,) of a table that its `column_sums` and `row_hashes` read."""
    column_hash = _mix(sums(None))
    row_hash = rows(column_hash)
    distinct = len(np.unique(column_hash))
    while distinct < len(column_hash):
        column_hash = _mix(sums(row_hash))
        row_hash = rows(column_hash)
        before, distinct = distinct, len(np.unique(column_hash))
        if distinct == before:
            break
    return row_hash, column_hash


def in_order(row_hash: Words, column_hash: Words) -> CanonicalOrder:
    """The order that hashes of rows (N,) and columns (d,) give."""
    rows, columns = np.argsort(row_hash, kind="stable"), np.argsort(column_hash, kind="stable")
    content = np.concatenate([row_hash[rows], column_hash[columns]]).tobytes()
    return CanonicalOrder(rows, columns, hashlib.sha256(content).hexdigest())


def _mix(words: Words) -> Words:
    """Scramble 64-bit words in place (multiply, fold the high half down, multiply)."""
    words *= _MULTIPLIER
    words ^= words >> np.uint64(29)
    words *= _MULTIPLIER
    words ^= words >> np.uint64(32)
    return words


def _words(chunk: Table) -> Words:
    """The values' bits as 64-bit words; adding zero maps -0.0 to 0.0, which compare equal."""
    return (chunk.astype(np.float64) + 0.0).view(np.uint64)


def column_sums(values: Table, row_hash: Words | None) -> Words:
    """Sums over the rows of `values` (N, d) what hashes of columns are made of, (d,); sums of parts of a table add up.

    `row_hash` (N,) tells columns with equal counts of values apart; None tells nothing.
    """
    total = np.zeros(values.shape[1], dtype=np.uint64)
    step = max(1, _CHUNK // max(1, values.shape[1]))
    for i in range(0, len(values), step):
        words = _mix(_words(values[i : i + step]))
        if row_hash is not None:
            words ^= row_hash[i : i + step, None]
        total += _mix(words).sum(axis=0, dtype=np.uint64)
    return total


def row_hashes(values: Table, column_hash: Words) -> Words:
    """Computes hashes (N,) of the rows of `values` (N, d), given those of its columns (d,)."""
    total = np.empty(len(values), dtype=np.uint64)
    step = max(1, _CHUNK // max(1, values.shape[1]))
    for i in range(0, len(values), step):
        words = _mix(_words(values[i : i + step]))
        words ^= column_hash
        total[i : i + step] = _mix(words).sum(axis=1, dtype=np.uint64)
    return _mix(total)
