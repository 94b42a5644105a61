"""Greedy steps over the parents of a leaf: against every single change there is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl.structure import steps
from brainet_pl.structure.steps import improve_parents


def is_acyclic(dag):
    power = np.eye(len(dag))
    for _ in range(len(dag)):
        power = np.minimum(power @ dag, 1)
    return not power.any()


def total(dag, score):
    return sum(score(x, tuple(np.flatnonzero(dag[:, x]).tolist())) for x in range(len(dag)))


def neighbours(dag, X, allowed):
    """Every DAG that differs in one arrow into X, added, removed or turned: one loop, no cleverness."""
    for j in X:
        for i in range(len(dag)):
            other = dag.copy()
            if dag[i, j]:
                other[i, j] = False
                yield other
                if i in X and allowed[j, i]:
                    turned = other.copy()
                    turned[j, i] = True
                    yield turned
            elif allowed[i, j] and not dag[j, i]:
                other[i, j] = True
                yield other


def random_score(seed):
    """Any number for a family, the same each time."""

    def score(x, parents):
        assert list(parents) == sorted(parents)
        return float(np.random.default_rng([seed, x, *parents, 99]).normal() - 0.3 * len(parents))

    return score


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_no_single_change_is_better_in_the_end(seed, d):
    rng = np.random.default_rng(seed)
    order = rng.permutation(d)
    start = np.zeros((d, d), dtype=bool)
    start[np.ix_(order, order)] = np.triu(rng.random((d, d)) < 0.4, 1)
    X = np.sort(rng.permutation(d)[: rng.integers(1, d + 1)])
    start[:, np.setdiff1d(np.arange(d), X)] = False  # no arrows into the others, as in a leaf
    candidates = (rng.random((d, d)) < 0.7) & ~np.eye(d, dtype=bool)
    candidates[np.ix_(X, np.setdiff1d(np.arange(d), X))] = False
    score = random_score(seed)
    found = improve_parents(start, X, candidates, score)
    assert is_acyclic(found)
    assert total(found, score) >= total(start, score) - 1e-9
    allowed = np.zeros((d, d), dtype=bool)
    allowed[:, X] = (candidates | start)[:, X]
    assert not (found & ~allowed).any()
    for other in neighbours(found, X.tolist(), allowed):
        assert not is_acyclic(other) or total(other, score) <= total(found, score) + 1e-6


def test_parents_are_capped_and_a_crowd_starts_anew(monkeypatch):
    monkeypatch.setattr(steps, "MOST_PARENTS", 2)
    start = np.zeros((6, 6), dtype=bool)
    start[:5, 5] = True
    weights = [0.1, 5.0, 0.3, 4.0, 0.2]
    found = improve_parents(start, np.array([5]), start.copy(), lambda x, parents: sum(weights[p] for p in parents))
    assert np.flatnonzero(found[:, 5]).tolist() == [1, 3]
    assert start[:5, 5].all()  # what was given stays as it was


def test_a_spent_budget_leaves_the_start():
    start = np.array([[0, 1], [0, 0]], dtype=bool)
    found = improve_parents(start, np.array([0, 1]), start.T | start, lambda x, parents: -len(parents), lambda: True)
    assert (found == start).all()


@pytest.mark.parametrize("turned", [False, True])
def test_an_arrow_is_turned_only_where_both_directions_are_allowed(turned):
    start = np.array([[0, 1], [0, 0]], dtype=bool)
    candidates = start | (start.T if turned else False)
    score = {(0, (1,)): 5.0, (1, (0,)): 1.0}
    found = improve_parents(start, np.array([0, 1]), candidates, lambda x, parents: score.get((x, parents), 0.0))
    assert found[1, 0] == turned
    assert found[0, 1] != turned
