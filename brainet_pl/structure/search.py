"""Second thoughts about a leaf: a greedy search for better parents among the pairs that depend on each other.

Tests of a low order leave edges that a larger condition set would remove, and a test that missed a weak dependence has
removed others. Both show in the score. The search keeps what the recursion decided (which sets come before which) and
changes only the arrows into the leaf's own variables.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.pdag import Bools, Ints

MOST_PARENTS = 8  # of a variable that the search touches; tables of more parents are empty at any number of rows
MOST_ARROWS = 20_000  # candidates up to which a leaf is searched: each is a family to score, again after each change
LEAST_GAIN = 1e-9  # smaller gains are rounding, and could send the search round in circles


def improve_parents(
    dag: Bools,
    X: Ints,
    candidates: Bools,
    score: Callable[[int, tuple[int, ...]], float],
    spent: Callable[[], bool] = lambda: False,
) -> Bools:
    """Hill climbing over the arrows into `X`: add, remove or turn the one that raises the score most, until none does.

    Args:
        dag: (d, d) where to start; [i, j] means i → j. A variable with more than `MOST_PARENTS` parents starts without.
        X: the variables whose parents may change.
        candidates: (d, d) which arrows may be added; one can be turned if both directions may be added.
        score: of a variable given its sorted parents; larger is better.
        spent: says when to stop early.

    Returns:
        (d, d) a DAG again, with at least the score of the start.
    """
    dag, d = dag.copy(), len(dag)
    crowded = X[dag[:, X].sum(axis=0) > MOST_PARENTS]
    dag[:, crowded] = False
    allowed = np.zeros((d, d), dtype=bool)
    allowed[:, X] = (candidates | dag)[:, X]
    gain = np.full((d, d), -np.inf)  # of changing one arrow, the others as they are
    for x in X:
        gain[:, x] = _gains(dag, int(x), allowed[:, x], score)
    while not spent():
        change = _best_change(dag, gain, allowed)
        if change is None:
            break
        i, j, turned = change
        dag[i, j] ^= True
        dag[j, i] ^= turned
        gain[:, j] = _gains(dag, j, allowed[:, j], score)
        if turned:
            gain[:, i] = _gains(dag, i, allowed[:, i], score)
    return dag


def _gains(dag: Bools, x: int, allowed: Bools, score: Callable[[int, tuple[int, ...]], float]) -> NDArray[np.float64]:
    """(d,) what adding each allowed parent of `x`, or removing it if it is one already, does to the score of x."""
    parents = tuple(np.flatnonzero(dag[:, x]).tolist())
    now = score(x, parents)
    gains = np.full(len(dag), -np.inf)
    for p in np.flatnonzero(allowed).tolist():
        if dag[p, x]:
            gains[p] = score(x, tuple(q for q in parents if q != p)) - now
        elif len(parents) < MOST_PARENTS:
            gains[p] = score(x, tuple(sorted((*parents, p)))) - now
    return gains


def _best_change(dag: Bools, gain: NDArray[np.float64], allowed: Bools) -> tuple[int, int, bool] | None:
    """The change (i, j, turned) that raises the score most and closes no cycle; None if nothing raises it."""
    change = np.where(dag.T, -np.inf, gain)  # j → i is there: i → j can only come by turning it
    # A turned arrow leaves one family and enters the other; both gains are independent of each other.
    turn = np.where(dag & allowed & allowed.T, gain + gain.T, -np.inf)
    both = np.concatenate([change.ravel(), turn.ravel()])
    promising = np.flatnonzero(both > LEAST_GAIN)
    for k in promising[np.argsort(-both[promising], kind="stable")]:
        turned, place = divmod(int(k), dag.size)
        i, j = divmod(place, len(dag))
        if turned:
            without = dag.copy()
            without[i, j] = False
            if not _leads_to(without, i, j):
                return i, j, True
        elif dag[i, j] or not _leads_to(dag, j, i):
            return i, j, False
    return None


def _leads_to(dag: Bools, start: int, end: int) -> bool:
    """Whether arrows lead from `start` to `end`."""
    reached = np.zeros(len(dag), dtype=bool)
    reached[start] = True
    fresh = reached
    while fresh.any() and not reached[end]:
        fresh = dag[fresh].any(axis=0) & ~reached
        reached = reached | fresh
    return bool(reached[end])
