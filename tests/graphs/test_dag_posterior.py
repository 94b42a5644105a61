"""Draws of DAGs against an enumeration of all DAGs of few variables."""

from itertools import permutations, product

import numpy as np
import pytest

from brainet_pl.graphs import Knowledge, cpdag, rai, structure_posterior
from brainet_pl.graphs.sampler import Chains, Families, PairProbabilities
from brainet_pl.structure import GGT, PreparedData, find_score, learn_structure
from brainet_pl.structure.pdag import dag_extension
from brainet_pl.structure.score import one_by_one
from brainet_pl.structure.statistics import bootstrap_weights

OF_LEVELS, OF_NUMBERS = 1.0, 1.5  # what an edge costs, times log d


def is_acyclic(dag):
    power = np.eye(len(dag))
    for _ in range(len(dag)):
        power = np.minimum(power @ dag, 1)
    return not power.any()


def all_dags(d):
    """(n, d, d) every DAG: each pair apart or joined one way or the other."""
    pairs = [(i, j) for i in range(d) for j in range(i)]
    dags = []
    for states in product(range(3), repeat=len(pairs)):
        dag = np.zeros((d, d), dtype=bool)
        for (i, j), state in zip(pairs, states, strict=True):
            dag[i, j], dag[j, i] = state == 1, state == 2
        if is_acyclic(dag):
            dags.append(dag)
    return np.stack(dags)


def total(dag, score, cost):
    return sum(score(x, tuple(np.flatnonzero(dag[:, x]).tolist())) for x in range(len(dag))) - cost * dag.sum()


def exactly(dags, score, cost):
    """(d, d) the probability of each arrow under p(G) ∝ exp(score)."""
    scores = np.array([total(dag, score, cost) for dag in dags])
    weights = np.exp(scores - scores.max())
    return np.einsum("n,nij->ij", weights / weights.sum(), dags)


def random_score(seed, scale):
    def score(x, parents):
        return float(np.random.default_rng([seed, x, *parents, 7]).normal() * scale)

    return score


def test_there_are_as_many_dags_as_known():
    assert [len(all_dags(d)) for d in (2, 3, 4)] == [3, 25, 543]


def chains_of(score, d, cost, chains, seed, required=None):
    candidates = [[u for u in range(d) if u != x] for x in range(d)]
    tables = Families.tabulate(candidates, score, one_by_one(score), cost, d, required)
    start = np.zeros((d, d), dtype=bool) if required is None else required
    return Chains(tables, [start] * chains, np.random.default_rng(seed))


