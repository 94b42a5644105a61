"""A climb of a score from a graph that tests have found, by single steps and by moves in the order of variables.

Tests decide edge by edge and can't weigh one decision against another; a score of the whole graph can, and a climb that
begins near the truth does not end in the poor local optima of one that begins with nothing. Where single steps end, a
search over orders goes on, so that little depends on the beginning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from brainet_pl.graphs.knowledge import class_of
from brainet_pl.graphs.orders import BestParents, improve_order
from brainet_pl.graphs.pdag import cpdag
from brainet_pl.structure.constraints import Constraints
from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.pdag import Bools, dag_extension, topological_order
from brainet_pl.structure.score import Growth, LocalScore
from brainet_pl.structure.steps import SMALLEST_GAIN, to_the_top

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

        >>> from brainet_pl.structure.score import one_by_one
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
        return pairs if known is None else known.start(pairs)

    parents = BestParents(score, growth, may(allowed), edge_cost, required)
    while tries and not budget.spent:
        start = _member_of_class(best, rng, known)
        steps = may(allowed)
        if required is not None:  # it is never touched
            steps = steps & ~required
        dag, reached = to_the_top(start, steps, score, growth, edge_cost, lambda: budget.spent)
        moved, by_order = parents.dag_of(improve_order(topological_order(dag), parents, lambda: budget.spent))
        if by_order > reached:
            dag, reached = moved, by_order
        tries -= 1
        if reached > highest + SMALLEST_GAIN:
            best = cpdag(dag).adjacency if known is None else class_of(dag, known)
            highest, tries = reached, TRIES
            more = allowed if unexplained is None else allowed | unexplained(dag)
            if (more != allowed).any():
                allowed, parents = more, parents.with_more(may(more))
    return best


def _member_of_class(A: Bools, rng: np.random.Generator, known: Constraints | None) -> Bools:
    """A DAG that the graph `A` (d, d) stands for, another one for each order of variables that is drawn."""
    order = rng.permutation(len(A))
    back = np.argsort(order)
    dag = dag_extension(A[np.ix_(order, order)])[np.ix_(back, back)]
    return dag if known is None else known.extend(dag)
