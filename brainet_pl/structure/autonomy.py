"""Recursive autonomy identification: thin a graph by tests of one order, and split it where it falls apart.

`increase_separation` is line 8 of Algorithm 1, `is_leaf` its line 2; `pdag.find_autonomous` is line 9. All work on the
adjacency `A` described in `pdag.py`, take `X` and `X_ex` as sorted index arrays, and return new arrays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.independence import Margins, SingleMargins
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
    transposed,
)

BLOCK_PAIRS = 24  # from so many pairs on, a block costs less than a list (measured for 5,000 to 60,000 rows)
THREADS = min(4, os.cpu_count() or 1)  # that look for single conditions; more wait for memory
ENDS = 64  # ends of edges looked from before the budget is asked again
CROWD = 1 << 17  # separated pairs beyond which both, not one, have to be among the strongest around a middle
PAIRS = 2048  # separated pairs whose v-structures are looked for together
LIST_LENGTH = 256  # pairs in one list
LIST_ORDER = 4  # lists keep dense tables, which grow as levels^(order + 2)
MOST_CONDITIONS = 64  # members of condition sets for one end of an edge: the variables that depend most on that end
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
        """Adds so many tests to those made, and tells whoever listens."""
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
    A: Bools, X: Ints, X_ex: Ints, n: int, test: Margins, budget: Budget, check_colliders: bool = False
) -> tuple[Bools, Separations]:
    """Line 8: remove edges by tests of order n, first between X_ex and X, then within X, and orient what is left.

    Orienting already between the two phases, as RAI was first described, lets an edge that the second phase is about
    to remove take part in a v-structure: with a perfect oracle 1 to 4 % of sparse random DAGs then come out wrong,
    and none if orientation waits. Returns the thinner graph and what was separated by what.

    With `check_colliders`, a v-structure x → z ← y counts only if x and y, apart given their separating set, depend on
    each other given z as well: an effect makes its causes compete. A dependence too weak to be seen, as between the
    ends of a chain x → z → y, does not pass: given z there is nothing left of it.
    """
    if getattr(test, "keeps_all", False):  # the ensemble of the ablation: d² edges times d sets without a finding
        return A, join_separations([])
    inside = _mask(len(A), X)
    scope = np.sort(np.concatenate([X, X_ex]))
    A, from_outside = _thin(A, X, X_ex, scope, n, test, budget)
    A, from_inside = _thin(A, X, X, scope, n, test, budget)
    found = join_separations([from_outside, from_inside])
    if not len(found.pairs):
        return A, found
    if check_colliders:
        votes = checked_votes(A, found, inside, n, test, budget)
        if len(scope) == len(A):
            return orient(A, votes), found
        A = A.copy()
        A[np.ix_(scope, scope)] = orient(A[np.ix_(scope, scope)], votes[np.ix_(scope, scope)])
        return A, found
    return _orient_within(A, scope, inside, found), found


def checked_votes(A: Bools, found: Separations, targets: Bools, n: int, test: Margins, budget: Budget) -> Bools:
    """Says for which x → z, (d, d), there is a v-structure x → z ← y in which x and y depend on each other given z.

    `found` holds pairs that sets of size n separate; z is one of `targets` (d,). With a spent budget nothing is tested,
    and every v-structure votes.
    """
    if budget.spent:
        return collider_votes(A, found, targets)
    if n == 0:
        return _votes_by_middle(A | A.T, found, targets, test, budget)
    return _votes_by_triple(A | A.T, found, targets, n, test, budget)


def _votes_by_middle(skeleton: Bools, found: Separations, targets: Bools, test: Margins, budget: Budget) -> Bools:
    """`checked_votes` of pairs apart given nothing: all v-structures with one middle are one block of tests."""
    votes = np.zeros_like(skeleton)
    apart = np.zeros_like(skeleton)
    apart[tuple(found.pairs.T)] = True
    apart |= apart.T
    rivals = strongest(skeleton, test)  # of each middle: against them every other neighbour has to compete
    for z in np.flatnonzero(targets & (skeleton.sum(axis=0) > 1)):
        around, near = np.flatnonzero(skeleton[z]), np.flatnonzero(rivals[z])
        open_ends = apart[np.ix_(around, near)]
        x, y = around[open_ends.any(axis=1)], near[open_ends.any(axis=0)]
        if len(x):
            budget.count(int(open_ends.sum()) // 2)
            compete = (test.block((int(z),), x, y) > 0) & apart[np.ix_(x, y)]
            votes[x, z] |= compete.any(axis=1)
            votes[y, z] |= compete.any(axis=0)
    return votes


def _votes_by_triple(
    skeleton: Bools, found: Separations, targets: Bools, n: int, test: Margins, budget: Budget
) -> Bools:
    """`checked_votes` of pairs with separating sets: each v-structure has a condition set of its own."""
    votes = np.zeros_like(skeleton)
    members = found.member.reshape(len(found.pairs), n)
    # Bits in place of bytes: most of the time goes to reading rows.
    around = np.packbits(skeleton & targets, axis=1)
    near = np.packbits(transposed(strongest(skeleton, test)), axis=1)  # [x, z]: x is one of the strongest around z
    length = getattr(test, "list_length", LIST_LENGTH)
    crowded = len(found.pairs) > CROWD
    for start in range(0, len(found.pairs), PAIRS):
        if budget.spent:
            break
        part = slice(start, start + PAIRS)
        (x, y), given = found.pairs[part].T, members[part]
        close = near[x] & near[y] if crowded else near[x] | near[y]
        i, z = _set_bits(around[x] & around[y] & close)
        open_ = (given[i] != z[:, None]).all(axis=1)
        i, z = i[open_], z[open_]
        for place in range(0, len(i), length):
            these, middles = i[place : place + length], z[place : place + length]
            budget.count(len(these))
            a, b = x[these], y[these]
            compete = test.pairs(a, b, np.column_stack([given[these], middles])) > 0
            votes[a[compete], middles[compete]] = votes[b[compete], middles[compete]] = True
    return votes


def _set_bits(packed: NDArray[np.uint8]) -> tuple[Ints, Ints]:
    """Row and column of every bit of `packed` (R, C/8) that is set."""
    row, byte = np.nonzero(packed)
    place, bit = np.nonzero(np.unpackbits(packed[row, byte][:, None], axis=1))
    return row[place], byte[place] * 8 + bit


def _orient_within(A: Bools, scope: Ints, inside: Bools, removed: Separations) -> Bools:
    """Orient edges among `scope`; only variables of X can be in the middle of a v-structure found here."""
    place = np.full(len(A), -1)
    place[scope] = np.arange(len(scope))
    known = place[removed.member] >= 0
    local = Separations(place[removed.pairs], removed.owner[known], place[removed.member[known]])
    inner = A[np.ix_(scope, scope)]
    A = A.copy()
    A[np.ix_(scope, scope)] = orient(inner, collider_votes(inner, local, inside[scope]))
    return A


def _mask(d: int, members: Ints) -> Bools:
    """(d,) which of d variables are `members`."""
    mask = np.zeros(d, dtype=bool)
    mask[members] = True
    return mask


def _thin(
    A: Bools, X: Ints, others: Ints, scope: Ints, n: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Test every edge X–others against every condition set of size n, then remove all that some set separates.

    All tests refer to the graph as it was at the start, so their order does not matter. A condition set for an edge
    is drawn from the potential parents of either end.
    """
    if not len(others):
        return A, join_separations([])
    own, other, inside = (_mask(len(A), part) for part in (X, others, scope))
    turned = transposed(A)
    between = (own[:, None] & other) | (other[:, None] & own)
    edges = (A | turned) & between
    potential = turned & inside[:, None] & inside  # potential[x, z]: z is a potential parent of x within the scope
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
    gone = edges & (evidence.best < 0)
    left = edges & ~gone
    skeleton = (A | transposed(A)) & ~gone
    for a, b, number in sorted(evidence.silent):
        members = list(evidence.conditions[number])
        if left[a, b] and skeleton[np.ix_(members, [a, b])].all():
            left[a, b] = left[b, a] = skeleton[a, b] = skeleton[b, a] = False
            evidence.witness[a, b] = evidence.witness[b, a] = number
    return A & skeleton, evidence.separations(edges & ~left)


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
        """Makes the evidence of somebody who knows nothing yet."""
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

        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(ends), ENDS):
                if budget.spent:
                    break
                part = ends[start : start + ENDS]
                list(pool.map(look_from, part.tolist()))
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
    """Says which pairs (d, d) of `X` the test does not call independent given nothing."""
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
