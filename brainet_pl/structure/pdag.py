"""Partially directed graphs: orientation rules, autonomous sets, and a DAG that a graph stands for.

Everywhere `A` is a boolean (d, d) adjacency: `A[i, j]` alone is i → j, together with `A[j, i]` it is i — j. Removing an
edge and orienting it both only clear entries, so results for different parts of a graph are merged by `&`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

DENSE = 64  # variables up to which plain matrix products find components faster than a graph library
FIRST_LOOKS = 16  # of a boolean product: after so many, what is open is asked pair by pair
TILE = 256  # rows and columns of a large matrix that are turned over together
_LIST_BYTES = 1 << 26  # of a list of rows looked at together
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class PDAG:
    """A partially directed graph over d variables; `adjacency` (d, d) is read-only."""

    adjacency: Bools

    def __post_init__(self) -> None:
        a = np.array(self.adjacency, dtype=bool)
        if a.ndim != 2 or a.shape[0] != a.shape[1] or a.diagonal().any():
            raise ValueError(f"expected a square adjacency without self-loops, got shape {a.shape}: check the graph")
        a.flags.writeable = False
        object.__setattr__(self, "adjacency", a)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PDAG) and np.array_equal(self.adjacency, other.adjacency)

    @property
    def directed(self) -> Bools:
        """(d, d): i → j."""
        return self.adjacency & ~self.adjacency.T

    @property
    def undirected(self) -> Bools:
        """(d, d): i — j."""
        return self.adjacency & self.adjacency.T

    @property
    def skeleton(self) -> Bools:
        """(d, d): i and j are adjacent."""
        return self.adjacency | self.adjacency.T

    def shd(self, other: PDAG) -> int:
        """Structural Hamming distance: the number of pairs joined differently (no edge, —, → or ←)."""
        differs = self.adjacency != other.adjacency
        return int(np.triu(differs | differs.T).sum())

    def permute(self, order: Ints) -> PDAG:
        """The graph whose variable `i` is this graph's variable `order[i]`."""
        return PDAG(self.adjacency[np.ix_(order, order)])


def complete_graph(d: int) -> Bools:
    """Where learning starts: every pair joined, nothing directed."""
    return ~np.eye(d, dtype=bool)


def cpdag(dag: Bools) -> PDAG:
    """The equivalence class of a DAG (d, d): its skeleton, its v-structures, and what Meek's rules make of them.

    Example:
        In 0 → 1 → 2 every arrow could be turned; in 0 → 1 ← 2 none.

        >>> chain = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=bool)
        >>> cpdag(chain).adjacency.astype(int).tolist()
        [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
        >>> collider = np.array([[0, 1, 0], [0, 0, 0], [0, 1, 0]], dtype=bool)
        >>> cpdag(collider).adjacency.astype(int).tolist()
        [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    """
    skeleton = dag | dag.T
    # x → z is compelled at once if some other parent y of z is not adjacent to x.
    unmarried = (_count(~skeleton & complete_graph(len(dag)), dag) > 0) & dag
    return PDAG(meek(skeleton & ~unmarried.T))


class Separations(NamedTuple):
    """Pairs (P, 2) found independent, and for each of `owner` (Q,) ⊂ P a `member` (Q,) of its separating set."""

    pairs: Ints
    owner: Ints
    member: Ints


def join_separations(parts: Sequence[Separations]) -> Separations:
    """One record of all `parts`."""
    offsets = np.cumsum([0, *(len(part.pairs) for part in parts)])
    return Separations(
        np.concatenate([np.empty((0, 2), dtype=np.intp), *(part.pairs for part in parts)]),
        np.concatenate(
            [np.empty(0, dtype=np.intp), *(part.owner + o for part, o in zip(parts, offsets, strict=False))]
        ),
        np.concatenate([np.empty(0, dtype=np.intp), *(part.member for part in parts)]),
    )


def collider_votes(A: Bools, found: Separations, targets: Bools) -> Bools:
    """(d, d): some v-structure x → z ← y asks for the edge x → z.

    For each separated pair (x, y), every z in `targets` (d,) adjacent to both and not in their separating set.
    """
    d = len(A)
    skeleton = A | A.T
    separated = np.zeros((d, d), dtype=bool)
    x, y = found.pairs.T
    separated[x, y] = separated[y, x] = True
    # votes[x, z] = number of y separated from x and adjacent to z, less those whose separating set holds z
    votes = _count(separated, skeleton)
    for a, b in ((x, y), (y, x)):
        holder, other, z = a[found.owner], b[found.owner], found.member
        np.subtract.at(votes, (holder, z), skeleton[other, z].astype(votes.dtype))
    return (votes > 0.5) & skeleton & targets


