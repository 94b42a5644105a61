"""The density of a tree of Bayesian networks: which inputs are unlike the training data, with a p-value for each.

python examples/unknown_inputs.py
"""

import numpy as np
import torch
from sklearn.datasets import load_digits

from brainet_pl import TreeDensity, learn_structure

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(np.flatnonzero(y < 8))
pixels, labels = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
train, held, test = order[:900], order[900:1200], order[1200:]

tree = learn_structure(pixels[train], test="gaussian", threshold=0.02, progress=False)
score = TreeDensity(tree, num_classes=8).fit(pixels[train], labels[train])
reference = score.scores(pixels[held])["generative"]


def known_p(inputs):
    """The share of held-out inputs that are at least as strange."""
    found = score.scores(inputs)["generative"]
    return (1 + (reference[None] >= found[:, None]).sum(1)) / (len(reference) + 1)


inverted = 16 - pixels[test]
print(f"known digits flagged at 5 %:    {(known_p(pixels[test]) <= 0.05).float().mean():.3f}")
print(f"eights and nines flagged:       {(known_p(pixels[y >= 8]) <= 0.05).float().mean():.3f}")
print(f"inverted digits flagged:        {(known_p(inverted) <= 0.05).float().mean():.3f}")
