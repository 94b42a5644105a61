"""Features that are seen in batches and never held, by one process or by several with a share each.

Everything that a structure is learned from is a sum over rows, except for two things, and both are small:

- the order of rows, which numbers them for the bootstrap: a hash of 8 bytes a row is held, so every row has the very
  number that it has in `canonical_order`, however it is stored;
- the ranks of values. A column with few distinct values, at most `FeatureStream.resolution`, has exact ones. Any other
  is cut into that many cells, whose edges are values of a random sample of rows and whose rows are then counted: only
  the order within a cell is lost.

The data is read four times for Gaussian tests: hashes of columns, hashes of rows, counts of values, and then one pass
for all samples of the tree whose matrices fit into memory together; discrete tests read their codes, one byte a value,
in the fourth pass and hold them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl.distributed.collectives import exchange, processes, rank, serve_rank_zero, summed
from brainet_pl.structure.canonical import Words, column_sums, in_order, refine, row_hashes
from brainet_pl.structure.cells import RowSample, add_counts, cell_edges, counted, more_levels, union_levels
from brainet_pl.structure.data import Floats, PreparedData, Weights, as_array, as_table
from brainet_pl.structure.discretize import MAX_LEVELS, Codes, check_bins, level_edges, level_scores
from brainet_pl.structure.statistics import CodeTable, self_product, standardised

Learned = TypeVar("Learned")

RESOLUTION = 4096  # cells of a column; the loss of a correlation is then below 1e-4
_BLOCK_ROWS = 4096  # rows worked on at a time, at the least: sums of large matrices cost as much as small products
_BLOCK_VALUES = 1 << 21  # values worked on at a time, where rows are short
_SAMPLE_VALUES = 1 << 26  # of the random sample of rows
_GRAM_BYTES = 1 << 30  # of all matrices that are summed in one pass
_MOST_GRAMS = 64  # summed in one pass; more would rather waste work on samples that nobody asks for
_GROUP = 64  # columns whose values are exchanged at a time


class FeatureStream:
    """Batches of features that can be read again and again: what `learn_structure` takes in the place of a table.

    Args:
        batches: a function without arguments that gives all batches (n_i, d), arrays or tensors of one type, from the
            beginning, in the same order each time.
        resolution: columns with more distinct values than that are cut into so many cells; more cells, less tolerance.
        shared: whether this is only this process's share of the data, and the other processes of the group have the
            rest. All of them must then call `learn_structure` with the same settings, and all get the same tree. A
            share may be empty.

    Example:
        >>> import numpy as np
        >>> from brainet_pl.structure import learn_structure
        >>> x = np.random.default_rng(0).normal(size=(300, 5)).cumsum(axis=1)
        >>> stream = FeatureStream(lambda: np.array_split(x, 7))
        >>> learn_structure(stream, test="cmi").fingerprint == learn_structure(x, test="cmi").fingerprint
        True
    """

    def __init__(
        self, batches: Callable[[], Iterable[Any]], *, resolution: int = RESOLUTION, shared: bool = False
    ) -> None:
        if not callable(batches):
            raise ValueError(
                f"expected batches to be a function that gives an iterator over all batches, got "
                f"{checks.shown(batches)}: give `lambda: loader` for a loader, so that it can be read again"
            )
        self.batches, self.shared = batches, checks.flag("shared", shared)
        self.resolution = checks.whole("resolution", resolution, 16, 1 << 20)
        self.held: NDArray[Any] | None = None

    @classmethod
    def share(cls, features: Any) -> FeatureStream:
        """This process's share (n, d) of data that the processes hold together in memory; all ranks are exact then."""
        values = as_array(features)  # checked when all processes look at their shares, so that all hear of an error
        stream = cls(lambda: [values] if len(values) else [], shared=True)
        stream.held = values
        return stream

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The rows as checked arrays (m, d) of a size that is good to work on, whatever the size of the batches."""
        waiting: list[NDArray[Any]] = []
        rows, first = 0, None
        for batch in self.batches():
            if not len(batch):
                continue
            values = as_table(batch, part=True)
            first = values[:0] if first is None else first
            _check_like(values, first)
            size = max(_BLOCK_ROWS, _BLOCK_VALUES // values.shape[1])
            while rows + len(values) >= size:
                yield _joined([*waiting, values[: size - rows]])
                values, waiting, rows = values[size - rows :], [], 0
            if len(values):
                waiting.append(values)
                rows += len(values)
        if rows:
            yield _joined(waiting)


def _check_like(values: NDArray[Any], first: NDArray[Any]) -> None:
    """Refuse a batch that has not the width and type of the first one."""
    if values.shape[1] != first.shape[1] or values.dtype != first.dtype:
        raise ValueError(
            f"expected batches of {first.shape[1]} columns of {first.dtype} like the first, got "
            f"{values.shape[1]} of {values.dtype}: bring all batches to one width and type"
        )


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """Rows behind each other; a single array is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class _FirstPass(NamedTuple):
    """What the first pass finds in a share: sums of hashes (d,), the type of values, and levels where they are few."""

    sums: Words
    dtype: np.dtype[Any]
    levels: list[NDArray[Any] | None]


