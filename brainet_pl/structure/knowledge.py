"""What is known before the data: arrows that must or must not be there, and which variables come before which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.independence import Margins, SingleMargins
from brainet_pl.structure.pdag import Bools, Ints, complete_graph, cpdag, dag_extension, meek, topological_order

Floats = NDArray[np.float64]
Variable = int | str
Arrow = tuple[Variable, Variable]


@dataclass(frozen=True)
class Knowledge:
    """Background knowledge of a graph. Variables are column numbers, or names where the data have them.

    Attributes:
        required: arrows (a, b) that are there: a → b.
        forbidden: arrows (a, b) that are not; b → a may be. Forbid both and the two are not joined.
        tiers: groups of variables in the order of time: no arrow leads to an earlier group. Within a group, and for
            variables in no group, nothing is known.

    Example:
        >>> Knowledge(required=[("smoking", "cancer")], tiers=[["age"], ["smoking"], ["cancer"]]).forbidden
        ()
    """

    required: Sequence[Arrow] = ()
    forbidden: Sequence[Arrow] = ()
    tiers: Sequence[Sequence[Variable]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Lists and plain values only, so that it travels in any file."""
        arrows = {name: [list(arrow) for arrow in getattr(self, name)] for name in ("required", "forbidden")}
        return arrows | {"tiers": [list(tier) for tier in self.tiers]}

    def numbered(self, d: int, names: Sequence[str] | None) -> Knowledge:
        """The same knowledge with column numbers in place of names."""
        place = partial(_place, d=d, names=names)
        required, forbidden = ([_pair(arrow, place) for arrow in arrows] for arrows in (self.required, self.forbidden))
        return Knowledge(required, forbidden, [[place(x) for x in _group(tier)] for tier in self.tiers])

    def on(self, d: int, names: Sequence[str] | None) -> Constraints:
        """The knowledge about `d` variables as matrices; refuses what contradicts itself or names no variable."""
        place = partial(_place, d=d, names=names)

        def said(i: int) -> str:
            return str(i) if names is None else names[i]

        tier_of: dict[int, int] = {}
        for number, tier in enumerate(self.tiers):
            for x in map(place, _group(tier)):
                if tier_of.setdefault(x, number) != number:
                    raise ValueError(
                        f"expected every variable in one tier at most, got {said(x)} in tiers {tier_of[x]} and "
                        f"{number}: leave it in one of them"
                    )
        level = np.array([tier_of.get(i, -1) for i in range(d)])
        before = (level[:, None] < level) & (level >= 0)[:, None] & (level >= 0)
        required, allowed = np.zeros((d, d), dtype=bool), complete_graph(d) & ~before.T
        for arrows, matrix, value in ((self.required, required, True), (self.forbidden, allowed, False)):
            for arrow in arrows:
                a, b = _pair(arrow, place)
                matrix[a, b] = value
        for a, b in np.argwhere(required & ~allowed):
            why = "against its tiers" if before[b, a] else "forbidden"
            raise ValueError(
                f"expected knowledge that can be true, got {said(a)} → {said(b)} required and {why}: drop one"
            )
        order = topological_order(required | before)
        if len(order) < d:
            rest = [said(i) for i in range(d) if i not in order]
            raise ValueError(
                f"expected knowledge that can be true, got a cycle of required arrows and tiers among "
                f"{', '.join(rest[:6])}: drop one of them"
            )
        return Constraints(required, allowed & ~required.T, before)


def check_knowledge(knowledge: Any, names: Sequence[str] | None, columns: Ints, original: Ints) -> Constraints:
    """The constraints on columns in canonical order; refuses knowledge about a column that is a copy of another.

    `columns` (d,) has the user's number of each, `original` (d,) the first of those that say the same.
    """
    if not isinstance(knowledge, Knowledge):
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


def _place(variable: Any, d: int, names: Sequence[str] | None) -> int:
    """The number of a variable that is given by its name or number."""
    if names is not None and isinstance(variable, str) and variable in names:
        return list(names).index(variable)
    if isinstance(variable, int | np.integer) and not isinstance(variable, bool) and 0 <= variable < d:
        return int(variable)
    known = f"columns 0 to {d - 1}" if names is None else f"columns such as {', '.join(list(names)[:3])}"
    raise ValueError(f"expected knowledge about {known}, got {variable!r}: check its spelling")


def _group(tier: Any) -> Iterable[Any]:
    if isinstance(tier, str) or not isinstance(tier, Iterable):
        raise ValueError(f"expected each tier to be a list of variables, got {tier!r}: write [[…], […]]")
    return tier


def _pair(arrow: Any, place: Callable[[Any], int]) -> tuple[int, int]:
    if isinstance(arrow, str) or not isinstance(arrow, Sequence) or len(arrow) != 2:
        raise ValueError(f"expected arrows as pairs (cause, effect), got {arrow!r}: write [(a, b), …]")
    a, b = map(place, arrow)
    if a == b:
        raise ValueError(f"expected arrows between two variables, got {arrow!r}: drop it")
    return a, b


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

    def class_of(self, dag: Bools) -> Bools:
        """The graph (d, d) of all DAGs that are equivalent to `dag` and break nothing known (Meek's rules R1 to R4)."""
        A = cpdag(dag).adjacency.copy()
        fixed = A & A.T & dag & (self.required | ~self.allowed.T | self.before)
        A[fixed.T] = False
        while True:
            A = meek(A)
            turned = _fourth_rule(A)
            if not turned.any():
                return np.asarray(A)
            A = A & ~turned.T


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


def _fourth_rule(A: Bools) -> Bools:
    """Meek's R4: a — b, a — c → d → b, a joined to d, b and c apart: a → b. Only knowledge makes it necessary."""
    directed, undirected, joined = A & ~A.T, A & A.T, A | A.T
    found = np.zeros_like(A)
    for c, d in np.argwhere(directed):
        for b in np.flatnonzero(directed[d] & ~joined[c]):
            if b != c:
                found[:, b] |= undirected[:, b] & undirected[:, c] & joined[:, d]
    return np.asarray(found & ~found.T)


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
