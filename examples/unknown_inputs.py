"""Which inputs are unlike the training data, with a p-value for each: by a density alone, and by a whole classifier.

python examples/unknown_inputs.py
"""

import numpy as np
import torch
from sklearn.datasets import load_digits

from brainet_pl import BRAINetClassifier, TreeDensity, learn_structure

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(np.flatnonzero(y < 8))
train, held, test = order[:900], order[900:1200], order[1200:]

# The density of a tree of Bayesian networks, which knows nothing of the classes but their numbers.
pixels, labels = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
tree = learn_structure(pixels[train], test="gaussian", threshold=0.02, progress=False)
density = TreeDensity(tree, num_classes=8).fit(pixels[train], labels[train])
reference = density.scores(pixels[held])["generative"]


def density_p(rows):
    """The share of held-out inputs that are at least as strange."""
    found = density.scores(torch.as_tensor(rows, dtype=torch.float32))["generative"]
    return ((1 + (reference[None] >= found[:, None]).sum(1)) / (len(reference) + 1)).numpy()


# The classifier joins such a density with how sure its prediction is.
model = BRAINetClassifier(random_state=0).fit(x[order[:1200]], y[order[:1200]])

noise = np.random.default_rng(0).normal(scale=0.05 * 16, size=x[test].shape)
print(f"{'called unknown at 5 %':<28}{'density':>10}{'classifier':>12}")
for name, rows in {
    "known digits": x[test],
    "the same with a little noise": x[test] + noise,
    "eights and nines": x[y >= 8],
    "inverted digits": 16 - x[test],
}.items():
    shares = [(p(rows) <= 0.05).mean() for p in (density_p, model.known_p)]
    print(f"{name:<28}{shares[0]:>10.3f}{shares[1]:>12.3f}")
