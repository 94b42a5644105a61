"""Columns that hardly vary: their scale, and what a little noise on them does to a density."""

import torch

from brainet_pl.scores.density import TreeDensity
from brainet_pl.sklearn.fitting import Standardize
from brainet_pl.structure import learn_structure


def rows(n=400):
    """A normal column, one that is 1 in every hundredth row, and a constant."""
    rng = torch.Generator().manual_seed(0)
    rare = (torch.arange(n) % 100 == 0).float()
    return torch.stack([torch.randn(n, generator=rng), rare, torch.full((n,), 3.0)], dim=1)


def test_a_rare_value_is_one_deviation_away():
    scaling = Standardize(3).fit(rows())
    torch.testing.assert_close(scaling.scale[1:], torch.ones(2))
    assert abs(scaling.scale[0] - 1) < 0.1


def test_a_little_noise_on_columns_that_hardly_vary_is_no_event():
    x = rows()
    tree = learn_structure(x, test="gaussian", threshold=0.05, progress=False)
    density = TreeDensity(tree, 1, normalize=False).fit(x, torch.zeros(len(x), dtype=torch.long))
    noisy = x[:50] + 0.1 * torch.tensor([0.0, 1.0, 1.0])
    change = density.scores(noisy)["generative"] - density.scores(x[:50])["generative"]
    assert change.abs().max() < 2  # with the variance of the columns alone it is hundreds of nats
    far = x[:50] + torch.tensor([0.0, 0.0, 50.0])
    assert (density.scores(far)["generative"] - density.scores(x[:50])["generative"]).min() > 100
