"""Learned graphs for other tools: tables of edges, networkx, GraphML, pgmpy and BIF files."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl._utils.atomic import atomic_write
from brainet_pl.graphs.pdag import PDAG
from brainet_pl.structure.data import as_array, column_names
from brainet_pl.structure.pdag import dag_extension

if TYPE_CHECKING:
    import networkx

Floats = NDArray[np.float64]
MOST_CELLS = 1_000_000  # of one variable's table in a BIF file


class Edge(NamedTuple):
    """One line of a table of edges.

    Attributes:
        first, second: the two variables, by name, or by number where they have none.
        mark: "→" from the first to the second, "—" where the direction is open, nothing where the graph has no edge.
        joined: the probability that there is an edge; 1 for a graph without probabilities.
        forward, backward: the probabilities of first → second and of second → first.
    """

    first: str
    second: str
    mark: str
    joined: float = 1.0
    forward: float = float("nan")
    backward: float = float("nan")


def names_of(graph: PDAG) -> list[str]:
    """The names of the variables, or their numbers as text."""
    return [str(i) for i in range(len(graph.adjacency))] if graph.names is None else list(graph.names)


def edge_table(graph: PDAG, probabilities: Floats | None = None, least: float = 0.05) -> list[Edge]:
    """The edges of a graph, or, with the `probabilities` (d, d) of arrows, all that are at least `least` probable.

    The likeliest come first. `pandas.DataFrame(edge_table(graph))` makes a data frame of it.

    Example:
        >>> graph = PDAG(np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0]], dtype=bool), ("rain", "wet", "cloud"))
        >>> [(edge.first, edge.mark, edge.second) for edge in edge_table(graph)]
        [('rain', '→', 'wet'), ('rain', '—', 'cloud')]
        >>> p = np.array([[0, 0.9, 0.3], [0, 0, 0], [0.2, 0, 0]])
        >>> [(edge.second, edge.mark, round(edge.joined, 1)) for edge in edge_table(graph, p)]
        [('wet', '→', 0.9), ('cloud', '—', 0.5)]
    """
    names, table = names_of(graph), []
    shown = graph.skeleton if probabilities is None else (probabilities + probabilities.T >= least)
    for i, j in np.argwhere(np.triu(shown, 1)).tolist():
        turned = graph.directed[j, i]
        if not graph.skeleton[i, j] and probabilities is not None:
            turned = probabilities[j, i] > probabilities[i, j]
        a, b = (j, i) if turned else (i, j)
        mark = "→" if graph.directed[a, b] else "—" if graph.skeleton[a, b] else ""
        if probabilities is None:
            table.append(Edge(names[a], names[b], mark))
        else:
            forward, backward = float(probabilities[a, b]), float(probabilities[b, a])
            table.append(Edge(names[a], names[b], mark, min(1.0, forward + backward), forward, backward))
    return sorted(table, key=lambda edge: -edge.joined) if probabilities is not None else table


def to_networkx(graph: PDAG, probabilities: Floats | None = None) -> networkx.DiGraph:
    """A `networkx.DiGraph` by name; an edge without direction is there both ways, with `directed=False`."""
    import networkx

    names, result = names_of(graph), networkx.DiGraph()
    result.add_nodes_from(names)
    for i, j in np.argwhere(graph.adjacency).tolist():
        facts: dict[str, Any] = {"directed": bool(graph.directed[i, j])}
        if probabilities is not None:
            facts["probability"] = float(probabilities[i, j])
        result.add_edge(names[i], names[j], **facts)
    return result


def write_graphml(graph: PDAG, path: str | os.PathLike[str], probabilities: Floats | None = None) -> None:
    """A GraphML file, which Gephi, yEd, Cytoscape and igraph read; edges as in `to_networkx`."""
    import networkx

    with atomic_write(path) as temporary:
        networkx.write_graphml(to_networkx(graph, probabilities), temporary)


def to_pgmpy(graph: PDAG, features: Any = None, ess: float = 1.0) -> Any:
    """The graph as `pgmpy.base.PDAG`; with the categories `features` (N, d) a network with fitted tables.

    Tables are BDeu posterior means with the weight `ess`, of a DAG of the graph's class.
    """
    names = names_of(graph)
    if features is None:
        from pgmpy.base import PDAG as Graph

        arrows, edges = _named_pairs(names, graph.directed), _named_pairs(names, np.triu(graph.undirected))
        result = Graph(directed_ebunch=arrows, undirected_ebunch=edges)
        result.add_nodes_from(names)
        return result
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    dag = dag_extension(graph.adjacency)
    network = DiscreteBayesianNetwork(_named_pairs(names, dag))
    network.add_nodes_from(names)
    levels, codes = _categories(graph, features)
    for x, name in enumerate(names):
        parents = np.flatnonzero(dag[:, x]).tolist()
        table = _table(codes, levels, x, parents, checks.above_zero("ess", ess))
        network.add_cpds(
            TabularCPD(
                name,
                len(levels[x]),
                table.reshape(-1, len(levels[x])).T,
                evidence=[names[p] for p in parents] or None,
                evidence_card=[len(levels[p]) for p in parents] or None,
                state_names={names[v]: levels[v] for v in (x, *parents)},
            )
        )
    return network


def _named_pairs(names: list[str], pairs: NDArray[np.bool_]) -> list[tuple[str, str]]:
    return [(names[i], names[j]) for i, j in np.argwhere(pairs).tolist()]


def write_bif(graph: PDAG, features: Any, path: str | os.PathLike[str], ess: float = 1.0) -> None:
    """A BIF file of a Bayesian network over the categories `features` (N, d): a DAG of the graph's class, and tables.

    Tables are BDeu posterior means with the weight `ess`. pgmpy, pyAgrum, bnlearn and GeNIe read such files.
    """
    names = [_word(name) for name in names_of(graph)]
    if len(set(names)) < len(names):
        raise ValueError("expected names that differ in letters and digits for a BIF file, got equal ones: rename them")
    dag = dag_extension(graph.adjacency)
    levels, codes = _categories(graph, features)
    ess = checks.above_zero("ess", ess)
    lines = ["network learned {", "}"]
    words = [[_word(level) for level in of_x] for of_x in levels]
    for name, of_x in zip(names, words, strict=True):
        lines += [f"variable {name} {{", f"  type discrete [ {len(of_x)} ] {{ {', '.join(of_x)} }};", "}"]
    for x, name in enumerate(names):
        parents = np.flatnonzero(dag[:, x]).tolist()
        given = f" | {', '.join(names[p] for p in parents)}" if parents else ""
        lines.append(f"probability ( {name}{given} ) {{")
        lines += _bif_rows(_table(codes, levels, x, parents, ess), [words[p] for p in parents])
        lines.append("}")
    with atomic_write(path) as temporary:
        Path(temporary).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _bif_rows(table: Floats, levels: list[list[str]]) -> list[str]:
    """The probabilities (r_parent, …, r_x) of a variable, a line for each configuration of its parents' levels."""
    rows = []
    for configuration, probabilities in zip(product(*levels), table.reshape(-1, table.shape[-1]), strict=True):
        numbers = ", ".join(f"{p:.10g}" for p in probabilities)
        rows.append(f"  ({', '.join(configuration)}) {numbers};" if levels else f"  table {numbers};")
    return rows


