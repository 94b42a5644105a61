"""Columns that say the same: found, left out of the tests, and given back to the graph.

Two columns that determine each other separate each other from everything else, so tests would take both out of the
graph. One of them speaks for all: the others are joined to it afterwards.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.data import DataKind, PreparedData, TableData
from brainet_pl.structure.pdag import Ints
from brainet_pl.structure.score import LocalScore
from brainet_pl.structure.tree import Branch, Leaf, Node, Tree


def find_copies(data: PreparedData, kind: DataKind) -> Ints:
    """Finds for each column the first that it determines and that determines it, as a test sees them, (d,).

    Discrete: the levels of one are those of the other by other names. Gaussian: one rises, or falls, exactly where the
    other does. A column without a copy has its own number; so have columns that never vary, which say nothing, and the
    numbers of a stream, which nobody holds to compare.

    Example:
        The second column is the first with its levels renamed; the third joins two of them, which can't be undone.

        >>> table = np.array([[0, 2, 0], [1, 0, 1], [2, 1, 1], [1, 0, 1]])
        >>> data = PreparedData.prepare(table, bins=3)
        >>> first = find_copies(data, "discrete")
        >>> len(np.unique(first)), sorted(data.columns[first != np.arange(3)].tolist()) in ([0], [1])
        (2, True)
    """
    first: dict[bytes, int] = {}
    original = np.arange(data.d)
    if kind == "gaussian" and not isinstance(data, TableData):
        return original
    columns, name = (data.table.codes, _renamed) if kind == "discrete" else (data.scores, _signed)
    for j in range(data.d):
        if (columns[:, j] != columns[0, j]).any():
            original[j] = first.setdefault(name(columns[:, j]).tobytes(), j)
    return original


def _renamed(codes: NDArray[Any]) -> NDArray[Any]:
    """(N,) levels numbered by the first row that has them: the same for every renaming."""
    seen, where = np.unique(codes, return_index=True)
    number = np.zeros(int(seen[-1]) + 1, dtype=np.uint8)
    number[seen[np.argsort(where)]] = np.arange(len(seen))
    return np.asarray(number[codes])


def _signed(scores: NDArray[Any]) -> NDArray[Any]:
    """(N,) scores, up to rounding, with the sign that makes the first one that is not zero positive."""
    rounded = np.round(scores, 5) + 0.0
    return np.asarray(rounded * np.sign(rounded[np.flatnonzero(rounded)[:1]].sum()) + 0.0)


def tree_with_copies(tree: Tree, original: Ints, score: LocalScore) -> Tree:
    """The tree with each copy in every set that its `original` (d,) is in, and in leaves as its child."""
    copies: dict[int, list[int]] = {}
    for copy in np.flatnonzero(original != np.arange(len(original))).tolist():
        copies.setdefault(int(original[copy]), []).append(copy)

    def complete(variables: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(chain(variables, *(copies.get(x, ()) for x in variables))))

    def rebuild(node: Tree) -> Tree:
        variables = complete(node.variables)
        if isinstance(node, Leaf):
            return _leaf_with_copies(node, variables, copies, score)
        branches = (Branch(tuple(map(rebuild, b.ancestors)), rebuild(b.descendant)) for b in node.branches)
        return Node(variables, tuple(branches))

    return rebuild(tree) if copies else tree


def _leaf_with_copies(leaf: Leaf, variables: tuple[int, ...], copies: dict[int, list[int]], score: LocalScore) -> Leaf:
    """The leaf over `variables`, its own and their copies; a copy has the neighbours of its original."""
    parents = dict(zip(leaf.variables, leaf.parents, strict=True))
    neighbours = dict(zip(leaf.variables, leaf.neighbours, strict=False))
    total = 0.0
    for x in leaf.variables:
        for copy in copies.get(x, ()):
            parents[copy] = (x,)
            if neighbours:
                neighbours[copy] = neighbours[x]
    for v in variables:
        if v not in leaf.variables:
            total += score(v, parents[v])
    near = tuple(neighbours[v] for v in variables) if neighbours else ()
    return Leaf(variables, tuple(parents[v] for v in variables), leaf.score + total, near)
