"""What tests say about pairs of variables, the smallest margin and the condition set that gave it, and how many ran."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.independence import Margins, SingleMargins
from brainet_pl.structure.pdag import Bools, Ints, Separations, transposed

BLOCK_PAIRS = 24  # from so many pairs on, a block costs less than a list (measured for 5,000 to 60,000 rows)
LEAST_FOR_A_THREAD = 10_000  # tests from one end, below which to hand them to a thread takes longer than they do
THREADS = min(4, os.cpu_count() or 1)  # that look for single conditions; more wait for memory
ENDS = 64  # ends of edges looked from before the budget is asked again
LIST_LENGTH = 256  # pairs in one list
LIST_ORDER = 4  # lists keep dense tables, which grow as levels^(order + 2)
MOST_CONDITIONS = 64  # members of condition sets for one end of an edge: the variables that depend most on that end


@dataclass
class Budget:
    """Counts the tests of a run and says when it has had enough of them, or of time."""

    max_tests: int | None = None
    max_seconds: float | None = None
    on_tests: Callable[[int], object] = lambda count: None
    tests: int = 0
    start: float = field(default_factory=time.monotonic)

    def count(self, tests: int) -> None:
        """Adds so many tests to those made, and tells whoever listens."""
        self.tests += tests
        self.on_tests(tests)

    @property
    def left(self) -> float | None:
        """The seconds that are left; None: no limit."""
        return None if self.max_seconds is None else max(0.0, self.max_seconds - (time.monotonic() - self.start))

    @property
    def spent(self) -> bool:
        """No further test should be started."""
        if self.max_tests is not None and self.tests >= self.max_tests:
            return True
        return self.max_seconds is not None and time.monotonic() - self.start >= self.max_seconds


@dataclass
class Evidence:
    """For every pair the smallest margin met so far, and the condition set that gave it."""

    best: NDArray[np.float64]  # (d, d) margins, symmetric
    witness: NDArray[np.int64]  # (d, d) index into `conditions`, -1 where no set was tried
    conditions: list[tuple[int, ...]]  # all sets tried
    silent: list[tuple[int, int, int]]  # (x, y, index into `conditions`) of tests that could not say anything

    @classmethod
    def none(cls, d: int) -> Evidence:
        """Evidence before the first test."""
        return cls(np.full((d, d), np.inf), np.full((d, d), -1), [], [])

    def collect(self, pairs: Bools, potential: Bools, n: int, test: Margins, budget: Budget) -> None:
        """Test `pairs` (d, d) given every set of n of the `potential` parents (d, d) of either end.

        Of more than `MOST_CONDITIONS` potential parents those count that depend most on the variable, where the test
        can say. A condition set shared by many pairs is tested as a block; those with few are gathered into long lists.
        """
        if n == 0:
            self._collect_marginal(pairs, test, budget)
            return
        potential = strongest(potential, test)
        if n == 1 and isinstance(test, SingleMargins):
            self._collect_singles(pairs, potential, test, budget)
            return
        pending: list[tuple[int, Ints, Ints]] = []  # (index of the condition set, x, y)
        waiting = 0
        for condition, left in _conditions(pairs, potential, n, budget):
            if budget.spent:
                break
            wanted = pairs[left]
            wanted[:, condition] = False
            wanted[:, left] = np.triu(wanted[:, left])  # a pair that owns the set twice is tested once
            row, y = np.nonzero(wanted)
            if not len(row):
                continue
            budget.count(len(row))
            number = len(self.conditions)
            self.conditions.append(condition)
            if len(row) >= BLOCK_PAIRS or n > LIST_ORDER:
                right = np.unique(y)
                margin = test.block(condition, left, right)
                self._keep(left[row], y, margin[row, np.searchsorted(right, y)], np.full(len(row), number))
            else:
                pending.append((number, left[row], y))
                waiting += len(row)
                if waiting >= LIST_LENGTH:
                    self._flush(pending, test)
                    pending, waiting = [], 0
        self._flush(pending, test)

    def _collect_marginal(self, pairs: Bools, test: Margins, budget: Budget) -> None:
        """`collect` for the empty set: one block."""
        ends = np.flatnonzero(pairs.any(axis=1))
        if budget.spent or not len(ends):
            return
        budget.count(int(pairs.sum()) // 2)
        margins = np.full(pairs.shape, np.inf)
        whole = len(ends) == len(pairs)  # a copy of the whole matrix by index takes longer than the tests
        block = np.round(test.block((), ends, ends), 12)
        margins[slice(None) if whole else np.ix_(ends, ends)] = block
        margins = np.minimum(margins, transposed(margins))  # the two halves may be rounded differently
        better = pairs & (margins < self.best)
        self.best[better] = margins[better]
        self.witness[better] = len(self.conditions)
        self.conditions.append(())

    def _collect_singles(self, pairs: Bools, potential: Bools, test: SingleMargins, budget: Budget) -> None:
        """`collect` for sets of one variable, where the test can find the best of them by itself: one end at a time."""
        before = len(self.conditions)
        self.conditions += [(z,) for z in range(len(pairs))]
        margins = np.full(pairs.shape, np.inf)
        witness = np.zeros(pairs.shape, dtype=np.int32)
        ends = np.flatnonzero(pairs.any(axis=1) & potential.any(axis=1))
        # A pair is met from both its ends, and mostly given the same variables: each side counts for half.
        asked = pairs.sum(axis=1) * potential.sum(axis=1)

        def look_from(x: int) -> None:
            y, z = np.flatnonzero(pairs[x]), np.flatnonzero(potential[x])
            margins[x, y], best = test.weakest(x, y, z)
            witness[x, y] = z[best]

        for x in ends[:1].tolist():
            look_from(x)  # what the test keeps for all ends is made once, before there are threads
        with ExitStack() as stack:
            few = not len(ends) or asked[ends].max() < LEAST_FOR_A_THREAD
            look_from_all = map if few else stack.enter_context(ThreadPoolExecutor(THREADS)).map
            for start in range(0, len(ends), ENDS):
                if budget.spent:
                    break
                part = ends[start : start + ENDS]
                list(look_from_all(look_from, part.tolist()))
                budget.count(int(asked[part].sum()) // 2)
        np.round(margins, 12, out=margins)
        other, other_witness = transposed(margins), transposed(witness)
        turned = (other < margins) | ((other == margins) & (other_witness < witness))
        margins, witness = np.where(turned, other, margins), np.where(turned, other_witness, witness)
        better = margins < self.best
        self.best[better] = margins[better]
        self.witness[better] = witness[better] + before

    def _flush(self, pending: list[tuple[int, Ints, Ints]], test: Margins) -> None:
        if pending:
            x = np.concatenate([xs for _, xs, _ in pending])
            y = np.concatenate([ys for _, _, ys in pending])
            number = np.repeat([k for k, _, _ in pending], [len(xs) for _, xs, _ in pending])
            conditions = np.asarray([self.conditions[k] for k, _, _ in pending])
            sets = np.repeat(conditions, [len(xs) for _, xs, _ in pending], axis=0)
            self._keep(x, y, test.pairs(x, y, sets), number)

    def _keep(self, x: Ints, y: Ints, margin: NDArray[np.float64], number: NDArray[np.int64]) -> None:
        """Remember smaller margins; ties, up to rounding, go to the condition set that came first."""
        margin = np.round(margin, 12)
        low, high = np.minimum(x, y), np.maximum(x, y)
        said_nothing = margin == 0
        if said_nothing.any():
            parts = (low[said_nothing], high[said_nothing], number[said_nothing])
            self.silent += zip(*(part.tolist() for part in parts), strict=True)
        order = np.lexsort((number, margin, high, low))
        first = np.ones(len(order), dtype=bool)
        first[1:] = (low[order][1:] != low[order][:-1]) | (high[order][1:] != high[order][:-1])
        chosen = order[first]
        chosen = chosen[margin[chosen] < self.best[low[chosen], high[chosen]]]
        low, high = low[chosen], high[chosen]
        self.best[low, high] = self.best[high, low] = margin[chosen]
        self.witness[low, high] = self.witness[high, low] = number[chosen]

    def add(self, separations: Separations, pairs: Bools, test: Margins, budget: Budget) -> None:
        """Test `pairs` (d, d) given the sets that are recorded for them in `separations`."""
        ends = np.searchsorted(separations.owner, np.arange(len(separations.pairs) + 1))
        for i in np.flatnonzero(pairs[separations.pairs[:, 0], separations.pairs[:, 1]]):
            condition = tuple(sorted(separations.member[ends[i] : ends[i + 1]].tolist()))
            x, y = separations.pairs[i : i + 1].T
            budget.count(1)
            self.conditions.append(condition)
            self._keep(x, y, test.block(condition, x, y)[0], np.array([len(self.conditions) - 1]))

    def separations(self, pairs: Bools) -> Separations:
        """The record of `pairs` (d, d), each with the condition set that made it most independent."""
        x, y = np.nonzero(np.triu(pairs & (self.witness >= 0)))
        used, which = np.unique(self.witness[x, y], return_inverse=True)
        sizes = np.array([len(self.conditions[i]) for i in used], dtype=np.intp)
        first = np.cumsum(sizes) - sizes
        members = np.fromiter(chain.from_iterable(self.conditions[i] for i in used), dtype=np.intp)
        size = sizes[which]
        owner = np.repeat(np.arange(len(x)), size)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(size) - size, size)  # within its set
        return Separations(np.column_stack([x, y]), owner, members[first[which[owner]] + place])


def strongest(potential: Bools, test: Margins) -> Bools:
    """Keeps of each row of `potential` (d, d) the `MOST_CONDITIONS` that depend most on its variable, given nothing.

    All of them where there are no more, or where the test has no `strength` or wants no cap.
    """
    strength = getattr(test, "strength", None) if getattr(test, "capped", True) else None
    crowded = np.flatnonzero(potential.sum(axis=1) > MOST_CONDITIONS)
    if strength is None or not len(crowded):
        return potential
    kept = potential.copy()
    kept[crowded] = False
    for x in crowded:
        z = np.flatnonzero(potential[x])
        kept[x, z[np.argsort(-strength[x, z], kind="stable")[:MOST_CONDITIONS]]] = True
    return kept


def _conditions(edges: Bools, potential: Bools, n: int, budget: Budget) -> Iterator[tuple[tuple[int, ...], Ints]]:
    """Every condition set of size n ≥ 1 with the variables `left` of which it holds n potential parents."""
    ends = np.flatnonzero(edges.any(axis=1))
    if n == 1:
        for z in np.flatnonzero(potential[ends].any(axis=0)):
            yield (int(z),), ends[potential[ends, z]]
    else:
        owners: dict[tuple[int, ...], list[int]] = {}
        for x in ends:
            if budget.spent:  # listing the sets of a dense graph takes time too
                break
            for condition in combinations(np.flatnonzero(potential[x]).tolist(), n):
                owners.setdefault(condition, []).append(int(x))
        for condition in sorted(owners):
            yield condition, np.asarray(owners[condition])


def remove_separated(
    A: Bools, edges: Bools, potential: Bools, n: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Remove from `A` those of `edges` (d, d) that some set of n `potential` parents (d, d) of either end separates.

    A set that determines an end of an edge leaves nothing to test (margin 0). It stands in for that end where the
    other end is still joined to all of the set: the edge then goes as well. If instead the set was separated from the
    other end, it was by the end that it determines, and this edge is the one to keep.
    """
    evidence = Evidence.none(len(A))
    evidence.collect(edges, potential, n, test, budget)
    gone = edges & (evidence.best < 0)
    left = edges & ~gone
    skeleton = (A | transposed(A)) & ~gone
    for a, b, number in sorted(evidence.silent):
        members = list(evidence.conditions[number])
        if left[a, b] and skeleton[np.ix_(members, [a, b])].all():
            left[a, b] = left[b, a] = skeleton[a, b] = skeleton[b, a] = False
            evidence.witness[a, b] = evidence.witness[b, a] = number
    return A & skeleton, evidence.separations(edges & ~left)
