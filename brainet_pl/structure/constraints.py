"""What is known before the data, as matrices: arrows that must or must not be there, and which variables come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.independence import Margins, SingleMargins
from brainet_pl.structure.pdag import Bools, Ints, complete_graph, dag_extension, topological_order

Floats = NDArray[np.float64]


@runtime_checkable
class Background(Protocol):
    """Knowledge of a graph that can be asked for its constraints, such as `brainet_pl.graphs.Knowledge`."""

    def on(self, d: int, names: Sequence[str] | None) -> Constraints:
        """The constraints on `d` variables; refuses what contradicts itself or names no variable."""

    def numbered(self, d: int, names: Sequence[str] | None) -> Background:
        """The same knowledge with column numbers in place of names."""

    def to_dict(self) -> dict[str, Any]:
        """Lists and plain values only, so that it travels in any file."""


@dataclass(frozen=True)
class Constraints:
    """`Knowledge` as matrices (d, d): arrows that must be there, that may, and variables before others by tiers."""

    required: Bools
    allowed: Bools
    before: Bools

    def permute(self, order: Ints) -> Constraints:
        """The constraints on variables whose number `i` is this number `order[i]`."""
        every = np.ix_(order, order)
        return Constraints(self.required[every], self.allowed[every], self.before[every])

    def start(self, A: Bools) -> Bools:
        """The graph `A` (d, d) with no arrow that is not allowed: edges that can go one way only are directed."""
        return np.asarray(A & self.allowed | self.required)

    def keep(self, test: Margins) -> Margins:
        """The test, which never calls the ends of a required arrow independent."""
        if not self.required.any():
            return test
        both = self.required | self.required.T
        return KeptSingles(test, both) if isinstance(test, SingleMargins) else KeptEdges(test, both)

    def extend(self, A: Bools) -> Bools:
        """A DAG with the edges of the graph `A` (d, d) that breaks nothing known, and follows its directions else.

        Edges that no allowed direction is left for are dropped; required arrows are added.
        """
        skeleton = A | A.T | self.required | self.required.T
        preferred = np.argsort(topological_order(dag_extension(A)))
        one_way = skeleton & self.allowed & ~self.allowed.T
        for known in (self.required | self.before | one_way, self.required | self.before):
            order = _first_come(known, preferred)
            if len(order) == len(A):
                break
        place = np.argsort(order)
        return np.asarray(skeleton & (place[:, None] < place) & self.allowed | self.required)

    def repair(self, dag: Bools, ours: Ints) -> Bools:
        """The DAG (d, d) of a leaf with arrows into `ours` that break nothing known; the others stay as they are."""
        among = self.permute(ours)
        repaired = dag & self.allowed | self.required
        inside = dag[np.ix_(ours, ours)]
        if (inside & ~among.allowed).any() or (among.required & ~inside).any():
            inside = among.extend(inside)
        repaired[np.ix_(ours, ours)] = inside
        others = np.setdiff1d(np.arange(len(dag)), ours)
        repaired[:, others] = dag[:, others]
        return np.asarray(repaired)


def check_knowledge(knowledge: Background, names: Sequence[str] | None, columns: Ints, original: Ints) -> Constraints:
    """The constraints on columns in canonical order; refuses knowledge about a column that is a copy of another.

    `columns` (d,) has the user's number of each, `original` (d,) the first of those that say the same.
    """
    if not isinstance(knowledge, Background):
        raise ValueError(f"expected knowledge to be a Knowledge, got {knowledge!r}: write Knowledge(required=[…], …)")
    known = knowledge.on(len(columns), names).permute(columns)
    touched = known.required | ~known.allowed & ~known.required.T & complete_graph(len(columns))
    for copy in np.flatnonzero((original != np.arange(len(original))) & (touched | touched.T).any(axis=0)):
        a, b = (int(columns[i]) for i in (copy, original[copy]))
        one, other = (str(i) if names is None else names[i] for i in (a, b))
        raise ValueError(
            f"expected knowledge about columns that differ, got {one}, which says the same as {other}: drop one of them"
        )
    return known


def _first_come(known: Bools, preferred: Ints) -> list[int]:
    """A topological order of `known` (d, d) that follows the `preferred` places (d,) else; shorter for cycles."""
    waiting, order = known.sum(axis=0), []
    left = set(range(len(known)))
    while ready := [v for v in left if not waiting[v]]:
        v = min(ready, key=lambda w: preferred[w])
        left.remove(v)
        order.append(v)
        waiting = waiting - known[v]
    return order


class KeptEdges:
    """A test that never calls some pairs independent."""

    def __init__(self, test: Margins, kept: Bools) -> None:
        self.test, self.kept = test, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.test, name)

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the margins (L, R) of left × right given `condition`."""
        return np.where(self.kept[np.ix_(left, right)], np.inf, self.test.block(condition, left, right))

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes the margins (T,) of x (T,) and y (T,) given conditions (T, n)."""
        return np.where(self.kept[x, y], np.inf, self.test.pairs(x, y, conditions))


class KeptSingles(KeptEdges):
    """`KeptEdges` of a test that finds the best of many single conditions by itself."""

    def weakest(self, x: int, y: Ints, z: Ints) -> tuple[Floats, Ints]:
        """Finds the smallest margin of `x` and each of `y` (Y,) given one of `z` (Z,), and its place in z."""
        margins, place = self.test.weakest(x, y, z)  # type: ignore[attr-defined]
        return np.where(self.kept[x, y], np.inf, margins), place
