"""Densities of columns that are no bell curves: no more known rows are called unknown, and other columns count."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brainet_pl.scores import Generative, ScoreContext
from brainet_pl.scores.density import typical_scale
from brainet_pl.scores.fitting import fit_score
from brainet_pl.scores.reference import p_values

ROWS, SHIFTED = 800, 3


def cauchy(n, columns, generator):
    return torch.distributions.Cauchy(0, 1).icdf(torch.rand(n, columns, generator=generator).clamp(1e-5, 1 - 1e-5))


ODD = {
    "nothing": lambda x, g: x[:, :0],
    "a duplicate": lambda x, g: x[:, :1],
    "nearly a duplicate": lambda x, g: x[:, :1] + 1e-6 * torch.randn(len(x), 1, generator=g),
    "a constant": lambda x, g: torch.full((len(x), 1), 3.0),
    "a rare value": lambda x, g: (torch.rand(len(x), 1, generator=g) < 0.01).float(),
    "a rare large value": lambda x, g: 1000 * (torch.rand(len(x), 1, generator=g) < 0.01).float(),
    "two values": lambda x, g: (torch.rand(len(x), 1, generator=g) < 0.5).float(),
    "heavy tails": lambda x, g: cauchy(len(x), 1, g),
    "many heavy tails": lambda x, g: cauchy(len(x), 4, g),
    "a skewed one": lambda x, g: (2 * torch.randn(len(x), 1, generator=g)).exp(),
    "large units": lambda x, g: 1e6 * torch.randn(len(x), 1, generator=g),
}


def rows_of(n, generator):
    fixed = torch.Generator().manual_seed(5)
    mix, means = torch.eye(8) + 0.4 * torch.randn(8, 8, generator=fixed), torch.randn(3, 8, generator=fixed)
    labels = torch.randint(0, 3, (n,), generator=generator)
    return torch.randn(n, 8, generator=generator) @ mix + means[labels], labels


def called_unknown(make_odd, seed):
    """The shares of known rows, and of rows of which an ordinary column is shifted, that a density calls unknown."""
    g = torch.Generator().manual_seed(seed)
    (train, labels), (held, _), (known, _) = (rows_of(ROWS, g) for _ in range(3))
    shifted = known.clone()
    shifted[:, SHIFTED] += 4 * train[:, SHIFTED].std()
    train, held, known, shifted = (torch.cat([x, make_odd(x, g)], dim=1) for x in (train, held, known, shifted))
    score = Generative(progress=False)
    score.set_context(ScoreContext(3, raw=True))
    fit_score(score, train, labels)
    reference, *found = (score.density.scores(x)["generative"] for x in (held, known, shifted))
    assert all(values.isfinite().all() for values in (reference, *found))
    return [float((p_values(values, reference.sort().values) <= 0.05).float().mean()) for values in found]


@pytest.mark.parametrize("odd", ODD)
def test_odd_columns_neither_raise_alarms_nor_hide_the_others(odd):
    known, shifted = called_unknown(ODD[odd], seed=0)
    assert known <= 0.05 + 3 * math.sqrt(2 * 0.05 * 0.95 / ROWS)  # of the known rows and of the reference
    assert shifted > 0.9


@settings(max_examples=15, deadline=None)
@example(kinds=["many heavy tails", "many heavy tails", "heavy tails"], scale=1.2e4, seed=43)  # most of all columns
@example(kinds=["many heavy tails", "many heavy tails", "large units"], scale=4.1e2, seed=42)
@given(
    kinds=st.lists(st.sampled_from(sorted(ODD)), min_size=1, max_size=3),
    scale=st.floats(-6, 6).map(lambda power: 10.0**power),
    seed=st.integers(0, 100),
)
def test_mixtures_of_odd_columns_in_any_units(kinds, scale, seed):
    known, shifted = called_unknown(lambda x, g: torch.cat([scale * ODD[kind](x, g) for kind in kinds], dim=1), seed)
    assert known <= 0.05 + 4 * math.sqrt(2 * 0.05 * 0.95 / ROWS)
    assert shifted > 0.8


def test_the_typical_scale_is_the_mean_but_for_few_large_columns():
    variances = torch.rand(50, dtype=torch.double)
    assert typical_scale(variances) == variances.mean()  # the same to the last bit
    assert typical_scale(torch.cat([variances, torch.tensor([1e12])])) < 100
    assert typical_scale(torch.zeros(3)) > 0
