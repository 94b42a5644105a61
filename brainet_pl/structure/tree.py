"""The generative graph tree as plain data: nodes, branches and leaves, their numbers, and what can be counted on them.

A node for a set of variables is a leaf, or has s branches; a branch has ancestor nodes and one descendant node. One
branch chosen at each node met from the root down is a sub-network: it uses every variable exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Leaf:
    """Lines 2–5: `variables`, the `parents` of each in the leaf's graph, and the score of those given these.

    `neighbours` are no part of Algorithm 1: for each of the variables, those of the whole table that it depends on most
    in the sample behind the leaf, the strongest first. They wire the lowest layer of a network; there may be none.
    """

    variables: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    score: float
    neighbours: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Branch:
    """One pass of the loop of line 6: the trees of the ancestor sets and of the descendant set."""

    ancestors: tuple[Tree, ...]
    descendant: Tree

    @property
    def children(self) -> tuple[Tree, ...]:
        """Ancestors first, as lines 10–12 visit them."""
        return (*self.ancestors, self.descendant)


@dataclass(frozen=True)
class Node:
    """A set of variables with `branches`, the alternatives found from s samples."""

    variables: tuple[int, ...]
    branches: tuple[Branch, ...]


Tree = Leaf | Node


@dataclass(frozen=True)
class SubNetwork:
    """The branch taken at each node met on the way down, ancestors before descendant."""

    choices: tuple[int, ...]


class NumberedTree(NamedTuple):
    """A tree by numbers: the root is 0, and every child has a larger number than its node.

    Attributes:
        nodes: all nodes and leaves, ancestors before descendant, depth first.
        branches: for each of `nodes` and each of its branches the numbers of the children; empty for a leaf.
    """

    nodes: tuple[Tree, ...]
    branches: list[list[list[int]]]


def number_nodes(root: Tree) -> NumberedTree:
    """Number the nodes by their place, so that one object that stands in two places has two numbers."""
    nodes: list[Tree] = []
    branches: list[list[list[int]]] = []
    top: list[int] = []
    stack = [(root, top)]  # a node, and the list of its siblings' numbers
    while stack:
        node, siblings = stack.pop()
        siblings.append(len(nodes))
        nodes.append(node)
        below: list[list[int]] = []
        branches.append(below)
        if isinstance(node, Node):
            below.extend([] for _ in node.branches)
            places = [(child, below[t]) for t, branch in enumerate(node.branches) for child in branch.children]
            stack.extend(reversed(places))
    return NumberedTree(tuple(nodes), branches)


def heights(tree: NumberedTree) -> tuple[int, ...]:
    """For each node 0 for a leaf, else one more than the highest child."""
    height = [0] * len(tree.nodes)
    for i in range(len(height) - 1, -1, -1):  # children have larger numbers than their node
        height[i] = max((1 + height[c] for branch in tree.branches[i] for c in branch), default=0)
    return tuple(height)


def count_subnetworks(node: Tree) -> int:
    """How many ways there are to choose branches from the root down."""
    if isinstance(node, Leaf):
        return 1
    return sum(math.prod(count_subnetworks(child) for child in branch.children) for branch in node.branches)


def shape(node: Tree) -> Any:
    """What `count_patterns` looks at: nested sets of variables, without scores and parents."""
    if isinstance(node, Leaf):
        return frozenset(node.variables)
    return tuple((tuple(shape(a) for a in b.ancestors), shape(b.descendant)) for b in node.branches)


def enumerate_choices(node: Tree) -> Iterator[tuple[int, ...]]:
    """The choices of every sub-network below `node`, each once."""
    if isinstance(node, Leaf):
        yield ()
        return
    for t, branch in enumerate(node.branches):
        for rest in _product(branch.children):
            yield (t, *rest)


def _product(children: tuple[Tree, ...]) -> Iterator[tuple[int, ...]]:
    if not children:
        yield ()
        return
    for first in enumerate_choices(children[0]):
        for rest in _product(children[1:]):
            yield first + rest


def visit(tree: NumberedTree, subnetwork: SubNetwork) -> Iterator[tuple[int, int]]:
    """The numbers of the nodes of a sub-network with the branch taken, -1 at a leaf, from the root down."""
    choices = iter(subnetwork.choices)
    stack = [0]
    while stack:
        i = stack.pop()
        branches = tree.branches[i]
        if not branches:
            yield i, -1
            continue
        t = next(choices, None)
        if t is None or not 0 <= t < len(branches):
            raise ValueError(f"{subnetwork} does not belong to this tree: draw it with sample, map or enumerate")
        yield i, t
        stack.extend(reversed(branches[t]))
    if next(choices, None) is not None:
        raise ValueError(f"{subnetwork} does not belong to this tree: draw it with sample, map or enumerate")
