"""Difficult tables, the same rule for all who learn structures: a clear error, or what docs/structure.md says."""

import numpy as np
import pandas as pd
import pytest

from brainet_pl.graphs import Knowledge, rai, structure_posterior
from brainet_pl.structure import FeatureStream, learn_structure


def tree(x, **settings):
    """The edges of the best network of a tree."""
    ggt = learn_structure(x, progress=False, **settings)
    return ggt.dag(ggt.map())


def posterior(x, **settings):
    """The arrows that have any probability at all."""
    return structure_posterior(x, draws=40, chains=2, **settings).edge_probabilities > 0


def graph(x, **settings):
    """The edges of one graph."""
    return rai(x, **settings).adjacency


LEARNERS = [graph, posterior, tree]
every_learner = pytest.mark.parametrize("learn", LEARNERS)


def numbers(n=300):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 4))
    x[:, 2] += x[:, 0]
    x[:, 3] += x[:, 2]
    return x


def categories(n=300):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (n, 4))
    x[:, 2] = (x[:, 0] + (rng.random(n) < 0.2)) % 3
    return x


tables = pytest.mark.parametrize("x", [numbers(), categories()], ids=["numbers", "categories"])


def joined(edges):
    return edges | edges.T


@every_learner
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.where(np.arange(1200).reshape(300, 4) == 7, np.nan, numbers()), "1 NaN or infinite .* row 1, column 3: "),
        (pd.DataFrame({"age": [1.0, np.nan, 3.0], "size": 0.5}), "row 1, column 'age': impute or drop"),
        (pd.DataFrame({"a": ["x", None, "y"], "b": [1, 2, 3]}), "1 missing values in 'a': impute or drop"),
        (np.array([["a", "b"], ["c", "d"]]), "got dtype <U1: encode .*, or give a data frame"),
        (numbers().astype(object), "got dtype object: encode"),
        ([[1, 2], [3]], "rows of equal length, got some that differ"),
        ("table.csv", "data frame or FeatureStream, got 'table.csv': read it first"),
        (None, "data frame or FeatureStream, got None"),
        (numbers()[:1], "at least 2 rows, got 1"),
        (numbers()[:0], r"got \(0, 4\)"),
        (numbers()[:, :0], r"got \(300, 0\)"),
        (numbers()[:, 0], r"got \(300,\)"),
        (pd.DataFrame(numbers(), columns=list("abca")), "got 'a' twice: rename"),
    ],
)
def test_what_no_structure_can_be_learned_from_is_refused(learn, x, message):
    with pytest.raises(ValueError, match=message):
        learn(x)


@every_learner
@pytest.mark.parametrize(
    ("known", "message"),
    [
        (Knowledge(required=[(0, 1)], forbidden=[(0, 1)]), "got 0 → 1 required and forbidden: drop one"),
        (Knowledge(required=[(0, 1), (1, 2), (2, 0)]), "a cycle of required arrows and tiers among 0, 1, 2"),
        (Knowledge(required=[(1, 0)], tiers=[[0], [1]]), "got 1 → 0 required and against its tiers"),
        (Knowledge(required=[(0, 9)]), "9"),
    ],
)
def test_contradictory_knowledge_is_refused(learn, known, message):
    with pytest.raises(ValueError, match=message):
        learn(numbers(), knowledge=known)


@every_learner
@tables
def test_a_constant_column_is_joined_to_nothing_unless_that_is_required(learn, x):
    x = x.copy()
    x[:, 1] = 1
    found = joined(learn(x))
    assert not found[1].any()
    assert found[0, 2]
    assert joined(learn(x, knowledge=Knowledge(required=[(1, 3)])))[1].tolist() == [False, False, False, True]


def test_a_constant_column_of_a_stream_is_joined_to_nothing():
    x = numbers()
    x[:, 1] = 1
    stream = FeatureStream(lambda: np.array_split(x, 3))
    assert not joined(posterior(stream, test="fisher_z"))[1].any()


@every_learner
def test_nothing_is_found_where_nothing_varies(learn):
    assert not learn(np.ones((50, 3))).any()


@every_learner
@tables
def test_of_two_equal_columns_one_speaks_for_both(learn, x):
    x = x.copy()
    x[:, 1] = 2 - x[:, 0]  # other units, renamed levels: the same
    found = joined(learn(x))
    assert found[0, 1]
    assert found[0, 2] != found[1, 2]
    with pytest.raises(ValueError, match="says the same as"):
        learn(x, knowledge=Knowledge(required=[(0, 2), (1, 3)]))


@every_learner
@tables
def test_more_columns_than_rows_are_warned_of(learn, x):
    with pytest.warns(UserWarning, match="expected more rows than columns, got 3 rows of 4"):
        learn(x[:3])


@every_learner
@tables
def test_one_column_has_no_edge(learn, x):
    assert learn(x[:, :1]).tolist() == [[False]]
