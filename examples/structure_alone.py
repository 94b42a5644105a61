"""The structure learner without any network: one graph, many graphs, and how sure it is of an edge.

python examples/structure_alone.py
"""

import numpy as np

from brainet_pl.graphs import rai
from brainet_pl.structure import learn_structure

rng = np.random.default_rng(0)
rain, sprinkler = rng.normal(size=(2, 2000))
wet = rain + sprinkler + 0.5 * rng.normal(size=2000)
slippery = wet + rng.normal(size=2000)
x = np.stack([rain, sprinkler, wet, slippery], axis=1)
names = ["rain", "sprinkler", "wet", "slippery"]

graph = rai(x)
for i, j in zip(*np.nonzero(graph.directed), strict=True):
    print(f"{names[i]} → {names[j]}")

tree = learn_structure(x, s=4, test="fisher_z", progress=False).named(names)
print(tree.summary())
print(f"{tree.num_subnetworks} networks, as many as {tree.perplexity():.1f} in effect")
for (i, j), p in np.ndenumerate(tree.edge_probabilities()):
    if p > 0.05:
        print(f"{names[i]:9s} → {names[j]:9s} {p:.2f}")