def shares(group, steps):
    edges = np.zeros((group.tables.d,) * 2)
    for step in range(steps):
        group.step()
        if step >= steps // 10:
            edges += group.tables.dags(group.families).mean(axis=0)
    return edges / (steps - steps // 10)


@pytest.mark.parametrize(("d", "scale", "cost"), [(3, 1.0, 0.0), (4, 1.0, 0.0), (4, 3.0, 0.5)])
def test_graphs_follow_the_posterior_over_all_dags(d, scale, cost):
    score = random_score(d, scale)
    exact = exactly(all_dags(d), score, cost)
    assert np.abs(shares(chains_of(score, d, cost, 64, 0), 300) - exact).max() < 0.03
    assert exact.max() - exact[~np.eye(d, dtype=bool)].min() > 0.2  # there is something to find


@pytest.mark.slow
def test_graphs_follow_the_posterior_of_five_variables():
    score = random_score(1, 1.5)
    exact = exactly(all_dags(5), score, 0.3)
    assert np.abs(shares(chains_of(score, 5, 0.3, 64, 0), 2000) - exact).max() < 0.02


def test_without_the_ratio_of_orders_graphs_of_many_orders_are_drawn_too_often(monkeypatch):
    """The test above can fail: an order sampler that takes every proposal prefers graphs with few edges."""
    score = random_score(4, 0.0)
    exact = exactly(all_dags(4), score, 0.0)
    right = shares(chains_of(score, 4, 0.0, 64, 0), 300)
    monkeypatch.setattr(Chains, "_log_order", lambda self, rank, families: np.zeros(len(rank)))
    biased = shares(chains_of(score, 4, 0.0, 64, 0), 300)
    assert np.abs(right - exact).max() < 0.03
    assert (exact - biased)[~np.eye(4, dtype=bool)].mean() > 0.05


def test_required_arrows_stay_and_the_rest_follows():
    score, required = random_score(2, 1.0), np.zeros((4, 4), dtype=bool)
    required[2, 0] = True
    dags = all_dags(4)
    exact = exactly(dags[dags[:, 2, 0]], score, 0.2)
    assert np.abs(shares(chains_of(score, 4, 0.2, 64, 0, required), 300) - exact).max() < 0.03


def test_tables_hold_every_family_and_its_sums():
    score = random_score(3, 1.0)
    tables = Families.tabulate([[1, 2, 3], [0, 2], [], [0, 1, 2]], score, one_by_one(score), 0.1, 2)
    assert tables.candidates.tolist() == [[1, 2, 3], [0, 2, 4], [4, 4, 4], [0, 1, 2]]
    for x, some in enumerate([[1, 2, 3], [0, 2], [], [0, 1, 2]]):
        for bits in range(8):
            chosen = [k for k in range(3) if bits >> k & 1]
            known = max(chosen, default=-1) < len(some) and len(chosen) <= 2
            parents = tuple(some[k] for k in chosen) if known else ()
            expected = score(x, parents) - 0.1 * len(parents) if known else -np.inf
            assert tables.stages[0][x, bits] == pytest.approx(expected)
            within = [tables.stages[0][x, other] for other in range(8) if not other & ~bits]
            assert tables.stages[-1][x, bits] == pytest.approx(np.logaddexp.reduce(within))
    dag = np.zeros((4, 4), dtype=bool)
    dag[0, 3] = dag[2, 3] = dag[2, 1] = True
    families = tables.families(dag)[None]
    assert (tables.dags(families)[0] == dag).all()
    assert tables.total(families)[0] == pytest.approx(total(dag, score, 0.1))


def test_orders_of_a_graph_come_with_their_probability():
    """Every order of 0 → 2 ← 1, 3: as often as its steps, each uniform among those that may come, say."""
    score = random_score(0, 0.0)
    group = chains_of(score, 4, 0.0, 20_000, 0)
    dag = np.zeros((4, 4), dtype=bool)
    dag[0, 2] = dag[1, 2] = True
    group.families = np.tile(group.tables.families(dag), (20_000, 1))
    ranks = group._order_of_graph()
    said = np.exp(group._log_order(ranks, group.families))
    seen = 0.0
    for order in permutations(range(4)):
        rank = np.argsort(order)
        here = (ranks == rank).all(axis=1)
        if order.index(2) < max(order.index(0), order.index(1)):
            assert not here.any()
            continue
        probability, placed = 1.0, []
        for v in order:
            may_come = [w for w in range(4) if w not in placed and set(np.flatnonzero(dag[:, w])) <= set(placed)]
            probability /= len(may_come)
            placed.append(v)
        assert here.mean() == pytest.approx(probability, abs=0.015)
        assert said[here] == pytest.approx(probability)
        seen += probability
    assert seen == pytest.approx(1.0)


def states_of(dag, i, j):
    """The DAGs that differ from `dag` at most in how i and j are joined."""
    for there, back in ((0, 0), (1, 0), (0, 1)):
        other = dag.copy()
        other[i, j], other[j, i] = there, back
        if is_acyclic(other):
            yield other


@pytest.mark.parametrize("seed", range(6))
def test_an_arrow_given_the_rest_of_a_graph_is_weighed_among_the_states_of_its_pair(seed):
    rng, d = np.random.default_rng(seed), 5
    dags = all_dags(4)
    dag = np.zeros((d, d), dtype=bool)
    dag[:4, :4] = dags[rng.integers(len(dags))]
    dag[rng.integers(4), 4] = True
    score, nothing = random_score(seed, 1.0), np.zeros((d, d), dtype=bool)
    every = ~np.eye(d, dtype=bool)
    found = PairProbabilities(score, one_by_one(score), 0.4, every, nothing, np.full(d, d))(dag)
    for i, j in permutations(range(d), 2):
        states = list(states_of(dag, i, j))
        weights = np.exp([total(state, score, 0.4) for state in states])
        expected = sum(w for w, state in zip(weights, states, strict=True) if state[i, j]) / weights.sum()
        assert found[i, j] == pytest.approx(expected)


def test_arrows_that_must_or_must_not_be_there_are_sure():
    score = random_score(0, 1.0)
    allowed, required, dag = ~np.eye(3, dtype=bool), np.zeros((3, 3), dtype=bool), np.zeros((3, 3), dtype=bool)
    allowed[0, 2] = allowed[2, 0] = False
    required[1, 0] = dag[1, 0] = dag[1, 2] = True
    p = PairProbabilities(score, one_by_one(score), 0.4, allowed, required, np.array([3, 3, 1]))(dag)
    assert (p[1, 0], p[0, 1], p[0, 2], p[2, 0]) == (1, 0, 0, 0)
    assert 0 < p[1, 2] < 1
    full = PairProbabilities(score, one_by_one(score), 0.4, ~np.eye(3, dtype=bool), required, np.array([3, 3, 1]))(dag)
    assert full[0, 2] == 0  # a second parent is more than the graphs that are drawn have


def four_columns(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4))
    x[:, 2] += 0.4 * x[:, 0] + 0.3 * x[:, 1]
    x[:, 3] += 0.3 * x[:, 2]
    return x


