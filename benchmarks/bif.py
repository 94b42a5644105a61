"""Bayesian networks in BIF files: reading and forward sampling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_VARIABLE = re.compile(r"variable\s+(\S+)\s*\{\s*type\s+discrete\s*\[\s*\d+\s*\]\s*\{([^}]*)\}")
_TABLE = re.compile(r"probability\s*\(\s*([^)|]+?)\s*(?:\|\s*([^)]*?))?\s*\)\s*\{(.*?)\n\}", re.S)
_ROW = re.compile(r"\(([^)]*)\)\s*([^;]+);")


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
    text = path.read_text()
    levels = {m[1]: [level.strip() for level in m[2].split(",")] for m in _VARIABLE.finditer(text)}
    names = list(levels)
    dag = np.zeros((len(names), len(names)), dtype=bool)
    tables: list[tuple[list[int], NDArray[np.float64]]] = [([], np.empty(0))] * len(names)
    for m in _TABLE.finditer(text):
        x, parents = m[1], [p.strip() for p in m[2].split(",")] if m[2] else []
        table = np.zeros([len(levels[p]) for p in parents] + [len(levels[x])])
        if parents:
            for row in _ROW.finditer(m[3]):
                key = tuple(levels[p].index(v.strip()) for p, v in zip(parents, row[1].split(","), strict=True))
                table[key] = [float(v) for v in row[2].split(",")]
        else:
            table[:] = [float(v) for v in re.findall(r"table\s+([^;]+);", m[3])[0].split(",")]
        numbers = [names.index(p) for p in parents]
        dag[numbers, names.index(x)] = True
        tables[names.index(x)] = numbers, table / table.sum(axis=-1, keepdims=True)
    return Network(names, dag, tables)
