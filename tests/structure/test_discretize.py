import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import norm, rankdata

from brainet_pl.structure.discretize import discretize, normal_scores


@given(
    hnp.arrays(
        np.float64, st.tuples(st.integers(1, 40), st.integers(1, 4)), elements=st.sampled_from([0, 0, 0, 1, 2.5, 3, 9])
    ),
    st.integers(2, 5),
)
def test_codes_are_monotone_dense_and_few(x, bins):
    codes, arities = discretize(x, bins)
    for j in range(x.shape[1]):
        seen = np.unique(codes[:, j])
        assert arities[j] == len(seen) == seen.max() + 1 <= bins
        order = np.argsort(x[:, j], kind="stable")
        assert (np.diff(codes[order, j].astype(int)) >= 0).all()
        for value in np.unique(x[:, j]):
            assert len(np.unique(codes[x[:, j] == value, j])) == 1
        assert len(seen) == min(bins, len(np.unique(x[:, j]))) or len(seen) >= 2


def test_continuous_columns_get_equal_bins():
    codes, arities = discretize(np.random.default_rng(0).normal(size=(1000, 1)), 4)
    assert arities[0] == 4
    assert np.bincount(codes[:, 0]).tolist() == [250] * 4


def test_zeros_of_a_relu_feature_are_a_level_and_the_rest_is_shared():
    x = np.maximum(np.random.default_rng(0).normal(size=(1000, 1)) - 0.5, 0)
    codes, _ = discretize(x, 3)
    counts = np.bincount(codes[:, 0])
    assert counts[0] == (x == 0).sum()
    assert abs(counts[1] - counts[2]) <= 1


def test_a_heavy_maximum_does_not_make_a_column_constant():
    x = np.r_[np.linspace(0, 0.9, 20), np.ones(80)][:, None]
    codes, arities = discretize(x, 2)
    assert arities[0] == 2
    assert (codes[:, 0] == (x[:, 0] == 1)).all()


def test_integers_keep_their_levels_and_gaps_are_closed():
    x = np.array([[3], [7], [7], [100], [-2]])
    codes, arities = discretize(x, 2)
    assert arities[0] == 4
    assert codes[:, 0].tolist() == [1, 2, 2, 3, 0]


def test_pixels_are_binned_although_they_are_integers():
    x = np.arange(256, dtype=np.uint8)[:, None]
    assert discretize(x, 2).arities[0] == 2


def test_constant_column():
    codes, arities = discretize(np.full((5, 1), 2.0), 3)
    assert arities[0] == 1
    assert not codes.any()


def test_normal_scores_match_scipy_ranks():
    rng = np.random.default_rng(1)
    x = np.round(rng.normal(size=(200, 3)), 1)
    expected = norm.ppf((rankdata(x, axis=0) - 0.5) / len(x))
    expected = (expected - expected.mean(0)) / expected.std(0)
    np.testing.assert_allclose(normal_scores(x), expected, atol=1e-5)
    assert not normal_scores(np.ones((4, 1))).any()


@pytest.mark.parametrize("bins", [-5, 0, 1, 257, 1000, 2.5])
def test_a_number_of_levels_that_codes_can_not_hold_is_refused(bins):
    with pytest.raises(ValueError, match=r"expected bins .*, got .*: it is the number of levels"):
        discretize(np.arange(3000.0)[:, None], bins)


def test_256_levels_fit():
    codes, arities = discretize(np.arange(3000.0)[:, None], 256)
    assert arities.tolist() == [256]
    assert len(np.unique(codes)) == 256
