"""Discrete tests at hundreds of features beside a plain way to count: `python benchmarks/structure.py counts`.

The plain way was the library's own before: for each condition set the rows of each configuration are copied and
multiplied, for all pairs that the set is asked for; lists of pairs are counted by a joint code of each row. Both ways
run in turn in one process, and their trees have to be the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from common.data import relu_features
from common.tables import table
from numpy.typing import NDArray

from brainet_pl.structure import PreparedData, learn_structure
from brainet_pl.structure.data import Weights
from brainet_pl.structure.independence.base import Floats, Ints
from brainet_pl.structure.independence.counts import ConditionalMutualInformation, CountTest
from brainet_pl.structure.statistics import CountSample, _chunks

THRESHOLD = ConditionalMutualInformation.default_threshold
CASES = [(20_000, 512, 2), (50_000, 512, 2), (50_000, 512, 3)]  # rows, features, levels
VALUES = 1 << 24  # copied at a time


class PlainSample(CountSample):
    """Counts of the same sample by copies of rows and by joint codes."""

    @cached_property
    def _by_row(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.table.indicators.T)

    def _split(self, condition: tuple[int, ...], left_columns: Ints, right_columns: Ints) -> NDArray[np.float32]:
        """(q - 1, 1 + Cl, 1 + Cr) counts in each configuration of `condition` but the one of all levels 0."""
        configuration = np.zeros(len(self._rows), dtype=np.int64)
        for z in condition:
            configuration *= self.table.arities[z]
            configuration += self._code_rows[z]
        selected = np.flatnonzero(configuration)
        kept = configuration[selected]
        if kept.size and kept.max() < 1 << 16:
            kept = kept.astype(np.uint16)  # numpy sorts 16-bit integers by radix
        order = np.argsort(kept, kind="stable")
        selected, kept = selected[order], kept[order]
        ends = np.append(np.flatnonzero(kept[1:] != kept[:-1]) + 1, len(kept)) if kept.size else np.empty(0, np.intp)
        table, rows, weights = self.table, self._rows[selected], self._weights[selected]
        parts = np.zeros((len(ends), len(left_columns), len(right_columns)), dtype=table.dtype)
        # Whole rows copy several times faster than scattered values, so a wider product is often the cheaper one.
        width, few = self._by_row.shape[1], len(left_columns) + len(right_columns)
        if width * (1 + width / 100) < few * 3 + len(left_columns) * len(right_columns) / 50:
            # Rows repeated by their weights: the product of a matrix with itself costs half of a general one.
            times = weights.astype(np.intp)
            rows = np.repeat(rows, times)
            ends = np.cumsum(times)[ends - 1] if len(ends) else ends
            for first, last, segments in _chunks(ends, max(1, VALUES // width)):
                a = self._by_row.take(rows[first:last], axis=0).astype(table.dtype)
                for i, start, end in segments:
                    segment = a[start:end]
                    parts[i] += (segment.T @ segment)[left_columns[:, None], right_columns]
        else:
            for first, last, segments in _chunks(ends, max(1, VALUES // few)):
                chunk = rows[first:last, None]
                a = self._by_row[chunk, left_columns].astype(table.dtype)
                b = self._by_row[chunk, right_columns] * weights[first:last, None]
                for i, start, end in segments:
                    parts[i] += a[start:end].T @ b[start:end]
        return parts

    def pair_tables(self, x: Ints, y: Ints, conditions: Ints) -> NDArray[np.int64]:
        """Counts pairs x (T,), y (T,) given conditions (T, n), (T, q, r, s)."""
        shape = self.table_shape(x, y, conditions)
        return self._coded_tables(shape, x, y, conditions).reshape(len(x), *shape)


class PlainInformation(CountTest):
    """The test "cmi" with the plain counts, without the short way for single conditions."""

    name = "cmi, plainly"
    unit = "nats"
    default_threshold = THRESHOLD

    @classmethod
    def on(cls, data: PreparedData, weights: Weights | None, threshold: float) -> CountTest:
        """The test on the codes of `data`, rows counted as often as `weights` (N,) says."""
        return cls(PlainSample(data.table, weights), threshold)

    def margin(self, information: Floats, freedom: Callable[[], Floats], order: int) -> Floats:
        """Computes the information less the threshold."""
        return information / self.sample.total - self.threshold


def counts(stored: dict[str, Any], save: Callable[[str, Any], None], cases: list[tuple[int, int, int]] = CASES) -> None:
    """Seconds of processor time of one structure by both ways, and their ratio; what is stored is not run again."""
    ways = {"quick": ConditionalMutualInformation, "plain": PlainInformation}
    rows = []
    for n, d, bins in cases:
        name = f"{d} × {n:,}, {bins} levels"
        if name not in stored:
            data = PreparedData.prepare(relu_features(n, d), bins)
            assert data.table.indicators.any()  # made here, not in the time of the first way
            case: dict[str, float] = {}
            trees = {}
            for way, test in ways.items():
                start = time.process_time()
                trees[way] = learn_structure(data, s=1, max_order=1, test=test, threshold=THRESHOLD, progress=False)
                case[way] = time.process_time() - start
            assert trees["quick"].root == trees["plain"].root, "expected the same tree of both ways"
            stored[name] = case | {"tests": trees["quick"].settings["tests"], "ratio": case["plain"] / case["quick"]}
            print(name, stored[name], flush=True)
            save("counts", stored)
        rows.append([name, *(stored[name][key] for key in ("tests", "plain", "quick", "ratio"))])
    table(["one structure, cmi", "CI tests", "plain, s", "quick, s", "ratio"], rows)