@pytest.mark.parametrize("discrete", [False, True])
def test_probabilities_are_those_of_an_enumeration(discrete):
    x = four_columns(120, 0)
    x = np.digitize(x, [-0.5, 0.5]) if discrete else x
    found = structure_posterior(x, draws=2000, chains=32, bootstraps=0)
    data = PreparedData.prepare(x, 3)
    local = find_score("bdeu" if discrete else "bge", "discrete" if discrete else "gaussian").on(data, 5.0)
    cost = (OF_LEVELS if discrete else OF_NUMBERS) * np.log(4)
    assert found.settings["edge_cost"] == pytest.approx(cost)
    exact = exactly(all_dags(4), local, cost)
    back = np.argsort(data.columns)
    assert np.abs(found.edge_probabilities - exact[np.ix_(back, back)]).max() < 0.04
    assert np.abs(found.draws.mean(axis=0) - found.edge_probabilities).max() < 0.05
    assert found.draws.shape == (2000, 4, 4)
    best = max(total(dag, local, cost) for dag in all_dags(4))
    assert found.map_score == pytest.approx(best)
    assert found.scores.max() <= best + 1e-9
    assert found.joined_probabilities.max() <= 1


def test_bootstrap_samples_are_averaged_with_all_rows():
    """Two thirds of a probability come from all rows, a third is the mean over samples, each enumerated by itself."""
    x = np.digitize(four_columns(120, 0), [-0.5, 0.5])
    found = structure_posterior(x, draws=3000, chains=16, bootstraps=3)
    data = PreparedData.prepare(x, 3)
    dags, scoring = all_dags(4), find_score("bdeu", "discrete")

    def enumerated(weights):
        return exactly(dags, scoring.on(data.resampled(weights), 5.0), OF_LEVELS * np.log(4))

    alone = enumerated(np.ones(data.n, dtype=np.int64))
    samples = np.mean([enumerated(bootstrap_weights(data.n, 0, (b,))) for b in range(3)], axis=0)
    back = np.ix_(np.argsort(data.columns), np.argsort(data.columns))
    assert np.abs(samples - alone).max() > 0.15
    assert np.abs(found.edge_probabilities - (2 * alone + samples)[back] / 3).max() < 0.04
    assert np.abs(found.draws.mean(axis=0) - found.edge_probabilities).max() < 0.05
    assert len(found.draws) == 3000
    assert found.scores == pytest.approx(
        [
            total(dag[np.ix_(data.columns, data.columns)], scoring.on(data, 5.0), OF_LEVELS * np.log(4))
            for dag in found.draws
        ]
    )


def test_the_best_graph_is_never_below_that_of_rai():
    rng = np.random.default_rng(3)
    dag = np.triu(rng.random((12, 12)) < 0.3, 1)
    x = np.linalg.solve(np.eye(12) - (dag * rng.uniform(0.3, 1, (12, 12))).T, rng.normal(size=(12, 400))).T
    found = structure_posterior(x, draws=80)
    data = PreparedData.prepare(x, 3)
    local = find_score("bge", "gaussian").on(data, 5.0)
    order = data.columns
    by_rai = dag_extension(rai(x).adjacency)
    assert found.map_score >= total(by_rai[np.ix_(order, order)], local, OF_NUMBERS * np.log(12)) - 1e-9
    assert found.map_score == pytest.approx(total(found.map[np.ix_(order, order)], local, OF_NUMBERS * np.log(12)))
    assert found.graph() == cpdag(found.map)


def test_columns_may_come_in_any_order_and_copies_are_children():
    x = four_columns(300, 1)
    x = np.column_stack([x, 2 * x[:, 0]])
    found = structure_posterior(x, draws=80)
    assert found.joined_probabilities[0, 4] == pytest.approx(1)
    assert sorted(found.joined_probabilities[[0, 4]].sum(axis=1).round(6))[0] == 1  # one of them has no other edge
    assert found.edge_probabilities[0, 4] == found.edge_probabilities[4, 0]  # nothing says which is the copy
    assert found.graph().undirected[0, 4]
    order = [3, 1, 4, 0, 2]
    again = structure_posterior(x[:, order], draws=80)
    assert (again.edge_probabilities == found.edge_probabilities[np.ix_(order, order)]).all()


def test_the_tree_stays_the_papers():
    found = structure_posterior(np.digitize(four_columns(500, 2), [0.0]), posterior="tree", draws=20)
    assert found.draws.shape == (20, 4, 4)
    assert found.edge_probabilities.max() <= 1 + 1e-9


