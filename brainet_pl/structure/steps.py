"""Greedy steps of a score from a DAG: one edge added, removed or turned at a time.

Tests decide edge by edge and can't weigh one decision against another; a score of the whole graph can.
`improve_parents` serves a leaf of a tree, where the recursion has decided which sets come before which: there only the
arrows into the leaf's own variables change.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from brainet_pl.structure.pdag import Bools, Ints
from brainet_pl.structure.score import Growth, LocalScore, one_by_one

SMALLEST_GAIN = 1e-9  # nats; less is rounding, and moving back and forth for it would never end
MOST_PARENTS = 8  # of a variable in a leaf that is improved; tables of more parents are empty at any number of rows
MOST_ARROWS = 20_000  # up to which a graph is climbed: each is a family to score, again after each change


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
    return to_the_top(dag, allowed, score, one_by_one(score), 0.0, spent, MOST_PARENTS)[0]


def to_the_top(
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