def _word(text: str) -> str:
    """A name as BIF readers take it: letters, digits and underscores, not beginning with a digit."""
    word = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in str(text))
    return word if word[:1].isalpha() else f"v{word}"


def _categories(graph: PDAG, features: Any) -> tuple[list[list[str]], NDArray[np.intp]]:
    """The levels of each column as text, and the codes (N, d) of all rows."""
    d = len(graph.adjacency)
    names = column_names(features)
    columns = [features[name].to_numpy() for name in features.columns] if names else list(as_array(features).T)
    if len(columns) != d:
        raise ValueError(f"expected a column for each of {d} variables, got {len(columns)}: give the data of the graph")
    levels, codes = [], []
    for number, column in enumerate(columns):
        if column.dtype.kind == "f":
            raise ValueError(
                f"expected categories for tables of probabilities, got numbers with a fraction in column {number}: "
                "discretise them first"
            )
        seen, code = np.unique(column if column.dtype.kind in "iub" else column.astype(str), return_inverse=True)
        levels.append([str(value) for value in seen.tolist()])
        codes.append(code.ravel())
    return levels, np.column_stack(codes)


def _table(codes: NDArray[np.intp], levels: list[list[str]], x: int, parents: list[int], ess: float) -> Floats:
    """Posterior means of p(x | parents), (r_parent, …, r_x)."""
    shape = [len(levels[v]) for v in (*parents, x)]
    if np.prod(shape, dtype=float) > MOST_CELLS:
        raise ValueError(
            f"expected a table of at most {MOST_CELLS:,} cells, got {len(parents)} parents with "
            f"{np.prod(shape, dtype=float):.3g}: no rows would fill it"
        )
    counts = np.full(shape, ess / np.prod(shape))
    np.add.at(counts, tuple(codes[:, v] for v in (*parents, x)), 1.0)
    return np.asarray(counts / counts.sum(axis=-1, keepdims=True))