class StreamedData(PreparedData):
    """A `FeatureStream` as the tests and scores read it; holds hashes, tables of values and sums, but no features.

    With shares, all processes make one together, and the first one learns while all of them `serve` it (`ask`).

    Attributes:
        exact: (d,) in the order of `columns`, whether the ranks of a column are exact; known after the first
            correlation or table.
    """

    def __init__(self, stream: FeatureStream, bins: int, max_rows: int | None = None) -> None:
        self.stream, self.bins = stream, check_bins(bins)
        max_rows = checks.whole_or_none("max_rows", max_rows, 2, "None learns from all rows")
        self._shared = stream.shared and processes() > 1
        self.ask: Callable[[Any], Any] = self.serve
        self._together: Callable[[Callable[[], Any]], list[Any]] = exchange if self._shared else _alone
        self._most = 0 if stream.held is not None else stream.resolution  # distinct values of a column that are kept
        self._sample: tuple[Words, NDArray[Any]]
        self._dtype: np.dtype[Any] | None = None
        self._own_rows: int | None = None
        self._own_hash: Words | None = None
        row_hash, self._column_hash = refine(self._column_sums, self._row_hashes)
        if len(row_hash) < 2:
            raise ValueError(f"expected at least 2 rows, got {len(row_hash)}: dependence can't be seen in fewer")
        rows, self.columns, self.digest = in_order(row_hash, self._column_hash)
        number = np.empty(len(rows), dtype=np.intp)
        number[rows] = np.arange(len(rows))
        self._own_hash = row_hash[self._own]
        self._number = number[self._own]  # of each row of this process, in the order of the stream
        self._n = len(rows) if max_rows is None else min(max_rows, len(rows))
        self._announced: Iterator[Weights] = iter(())
        self._known: dict[str, Floats] = {}
        self._given: set[str] = set()
        self.exact: NDArray[np.bool_] | None = None

    @property
    def n(self) -> int:
        """The number of rows that are learned from, in all processes."""
        return self._n

    @property
    def categories(self) -> bool:
        """Whether columns are integers, and so categories where they have few levels."""
        assert self._dtype is not None
        return self._dtype.kind in "iub"

    @property
    def only_categories(self) -> bool:
        """Whether every column is taken as categories: whole numbers with few levels."""
        return self.categories and all(levels is not None and len(levels) <= MAX_LEVELS for levels in self._levels)

    @property
    def scores(self) -> NDArray[np.float32]:
        """Not there: no process holds all rows."""
        raise RuntimeError(
            "expected a test or score that asks for data.correlation(weights), got one that reads data.scores of a "
            "stream, whose rows nobody holds: change it, or give learn_structure a table"
        )

    # -- what the first process asks for, and all serve ---------------------------------------------------------------

    def serve(self, request: tuple[str, Any]) -> Any:
        """Answer a request of the first process; a collective where data is shared."""
        name, content = request
        return self._codes() if name == "codes" else self._grams(content)

    @cached_property
    def table(self) -> CodeTable:
        """The codes (n, d) that discrete tests and scores read, one byte each."""
        return CodeTable(self.ask(("codes", None)))

    def announce(self, samples: Iterable[Weights]) -> None:
        """Hear which samples will be asked for, so that one pass serves many of them."""
        self._announced = iter(samples)

    def correlation(self, weights: Weights | None = None) -> Floats:
        """Computes the correlation (d, d) of the normal scores, rows counted as often as `weights` (n,) says."""
        weights = _small(np.ones(self.n, dtype=np.uint8) if weights is None else weights)
        key = _key(weights)
        if key not in self._known:
            self._sum_many(key, weights)
        self._given.add(key)
        return self._known[key]

    def _sum_many(self, key: str, weights: NDArray[Any]) -> None:
        """Find the correlation of a sample, and in the same pass of as many announced ones as there is room for."""
        # Whoever was given one has it; what nobody has asked for yet stays.
        self._known = {name: matrix for name, matrix in self._known.items() if name not in self._given}
        room = min(_MOST_GRAMS, _GRAM_BYTES // (8 * self.d**2)) - len(self._known)
        wanted = {key: weights}
        while len(wanted) < room and (more := next(self._announced, None)) is not None:
            wanted.setdefault(_key(more), _small(more))
        wanted = {name: sample for name, sample in wanted.items() if name not in self._known}
        sums = self.ask(("grams", np.stack(list(wanted.values()))))
        for i, (name, sample) in enumerate(wanted.items()):
            gram, total = sums[i]
            sums[i] = (np.empty(0), np.empty(0))  # one by one, so that no more than one is there twice
            self._known[name] = standardised(gram, total, int(sample.sum()))

    # -- passes over the data -----------------------------------------------------------------------------------------

    def _blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(number of the first row, block): all rows of this process, as they were in earlier passes."""
        start = 0
        for block in self.stream.blocks():
            # One row of each block is compared: enough to notice another order, at next to no cost.
            expected = None if self._own_hash is None else self._own_hash[start : start + 1]
            if expected is not None and (row_hashes(block[: len(expected)], self._column_hash) != expected).any():
                raise ValueError(
                    f"expected the same batches in the same order in every pass, got another row {start}: give "
                    "FeatureStream a function that begins anew each time, without shuffling or augmentation"
                )
            yield start, block
            start += len(block)
        if self._own_rows is not None and start != self._own_rows:
            raise ValueError(
                f"expected {self._own_rows:,} rows in every pass, got {start:,}: give FeatureStream a function that "
                "begins anew each time, such as `lambda: loader`, not an iterator that is used up"
            )
        self._own_rows = start

    def _kept(self) -> Iterator[tuple[NDArray[np.intp], NDArray[Any]]]:
        """(canonical numbers (m,), values (m, d) with columns in canonical order) of the rows that are learned from."""
        for start, block in self._blocks():
            number = self._number[start : start + len(block)]
            kept = number < self.n
            if not kept.all():
                number, block = number[kept], block[kept]
            yield number, block[:, self.columns]

    def _column_sums(self, row_hash: Words | None) -> Words:
        """(d,) `column_sums` of all processes; the first call also finds the columns that have few distinct values."""
        hashes = None if row_hash is None else row_hash[self._own]
        answers = self._together(lambda: _first_pass(self._blocks(), hashes, self._most))
        shares = [share for share in answers if share is not None]
        if not shares:
            raise ValueError("expected features to learn from, got a stream without rows: check the data")
        shapes = [f"{len(share.sums)} columns of {share.dtype}" for share in shares]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"expected the same columns in every share, got {', '.join(shapes)}: check what each process reads"
            )
        self._dtype = shares[0].dtype
        if row_hash is None and self._most:
            columns = zip(*(share.levels for share in shares), strict=True)
            self._levels = [union_levels(list(levels), self._most) for levels in columns]
        return np.asarray(np.sum([share.sums for share in shares], axis=0, dtype=np.uint64))

    def _row_hashes(self, column_hash: Words) -> Words:
        """(N,) hashes of the rows of all processes; keeps a random sample of the rows beside them."""
        most = min(4 * self._most, _SAMPLE_VALUES // len(column_hash))

        def look() -> tuple[Words, Words, NDArray[Any]]:
            hashes, sample = [np.empty(0, dtype=np.uint64)], RowSample(most, len(column_hash), self._dtype)
            for _, block in self._blocks():
                hashes.append(row_hashes(block, column_hash))
                sample.add(hashes[-1], block)
            return np.concatenate(hashes), sample.hashes, sample.rows

        shares = self._together(look)
        sample = RowSample(most, len(column_hash), self._dtype)
        for _, hashes, rows in shares:
            sample.add(hashes, rows)
        self._sample = sample.hashes, sample.rows
        starts = np.cumsum([0, *(len(hashes) for hashes, _, _ in shares)])
        place = rank() if self._shared else 0
        self._own = slice(int(starts[place]), int(starts[place + 1]))
        return np.concatenate([hashes for hashes, _, _ in shares])

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Find levels and scores of every column, once; a collective where data is shared."""
        if self.exact is None:
            self.exact = self._measure_held() if self.stream.held is not None else self._measure_cells()

    def _measure_held(self) -> NDArray[np.bool_]:
        """From all distinct values of all processes, a few columns at a time; each keeps the scores of its own rows."""
        numbers, values = zip(*self._kept(), strict=True) if len(self._number) else ((), ())
        own = np.concatenate(values) if values else np.empty((0, self.d), dtype=self._dtype)
        self._held_number = np.concatenate(numbers) if numbers else np.empty(0, dtype=np.intp)
        self._held = own
        self._held_scores = np.empty(own.shape, dtype=np.float32)
        self._edges: list[NDArray[Any]] = []
        for first in range(0, self.d, _GROUP):
            group = range(first, min(first + _GROUP, self.d))
            counts = self._together(partial(counted, own[:, first : first + _GROUP]))
            for j, shares in zip(group, zip(*counts, strict=True), strict=True):
                levels, count = add_counts(shares)
                self._held_scores[:, j] = level_scores(count)[np.searchsorted(levels, own[:, j])]
                self._edges.append(level_edges(levels, count, self.bins, self.categories))
        return np.ones(self.d, dtype=bool)

    def _measure_cells(self) -> NDArray[np.bool_]:
        """From counts of the rows in each cell; a column with few distinct values has one of them in each cell."""
        exact = np.array([self._levels[j] is not None for j in self.columns])
        cells = [cell_edges(self._levels[j], self._sample[1][:, j], self.stream.resolution) for j in self.columns]

        def count() -> list[NDArray[np.int64]]:
            counts = [np.zeros(len(edges) + 1, dtype=np.int64) for edges in cells]
            for _, block in self._kept():
                for j, column in enumerate(np.ascontiguousarray(block.T)):
                    # Where the edges fall among the sorted values: a third of the time of a search for each value.
                    ends = np.searchsorted(np.sort(column), cells[j], side="right")
                    counts[j] += np.diff(ends, prepend=0, append=len(column))
            return counts

        shares = self._together(count)
        self._cells, self._cell_scores, self._edges = cells, [], []
        for j, edges in enumerate(cells):
            total = np.asarray(np.sum([counts[j] for counts in shares], axis=0, dtype=np.int64))
            filled = np.flatnonzero(total)
            score = np.zeros(len(total), dtype=np.float32)
            score[filled] = level_scores(total[filled])
            self._cell_scores.append(score)
            # The last cell holds all that lies above the largest edge, and is never an upper edge itself.
            upper = np.append(edges, edges[-1] if len(edges) else 0)[filled]
            self._edges.append(level_edges(upper, total[filled], self.bins, self.categories))
        return exact

    def _scored(self) -> Iterator[tuple[NDArray[np.intp], NDArray[np.float32]]]:
        """(canonical numbers (m,), normal scores (m, d)) of the rows of this process."""
        if self.stream.held is not None:
            for i in range(0, len(self._held), _BLOCK_ROWS):
                yield self._held_number[i : i + _BLOCK_ROWS], self._held_scores[i : i + _BLOCK_ROWS]
            return
        for number, block in self._kept():
            scores = np.empty((self.d, len(block)), dtype=np.float32)
            for j, column in enumerate(np.ascontiguousarray(block.T)):
                np.take(self._cell_scores[j], np.searchsorted(self._cells[j], column), out=scores[j])
            yield number, np.ascontiguousarray(scores.T)

    # -- sums ---------------------------------------------------------------------------------------------------------

    def _grams(self, weights: NDArray[Any]) -> list[tuple[Floats, Floats]]:
        """Σ w·z·zᵀ (d, d) and Σ w·z (d,) of all rows for each row of `weights` (K, n), in one pass."""
        self._measure()
        grams = [(np.zeros((self.d, self.d)), np.zeros(self.d)) for _ in weights]

        def add() -> None:
            for number, scores in self._scored():
                for (gram, total), own in zip(grams, weights[:, number], strict=True):
                    drawn = np.flatnonzero(own)
                    root = np.sqrt(own[drawn], dtype=np.float32)
                    # √w on both sides: the product of a matrix with itself costs half of a general one.
                    part = scores[drawn] * root[:, None]
                    gram += self_product(part)
                    total += root @ part

        self._together(add)
        return [(summed(gram), summed(total)) for gram, total in grams] if self._shared else grams

    def _codes(self) -> Codes:
        """The codes (n, d) of all rows, in canonical order."""
        self._measure()

        def code() -> tuple[NDArray[np.intp], NDArray[np.uint8]]:
            numbers, codes = [np.empty(0, dtype=np.intp)], [np.empty((0, self.d), dtype=np.uint8)]
            for number, block in self._kept():
                numbers.append(number)
                codes.append(np.empty(block.shape, dtype=np.uint8))
                for j, column in enumerate(np.ascontiguousarray(block.T)):
                    codes[-1][:, j] = np.searchsorted(self._edges[j], column)
            return np.concatenate(numbers), np.concatenate(codes)

        result = np.empty((self.n, self.d), dtype=np.uint8, order="F")
        for number, codes in self._together(code):
            result[number] = codes
        return Codes(result, np.array([len(edges) + 1 for edges in self._edges]))


def _alone(work: Callable[[], Any]) -> list[Any]:
    """The answers of all processes, of which there is one."""
    return [work()]


def _first_pass(blocks: Iterator[tuple[int, NDArray[Any]]], row_hash: Words | None, most: int) -> _FirstPass | None:
    """The sums and levels of the blocks of a share, or with hashes of its rows the sums alone; None without rows."""
    total: Words | None = None
    dtype: np.dtype[Any] | None = None
    levels: list[NDArray[Any] | None] = []
    for start, block in blocks:
        sums = column_sums(block, None if row_hash is None else row_hash[start : start + len(block)])
        total = sums if total is None else total + sums
        dtype = block.dtype
        if row_hash is None:
            levels = levels or [block[:0, 0]] * block.shape[1]
            levels = [more_levels(known, column, most) for known, column in zip(levels, block.T, strict=True)]
    return None if total is None or dtype is None else _FirstPass(total, dtype, levels)


def _small(weights: NDArray[Any]) -> NDArray[Any]:
    """The same weights in as few bytes as hold them."""
    return weights.astype(np.min_scalar_type(int(weights.max())))


def _key(weights: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(weights, dtype=np.int64).tobytes(), digest_size=16).hexdigest()


def learn_together(features: Any, bins: int, max_rows: int | None, learn: Callable[[Any], Learned]) -> Learned:
    """`learn(features)`; of shares the first process learns, all read the data, and all get what it gives.

    Data is read by all processes together. In between the first one learns alone, for as long as it takes.
    """
    if not (isinstance(features, FeatureStream) and features.shared and processes() > 1):
        return learn(features)
    data = StreamedData(features, bins, max_rows)

    def work(ask: Callable[[Any], Any]) -> Learned:
        data.ask = ask
        return learn(data)

    return serve_rank_zero(work, data.serve)


PreparedData.sources[FeatureStream] = StreamedData
