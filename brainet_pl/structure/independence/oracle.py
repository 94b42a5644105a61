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
        found = np.asarray(dag)
        if found.ndim != 2 or found.shape[0] != found.shape[1] or not found.size or found.dtype.kind not in "fiub":
            raise ValueError(
                f"expected a DAG as a square matrix (d, d) of true and false, got {found.shape} of {found.dtype}: "
                "dag[i, j] says whether i is a parent of j"
            )
        self.dag = found.astype(bool)
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
        ancestors = given.copy()
        while True:
            more = ancestors | self.dag[:, ancestors].any(axis=1)
            if (more == ancestors).all():
                break
            ancestors = more
        seen: set[tuple[int, bool]] = set()  # (variable, whether the walk entered it from a child)
        stack = [(source, True)]
        while stack:
            v, from_child = stack.pop()
            if (v, from_child) in seen:
                continue
            seen.add((v, from_child))
            if from_child and not given[v]:
                stack += [(int(p), True) for p in np.flatnonzero(self.dag[:, v])]
            if not given[v]:
                stack += [(int(c), False) for c in np.flatnonzero(self.dag[v])]
            if not from_child and ancestors[v]:
                stack += [(int(p), True) for p in np.flatnonzero(self.dag[:, v])]
        reached = np.zeros(len(self.dag), dtype=bool)
        reached[[v for v, _ in seen if not given[v]]] = True
        return reached
