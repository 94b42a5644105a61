"""Recursive autonomy identification: thin a graph by tests of one order, and split it where it falls apart.

`increase_separation` is line 8 of Algorithm 1, `is_leaf` its line 2; `pdag.find_autonomous` is line 9. All work on the
adjacency `A` described in `pdag.py`, take `X` and `X_ex` as sorted index arrays, and return new arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.independence import Margins
from brainet_pl.structure.pdag import (
    Bools,
    Ints,
    Separations,
    collider_votes,
    complete_graph,
    find_autonomous,
    join_separations,
    orient,
    orient_surest_first,
)

BLOCK_PAIRS = 24  # from so many pairs on, a block costs less than a list (measured for 5,000 to 60,000 rows)
LIST_LENGTH = 256  # pairs in one list
LIST_ORDER = 4  # lists keep dense tables, which grow as levels^(order + 2)
REPAIR_ORDER = 3  # largest set weighed when a v-structure is decided; more only adds noise and time


@dataclass
class Budget:
    """Counts the tests of a run and says when it has had enough of them, or of time."""

    max_tests: int | None = None
    max_seconds: float | None = None
    on_tests: Callable[[int], object] = lambda count: None
    tests: int = 0
    start: float = field(default_factory=time.monotonic)

    def count(self, tests: int) -> None:
        """Add `tests` tests."""
        self.tests += tests
        self.on_tests(tests)

    @property
    def spent(self) -> bool:
        """No further test should be started."""
        if self.max_tests is not None and self.tests >= self.max_tests:
            return True
        return self.max_seconds is not None and time.monotonic() - self.start >= self.max_seconds


def is_leaf(A: Bools, X: Ints, X_ex: Ints, n: int) -> bool:
    """Line 2: no variable of X has more than n potential parents within X ∪ X_ex, so no test of order n is possible."""
    scope = np.concatenate([X, X_ex])
    return bool(A[np.ix_(scope, X)].sum(axis=0).max() <= n)


def increase_separation(
    A: Bools, X: Ints, X_ex: Ints, n: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Line 8: remove edges by tests of order n, first between X_ex and X, then within X, and orient what is left.

    Orienting already between the two phases, as RAI was first described, lets an edge that the second phase is about
    to remove take part in a v-structure: with a perfect oracle 1 to 4 % of sparse random DAGs then come out wrong,
    and none if orientation waits. Returns the thinner graph and what was separated by what.
    """
    if getattr(test, "keeps_all", False):  # the ensemble of the ablation: d² edges times d sets without a finding
        return A, join_separations([])
    inside = np.zeros(len(A), dtype=bool)
    inside[X] = True
    scope = np.sort(np.concatenate([X, X_ex]))
    A, from_outside = _thin(A, X, X_ex, scope, n, test, budget)
    A, from_inside = _thin(A, X, X, scope, n, test, budget)
    found = join_separations([from_outside, from_inside])
    return _orient_within(A, scope, inside, found), found


def _orient_within(A: Bools, scope: Ints, inside: Bools, removed: Separations) -> Bools:
    """Orient edges among `scope`; only variables of X can be in the middle of a v-structure found here."""
    if not len(removed.pairs):
        return A
    place = np.full(len(A), -1)
    place[scope] = np.arange(len(scope))
    known = place[removed.member] >= 0
    local = Separations(place[removed.pairs], removed.owner[known], place[removed.member[known]])
    inner = A[np.ix_(scope, scope)]
    A = A.copy()
    A[np.ix_(scope, scope)] = orient(inner, collider_votes(inner, local, inside[scope]))
    return A


