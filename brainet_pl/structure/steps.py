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
    climb = _Climb(dag.copy(), allowed, score, growth, edge_cost, most_parents)
    for v in range(len(dag)):
        if spent():
            return climb.dag, -np.inf  # not all is weighed: no step from here is known to be the best
        climb.weigh(v)
    while not spent() and climb.step():
        pass
    return climb.dag, float(climb.value.sum())


class _Climb:
    """A DAG that changes by steps, and what each of them would gain. All steps toggle an arrow y → x, or turn one."""

    def __init__(
        self,
        dag: Bools,
        allowed: Bools,
        score: LocalScore,
        growth: Growth,
        edge_cost: float,
        most_parents: int | None,
    ) -> None:
        self.dag, self.score, self.growth = dag, score, growth
        self.edge_cost, self.most_parents = edge_cost, most_parents
        self.y, self.x = np.nonzero(allowed)
        place = np.full(dag.shape, -1)
        place[self.y, self.x] = np.arange(len(self.x))
        self.turned = place[self.x, self.y]  # the number of the arrow the other way, -1 where that is not allowed
        self.rows_of = [np.flatnonzero(self.x == v) for v in range(len(dag))]
        self.children = [set(np.flatnonzero(row).tolist()) for row in dag]
        self.gain = np.zeros(len(self.x))
        self.value = np.zeros(len(dag))

    def weigh(self, v: int) -> None:
        """Score a variable with its parents, and with one of them more or less."""
        parents = tuple(np.flatnonzero(self.dag[:, v]).tolist())
        now = self.score(v, parents)
        self.value[v] = now - self.edge_cost * len(parents)
        rows = self.rows_of[v]
        inside = self.dag[self.y[rows], v]
        for i in rows[inside]:
            fewer = tuple(p for p in parents if p != self.y[i])
            self.gain[i] = self.score(v, fewer) - now + self.edge_cost
        more = rows[~inside]
        if self.most_parents is not None and len(parents) >= self.most_parents:
            self.gain[more] = -np.inf
        elif len(more):
            self.gain[more] = self.growth(v, parents, self.y[more]) - now - self.edge_cost

    def step(self) -> bool:
        """Take the step that gains most of those that leave no cycle; says whether there was one."""
        here, back = self.dag[self.y, self.x], self.dag[self.x, self.y]
        single = np.where(back, -np.inf, self.gain)  # add y → x, or remove it
        # y → x becomes x → y
        turning = np.where(here & (self.turned >= 0), self.gain + self.gain[self.turned], -np.inf)
        gains = np.concatenate([single, turning])
        worth = np.flatnonzero(gains > SMALLEST_GAIN)
        best_first = worth[np.argsort(-gains[worth], kind="stable")]
        return any(self._take(k) for k in best_first.tolist())

    def _take(self, k: int) -> bool:
        """Take step k: a toggle of arrow k, or beyond their number a turn; not where it would close a cycle."""
        arrows = len(self.x)
        a, b = int(self.y[k % arrows]), int(self.x[k % arrows])
        if k >= arrows:
            return self._turn(a, b)
        if self.dag[a, b]:
            self.children[a].remove(b)
            self.dag[a, b] = False
        elif _reaches(self.children, b, a):
            return False
        else:
            self.children[a].add(b)
            self.dag[a, b] = True
        self.weigh(b)
        return True

    def _turn(self, a: int, b: int) -> bool:
        self.children[a].remove(b)
        if _reaches(self.children, a, b):
            self.children[a].add(b)
            return False
        self.children[b].add(a)
        self.dag[a, b], self.dag[b, a] = False, True
        self.weigh(a)
        self.weigh(b)
        return True


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
