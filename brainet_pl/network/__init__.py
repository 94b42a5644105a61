"""Heads: modules from features to outputs, and the settings they are built from.

Settings, as Python, YAML and the command line name them: `Tree`, `TreeEnsemble`, `TreeDropout` on a learned structure;
`Linear`, `MLP`, `MCDropout`, `Ensemble`, `Bayes`, `Laplace` for comparison. `BRAINetHead` and the others are the
modules.
"""

from brainet_pl.network.base import Head, HeadSettings, Outputs
from brainet_pl.network.ensemble import Ensemble, EnsembleHead, TreeDropout, TreeEnsemble, stacked_tree
from brainet_pl.network.laplace import Laplace, LaplaceHead
from brainet_pl.network.mlp import MLP, Bayes, BayesHead, Linear, LinearHead, MCDropout, MLPHead
from brainet_pl.network.tree import Tree, smallest_budget
from brainet_pl.network.tree_head import BRAINetHead

__all__ = [
    "MLP",
    "BRAINetHead",
    "Bayes",
    "BayesHead",
    "Ensemble",
    "EnsembleHead",
    "Head",
    "HeadSettings",
    "Laplace",
    "LaplaceHead",
    "Linear",
    "LinearHead",
    "MCDropout",
    "MLPHead",
    "Outputs",
    "Tree",
    "TreeDropout",
    "TreeEnsemble",
    "smallest_budget",
    "stacked_tree",
]
