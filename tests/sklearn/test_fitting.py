"""Columns that hardly vary: their scale, and what a little noise on them does to a density."""

import pytest
import torch

from brainet_pl._utils.rng import isolated_rng
from brainet_pl.network import Tree
from brainet_pl.scores.density import TreeDensity
from brainet_pl.sklearn.encoding import DIRECTIONS, SCREENED, Screen, Standardize, screen_folds, screened
from brainet_pl.sklearn.fitting import Members
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


@pytest.mark.parametrize("count", [2, 5])
def test_members_that_average_all_sub_networks_do_so_in_an_export_too(count):
    """Five passes of three members are two of each, but a tree of four sub-networks is averaged whole."""
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    ggt = learn_structure(x @ torch.triu(torch.ones(6, 6)), progress=False)
    assert ggt.num_subnetworks == 4
    torch.manual_seed(0)
    members = Members([Tree().build(6, 2, ggt).eval() for _ in range(3)], 3)
    with torch.no_grad(), members.fixed_draws(count, 0):
        held = members.passes(x, count)
    with torch.no_grad(), isolated_rng(0):
        free = members.passes(x, count)
    assert held.values.shape[0] == 3 * (1 if count == 2 else 4)
    torch.testing.assert_close(held.values, free.values)
    torch.testing.assert_close(held.weights, free.weights)


def wide(n=300, d=400):
    """Rows of which two columns and the square of a third make the target (n, 1)."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=rng)
    return x, x[:, 7:8] - x[:, 70:71] + x[:, 300:301].square()


def test_columns_that_say_something_are_found():
    x, y = wide()
    assert {7, 70, 300} <= set(screened(x, y, SCREENED).tolist())


def test_rows_that_vouch_have_no_say_in_what_their_fold_reads():
    x, y = wide()
    folds = [torch.arange(100, 300), torch.arange(200)]
    kept, masks = screen_folds(x, y, folds)
    assert masks.sum(dim=1).tolist() == [SCREENED, SCREENED]
    other = y.clone()
    other[:100] = 100 * x[:100, 5:6]  # the rows that the first fold holds back
    kept_again, masks_again = screen_folds(x, other, folds)
    assert torch.equal(kept[masks[0] > 0], kept_again[masks_again[0] > 0])
    assert 5 in kept_again[masks_again[1] > 0]
    assert 5 not in kept[masks[1] > 0]


def test_directions_are_those_of_a_decomposition_of_all_columns():
    x, _ = wide()
    x[:, 100:200] += 3 * torch.randn(300, 1, generator=torch.Generator().manual_seed(1))
    found = Screen.learn(x, torch.tensor([3, 5]))(x)
    assert found.shape == (300, 2 + DIRECTIONS)
    assert torch.equal(found[:, :2], x[:, [3, 5]])
    z = (x - x.mean(0)) / x.std(0, correction=0)
    first = torch.linalg.svd(z, full_matrices=False)[0][:, 0]
    assert abs(torch.corrcoef(torch.stack([found[:, -1], first]))[0, 1]) > 0.999
