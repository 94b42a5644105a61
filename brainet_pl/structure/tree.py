"""The generative graph tree as plain data: nodes, branches and leaves, their numbers, and what can be counted on them.

A node for a set of variables is a leaf, or has s branches; a branch has ancestor nodes and one descendant node. One
branch chosen at each node met from the root down is a sub-network: it uses every variable exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import numpy as np


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


def join_ancestors(node: Tree, most: int) -> Tree:
    """A tree whose branches have no more than `most` ancestors, as far as these are leaves.

    A union of autonomous ancestor sets is one too. Leaves beside each other become one, of about equally many variables
    each, with their parents, neighbours and the sum of their scores: scores of sub-networks stay, and so do the
    choices that lead to them.

    >>> few = [Leaf((v,), ((),), -1.0) for v in range(5)]
    >>> joined = join_ancestors(Node(tuple(range(5)), (Branch(tuple(few[:4]), few[4]),)), 2)
    >>> [leaf.variables for leaf in joined.branches[0].ancestors], joined.branches[0].ancestors[0].score
    ([(0, 1), (2, 3)], -2.0)
    """
    if isinstance(node, Leaf):
        return node
    branches = []
    for branch in node.branches:
        ancestors = [join_ancestors(child, most) for child in branch.ancestors]
        leaves = [child for child in ancestors if isinstance(child, Leaf)]
        others = [child for child in ancestors if not isinstance(child, Leaf)]
        room = max(1, most - len(others))
        if len(leaves) > room:
            ancestors = sorted([*others, *_join_to(leaves, room)], key=lambda child: child.variables)
        branches.append(Branch(tuple(ancestors), join_ancestors(branch.descendant, most)))
    return Node(node.variables, tuple(branches))


def _join_to(leaves: list[Leaf], count: int) -> list[Leaf]:
    """At most so many leaves of about equally many variables, each the union of leaves beside each other."""
    ends = np.cumsum([len(leaf.variables) for leaf in leaves])
    groups = (ends - 1) * count // ends[-1]
    joined = []
    for group in np.unique(groups):
        first, last = np.searchsorted(groups, [group, group + 1])
        joined.append(_join_leaves(leaves[first:last]))
    return joined


def _join_leaves(leaves: list[Leaf]) -> Leaf:
    near = [leaf.neighbours or [()] * len(leaf.variables) for leaf in leaves]
    rows = [zip(leaf.variables, leaf.parents, n, strict=True) for leaf, n in zip(leaves, near, strict=True)]
    variables, parents, neighbours = zip(*sorted(chain.from_iterable(rows)), strict=True)
    score = math.fsum(leaf.score for leaf in leaves)
    return Leaf(variables, parents, score, neighbours if all(leaf.neighbours for leaf in leaves) else ())


class NumberedTree(NamedTuple):
    """A tree by numbers: the root is 0, and every child has a larger number than its node."""

    nodes: tuple[Tree, ...]  # all nodes and leaves, ancestors before descendant, depth first
    branches: list[list[list[int]]]  # for each node and each of its branches the numbers of the children


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


def enumerate_choices(node: Tree) -> Iterator[tuple[int, ...]]:
    """The choices of every sub-network below `node`, each once."""
    if isinstance(node, Leaf):
        yield ()
        return
    for t, branch in enumerate(node.branches):
        for parts in product(*map(enumerate_choices, branch.children)):
            yield (t, *chain.from_iterable(parts))


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


# -- different connectivity patterns -----------------------------------------------------------------------------------

Key = frozenset[int]
Decomposition = tuple[frozenset[Key], Key]
Children = tuple[int, ...]


class _Shapes:
    """Shapes with equal subtrees merged: a shape is a number, equal numbers are equal subtrees."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.variables: list[Key] = []
        self.branches: list[dict[Decomposition, set[Children]] | None] = []  # None for a leaf

    def add(self, node: Tree) -> int:
        """The number of the shape of a node, whatever its scores and parents are."""
        if isinstance(node, Leaf):
            return self._register(("leaf", frozenset(node.variables)), frozenset(node.variables), None)
        grouped: dict[Decomposition, set[Children]] = {}
        for branch in node.branches:
            below = sorted((self.add(a) for a in branch.ancestors), key=lambda number: min(self.variables[number]))
            last = self.add(branch.descendant)
            decomposition = frozenset(self.variables[a] for a in below), self.variables[last]
            grouped.setdefault(decomposition, set()).add((*below, last))
        variables = frozenset().union(*(self.variables[c] for c in next(iter(next(iter(grouped.values()))))))
        key = frozenset((d, frozenset(children)) for d, children in grouped.items())
        return self._register(key, variables, grouped)

    def _register(self, key: Any, variables: Key, branches: dict[Decomposition, set[Children]] | None) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.variables)
            self.variables.append(variables)
            self.branches.append(branches)
        return self.numbers[key]


def count_patterns(node: Tree) -> int:
    """The number of different patterns below a node, counted without listing them.

    Two branches may decompose their variables alike and differ only further down, so that the same pattern can be
    reached in several ways. The patterns of a branch are the product of its children's, those of a node the union of
    its branches'; unions of products are counted by inclusion and exclusion, and equal subtrees are merged first.
    """
    shapes = _Shapes()
    root = shapes.add(node)

    @cache
    def shared(numbers: frozenset[int]) -> int:
        """How many patterns all of these shapes have."""
        groups = [shapes.branches[i] for i in numbers]
        split = [group for group in groups if group is not None]
        if len(split) < len(groups):  # a leaf has one pattern, and shares it with no other shape
            return int(len(groups) == 1)
        total = 0
        for decomposition in set(split[0]).intersection(*split[1:]):
            options = (_nonempty_subsets(sorted(group[decomposition])) for group in split)
            for chosen in product(*options):
                sign = (-1) ** sum(len(subset) + 1 for subset in chosen)
                positions = zip(*set().union(*chosen), strict=True)
                total += sign * math.prod(shared(frozenset(position)) for position in positions)
        return total

    return shared(frozenset([root]))


def _nonempty_subsets(items: list[Children]) -> Iterator[tuple[Children, ...]]:
    for size in range(1, len(items) + 1):
        yield from combinations(items, size)