def orient(A: Bools, votes: Bools) -> Bools:
    """Orient undirected edges by unopposed votes, then by Meek's rules; contradictory votes leave an edge as it is."""
    towards = votes & ~transposed(votes) & A & transposed(A)
    return meek(A & ~transposed(towards))


def orient_surest_first(skeleton: Bools, found: Separations, order: Ints) -> Bools:
    """Orient v-structures one separated pair after the other, then by Meek's rules; an earlier one is never undone."""
    A = skeleton.copy()
    ends = np.searchsorted(found.owner, np.arange(len(found.pairs) + 1))
    for i in order:
        x, y = found.pairs[i]
        middle = skeleton[x] & skeleton[y]
        middle[found.member[ends[i] : ends[i + 1]]] = False
        z = np.flatnonzero(middle & A[x] & A[y])
        A[z, x] = A[z, y] = False
    return meek(A)


def meek(A: Bools) -> Bools:
    """Meek's rules R1 to R3 to a fixed point.

    All edges are oriented at once in each round, and an edge that is asked to point both ways stays undirected, so the
    result does not depend on the order of variables. What R1 and R2 ask for they ask for ever after, so that each round
    looks only at what the last one directed.
    """
    turned = transposed(A)
    undirected, directed, into = A & turned, A & ~turned, turned & ~A  # into[j, i]: i → j
    skeleton = A | turned
    apart = ~skeleton
    asked = np.zeros_like(A)  # by R1 and R2
    shielded = np.zeros_like(A)  # pairs that R3 has asked for and did not get
    start, end = np.nonzero(directed)  # of the edges directed since the last round
    while len(start):
        # R1: a → b — c, a and c apart: b → c. R2: a → b → c and a — c: a → c.
        asked |= _meets(end, start, apart, undirected & ~asked)
        asked |= _meets(start, end, directed, undirected & ~asked)
        asked |= transposed(_meets(end, start, into, undirected & ~transposed(asked)))
        # R3: a — c → b, a — d → b, c and d apart: a → b
        fresh = np.zeros(len(A), dtype=bool)
        fresh[end] = True
        ask = asked | _shields(undirected, into, skeleton, (fresh | shielded) & undirected & ~asked)
        shielded = ask & ~asked
        start, end = np.nonzero(ask & undirected)
        one_way = ~ask[end, start]
        start, end = start[one_way], end[one_way]
        undirected[start, end] = undirected[end, start] = False
        directed[start, end] = into[end, start] = True
    return np.asarray(undirected | directed)


def transposed(a: NDArray[Any]) -> NDArray[Any]:
    """A square matrix turned over, its rows together in memory; tile by tile, as large ones leave the cache."""
    d = len(a)
    if d <= TILE:
        return np.ascontiguousarray(a.T)
    turned = np.empty_like(a)
    for i in range(0, d, TILE):
        for j in range(0, d, TILE):
            turned[j : j + TILE, i : i + TILE] = a[i : i + TILE, j : j + TILE].T
    return turned


