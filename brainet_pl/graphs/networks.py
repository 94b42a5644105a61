"""Networks of another search in the place of those that a tree's own recursion found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from brainet_pl.structure.pdag import Bools
from brainet_pl.structure.score import LocalScore
from brainet_pl.structure.tree import Branch, Leaf, Node, Tree


def with_networks(root: Tree, dags: Sequence[Bools], score: LocalScore) -> Tree:
    """The tree with the same sets, in which branch t of the root stands for the DAG t (d, d), or t modulo their number.

    Args:
        root: The tree; heads are wired by its sets and neighbours, which stay.
        dags: The networks; [i, j] means i → j.
        score: Of a variable given its sorted parents, in nats.

    Example:
        >>> joined = np.array([[0, 1], [0, 0]], dtype=bool)
        >>> root = Node((0, 1), (Branch((), Leaf((0, 1), ((), ()), 0.0)),))
        >>> with_networks(root, [joined], lambda x, parents: -1.0 * len(parents)).branches[0].descendant
        Leaf(variables=(0, 1), parents=((), (0,)), score=-1.0, neighbours=())
    """

    def below(node: Tree, dag: Bools) -> Tree:
        if isinstance(node, Leaf):
            parents = tuple(tuple(np.flatnonzero(dag[:, x]).tolist()) for x in node.variables)
            total = sum(score(x, of_x) for x, of_x in zip(node.variables, parents, strict=True))
            return replace(node, parents=parents, score=total)
        return Node(node.variables, tuple(branch(one, dag) for one in node.branches))

    def branch(one: Branch, dag: Bools) -> Branch:
        return Branch(tuple(below(part, dag) for part in one.ancestors), below(one.descendant, dag))

    if isinstance(root, Leaf):
        return below(root, dags[0])
    return Node(root.variables, tuple(branch(one, dags[t % len(dags)]) for t, one in enumerate(root.branches)))
