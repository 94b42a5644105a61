"""Partially directed graphs: orientation rules, autonomous sets, and a DAG that a graph stands for.

Everywhere `A` is a boolean (d, d) adjacency: `A[i, j]` alone is i → j, together with `A[j, i]` it is i — j. Removing an
edge and orienting it both only clear entries, so results for different parts of a graph are merged by `&`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

DENSE = 64  # variables up to which plain matrix products find components faster than a graph library
FIRST_LOOKS = 16  # of a boolean product: after so many, what is open is asked pair by pair
TILE = 256  # rows and columns of a large matrix that are turned over together
_LIST_BYTES = 1 << 26  # of a list of rows looked at together
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]


def complete_graph(d: int, X: Ints | None = None) -> Bools:
    """Where learning starts: every pair of d variables, or of those of them in `X`, joined, nothing directed."""
    joined = ~np.eye(d, dtype=bool)
    if X is not None:
        outside = np.setdiff1d(np.arange(d), X)
        joined[outside] = joined[:, outside] = False
    return joined


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


def collider_votes(A: Bools, separations: Separations, targets: Bools) -> Bools:
    """Says which edges x → z, (d, d), some v-structure x → z ← y asks for.

    For each separated pair (x, y), every z in `targets` (d,) adjacent to both and not in their separating set.
    """
    d = len(A)
    skeleton = A | A.T
    separated = np.zeros((d, d), dtype=bool)
    x, y = separations.pairs.T
    separated[x, y] = separated[y, x] = True
    # votes[x, z] = number of y separated from x and adjacent to z, less those whose separating set holds z
    votes = count_paths(separated, skeleton)
    for a, b in ((x, y), (y, x)):
        holder, other, z = a[separations.owner], b[separations.owner], separations.member
        np.subtract.at(votes, (holder, z), skeleton[other, z].astype(votes.dtype))
    return (votes > 0.5) & skeleton & targets


def orient(A: Bools, votes: Bools) -> Bools:
    """Orient undirected edges by unopposed votes, then by Meek's rules; contradictory votes leave an edge as it is."""
    towards = votes & ~transposed(votes) & A & transposed(A)
    return meek(A & ~transposed(towards))


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
    asked, asked_back = np.zeros_like(A), np.zeros_like(A)  # by R1 and R2; the second is the transpose of the first

    def ask(i: Ints, j: Ints) -> None:
        asked[i, j] = asked_back[j, i] = True

    shields = (np.empty(0, dtype=np.intp),) * 2  # pairs (a, b) that R3 asked for in the last round
    start, end = np.nonzero(directed)  # of the edges directed since the last round
    while len(start):
        # R1: a → b — c, a and c apart: b → c. R2: a → b → c and a — c: a → c.
        ask(*_meets(end, start, apart, lambda b: undirected[b] & ~asked[b]))
        ask(*_meets(start, end, directed, lambda a: undirected[a] & ~asked[a]))
        ask(*_meets(end, start, into, lambda c: undirected[c] & ~asked_back[c])[::-1])
        # R3: a — c → b, a — d → b, c and d apart: a → b
        fresh = np.unique(end)
        place, a = np.nonzero(undirected[fresh] & ~asked_back[fresh])
        a, b = np.concatenate([a, shields[0]]), np.concatenate([fresh[place], shields[1]])
        open_ = undirected[a, b] & ~asked[a, b]
        shields = _shields(undirected, into, skeleton, a[open_], b[open_])
        this_round, back = (asked.copy(), asked_back.copy()) if len(shields[0]) else (asked, asked_back)
        this_round[shields] = back[shields[::-1]] = True
        start, end = np.nonzero(undirected & this_round & ~back)  # those that are asked to point one way only
        undirected[start, end] = undirected[end, start] = False
        directed[start, end] = into[end, start] = True
    return np.asarray(undirected | directed)


def transposed(a: NDArray[Any]) -> NDArray[Any]:
    """A square matrix turned over, its rows together in memory; tile by tile, as large ones leave the cache."""
    d = len(a)
    if d <= TILE:
        return np.ascontiguousarray(a.T)
    if a.dtype == bool:  # bytes are turned over three times faster by torch, numbers are not
        whole: NDArray[Any] = torch.from_numpy(a).t().contiguous().numpy()
        return whole
    turned = np.empty_like(a)
    for i in range(0, d, TILE):
        for j in range(0, d, TILE):
            turned[j : j + TILE, i : i + TILE] = a[i : i + TILE, j : j + TILE].T
    return turned


