"""What validation data tell about scores: p-values and the surprise."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl.scores.reference import FEW, MOST_KEPT, Reference, Verdict, fit_surprise, p_values

NUMBERS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40)


@given(NUMBERS, NUMBERS)
@settings(max_examples=50, deadline=None)
def test_p_values_count_samples_at_least_as_strange(values, scores):
    reference = torch.tensor(sorted(values))
    expected = [
        (1 + sum(v >= s for v in reference.tolist())) / (len(values) + 1) for s in torch.tensor(scores).tolist()
    ]
    torch.testing.assert_close(p_values(torch.tensor(scores), reference), torch.tensor(expected))


def test_nan_is_never_known():
    found = p_values(torch.tensor([math.nan, math.inf, -math.inf]), torch.arange(9.0))
    assert found.tolist() == pytest.approx([0.0, 0.1, 1.0])


@pytest.mark.parametrize(("n", "level"), [(50, 0.05), (500, 0.05), (500, 0.2), (2000, 0.01)])
def test_false_alarms_are_the_level_within_binomial_error(n, level):
    """Over many validation sets: P(p ≤ α) = ⌊α·(n + 1)⌋/(n + 1), whatever the distribution of the score."""
    rng, alarms, trials, tests = np.random.default_rng(n), 0, 300, 20
    for _ in range(trials):
        both = torch.from_numpy(rng.standard_t(2, size=n + tests)).float()
        alarms += int((p_values(both[n:], both[:n].sort().values) <= level).sum())
    share = math.floor(level * (n + 1) + 1e-9) / (n + 1)
    # The tests of a trial share their validation set, which adds to the binomial error.
    error = math.sqrt(share * (1 - share) * (1 / (trials * tests) + 1 / (trials * n)))
    assert abs(alarms / (trials * tests) - share) < 4 * error


def test_the_surprise_is_minus_the_log_of_the_share_and_rises_for_ever():
    values = torch.from_numpy(np.random.default_rng(0).exponential(size=5000)).float()
    surprise = fit_surprise(values)
    x = torch.linspace(-1, 40, 500)
    found = surprise(x)
    assert (found.diff() >= 0).all()
    assert (found.diff()[x[1:] > 0.2] > 0).all()
    assert found[0] == 0
    torch.testing.assert_close(found[x > 0.5], x[x > 0.5], rtol=0.15, atol=0.05)  # of exponential samples: x itself
    assert surprise(torch.tensor([math.nan])).item() == surprise(torch.tensor([math.inf])).item() == 1e9


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_surprise_of_few_and_of_equal_values_is_finite_and_rises(values):
    surprise = fit_surprise(torch.tensor(values))
    low, high = min(values), max(values)
    found = surprise(torch.linspace(low - 1, high + 1, 100))
    assert found.isfinite().all()
    assert (found.diff() >= -1e-4).all()


def test_the_surprise_of_nothing_says_what_it_needs():
    with pytest.raises(ValueError, match="at least two finite scores of validation data, got 1"):
        fit_surprise(torch.tensor([1.0, math.nan]))


def test_few_samples_are_said_once_and_many_are_sampled():
    reference = Reference()
    reference.keep({"a": torch.arange(3.0)})
    with pytest.warns(
        UserWarning, match=f"no finer than 0.25: expected at least {FEW} validation samples in the fit, got 3"
    ):
        reference.warn_of_few("a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference.warn_of_few("a")
    reference.keep({"a": torch.arange(2.0 * MOST_KEPT)})
    assert len(reference["a"]) == MOST_KEPT
    assert p_values(torch.tensor([1.0 * MOST_KEPT]), reference["a"]).item() == pytest.approx(0.5, abs=0.02)


def test_a_reference_travels_in_weights():
    reference, again = Reference(), Reference()
    reference.keep({"float": torch.tensor([math.nan, 1.0, 2.0] * 100), "b": torch.arange(300.0)})
    again.load_state_dict(reference.state_dict())
    assert again.names == reference.names == ["float", "b"]
    assert again["float"][-1] == math.inf
    assert Reference().load_state_dict({}).missing_keys == []


@pytest.mark.parametrize("level", [0, 1, -0.1, math.nan, "5%"])
def test_a_level_that_means_nothing_is_refused(level):
    with pytest.raises(ValueError, match="level of the verdict"):
        Verdict(level=level)


def test_the_score_of_a_verdict():
    assert Verdict().choose(["b"], ["a", "b"]) == "b"
    assert Verdict().choose(["c"], ["a", "b"]) == "a"
    assert Verdict("a").choose(["b"], ["a", "b"]) == "a"
    with pytest.raises(ValueError, match="one of a, b, got 'c'"):
        Verdict("c").choose([], ["a", "b"])
    with pytest.raises(ValueError, match="to be a name, got 3"):
        Verdict(3)
