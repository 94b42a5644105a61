"""What is known before the data: arrows that must or must not be there, and which variables come before which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from brainet_pl.graphs.pdag import cpdag
from brainet_pl.structure.constraints import Constraints
from brainet_pl.structure.pdag import Bools, complete_graph, meek, topological_order

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
        return {name: list(map(list, getattr(self, name))) for name in ("required", "forbidden", "tiers")}

    def numbered(self, d: int, names: Sequence[str] | None) -> Knowledge:
        """The same knowledge with column numbers in place of names."""
        place = partial(_place, d=d, names=names)
        required = [_pair(arrow, place) for arrow in self.required]
        forbidden = [_pair(arrow, place) for arrow in self.forbidden]
        return Knowledge(required, forbidden, [list(map(place, _group(tier))) for tier in self.tiers])

    def on(self, d: int, names: Sequence[str] | None) -> Constraints:
        """The knowledge about `d` variables as matrices; refuses what contradicts itself or names no variable."""
        place = partial(_place, d=d, names=names)

        def name_of(i: int) -> str:
            return str(i) if names is None else names[i]

        level = np.full(d, -1)
        for number, tier in enumerate(self.tiers):
            for x in map(place, _group(tier)):
                if level[x] not in (-1, number):
                    raise ValueError(
                        f"expected every variable in one tier at most, got {name_of(x)} in tiers {level[x]} and "
                        f"{number}: leave it in one of them"
                    )
                level[x] = number
        before = (level[:, None] < level) & (level >= 0)[:, None] & (level >= 0)
        required, allowed = np.zeros((d, d), dtype=bool), complete_graph(d) & ~before.T
        for arrow in self.required:
            required[_pair(arrow, place)] = True
        for arrow in self.forbidden:
            allowed[_pair(arrow, place)] = False
        for a, b in np.argwhere(required & ~allowed):
            why = "against its tiers" if before[b, a] else "forbidden"
            raise ValueError(
                f"expected knowledge that can be true, got {name_of(a)} → {name_of(b)} required and {why}: drop one"
            )
        order = topological_order(required | before)
        if len(order) < d:
            rest = list(map(name_of, np.setdiff1d(np.arange(d), order).tolist()))
            raise ValueError(
                f"expected knowledge that can be true, got a cycle of required arrows and tiers among "
                f"{', '.join(rest[:6])}: drop one of them"
            )
        return Constraints(required, allowed & ~required.T, before)


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


def class_of(dag: Bools, known: Constraints) -> Bools:
    """The graph (d, d) of all DAGs that are equivalent to `dag` and break nothing known (Meek's rules R1 to R4)."""
    A = cpdag(dag).adjacency.copy()
    fixed = A & A.T & dag & (known.required | ~known.allowed.T | known.before)
    A[fixed.T] = False
    while True:
        A = meek(A)
        turned = _fourth_rule(A)
        if not turned.any():
            return np.asarray(A)
        A = A & ~turned.T


def _fourth_rule(A: Bools) -> Bools:
    """Meek's R4: a — b, a — c → d → b, a joined to d, b and c apart: a → b. Only knowledge makes it necessary."""
    directed, undirected, joined = A & ~A.T, A & A.T, A | A.T
    found = np.zeros_like(A)
    for c, d in np.argwhere(directed):
        for b in np.flatnonzero(directed[d] & ~joined[c]):
            if b != c:
                found[:, b] |= undirected[:, b] & undirected[:, c] & joined[:, d]
    return np.asarray(found & ~found.T)
