import numpy as np
import pytest

from brainet_pl.structure.canonical import canonical_order


def table(kind, rng):
    if kind == "continuous":
        return rng.normal(size=(50, 6))
    if kind == "binary":  # equal value counts in every column: only refinement tells the columns apart
        return np.stack([rng.permutation(np.repeat([0, 1], 20)) for _ in range(6)], axis=1)
    return np.repeat(rng.integers(0, 3, size=(10, 6)), 4, axis=0)  # identical rows


@pytest.mark.parametrize("kind", ["continuous", "binary", "repeated"])
def test_sorted_table_does_not_depend_on_the_storage_order(kind):
    rng = np.random.default_rng(0)
    x = table(kind, rng)
    a = canonical_order(x)
    for _ in range(5):
        y = x[rng.permutation(len(x))][:, rng.permutation(x.shape[1])]
        b = canonical_order(y)
        assert a.digest == b.digest
        np.testing.assert_array_equal(x[a.rows][:, a.columns], y[b.rows][:, b.columns])


def test_digest_sees_a_changed_value():
    x = np.random.default_rng(0).normal(size=(20, 3))
    y = x.copy()
    y[3, 1] = np.nextafter(y[3, 1], 2)
    assert canonical_order(x).digest != canonical_order(y).digest


def test_minus_zero_is_zero():
    x = np.array([[0.0, 1.0], [2.0, 3.0]])
    y = np.array([[-0.0, 1.0], [2.0, 3.0]])
    assert canonical_order(x).digest == canonical_order(y).digest


def test_first_rows_are_a_fair_sample():
    x = np.arange(4000.0)[:, None]
    first = x[canonical_order(x).rows[:1000], 0]
    assert abs(first.mean() - 2000) < 150  # 4 standard errors
