"""A graph of columns for its own sake: `rai` learns one, `structure_posterior` says how sure each of its edges is.

Knowledge that a graph must respect, searches over scores and orders, drawings and files for other tools live here too;
what a head is wired by lives in `brainet_pl.structure`, which does not import this room.
"""

from brainet_pl.graphs.dag_posterior import StructurePosterior, structure_posterior
from brainet_pl.graphs.dependences import Dependence, dependence_table, knowledge_of_columns
from brainet_pl.graphs.draw_graph import draw_graph
from brainet_pl.graphs.export import Edge, edge_table, to_networkx, to_pgmpy, write_bif, write_graphml
from brainet_pl.graphs.knowledge import Knowledge
from brainet_pl.graphs.pdag import PDAG, cpdag
from brainet_pl.graphs.plain_rai import rai

__all__ = [
    "PDAG",
    "Dependence",
    "Edge",
    "Knowledge",
    "StructurePosterior",
    "cpdag",
    "dependence_table",
    "draw_graph",
    "edge_table",
    "knowledge_of_columns",
    "rai",
    "structure_posterior",
    "to_networkx",
    "to_pgmpy",
    "write_bif",
    "write_graphml",
]
