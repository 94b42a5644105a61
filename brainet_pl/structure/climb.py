"""Greedy steps of a score from a graph that tests have found: one edge added, removed or turned at a time.

Tests decide edge by edge and can't weigh one decision against another; a score of the whole graph can, and a climb that
begins near the truth does not end in the poor local optima of one that begins with nothing. Where single steps end, a
search over orders goes on, so that little depends on the beginning. `climb_from` serves `rai`;
`improve_parents` serves a leaf of a tree, where the recursion has decided which sets come before which: there only the
arrows into the leaf's own variables change.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.knowledge import Constraints
from brainet_pl.structure.orders import SMALLEST_GAIN, BestParents, improve_order
from brainet_pl.structure.pdag import Bools, Ints, cpdag, dag_extension, topological_order
from brainet_pl.structure.score import Growth, LocalScore, one_by_one

MOST_PARENTS = 8  # of a variable in a leaf that is improved; tables of more parents are empty at any number of rows
MOST_ARROWS = 20_000  # up to which a graph is climbed: each is a family to score, again after each change
TRIES = 3  # other members of the equivalence class to begin from before the climb ends


def climb_from(
    A: Bools,
    allowed: Bools,
    unexplained: Callable[[Bools], Bools] | None,
    score: LocalScore,
    growth: Growth,
    edge_cost: float,
    budget: Budget,
    known: Constraints | None = None,
) -> Bools:
    """The equivalence class (d, d) of the DAG in which a climb from the graph `A` (d, d) ends.

    First single steps: each is the one that raises Σ score(x, parents) - edge_cost·|edges| most, and keeps the graph
    without cycles. Where no step gains, variables move in their order, each to its best place, and all take their best
    parents anew (`improve_order`). Where no move gains, the climb begins again from another DAG of the same class,
    whose steps and moves are others, and with what the DAG leaves unexplained among the pairs; it ends when that gained
    nothing `TRIES` times in a row.

    Args:
        A: where to begin.
        allowed: (d, d), symmetric: the pairs that may be joined; edges of `A` always may.
        unexplained: from a DAG (d, d) to further pairs (d, d), symmetric, that may be joined. None: there are none.
        score: of a variable given sorted parents, in nats.
        growth: of a variable with one parent more, for several of them at once.
        edge_cost: what an edge costs by the prior over graphs, in nats: log d expects about one parent a variable.
        budget: no step is begun once it is spent.
        known: what no step may break.

    Example:
        A score that likes nothing but 0 — 1 takes away the wrong edge 1 — 2 and joins the right pair:

        >>> wrong = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0]], dtype=bool)
        >>> likes = lambda x, parents: float((x, parents) in {(1, (0,)), (0, (1,))})
        >>> every = ~np.eye(3, dtype=bool)
        >>> found = climb_from(wrong, every, lambda dag: every, likes, one_by_one(likes), 0.5, Budget())
        >>> found.astype(int).tolist()
        [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    """
    rng = np.random.default_rng(0)  # variables are in canonical order: the same data give the same draws
    best, highest, tries = A, -np.inf, TRIES
    allowed = allowed | A | A.T
    required = None if known is None else known.required

    def may(pairs: Bools) -> Bools:
        return pairs if known is None else pairs & known.allowed | known.required

    parents = BestParents(score, growth, may(allowed), edge_cost, required)
    while tries and not budget.spent:
        order = rng.permutation(len(A))
        back = np.argsort(order)
        start = dag_extension(best[np.ix_(order, order)])[np.ix_(back, back)]
        if known is not None:
            start = known.extend(start)
        steps = may(allowed) if required is None else may(allowed) & ~required  # what is required is never touched
        dag, reached = _to_the_top(start, steps, score, growth, edge_cost, lambda: budget.spent)
        moved, by_order = parents.dag_of(improve_order(topological_order(dag), parents, lambda: budget.spent))
        if by_order > reached:
            dag, reached = moved, by_order
        tries -= 1
        if reached > highest + SMALLEST_GAIN:
            best = cpdag(dag).adjacency if known is None else known.class_of(dag)
            highest, tries = reached, TRIES
            more = allowed if unexplained is None else allowed | unexplained(dag)
            if (more != allowed).any():
                allowed, parents = more, parents.with_more(may(more))
    return best


def improve_parents(
    dag: Bools,
    X: Ints,
    candidates: Bools,
    score: LocalScore,
    spent: Callable[[], bool] = lambda: False,
    fixed: Bools | None = None,
) -> Bools:
    """The DAG (d, d) in which greedy steps over the arrows into `X` end: a leaf's second thoughts.

    Args:
        dag: (d, d) where to begin; [i, j] means i → j. A variable with more than `MOST_PARENTS` parents begins without.
        X: the variables whose parents may change.
        candidates: (d, d) arrows that may be added; one can be turned if both its directions may.
        score: of a variable given its sorted parents, in nats.
        spent: says when to stop early.
        fixed: (d, d) arrows that stay, or None.
    """
    dag = dag.copy()
    dag[:, X[dag[:, X].sum(axis=0) > MOST_PARENTS]] = False
    allowed = np.zeros_like(dag)
    allowed[:, X] = (candidates | dag)[:, X]
    if fixed is not None:
        dag[:, X] |= fixed[:, X]
        allowed &= ~fixed
    return _to_the_top(dag, allowed, score, one_by_one(score), 0.0, spent, MOST_PARENTS)[0]


def _to_the_top(
    dag: Bools,
    allowed: Bools,
    score: LocalScore,
    growth: Growth,
    edge_cost: float,
    spent: Callable[[], bool],
    most_parents: int | None = None,
) -> tuple[Bools, float]:
    """The DAG (d, d) where no single step from `dag` over `allowed` arrows (d, d) gains any more, and its score."""
    dag = dag.copy()
    y, x = np.nonzero(allowed)  # all changes are toggles of y in the parents of x
    place = np.full(dag.shape, -1)
    place[y, x] = np.arange(len(x))
    turned = place[x, y]
    rows_of = [np.flatnonzero(x == v) for v in range(len(dag))]
    children = [set(np.flatnonzero(row).tolist()) for row in dag]
    gain = np.zeros(len(x))
    value = np.zeros(len(dag))

    def weigh(v: int) -> None:
        parents = tuple(np.flatnonzero(dag[:, v]).tolist())
        now = score(v, parents)
        value[v] = now - edge_cost * len(parents)
        rows = rows_of[v]
        inside = dag[y[rows], v]
        for i in rows[inside]:
            gain[i] = score(v, tuple(p for p in parents if p != y[i])) - now + edge_cost
        more = rows[~inside]
        if most_parents is not None and len(parents) >= most_parents:
            gain[more] = -np.inf
        elif len(more):
            gain[more] = growth(v, parents, y[more]) - now - edge_cost

    for v in range(len(dag)):
        if spent():
            return dag, -np.inf  # not all is weighed: no step from here is known to be the best
        weigh(v)
    while not spent():
        here, back = dag[y, x], dag[x, y]
        single = np.where(back, -np.inf, gain)  # add y → x, or remove it
        turning = np.where(here & (turned >= 0), gain + gain[turned], -np.inf)  # y → x becomes x → y
        gains = np.concatenate([single, turning])
        worth = np.flatnonzero(gains > SMALLEST_GAIN)
        for k in worth[np.argsort(-gains[worth], kind="stable")]:  # the largest first
            i = k % len(x)
            a, b = int(y[i]), int(x[i])
            if k >= len(x):
                children[a].remove(b)
                if _reaches(children, a, b):
                    children[a].add(b)
                    continue
                children[b].add(a)
                dag[a, b], dag[b, a] = False, True
                weigh(a)
            elif here[i]:
                children[a].remove(b)
                dag[a, b] = False
            elif _reaches(children, b, a):
                continue
            else:
                children[a].add(b)
                dag[a, b] = True
            weigh(b)
            break
        else:
            break
    return dag, float(value.sum())


def _reaches(children: list[set[int]], a: int, b: int) -> bool:
    """Some directed path leads from a to b."""
    seen, waiting = {a}, [a]
    while waiting:
        more = children[waiting.pop()] - seen
        if b in more:
            return True
        seen |= more
        waiting += more
    return False
