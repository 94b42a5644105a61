"""Recursive autonomy identification: thin a graph by tests of one order, and split it where it falls apart.

`increase_separation` is line 8 of Algorithm 1, `is_leaf` its line 2; `pdag.find_autonomous` is line 9. All work on the
adjacency `A` described in `pdag.py`, take `X` and `X_ex` as sorted index arrays, and return new arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure import pdag
from brainet_pl.structure.evidence import LIST_LENGTH, Budget, remove_separated, strongest
from brainet_pl.structure.independence import Margins
from brainet_pl.structure.pdag import Bools, Ints, Separations

CROWD = 1 << 17  # separated pairs beyond which both, not one, have to be among the strongest around a middle
PAIRS = 2048  # separated pairs whose v-structures are looked for together


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
        return A, pdag.join_separations([])
    inside = np.isin(np.arange(len(A)), X)
    scope = np.sort(np.concatenate([X, X_ex]))
    A, from_outside = _thin(A, X, X_ex, scope, n, test, budget)
    A, from_inside = _thin(A, X, X, scope, n, test, budget)
    separations = pdag.join_separations([from_outside, from_inside])
    if not len(separations.pairs):
        return A, separations
    if check_colliders:
        votes = checked_votes(A, separations, inside, n, test, budget)
        if len(scope) == len(A):
            return pdag.orient(A, votes), separations
        A = A.copy()
        A[np.ix_(scope, scope)] = pdag.orient(A[np.ix_(scope, scope)], votes[np.ix_(scope, scope)])
        return A, separations
    return _orient_within(A, scope, inside, separations), separations


def checked_votes(A: Bools, separations: Separations, targets: Bools, n: int, test: Margins, budget: Budget) -> Bools:
    """Says for which x → z, (d, d), there is a v-structure x → z ← y in which x and y depend on each other given z.

    `separations` holds pairs that sets of size n separate; z is one of `targets` (d,). With a spent budget nothing is
    tested, and every v-structure votes.
    """
    if budget.spent:
        return pdag.collider_votes(A, separations, targets)
    if n == 0:
        return _votes_by_middle(A | A.T, separations, targets, test, budget)
    return _votes_by_triple(A | A.T, separations, targets, n, test, budget)


def _votes_by_middle(skeleton: Bools, separations: Separations, targets: Bools, test: Margins, budget: Budget) -> Bools:
    """`checked_votes` of pairs apart given nothing: all v-structures with one middle are one block of tests."""
    votes = np.zeros_like(skeleton)
    apart = np.zeros_like(skeleton)
    apart[tuple(separations.pairs.T)] = True
    apart |= apart.T
    rivals = strongest(skeleton, test)  # of each middle: against them every other neighbour has to compete
    for z in np.flatnonzero(targets & (skeleton.sum(axis=0) > 1)):
        around, near = np.flatnonzero(skeleton[z]), np.flatnonzero(rivals[z])
        open_ends = apart[around[:, None], near]
        x, y = around[open_ends.any(axis=1)], near[open_ends.any(axis=0)]
        if len(x):
            budget.count(int(open_ends.sum()) // 2)
            compete = (test.block((int(z),), x, y) > 0) & apart[x[:, None], y]
            votes[x, z] |= compete.any(axis=1)
            votes[y, z] |= compete.any(axis=0)
    return votes


def _votes_by_triple(
    skeleton: Bools, separations: Separations, targets: Bools, n: int, test: Margins, budget: Budget
) -> Bools:
    """`checked_votes` of pairs with separating sets: each v-structure has a condition set of its own."""
    votes = np.zeros_like(skeleton)
    members = separations.member.reshape(len(separations.pairs), n)
    # Bits in place of bytes: most of the time goes to reading rows.
    around = np.packbits(skeleton & targets, axis=1)
    near = np.packbits(pdag.transposed(strongest(skeleton, test)), axis=1)  # [x, z]: x is one of the strongest around z
    length = getattr(test, "list_length", LIST_LENGTH)
    crowded = len(separations.pairs) > CROWD
    for start in range(0, len(separations.pairs), PAIRS):
        if budget.spent:
            break
        part = slice(start, start + PAIRS)
        (x, y), given = separations.pairs[part].T, members[part]
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
    A[np.ix_(scope, scope)] = pdag.orient(inner, pdag.collider_votes(inner, local, inside[scope]))
    return A


def _thin(
    A: Bools, X: Ints, others: Ints, scope: Ints, n: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Test every edge X–others against every condition set of size n, then remove all that some set separates.

    All tests refer to the graph as it was at the start, so their order does not matter. A condition set for an edge
    is drawn from the potential parents of either end.
    """
    if not len(others):
        return A, pdag.join_separations([])
    ours, other, inside = (np.isin(np.arange(len(A)), part) for part in (X, others, scope))
    turned = pdag.transposed(A)
    between = (ours[:, None] & other) | (other[:, None] & ours)
    edges = (A | turned) & between
    potential = turned & inside[:, None] & inside  # potential[x, z]: z is a potential parent of x within the scope
    return remove_separated(A, edges, potential, n, test, budget)