def _meets(i: Ints, k: Ints, right: Bools, wanted_of: Callable[[Ints], Bools]) -> tuple[Ints, Ints]:
    """Pairs (i, j), wanted ones, with some of the pairs (i, k) for which right[k, j].

    The product of two boolean matrices, but most answers are found with one of the first k, and few questions are
    asked: the rest is looked up pair by pair. `wanted_of(rows)` gives the questions (rows, d) of some i.
    """
    order = np.argsort(i, kind="stable")
    i, k = i[order], k[order]
    rows, first, count = np.unique(i, return_index=True, return_counts=True)
    wanted = wanted_of(rows)
    kept = np.flatnonzero(wanted.any(axis=1))
    rows, first, count, wanted = rows[kept], first[kept], count[kept], wanted[kept]
    found = np.zeros_like(wanted)
    open_ = np.arange(len(rows))  # places in rows with a question left
    for look in range(min(FIRST_LOOKS, int(count.max(initial=0)))):
        has = open_[count[open_] > look]  # with so many k
        found[has] |= wanted[has] & right[k[first[has] + look]]
        if look % 4 == 3:
            open_ = open_[(wanted[open_] & ~found[open_]).any(axis=1)]
    open_ = open_[count[open_] > FIRST_LOOKS]
    if len(open_):
        left = np.zeros((len(open_), wanted.shape[1]), dtype=bool)
        for place, row in enumerate(open_.tolist()):
            left[place, k[first[row] : first[row] + count[row]]] = True
        where, j = np.nonzero(wanted[open_] & ~found[open_])
        a, b = np.packbits(left, axis=1), np.packbits(transposed(right), axis=1)
        step = max(1, _LIST_BYTES // a.shape[1])
        for begin in range(0, len(where), step):
            asked, column = where[begin : begin + step], j[begin : begin + step]
            found[open_[asked], column] = (a[asked] & b[column]).any(axis=1)
    hits, j = np.nonzero(found)
    return rows[hits], j


def _shields(undirected: Bools, into: Bools, skeleton: Bools, a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Those of the pairs (a, b) with two c — a, c → b that are apart from each other."""
    kept = (into.sum(axis=1)[b] > 1) & (undirected.sum(axis=1)[a] > 1)
    a, b = a[kept], b[kept]
    found = np.zeros(len(a), dtype=bool)
    step = max(1, _LIST_BYTES // len(skeleton))
    for start in range(0, len(a), step):
        which = np.arange(start, min(start + step, len(a)))
        both = undirected[a[which]] & into[b[which]]  # (pairs, d) the candidates for c
        many = both.sum(axis=1) > 1
        which, both = which[many], both[many]
        left = both.copy()
        while len(which):
            c = left.argmax(axis=1)
            left[np.arange(len(which)), c] = False
            apart = both & ~skeleton[c]
            apart[np.arange(len(which)), c] = False
            hit = apart.any(axis=1)
            found[which[hit]] = True
            go_on = ~hit & left.any(axis=1)
            which, both, left = which[go_on], both[go_on], left[go_on]
    return a[found], b[found]


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


def topological_order(dag: Bools) -> list[int]:
    """The variables of a DAG (d, d), parents before children, the first of several first."""
    waiting_for = dag.sum(axis=0)
    ready, order = np.flatnonzero(waiting_for == 0).tolist(), []
    while ready:
        v = ready.pop(0)
        order.append(v)
        children = np.flatnonzero(dag[v])
        waiting_for[children] -= 1
        ready += children[waiting_for[children] == 0].tolist()
    return order


def _components(A: Bools, connection: Literal["strong", "weak"]) -> Ints:
    """(d,) the number of each variable's connected component."""
    if len(A) <= DENSE:  # reachability by squaring: no sparse matrix to build
        reach = A | (A.T if connection == "weak" else False) | np.eye(len(A), dtype=bool)
        for _ in range(max(1, (len(A) - 1).bit_length())):
            reach = count_paths(reach, reach) > 0
        return np.unique((reach & reach.T).argmax(axis=1), return_inverse=True)[1].astype(np.intp)
    _, component = connected_components(csr_array(A), directed=True, connection=connection)
    return np.asarray(component, dtype=np.intp)


def count_paths(a: Bools, b: Bools) -> NDArray[np.float32]:
    """The integer matrix product as float32, exact below 2^24 and much faster than an integer one."""
    return np.asarray(a.astype(np.float32) @ b.astype(np.float32))
