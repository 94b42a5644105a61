"""Learning the wiring: from features to a scored tree of Bayesian-network structures."""

from brainet_pl.structure.ggt import GGT, Branch, Leaf, Node, SubNetwork
from brainet_pl.structure.independence import DSeparation
from brainet_pl.structure.learn import learn_structure, rai
from brainet_pl.structure.pdag import PDAG, cpdag

__all__ = ["GGT", "PDAG", "Branch", "DSeparation", "Leaf", "Node", "SubNetwork", "cpdag", "learn_structure", "rai"]