def _thin(
    A: Bools, X: Ints, others: Ints, scope: Ints, n: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Test every edge X–others against every condition set of size n, then remove all that some set separates.

    All tests refer to the graph as it was at the start, so their order does not matter. A condition set for an edge
    is drawn from the potential parents of either end.
    """
    d = len(A)
    edges = np.zeros((d, d), dtype=bool)
    edges[np.ix_(X, others)] = (A | A.T)[np.ix_(X, others)]
    edges |= edges.T
    potential = np.zeros((d, d), dtype=bool)  # potential[x, z]: z is a potential parent of x within the scope
    potential[np.ix_(scope, scope)] = A.T[np.ix_(scope, scope)]
    return _remove_separated(A, edges, potential, n, test, budget)


def _remove_separated(
    A: Bools, edges: Bools, potential: Bools, n: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Remove from `A` those of `edges` (d, d) that some set of n `potential` parents (d, d) of either end separates.

    A set that determines an end of an edge leaves nothing to test (margin 0). It stands in for that end where the
    other end is still joined to all of the set: the edge then goes as well. If instead the set was separated from the
    other end, it was by the end that it determines, and this edge is the one to keep.
    """
    evidence = Evidence.none(len(A))
    evidence.collect(edges, potential, n, test, budget)
    A = A.copy()
    x, y = np.nonzero(np.triu(edges & (evidence.best < 0)))
    A[x, y] = A[y, x] = False
    for a, b, number in sorted(evidence.silent):
        members = list(evidence.conditions[number])
        if (A[a, b] or A[b, a]) and ((A | A.T)[np.ix_(members, [a, b])]).all():
            A[a, b] = A[b, a] = False
            evidence.witness[a, b] = evidence.witness[b, a] = number
    gone = edges & ~(A | A.T)
    return A, evidence.separations(gone)


@dataclass
class Evidence:
    """For every pair the smallest margin met so far, and the condition set that gave it.

    Attributes:
        best: (d, d) margins, symmetric.
        witness: (d, d) index into `conditions`, -1 where no set was tried.
        conditions: all sets tried.
        silent: (x, y, index into `conditions`) of tests that could not say anything.
    """

    best: NDArray[np.float64]
    witness: NDArray[np.int64]
    conditions: list[tuple[int, ...]]
    silent: list[tuple[int, int, int]]

    @classmethod
    def none(cls, d: int) -> Evidence:
        """Nothing is known yet."""
        return cls(np.full((d, d), np.inf), np.full((d, d), -1), [], [])

    def collect(self, pairs: Bools, potential: Bools, n: int, test: Margins, budget: Budget) -> None:
        """Test `pairs` (d, d) given every set of n of the `potential` parents (d, d) of either end.

        A condition set shared by many pairs is tested as a block; those with few are gathered into long lists.
        """
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
            if n == 0 or len(row) >= BLOCK_PAIRS or n > LIST_ORDER:
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

    def add(self, found: Separations, pairs: Bools, test: Margins, budget: Budget) -> None:
        """Test `pairs` (d, d) given the sets that are recorded for them in `found`."""
        ends = np.searchsorted(found.owner, np.arange(len(found.pairs) + 1))
        for i in np.flatnonzero(pairs[found.pairs[:, 0], found.pairs[:, 1]]):
            condition = tuple(sorted(found.member[ends[i] : ends[i + 1]].tolist()))
            x, y = found.pairs[i : i + 1].T
            budget.count(1)
            self.conditions.append(condition)
            self._keep(x, y, test.block(condition, x, y)[0], np.array([len(self.conditions) - 1]))

    def separations(self, pairs: Bools) -> Separations:
        """The record of `pairs` (d, d), each with the condition set that made it most independent."""
        x, y = np.nonzero(np.triu(pairs & (self.witness >= 0)))
        sets = [self.conditions[i] for i in self.witness[x, y]]
        owner = np.repeat(np.arange(len(x)), [len(members) for members in sets]).astype(np.intp)
        member = np.fromiter(chain.from_iterable(sets), dtype=np.intp)
        return Separations(np.column_stack([x, y]), owner, member)


def _conditions(edges: Bools, potential: Bools, n: int, budget: Budget) -> Iterator[tuple[tuple[int, ...], Ints]]:
    """Every condition set of size n with the variables `left` of which it holds n potential parents."""
    ends = np.flatnonzero(edges.any(axis=1))
    if n == 0:
        if len(ends):
            yield (), ends
    elif n == 1:
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


def recursive_autonomy(
    A: Bools, X: Ints, X_ex: Ints, n: int, max_order: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Plain RAI: Algorithm 1 with one pass instead of s, and the whole graph as its result."""
    if n > max_order or is_leaf(A, X, X_ex, n) or budget.spent:
        return A, join_separations([])
    A, found = increase_separation(A, X, X_ex, n, test, budget)
    descendant, ancestors = find_autonomous(A, X)
    exogenous = np.sort(np.concatenate([X_ex, *ancestors]))
    calls = [(part, X_ex) for part in ancestors] + [(descendant, exogenous)]
    results = [recursive_autonomy(A, part, part_ex, n + 1, max_order, test, budget) for part, part_ex in calls]
    merged = np.logical_and.reduce([graph for graph, _ in results])
    return merged, join_separations([found, *(more for _, more in results)])


def marginally_dependent(d: int, X: Ints, test: Margins, budget: Budget) -> Bools:
    """(d, d): pairs of `X` that the test does not call independent given nothing."""
    inside = np.zeros((d, d), dtype=bool)
    inside[np.ix_(X, X)] = complete_graph(len(X))
    evidence = Evidence.none(d)
    evidence.collect(inside, inside, 0, test, budget)
    return inside & (evidence.best >= 0)


class Unexplained:
    """From a DAG (d, d) to the pairs of `X` (d, d) that are dependent given the parents of either end.

    Dependences that cancel, such as a direct one and one by another way, show only here and not given nothing. What was
    tested once is remembered, because most parents stay from one DAG to the next.
    """

    def __init__(self, X: Ints, test: Margins, budget: Budget) -> None:
        self.X, self.test, self.budget = X, test, budget
        self._known: dict[tuple[int, tuple[int, ...]], Ints] = {}

    def __call__(self, dag: Bools) -> Bools:
        """(d, d), symmetric."""
        pairs = np.zeros(dag.shape, dtype=bool)
        for x in self.X.tolist():
            parents = tuple(np.flatnonzero(dag[:, x]).tolist())
            if parents and not self.budget.spent:
                pairs[x, self._dependent(x, parents)] = True
        return pairs | pairs.T

    def _dependent(self, x: int, parents: tuple[int, ...]) -> Ints:
        if (x, parents) not in self._known:
            others = np.setdiff1d(self.X, [x, *parents])
            if len(others):
                self.budget.count(len(others))
                others = others[self.test.block(parents, np.array([x]), others)[0] > 0]
            self._known[x, parents] = others
        return self._known[x, parents]


def retest_widely(
    A: Bools, X: Ints, found: Separations, max_order: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Second thoughts about the edges among `X` that the recursion left: no direction is believed any more.

    A weak dependence that an early test misses makes a false v-structure, which hides separating sets from later
    calls. So every remaining edge is tested given each single variable that depends on one of its ends, neighbour or
    not (one such test often does what would take two neighbours), and then given neighbours of either end up to
    `max_order`. Returns the skeleton, and `found` with what was separated here.
    """
    skeleton = A | A.T
    if max_order < 1:
        return skeleton, found
    dependent = marginally_dependent(len(A), X, test, budget)
    parts = [found]
    for n in range(1, max_order + 1):
        candidates = dependent if n == 1 else skeleton
        if n > 1 and skeleton.sum(axis=0).max() <= n:
            break
        skeleton, removed = _remove_separated(skeleton, skeleton, candidates, n, test, budget)
        parts.append(removed)
    return skeleton, join_separations(parts)


def orient_by_evidence(skeleton: Bools, found: Separations, max_order: int, test: Margins, budget: Budget) -> Bools:
    """Direct the edges of a finished skeleton: v-structures, the surest first, then Meek's rules.

    The ends of each open triple x — z — y are tested given neighbours of either end, and the set that makes them most
    independent says whether z is in the middle. Where none of these sets separates them, the one in `found`, which
    did, decides: with a perfect oracle every decision is therefore right.
    """
    d = len(skeleton)
    common = (skeleton.astype(np.float32) @ skeleton.astype(np.float32)) > 0
    open_ends = common & ~skeleton & complete_graph(d)
    evidence = Evidence.none(d)
    for n in range(min(max_order, REPAIR_ORDER) + 1):
        evidence.collect(open_ends, skeleton, n, test, budget)
    evidence.add(found, open_ends & (evidence.best >= 0), test, budget)
    chosen = evidence.separations(open_ends & (evidence.best < 0))
    x, y = chosen.pairs.T
    return orient_surest_first(skeleton, chosen, np.argsort(evidence.best[x, y], kind="stable"))