def _meets(i: Ints, k: Ints, right: Bools, wanted: Bools) -> Bools:
    """(d, d): those of `wanted` [i, j] with some of the pairs (i, k) for which right[k, j].

    The product of two boolean matrices, but most answers are found with one of the first k, and few questions are
    asked: the rest is looked up pair by pair.
    """
    found = np.zeros_like(wanted)
    order = np.argsort(i, kind="stable")
    i, k = i[order], k[order]
    rows, first, count = np.unique(i, return_index=True, return_counts=True)
    kept = wanted[rows].any(axis=1)
    rows, first, count = rows[kept], first[kept], count[kept]
    for look in range(min(FIRST_LOOKS, int(count.max(initial=0)))):
        has = np.flatnonzero(count > look)  # rows with so many k
        found[rows[has]] |= wanted[rows[has]] & right[k[first[has] + look]]
        if look % 4 == 3:  # rows whose questions are all answered need no further look
            kept = (wanted[rows] & ~found[rows]).any(axis=1)
            rows, first, count = rows[kept], first[kept], count[kept]
    long = count > FIRST_LOOKS
    rows, first, count = rows[long], first[long], count[long]
    if len(rows):
        left = np.zeros((len(rows), len(wanted)), dtype=bool)
        for place, (begin, length) in enumerate(zip(first, count, strict=True)):
            left[place, k[begin : begin + length]] = True
        where, j = np.nonzero(wanted[rows] & ~found[rows])
        a, b = np.packbits(left, axis=1), np.packbits(transposed(right), axis=1)
        step = max(1, _LIST_BYTES // a.shape[1])
        for begin in range(0, len(where), step):
            row, column = where[begin : begin + step], j[begin : begin + step]
            found[rows[row], column] = (a[row] & b[column]).any(axis=1)
    return found


def _shields(undirected: Bools, into: Bools, skeleton: Bools, wanted: Bools) -> Bools:
    """(d, d): those of `wanted` [a, b] with two c — a, c → b that are apart from each other."""
    found = np.zeros_like(wanted)
    a, b = np.nonzero(wanted & (into.sum(axis=1) > 1) & (undirected.sum(axis=1) > 1)[:, None])
    step = max(1, _LIST_BYTES // len(wanted))
    for start in range(0, len(a), step):
        i, j = a[start : start + step], b[start : start + step]
        both = undirected[i] & into[j]  # (pairs, d) the candidates for c
        many = both.sum(axis=1) > 1
        i, j, both = i[many], j[many], both[many]
        left = both.copy()
        while len(i):
            c = left.argmax(axis=1)
            left[np.arange(len(i)), c] = False
            apart = both & ~skeleton[c]
            apart[np.arange(len(i)), c] = False
            hit = apart.any(axis=1)
            found[i[hit], j[hit]] = True
            go_on = ~hit & left.any(axis=1)
            i, j, both, left = i[go_on], j[go_on], both[go_on], left[go_on]
    return found


class Autonomous(NamedTuple):
    """Line 9 of Algorithm 1: the descendant set and the ancestor sets, each an index array."""

    descendant: Ints
    ancestors: list[Ints]


def find_autonomous(A: Bools, X: Ints) -> Autonomous:
    """Decompose `X` into the set of lowest topological order and the parts that fall apart without it.

    Works on strongly connected components with undirected edges counting both ways: closed under undirected edges, and
    safe when sampling errors close a directed cycle.
    """
    inner = A[np.ix_(X, X)]
    component = _components(inner, "strong")
    leaving = inner & (component[:, None] != component[None, :])
    has_child = np.zeros(component.max() + 1, dtype=bool)
    has_child[component[leaving.any(axis=1)]] = True
    lowest = ~has_child[component]
    rest = np.flatnonzero(~lowest)
    if not len(rest):
        return Autonomous(X, [])
    part = _components(inner[np.ix_(rest, rest)], "weak")
    ancestors = [X[rest[part == i]] for i in range(part.max() + 1)]
    return Autonomous(X[lowest], ancestors)


def dag_extension(A: Bools) -> Bools:
    """A DAG with the skeleton of `A` and, where one exists, no v-structure that `A` does not have.

    Components (as in `find_autonomous`) follow their topological order; inside one, maximum cardinality search, which
    orients a chordal undirected graph without new v-structures. Where no consistent extension exists, because a
    component is not chordal or holds a directed cycle, the same order gives the DAG, and some edges are turned.
    """
    d = len(A)
    component = _components(A, "strong")
    directed = A & ~A.T
    skeleton = A | A.T
    same = component[:, None] == component[None, :]
    waiting_for = (directed & ~same).sum(axis=0)  # unplaced parents from other components: must come first
    blocked = (directed & same).sum(axis=0)  # unplaced parents inside a cycle: come first where possible
    weight = np.zeros(d, dtype=np.int64)  # placed neighbours inside the component
    placed = np.zeros(d, dtype=bool)
    open_component = -1
    position = np.empty(d, dtype=np.intp)
    members = np.bincount(component)
    members_waiting = np.bincount(component, weights=waiting_for)
    for step in range(d):
        if open_component < 0 or not members[open_component]:
            ready = (members > 0) & (members_waiting == 0)
            open_component = int(np.flatnonzero(ready)[0])
        candidates = np.flatnonzero(~placed & (component == open_component))
        key = blocked[candidates] * (d + 1) - weight[candidates]
        v = candidates[np.argmin(key)]
        placed[v] = True
        position[v] = step
        members[component[v]] -= 1
        inside = same[v] & skeleton[v]
        weight[inside] += 1
        blocked[directed[v] & same[v]] -= 1
        children = np.flatnonzero(directed[v] & ~same[v])
        np.subtract.at(members_waiting, component[children], 1)
    return skeleton & (position[:, None] < position[None, :])


def _components(A: Bools, connection: Literal["strong", "weak"]) -> Ints:
    """(d,) the number of each variable's connected component."""
    if len(A) <= DENSE:  # reachability by squaring: no sparse matrix to build
        reach = A | (A.T if connection == "weak" else False) | np.eye(len(A), dtype=bool)
        for _ in range(max(1, (len(A) - 1).bit_length())):
            reach = _count(reach, reach) > 0
        return np.unique((reach & reach.T).argmax(axis=1), return_inverse=True)[1].astype(np.intp)
    _, component = connected_components(csr_array(A), directed=True, connection=connection)
    return np.asarray(component, dtype=np.intp)


def _count(a: Bools, b: Bools) -> NDArray[np.float32]:
    """The integer matrix product as float32, exact below 2^24 and much faster than an integer one."""
    return np.asarray(a.astype(np.float32) @ b.astype(np.float32))
