import numpy as np

from brainet_pl.structure.statistics import bootstrap_weights, correlation


def test_weighted_correlation_equals_that_of_copied_rows():
    z = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    w = bootstrap_weights(200, 3, (0, 1))
    np.testing.assert_allclose(correlation(z, w), np.corrcoef(np.repeat(z, w, axis=0).T), atol=1e-5)


def test_bootstrap_draws_as_many_rows_as_there_are_and_paths_differ():
    a, b = bootstrap_weights(1000, 0, (0,)), bootstrap_weights(1000, 0, (1,))
    assert a.sum() == b.sum() == 1000
    assert (a != b).any()
    assert (bootstrap_weights(1000, 0, (0,)) == a).all()
    assert (bootstrap_weights(1000, 0, (0, 0)) != a).any()
