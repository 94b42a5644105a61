"""Learning the wiring: from features to a scored tree of Bayesian-network structures."""

from brainet_pl.structure.dag_posterior import StructurePosterior, structure_posterior
from brainet_pl.structure.data import PreparedData
from brainet_pl.structure.draw_graph import draw_graph
from brainet_pl.structure.export import Edge, edge_table, to_networkx, to_pgmpy, write_bif, write_graphml
from brainet_pl.structure.ggt import GGT, Branch, Leaf, Node, SubNetwork
from brainet_pl.structure.independence import DSeparation, IndependenceTest, find_test
from brainet_pl.structure.knowledge import Knowledge
from brainet_pl.structure.learn import learn_structure
from brainet_pl.structure.pdag import PDAG, cpdag
from brainet_pl.structure.plain_rai import rai
from brainet_pl.structure.score import Score, find_score
from brainet_pl.structure.stream import FeatureStream

__all__ = [
    "GGT",
    "PDAG",
    "Branch",
    "DSeparation",
    "Edge",
    "FeatureStream",
    "IndependenceTest",
    "Knowledge",
    "Leaf",
    "Node",
    "PreparedData",
    "Score",
    "StructurePosterior",
    "SubNetwork",
    "cpdag",
    "draw_graph",
    "edge_table",
    "find_score",
    "find_test",
    "learn_structure",
    "rai",
    "structure_posterior",
    "to_networkx",
    "to_pgmpy",
    "write_bif",
    "write_graphml",
]
