"""Bayesian networks in BIF files: read by pgmpy, and forward sampling that a seed repeats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Network:
    """Variables in file order, the DAG (d, d), and for each variable its parents and table (r_p1, …, r_x)."""

    names: list[str]
    dag: NDArray[np.bool_]
    tables: list[tuple[list[int], NDArray[np.float64]]]

    def sample(self, n: int, seed: int) -> NDArray[np.int64]:
        """(n, d) level numbers, parents before children."""
        rng = np.random.default_rng(seed)
        x = np.full((n, len(self.names)), -1)
        waiting = list(range(len(self.names)))
        while waiting:
            ready = [v for v in waiting if not set(self.tables[v][0]) & set(waiting)]
            for v in ready:
                parents, table = self.tables[v]
                p = table[tuple(x[:, q] for q in parents)] if parents else np.broadcast_to(table, (n, len(table)))
                x[:, v] = (rng.random((n, 1)) > p.cumsum(axis=1)[:, :-1]).sum(axis=1)
            waiting = [v for v in waiting if v not in ready]
        return x


def read_bif(path: Path) -> Network:
    """The network of a BIF file."""
    # pyAgrum is lighter, but its reader stops at the level `Asy/Patch` of CHILD.
    from pgmpy.readwrite import BIFReader

    reader = BIFReader(str(path))
    names = list(reader.variable_names)
    dag = np.zeros((len(names), len(names)), dtype=bool)
    tables = []
    for x, name in enumerate(names):
        parents = [names.index(parent) for parent in reader.variable_parents[name]]
        dag[parents, x] = True
        levels = [len(reader.variable_states[names[v]]) for v in (x, *parents)]
        # One column for each configuration of the parents, the last parent changing fastest.
        table = np.moveaxis(np.asarray(reader.variable_cpds[name], dtype=np.float64).reshape(levels), 0, -1)
        tables.append((parents, table / table.sum(axis=-1, keepdims=True)))  # files round their numbers
    return Network(names, dag, tables)
