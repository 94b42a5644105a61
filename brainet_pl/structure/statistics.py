"""Sufficient statistics of resampled data: contingency counts of codes, correlations of normal scores.

A bootstrap sample is a vector of integer row weights, never a copy of the rows; every statistic is a sum over rows, and
every sum over rows is a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.discretize import Codes

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]

_NARROW = 256  # columns up to which products are summed in 64 bits
_GRAM_VALUES = 1 << 24  # values copied at a time while a Gram matrix is summed over rows
_PACKED_CELLS = 256  # of a table up to which it is counted by bits; beyond, each row is looked at once
_PACKED_WORDS = 1 << 17  # of 64 rows at a time: they stay in the processor's cache
_SORTED_VALUES = 1 << 17  # codes that are sorted at a time: they stay in the processor's cache


def bootstrap_weights(n: int, seed: int, path: tuple[int, ...]) -> NDArray[np.int64]:
    """Line 7: how often each of n rows is drawn when n rows are drawn with replacement."""
    rng = np.random.default_rng([seed, *path, len(path)])
    return np.bincount(rng.integers(0, n, size=n), minlength=n)


def half_weights(n: int, seed: int, path: tuple[int, ...]) -> NDArray[np.int64]:
    """In place of line 7: 1 for a random half of n rows, 0 for the others.

    A bootstrap sample repeats rows, and to a test repeated rows look like dependence: G² of independent variables is
    twice as large as it should be. Half of the rows vary as much from sample to sample, and no test is misled.
    """
    rng = np.random.default_rng([seed, *path, len(path)])
    weights = np.zeros(n, dtype=np.int64)
    weights[rng.permutation(n)[: (n + 1) // 2]] = 1
    return weights


class CodeTable:
    """Codes as an indicator matrix, one column for each level but the most frequent.

    The column of the most frequent level follows from the others and the row count, so leaving it out saves most of
    the work of every product: (r-1)² instead of r² columns, and in a split by a variable the largest part.

    Attributes:
        codes: (N, d), level 0 the most frequent.
        indicators: (1 + C, N), ones, then a block of arities[j] - 1 rows for each variable j: what a test asks for is
            a few of these, whole.
    """

    def __init__(self, data: Codes) -> None:
        self.arities = data.arities
        self.codes = np.empty_like(data.codes, order="F")
        for j, r in enumerate(data.arities):
            frequency = np.bincount(data.codes[:, j], minlength=r)
            rank = np.empty(r, dtype=np.uint8)
            rank[np.argsort(-frequency, kind="stable")] = np.arange(r)
            self.codes[:, j] = rank[data.codes[:, j]]
        self.widths = np.maximum(self.arities - 1, 1)  # a constant column keeps one column of zeros
        self.starts = 1 + np.concatenate([[0], np.cumsum(self.widths)])

    @property
    def num_rows(self) -> int:
        """The number of rows, N."""
        return len(self.codes)

    def drawn(self, weights: NDArray[np.int64]) -> CodeTable:
        """The table of a sample, each row as often as `weights` (N,) says; levels that no longer occur still count."""
        return CodeTable(Codes(self.codes[np.repeat(np.arange(self.num_rows), weights)], self.arities))

    @property
    def dtype(self) -> type[np.floating[Any]]:
        """Of products of indicators: exact in float32 as long as no count reaches 2^24; float64 beyond."""
        return np.float32 if self.num_rows < 1 << 23 else np.float64

    @cached_property
    def indicators(self) -> NDArray[np.uint8]:
        """Bytes, of which a few at a time become floats for a product: a quarter of the memory."""
        matrix = np.zeros((self.starts[-1], self.num_rows), dtype=np.uint8)
        matrix[0] = 1
        for j, start in enumerate(self.starts[:-1]):
            for level in range(1, self.arities[j]):
                matrix[start + level - 1] = self.codes[:, j] == level
        return matrix

    def columns(self, variables: Ints) -> Ints:
        """Indicator columns of `variables`, block after block, behind the column of ones."""
        if (self.widths == 1).all():
            return np.concatenate([[0], 1 + variables])
        blocks = [np.arange(self.starts[j], self.starts[j + 1]) for j in variables]
        return np.concatenate([[0], *blocks])


class JointCounts(NamedTuple):
    """Counts of left × right levels for each configuration of a condition set, most frequent levels left out."""

    counts: NDArray[np.float32]  # (q, 1 + Cl, 1 + Cr); index 0 sums over all levels
    left: Ints  # (L,) where each left variable's block begins, counted without index 0; likewise `right` (R,)
    right: Ints


class CountSample:
    """Contingency counts of a weighted sample of a `CodeTable`."""

    def __init__(self, table: CodeTable, weights: NDArray[np.int64] | None = None) -> None:
        self.table = table
        if weights is None:
            weights = np.ones(table.num_rows, dtype=np.int64)
        self.total = int(weights.sum())
        self._rows = np.flatnonzero(weights)
        self._weights = weights[self._rows].astype(table.dtype)
        self._repeats = bool((weights > 1).any())

    @cached_property
    def n_log_n(self) -> Floats:
        """(total + 1,) n·log n of every count there can be: entropies become table look-ups."""
        n = np.arange(self.total + 1, dtype=np.float64)
        n[1:] *= np.log(n[1:])
        return n

    @cached_property
    def gram(self) -> NDArray[np.float32]:
        """(1 + C, 1 + C) weighted counts of all pairs of levels."""
        width = len(self.table.indicators)
        step = max(1, _GRAM_VALUES // width)
        gram = np.zeros((width, width), dtype=self.table.dtype)
        for i in range(0, len(self._rows), step):
            block = self.table.indicators.take(self._rows[i : i + step], axis=1).astype(self.table.dtype)
            gram += block @ (block * self._weights[i : i + step] if self._repeats else block).T
        return gram

    def joint(self, condition: tuple[int, ...], left: Ints, right: Ints) -> JointCounts:
        """Counts of every left × right pair in each observed configuration of `condition`.

        The rows of the most frequent configuration are never touched: its counts are the whole sample's less the rest.
        """
        table = self.table
        left_columns, right_columns = table.columns(left), table.columns(right)
        whole = self.gram[np.ix_(left_columns, right_columns)]
        if condition:
            parts = self._split(condition, left_columns, right_columns)
            whole = np.concatenate([(whole - parts.sum(axis=0))[None], parts])
        else:
            whole = whole[None]
        left_blocks = np.concatenate([[0], np.cumsum(table.widths[left])[:-1]]).astype(np.intp)
        right_blocks = np.concatenate([[0], np.cumsum(table.widths[right])[:-1]]).astype(np.intp)
        return JointCounts(whole, left_blocks, right_blocks)

    def pair_tables(self, x: Ints, y: Ints, conditions: Ints) -> NDArray[np.int64]:
        """Counts pairs x (T,), y (T,) given conditions (T, n), all levels kept and padded to one shape, (T, q, r, s).

        The cheap way for a few pairs at a time. Small tables are counted by bits; larger ones by one joint code a row
        and one histogram for all T tests together. Configurations of a set may be numbered in either way.
        """
        levels = [int(self.table.arities[variable].max()) for variable in (*conditions.T, x, y)]
        if math.prod(levels) <= _PACKED_CELLS:
            count, shape = partial(self._packed_tables, levels), (math.prod(levels[:-2]), *levels[-2:])
            most = _PACKED_WORDS // max(1, self._bits.shape[1] * math.prod(levels))
        else:
            shape = self.table_shape(x, y, conditions)
            count, most = partial(self._coded_tables, shape), _GRAM_VALUES // max(1, len(self._rows))
        counts = np.empty((len(x), math.prod(shape)), dtype=np.int64)
        step = max(1, most)
        for part in (slice(i, i + step) for i in range(0, len(x), step)):
            counts[part] = count(x[part], y[part], conditions[part])
        return counts.reshape(len(x), *shape)

    def _coded_tables(self, shape: tuple[int, ...], x: Ints, y: Ints, conditions: Ints) -> NDArray[np.int64]:
        """`pair_tables` of one shape (q, r, s) by joint codes, (T, q·r·s)."""
        q, r, s = shape
        code = np.zeros((len(x), len(self._rows)), dtype=np.int64)
        for variable in conditions.T:
            code *= self.table.arities[variable][:, None]
            code += self._code_rows[variable]
        code += (np.arange(len(code)) * q)[:, None]
        for variable, levels in ((x, r), (y, s)):
            code *= levels
            code += self._code_rows[variable]
        weights = np.broadcast_to(self._weights.astype(np.float64), code.shape).ravel() if self._repeats else None
        found = np.bincount(code.ravel(), weights=weights, minlength=len(code) * q * r * s)
        return np.asarray(found.reshape(len(code), -1), dtype=np.int64)

    def table_shape(self, x: Ints, y: Ints, conditions: Ints) -> tuple[int, int, int]:
        """The shape (q, r, s) of one table of `pair_tables`."""
        arities = self.table.arities
        # As floats, because a set of many variables has more configurations than an integer holds.
        q = arities[conditions].astype(np.float64).prod(axis=1).max()
        return int(q), int(arities[x].max()), int(arities[y].max())

    def _packed_tables(self, levels: list[int], x: Ints, y: Ints, conditions: Ints) -> NDArray[np.int64]:
        """`pair_tables` by bits, 64 rows at a time: rows with a level of each variable are an AND, counted by its ones.

        `levels` are the most of each variable of the set, of x and of y. Index 0 counts rows of any level until the
        end, where it becomes what the other levels leave of that. (T, product of levels)
        """
        variables = [*conditions.T, x, y]
        every = np.broadcast_to(self._bits[0], (len(x), 1, self._bits.shape[1]))
        found = every
        for variable, most in zip(variables, levels, strict=True):
            level = np.arange(1, most)
            there = level < self.table.arities[variable][:, None]
            place = np.where(there, self.table.starts[variable][:, None] + level - 1, len(self._bits) - 1)
            either = np.concatenate([every, self._bits[place]], axis=1)
            found = (found[:, :, None] & either[:, None]).reshape(len(x), -1, every.shape[2])
        counts = _ones_of(found).reshape(len(x), *levels)
        for axis in range(1, counts.ndim):
            by_level = np.moveaxis(counts, axis, 0)
            by_level[0] -= by_level[1:].sum(axis=0)
        return np.asarray(counts.reshape(len(x), -1))

    @cached_property
    def _bits(self) -> NDArray[np.uint64]:
        """(1 + C + 1, words) the indicators, 64 drawn rows in a word, rows as often as they were drawn; then none."""
        rows = self._rows.repeat(self._weights.astype(np.intp)) if self._repeats else self._rows
        packed = np.zeros((len(self.table.indicators) + 1, -(-len(rows) // 64) * 8), dtype=np.uint8)
        for column, bits in zip(self.table.indicators, packed, strict=False):
            bits[: -(-len(rows) // 8)] = np.packbits(column[rows])
        return packed.view(np.uint64)

    def pair_sums(self, x: Ints, y: Ints, conditions: Ints) -> tuple[Floats, Floats]:
        """N times the information, and the degrees of freedom, of pairs x, y (T,) given conditions (T, n), each (T,).

        By sorted codes of rows instead of tables: it takes as long as there are rows, however many cells a table has.
        The cells of one table must have numbers of 63 bits.
        """
        information, freedom = np.empty(len(x)), np.empty(len(x))
        step = max(1, _SORTED_VALUES // max(1, self.total))
        for part in (slice(i, i + step) for i in range(0, len(x), step)):
            information[part], freedom[part] = self._sorted_sums(x[part], y[part], conditions[part])
        return information, freedom

    def _sorted_sums(self, x: Ints, y: Ints, conditions: Ints) -> tuple[Floats, Floats]:
        """`pair_sums` of a few pairs at a time: equal codes stand side by side, each run of them is a cell."""
        arities, codes = self.table.arities.astype(np.int64), self._repeated_codes
        r, s = arities[x][:, None], arities[y][:, None]
        z = np.zeros((len(x), codes.shape[1]), dtype=np.int64)
        for variable in conditions.T:
            z *= arities[variable][:, None]
            z += codes[variable]
        zy, zxy = z * s + codes[y], (z * r + codes[x]) * s + codes[y]
        zy.sort(axis=1)
        zxy.sort(axis=1)
        zx = zxy // s
        runs = [_runs(sorted_codes) for sorted_codes in (zxy, zx, zy, zx // r)]
        joint, of_x, of_y, configurations = [_sums(run, self.n_log_n) for run in runs]
        _, x_runs, y_runs, z_runs = runs
        # Both orders begin with the configuration, so that its runs begin at the same places in both.
        starts = np.flatnonzero(z_runs)
        seen_x, seen_y = (np.add.reduceat(run.ravel(), starts, dtype=np.int64) for run in (x_runs, y_runs))
        first = np.searchsorted(starts, np.arange(len(x)) * z.shape[1])
        freedom = np.add.reduceat((seen_x - 1) * (seen_y - 1), first)
        return np.maximum(joint - of_x - of_y + configurations, 0.0), freedom.astype(np.float64)

    @cached_property
    def _repeated_codes(self) -> NDArray[np.uint8]:
        """(d, total) the codes of the drawn rows, each as often as it was drawn."""
        if not self._repeats:
            return self._code_rows
        return np.repeat(self._code_rows, self._weights.astype(np.intp), axis=1)

    @cached_property
    def _code_rows(self) -> NDArray[np.uint8]:
        """(d, rows) the codes of the drawn rows, a variable after the other."""
        return np.take(self.table.codes.T, self._rows, axis=1)

    def _by_configuration(self, condition: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Places of the drawn rows that are not all levels 0, by configuration, and where each configuration ends."""
        configuration = np.zeros(len(self._rows), dtype=np.int64)
        for z in condition:
            configuration *= self.table.arities[z]
            configuration += self._code_rows[z]
        selected = np.flatnonzero(configuration)
        kept = configuration[selected]
        if not kept.size:
            return selected, np.empty(0, np.intp)
        if kept.max() < 1 << 16:
            kept = kept.astype(np.uint16)  # numpy sorts 16-bit integers by radix
        if len(condition) > 1 or self.table.arities[list(condition)].max() > 2:  # else there is one part only
            order = np.argsort(kept, kind="stable")
            selected, kept = selected[order], kept[order]
        return selected, np.append(np.flatnonzero(kept[1:] != kept[:-1]) + 1, len(kept))

    def _split(self, condition: tuple[int, ...], left_columns: Ints, right_columns: Ints) -> NDArray[np.float32]:
        """(q - 1, 1 + Cl, 1 + Cr) counts in each configuration of `condition` but the one of all levels 0."""
        selected, ends = self._by_configuration(condition)
        parts = np.zeros((len(ends), len(left_columns), len(right_columns)), dtype=self.table.dtype)
        same = np.array_equal(left_columns, right_columns)  # the product of a matrix with itself is half the work
        left = self.table.indicators[left_columns]
        right = left if same else self.table.indicators[right_columns]
        step = max(1, _GRAM_VALUES // (len(left_columns) + len(right_columns)))
        for first, last, segments in _chunks(ends, step):
            chosen = selected[first:last]
            rows = self._rows[chosen]
            a = left.take(rows, axis=1).astype(self.table.dtype)
            b = a if same else right.take(rows, axis=1).astype(self.table.dtype)
            if self._repeats:
                b = b * self._weights[chosen]
            for i, start, end in segments:
                parts[i] += a[:, start:end] @ b[:, start:end].T
        return parts


def _runs(codes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where in sorted codes (T, N) a run of equal ones begins, (T, N)."""
    begins = np.ones(codes.shape, dtype=bool)
    np.not_equal(codes[:, 1:], codes[:, :-1], out=begins[:, 1:])
    return begins


def _sums(begins: NDArray[np.bool_], n_log_n: Floats) -> Floats:
    """The sum of n·log n over runs that begin at (T, N), n their lengths, (T,)."""
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=begins.size)
    first = np.searchsorted(starts, np.arange(len(begins)) * begins.shape[1])
    return np.asarray(np.add.reduceat(n_log_n[lengths], first))


def _ones_of(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Counts the ones in the last axis of `words` (..., W), (...)."""
    if hasattr(np, "bitwise_count"):
        return np.asarray(np.bitwise_count(words).sum(axis=-1, dtype=np.int64))
    return np.asarray(np.unpackbits(words.view(np.uint8), axis=-1).sum(axis=-1, dtype=np.int64))  # numpy 1


def _chunks(ends: Ints, step: int) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """Rows in chunks of at most `step`: (first, last, [(segment, start, end), …]), starts and ends within the chunk.

    Segment i of the rows ends before row `ends[i]`, where the next one begins.
    """
    total = int(ends[-1]) if len(ends) else 0
    starts = np.concatenate([[0], ends[:-1]])
    for first in range(0, total, step):
        last = min(first + step, total)
        low, high = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last - 1, side="right")
        inside = np.arange(low, high + 1)
        begin, end = np.maximum(starts[inside], first) - first, np.minimum(ends[inside], last) - first
        yield first, last, list(zip(inside.tolist(), begin.tolist(), end.tolist(), strict=True))


def correlation(scores: NDArray[np.float32], weights: NDArray[np.int64] | None = None) -> Floats:
    """Computes the correlation (d, d) of `scores` (N, d) under row weights.

    It is 0 where a column does not vary, and 1 on the diagonal.
    """
    n, d = scores.shape
    step = max(1, _GRAM_VALUES // d)
    gram, total = np.zeros((d, d)), np.zeros(d)
    for i in range(0, n, step):
        block = scores[i : i + step]
        if weights is not None:
            drawn = np.flatnonzero(weights[i : i + step])
            weight = weights[i : i + step][drawn].astype(np.float32)
            block = block[drawn]
            total += weight @ block
            if (weight != 1).any():
                block = block * np.sqrt(weight)[:, None]
        else:
            total += block.sum(axis=0, dtype=np.float64)
        gram += self_product(block)
    return standardised(gram, total, n if weights is None else int(weights.sum()))


def self_product(block: NDArray[np.float32]) -> Floats:
    """blockᵀ·block (d, d) of rows (n, d), in 64 bits where that costs little.

    Sums in 32 bits are a few millionths off and differ between processors and libraries: enough to move a test that
    lies at its threshold. A matrix times itself is half the work of any other product.
    """
    exact = block.astype(np.float64) if block.shape[1] <= _NARROW else block
    return np.asarray(exact.T @ exact, dtype=np.float64)


def standardised(gram: Floats, total: Floats, count: int) -> Floats:
    """Computes the correlation (d, d) from sums over `count` rows: of products (d, d), symmetric, and of values (d,).

    The products are overwritten: a matrix of thousands of variables is best touched few times.
    """
    mean = total / count
    gram /= count
    gram -= np.outer(mean, mean)
    deviation = np.sqrt(np.maximum(gram.diagonal(), 0.0))
    varies = deviation > 1e-6
    scale = np.where(varies, 1.0 / np.where(varies, deviation, 1.0), 0.0)
    gram *= np.outer(scale, scale)  # one factor, so that the result is symmetric to the last bit
    np.clip(gram, -1.0, 1.0, out=gram)
    np.fill_diagonal(gram, 1.0)
    return gram
