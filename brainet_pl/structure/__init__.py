"""Learning the wiring of a head: from features to a scored tree of Bayesian-network structures."""

from brainet_pl.structure.data import PreparedData
from brainet_pl.structure.ggt import GGT, Branch, Leaf, Node, SubNetwork
from brainet_pl.structure.independence import DSeparation, IndependenceTest, find_test
from brainet_pl.structure.learn import learn_structure
from brainet_pl.structure.score import Score, find_score
from brainet_pl.structure.settings import StructureSettings
from brainet_pl.structure.stream import FeatureStream

__all__ = [
    "GGT",
    "Branch",
    "DSeparation",
    "FeatureStream",
    "IndependenceTest",
    "Leaf",
    "Node",
    "PreparedData",
    "Score",
    "StructureSettings",
    "SubNetwork",
    "find_score",
    "find_test",
    "learn_structure",
]
