"""A tree of given networks: each splits by itself, where Algorithm 1 splits by tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from brainet_pl.structure.pdag import Bools, Ints, cpdag, find_autonomous
from brainet_pl.structure.score import LocalScore
from brainet_pl.structure.tree import Branch, Leaf, Node, Tree

Neighbours = Callable[[int], tuple[int, ...]]


def tree_of_networks(dags: Sequence[Bools], score: LocalScore, neighbours: Neighbours, max_order: int) -> Tree:
    """A root with a branch for each DAG (d, d): its sub-networks are these DAGs.

    A branch is split into the set that comes last in its network and the sets before it, which fall apart without it
    (line 9 of Algorithm 1), and these again, `max_order` times. Directions that its independences leave open do not
    count: DAGs of one equivalence class are split alike.

    Args:
        dags: The networks; [i, j] means i → j.
        score: Of a variable given its sorted parents, in nats.
        neighbours: From a variable to those that it depends on most, the strongest first.
        max_order: How often the sets of the root are split further.

    Example:
        Two causes, independent of each other, come before their effect:

        >>> dag = np.array([[0, 0, 1], [0, 0, 1], [0, 0, 0]], dtype=bool)
        >>> (branch,) = tree_of_networks([dag], lambda x, parents: -1.0, lambda x: (), 1).branches
        >>> [cause.variables for cause in branch.ancestors], branch.descendant.variables, branch.descendant.parents
        ([(0,), (1,)], (2,), ((0, 1),))
    """

    def leaf(dag: Bools, X: Ints) -> Leaf:
        variables = tuple(X.tolist())
        parents = tuple(tuple(np.flatnonzero(dag[:, x]).tolist()) for x in variables)
        near = tuple(neighbours(x) for x in variables)
        total = sum(score(x, of_x) for x, of_x in zip(variables, parents, strict=True))
        return Leaf(variables, parents, total, near if all(near) else ())

    def split(dag: Bools, A: Bools, X: Ints, left: int) -> Tree:
        if left and len(find_autonomous(A, X).ancestors):
            return Node(tuple(X.tolist()), (branch(dag, A, X, left - 1),))
        return leaf(dag, X)

    def branch(dag: Bools, A: Bools, X: Ints, left: int) -> Branch:
        last, before = find_autonomous(A, X)
        return Branch(tuple(split(dag, A, part, left) for part in before), split(dag, A, last, left))

    X = np.arange(len(dags[0]))
    return Node(tuple(X.tolist()), tuple(branch(dag, cpdag(dag).adjacency, X, max_order) for dag in dags))
