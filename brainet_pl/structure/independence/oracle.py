"""Independence read off a known graph: no data, no threshold, no error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.independence.base import Floats, Ints


class DSeparation:
    """An oracle that reads independence off a known DAG (d, d): the learner's reference in tests.

    It reads no data, so it has no name: hand the object itself to `rai(d, test=DSeparation(dag))`.
    """

    def __init__(self, dag: NDArray[np.bool_]) -> None:
        matrix = np.asarray(dag)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size or matrix.dtype.kind not in "fiub":
            raise ValueError(
                f"expected a DAG as a square matrix (d, d) of true and false, got {matrix.shape} of {matrix.dtype}: "
                "dag[i, j] says whether i is a parent of j"
            )
        self.dag = matrix.astype(bool)
        self.num_variables = len(self.dag)
        left = np.ones(self.num_variables, dtype=bool)
        while left.any():  # take away what no remaining variable is a parent of
            first = left & ~self.dag[left].any(axis=0)
            if not first.any():
                raise ValueError(
                    f"expected a graph without cycles, got one among variables {np.flatnonzero(left).tolist()}: remove "
                    "an edge of each cycle"
                )
            left &= ~first

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Gives -1 where x and y are d-separated and +1 elsewhere, (T,)."""
        tests = zip(x, y, conditions.tolist(), strict=True)
        return np.array([self.block(tuple(z), np.array([a]), np.array([b]))[0, 0] for a, b, z in tests])

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Gives -1 where left and right are d-separated and +1 elsewhere, (L, R)."""
        given = np.zeros(len(self.dag), dtype=bool)
        given[list(condition)] = True
        connected = np.stack([self._reachable(int(x), given) for x in left])
        return np.where(connected[:, right], 1.0, -1.0)

    def _reachable(self, source: int, given: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(d,) variables that an active trail joins to `source` (the Bayes-ball walk)."""
        opened = self._ancestors(given)
        seen: set[tuple[int, bool]] = set()  # (variable, whether the walk entered it from a child)
        stack = [(source, True)]
        while stack:
            place = stack.pop()
            if place not in seen:
                seen.add(place)
                stack += self._next_places(*place, given, opened)
        reached = np.zeros(len(self.dag), dtype=bool)
        reached[[v for v, _ in seen]] = True
        return reached & ~given

    def _next_places(
        self, v: int, from_child: bool, given: NDArray[np.bool_], opened: NDArray[np.bool_]
    ) -> list[tuple[int, bool]]:
        """Where the walk goes on from a variable that it entered from a child, or from a parent."""
        places: list[tuple[int, bool]] = []
        if not given[v]:
            places += [(child, False) for child in np.flatnonzero(self.dag[v]).tolist()]
        if not given[v] if from_child else opened[v]:
            places += [(parent, True) for parent in np.flatnonzero(self.dag[:, v]).tolist()]
        return places

    def _ancestors(self, given: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(d,) the given variables and all from which a directed path leads to one: they open v-structures."""
        ancestors = given
        while True:
            more = ancestors | self.dag[:, ancestors].any(axis=1)
            if (more == ancestors).all():
                return ancestors
            ancestors = more
