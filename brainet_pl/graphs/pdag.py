"""A partially directed graph as users have it, the class of a DAG, and v-structures one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from brainet_pl.structure.pdag import Bools, Ints, Separations, complete_graph, count_paths, meek


@dataclass(frozen=True, eq=False)
class PDAG:
    """A partially directed graph over d variables; `adjacency` (d, d) is read-only.

    Variables may have `names`, which tables, files and drawings show; they are no part of what makes two graphs equal.

    >>> graph = PDAG(np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0]], dtype=bool))  # 0 → 1, 0 — 2
    >>> graph.directed.astype(int).tolist(), graph.undirected.astype(int).tolist()
    ([[0, 1, 0], [0, 0, 0], [0, 0, 0]], [[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    """

    adjacency: Bools
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        a = np.array(self.adjacency, dtype=bool)
        if a.ndim != 2 or a.shape[0] != a.shape[1] or a.diagonal().any():
            raise ValueError(f"expected a square adjacency without self-loops, got shape {a.shape}: check the graph")
        a.flags.writeable = False
        object.__setattr__(self, "adjacency", a)
        if self.names is not None and len(self.names) != len(a):
            raise ValueError(f"expected a name for each of {len(a)} variables, got {len(self.names)}: name all or none")

    def named(self, names: Sequence[str] | None) -> PDAG:
        """The same graph with a name for each variable."""
        return PDAG(self.adjacency, None if names is None else tuple(map(str, names)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PDAG) and np.array_equal(self.adjacency, other.adjacency)

    @property
    def directed(self) -> Bools:
        """Says where there is an arrow, (d, d): [i, j] means i → j."""
        return self.adjacency & ~self.adjacency.T

    @property
    def undirected(self) -> Bools:
        """Says where there is an edge without direction, (d, d): [i, j] means i — j."""
        return self.adjacency & self.adjacency.T

    @property
    def skeleton(self) -> Bools:
        """Says which variables are adjacent, (d, d), whatever the direction."""
        return self.adjacency | self.adjacency.T

    def shd(self, other: PDAG) -> int:
        """Structural Hamming distance: the number of pairs joined differently (no edge, —, → or ←)."""
        differs = self.adjacency != other.adjacency
        return int(np.triu(differs | differs.T).sum())

    def permute(self, order: Ints) -> PDAG:
        """The graph whose variable `i` is this graph's variable `order[i]`."""
        names = None if self.names is None else tuple(self.names[i] for i in order)
        return PDAG(self.adjacency[np.ix_(order, order)], names)


def cpdag(dag: Bools) -> PDAG:
    """The equivalence class of a DAG (d, d): its skeleton, its v-structures, and what Meek's rules make of them.

    Example:
        In 0 → 1 → 2 every arrow could be turned; in 0 → 1 ← 2 none.

        >>> chain = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=bool)
        >>> cpdag(chain).adjacency.astype(int).tolist()
        [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
        >>> collider = np.array([[0, 1, 0], [0, 0, 0], [0, 1, 0]], dtype=bool)
        >>> cpdag(collider).adjacency.astype(int).tolist()
        [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    """
    skeleton = dag | dag.T
    # x → z is compelled at once if some other parent y of z is not adjacent to x.
    unmarried = (count_paths(~skeleton & complete_graph(len(dag)), dag) > 0) & dag
    return PDAG(meek(skeleton & ~unmarried.T))


def orient_surest_first(skeleton: Bools, separations: Separations, order: Ints) -> Bools:
    """Orient v-structures one separated pair after the other, then by Meek's rules; an earlier one is never undone."""
    A = skeleton.copy()
    ends = np.searchsorted(separations.owner, np.arange(len(separations.pairs) + 1))
    for i in order:
        x, y = separations.pairs[i]
        middle = skeleton[x] & skeleton[y]
        middle[separations.member[ends[i] : ends[i + 1]]] = False
        z = np.flatnonzero(middle & A[x] & A[y])
        A[z, x] = A[z, y] = False
    return meek(A)