def test_contradictions_are_told_in_names_and_few_rows_are_warned_of():
    pandas = pytest.importorskip("pandas")
    data = pandas.DataFrame(four_columns(60, 0), columns=["a", "b", "c", "e"])
    with pytest.raises(ValueError, match="a → b required and forbidden"):
        structure_posterior(data, knowledge=Knowledge(required=[("a", "b")], forbidden=[("a", "b")]))
    known = Knowledge(required=[("copy", "b"), ("a", "b")])
    with pytest.raises(ValueError, match=r"which says the same as (a|copy): drop one"):
        structure_posterior(data.assign(copy=data.a), knowledge=known)
    with pytest.warns(UserWarning, match="more rows than columns") as warned:
        structure_posterior(data[:3], draws=8, chains=1)
    assert warned[0].filename == __file__


def test_what_can_not_be_sampled_is_refused():
    with pytest.raises(ValueError, match="at most 300 columns"):
        structure_posterior(np.random.default_rng(0).normal(size=(400, 301)))
    with pytest.raises(ValueError, match="posterior"):
        structure_posterior(four_columns(50, 0), posterior="all")
    one = structure_posterior(four_columns(50, 0)[:, :1], draws=3)
    assert not one.draws.any()
    few = structure_posterior(four_columns(200, 0), max_seconds=0)
    assert len(few.draws) >= 1


def an_effect(rng, n=300):
    a, b, noise, more = rng.normal(size=(4, n))
    c = 1.5 * a + 0.7 * b + noise
    return np.stack([c, a, 0.5 * c + more, b], axis=1)


@pytest.mark.parametrize("kind", ["numbers", "categories"])
def test_a_tree_of_draws_has_the_draws_as_its_networks(kind):
    x = an_effect(np.random.default_rng(0), 60)
    x = x if kind == "numbers" else (x > 0).astype(int)
    found = structure_posterior(x, draws=40, edge_cost=0.5, bootstraps=0)
    ggt = found.tree(x, s=(5, 2), progress=False)
    drawn = {dag.tobytes(): score for dag, score in zip(found.draws, found.scores, strict=True)}
    of_branch = {}
    for way in ggt.enumerate():
        dag = ggt.dag(way)
        assert ggt.score(way) == pytest.approx(drawn[dag.tobytes()] + 0.5 * dag.sum())  # draws pay for their edges
        of_branch.setdefault(way.choices[0], set()).add(dag.tobytes())
    assert [len(of_t) for of_t in of_branch.values()] == [1] * 5
    assert len(set().union(*of_branch.values())) == 5


def test_a_tree_of_draws_is_wired_by_tests():
    x = np.random.default_rng(1).normal(size=(200, 7)) @ np.random.default_rng(2).normal(size=(7, 7))
    settings = {"threshold": 0.1, "seed": 3, "progress": False}
    ggt, learned = structure_posterior(x, draws=60, bootstraps=0).tree(x, **settings), learn_structure(x, **settings)
    assert ggt.num_leaves > 4
    assert ggt != learned
    for ours, theirs in zip(ggt.nodes, learned.nodes, strict=True):
        assert ours.variables == theirs.variables
        assert getattr(ours, "neighbours", ()) == getattr(theirs, "neighbours", ())
    assert GGT.from_dict(ggt.to_dict()) == ggt


def test_a_tree_of_few_draws_repeats_them():
    x = an_effect(np.random.default_rng(3))
    found = structure_posterior(x, draws=2, bootstraps=0)
    ggt = found.tree(x, progress=False)
    dags = [ggt.dag(way).tobytes() for way in ggt.enumerate()]
    assert len(dags) == 4
    assert set(dags) == {dag.tobytes() for dag in found.draws}


def test_a_tree_of_draws_makes_a_head_and_a_density():
    torch = pytest.importorskip("torch")
    from brainet_pl.network import Tree
    from brainet_pl.scores import TreeDensity

    x = an_effect(np.random.default_rng(4))
    ggt = structure_posterior(x, draws=50).tree(x, progress=False)
    rows = torch.tensor(x, dtype=torch.float32)
    assert Tree().build(4, 3, ggt)(rows).shape[-2:] == (300, 3)
    density = TreeDensity(ggt, 1, normalize=False).fit(rows, torch.zeros(300, dtype=torch.long))
    assert density(rows).mean() > density(rows + 10).mean()


def test_a_tree_of_draws_wants_the_same_table():
    x = an_effect(np.random.default_rng(5))
    found = structure_posterior(x, draws=10)
    with pytest.raises(ValueError, match=r"expected the 4 columns that the draws are of, got 3"):
        found.tree(x[:, :3])
    with pytest.raises(TypeError, match="branches"):
        found.tree(x, branches=3)
