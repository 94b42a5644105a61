"""The search over orders: growing and shrinking, and moves, against what one would write first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl.graphs import cpdag, orders, rai
from brainet_pl.graphs.orders import BestParents, improve_order
from brainet_pl.structure import PreparedData, find_score
from brainet_pl.structure.pdag import topological_order
from brainet_pl.structure.score import bge_growth, gaussian_bic_growth, one_by_one


def random_score(seed):
    """Any number for a family, the same each time."""

    def score(x, parents):
        assert list(parents) == sorted(parents)
        assert x not in parents
        return float(np.random.default_rng([seed, x, *parents, 99]).normal())

    return score


def grow_and_shrink(x, before, score, cost, required=()):
    """The best parents of x among `before`: add the best while it gains, then take away the worst while it gains."""

    def value(parents):
        return score(x, tuple(sorted(parents))) - cost * len(parents)

    parents = set(required)
    while more := [(value(parents | {c}), c) for c in sorted(before - parents)]:
        best = max(more, key=lambda one: one[0])
        if best[0] <= value(parents):
            break
        parents.add(best[1])
    while fewer := [(value(parents - {p}), p) for p in sorted(parents - set(required))]:
        best = max(fewer, key=lambda one: one[0])
        if best[0] <= value(parents):
            break
        parents.remove(best[1])
    return value(parents), tuple(sorted(parents))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_best_parents_are_those_of_plain_loops(seed, d):
    rng = np.random.default_rng(seed)
    score = random_score(seed)
    allowed = (rng.random((d, d)) < 0.8) & ~np.eye(d, dtype=bool)
    required = allowed & (rng.random((d, d)) < 0.1)
    best = BestParents(score, one_by_one(score), allowed, 0.2, required)
    for _ in range(10):
        x = int(rng.integers(d))
        before = set(rng.permutation(d)[: rng.integers(d)].tolist()) - {x}
        must = set(np.flatnonzero(required[:, x]).tolist())
        found = best.of(x, sum(1 << v for v in before))
        if not must <= before:
            assert found == (-np.inf, ())
            continue
        expected = grow_and_shrink(x, before & set(np.flatnonzero(allowed[:, x]).tolist()), score, 0.2, must)
        assert found[0] == pytest.approx(expected[0])
        assert found[1] == expected[1]


def total(order, score, cost):
    return sum(grow_and_shrink(v, set(order[:i]), score, cost)[0] for i, v in enumerate(order))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_no_variable_gains_by_moving_elsewhere(seed, d):
    score = random_score(seed)
    best = BestParents(score, one_by_one(score), ~np.eye(d, dtype=bool), 0.2)
    start = np.random.default_rng(seed).permutation(d).tolist()
    order = improve_order(start, best)
    dag, reached = best.dag_of(order)
    assert reached == pytest.approx(total(order, score, 0.2))
    assert reached >= total(start, score, 0.2) - 1e-9
    assert not any(dag[w, v] for i, v in enumerate(order) for w in order[i:])
    for v in order:
        others = [w for w in order if w != v]
        for i in range(d):
            assert total([*others[:i], v, *others[i:]], score, 0.2) <= reached + 1e-6


def test_moves_end_when_the_work_is_done(monkeypatch):
    score = random_score(0)
    best = BestParents(score, one_by_one(score), ~np.eye(6, dtype=bool), 0.0)
    monkeypatch.setattr(orders, "MOST_WORK", 0)
    first = improve_order(range(6), best)
    assert sum(a != b for a, b in zip(first, range(6), strict=True)) <= 6
    assert improve_order(first, best) == first  # the work counts on
    assert improve_order(range(6), best, lambda: True) == list(range(6))
    assert best.with_more(~np.eye(6, dtype=bool)).work == best.work


def test_parents_are_capped():
    best = BestParents(
        lambda x, parents: float(sum(parents)),
        one_by_one(lambda x, parents: float(sum(parents))),
        ~np.eye(5, dtype=bool),
        0.0,
        most_parents=2,
    )
    assert best.of(0, 0b11110) == (7.0, (3, 4))


def test_a_topological_order_has_parents_first(random_dag):
    for seed in range(20):
        dag = random_dag(seed, 8, 0.3)
        order = topological_order(dag)
        assert sorted(order) == list(range(8))
        assert not any(dag[w, v] for i, v in enumerate(order) for w in order[i:])


@pytest.mark.parametrize(
    ("name", "kind", "discrete"),
    [("bge", "gaussian", False), ("bic", "gaussian", False), ("bdeu", "discrete", True), ("bic", "discrete", True)],
)
def test_growth_is_the_score_of_each_larger_family(name, kind, discrete):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 7))
    x[:, 3] += x[:, 0] - x[:, 1]
    x[:, 5] += x[:, 3]
    if discrete:
        x = np.digitize(x, [-0.5, 0.5, 1.5]) % np.array([2, 3, 4, 3, 2, 4, 3])
    data = PreparedData.prepare(x, 3)
    scoring = find_score(name, kind)
    local, growth = scoring.on(data, 2.0), scoring.growth_on(data, 2.0)
    for parents in ((), (1,), (0, 4), (0, 1, 4, 6)):
        candidates = np.array([v for v in range(7) if v != 3 and v not in parents])
        assert growth(3, parents, candidates) == pytest.approx(one_by_one(local)(3, parents, candidates), rel=1e-9)


def test_growth_survives_parents_that_determine_each_other():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 200))
    correlation = np.corrcoef(np.stack([a, a, b, a + b, rng.normal(size=200)]))
    for growth in (gaussian_bic_growth(correlation, 200), bge_growth(correlation, 200, 1.0)):
        assert np.isfinite(growth(4, (0, 1), np.array([2, 3]))).all()


def dense_gaussian(d, degree, n, seed):
    rng = np.random.default_rng([seed, d])
    dag = np.triu(rng.random((d, d)) < degree / (d - 1), 1)
    weights = dag * rng.uniform(0.25, 1.0, (d, d)) * rng.choice([-1.0, 1.0], (d, d))
    x = np.linalg.solve(np.eye(d) - weights.T, rng.normal(size=(d, n))).T
    order = rng.permutation(d)
    return dag[np.ix_(order, order)], x[:, order]


def test_dense_gaussian_graphs_are_found(monkeypatch):
    wrong, by_steps = 0, 0
    for seed in range(3):
        dag, x = dense_gaussian(20, 5, 2000, seed)
        wrong += rai(x).shd(cpdag(dag))
        with monkeypatch.context() as only_steps:
            only_steps.setattr("brainet_pl.graphs.climb.improve_order", lambda order, *_: list(order))
            by_steps += rai(x).shd(cpdag(dag))
    assert wrong <= 6
    assert wrong < by_steps


def test_the_order_of_columns_does_not_matter():
    _, x = dense_gaussian(12, 4, 1000, 1)
    order = np.random.default_rng(1).permutation(12)
    assert rai(x[:, order]) == rai(x).permute(order)
