import numpy as np
import pytest

from brainet_pl.structure import DSeparation, cpdag, rai


@pytest.mark.parametrize("second_pass", [True, False])
@pytest.mark.parametrize(
    "edges",
    [
        [(0, 1), (1, 2), (2, 3)],
        [(1, 0), (1, 2), (1, 3)],
        [(0, 2), (1, 2), (2, 3)],
        [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)],
        [(0, 1), (0, 3), (0, 4), (2, 4), (3, 1), (4, 3)],  # wrong if edges are oriented between the two phases
        [],
    ],
    ids=["chain", "fork", "collider", "diamond", "two-phases", "empty"],
)
def test_exact_with_an_oracle(edges, second_pass):
    dag = np.zeros((5, 5), dtype=bool)
    for a, b in edges:
        dag[a, b] = True
    assert rai(5, test=DSeparation(dag), second_pass=second_pass) == cpdag(dag)


@pytest.mark.parametrize("second_pass", [True, False])
def test_exact_on_trees_and_sparse_random_dags(second_pass, random_dag):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tree = np.zeros((12, 12), dtype=bool)
        for child in range(1, 12):
            tree[rng.integers(child), child] = True
        for dag in (tree, random_dag(seed, 9, 0.25)):
            assert rai(len(dag), test=DSeparation(dag), second_pass=second_pass) == cpdag(dag)


@pytest.mark.slow
def test_error_rate_on_dense_random_dags(record_property, random_dag):
    wrong = [rai(8, test=DSeparation(d)) != cpdag(d) for d in (random_dag(seed, 8, 0.6) for seed in range(30))]
    record_property("error_rate", float(np.mean(wrong)))
    print(f"dense DAGs, oracle: {np.mean(wrong):.1%} not exact")
    assert np.mean(wrong) <= 0.2


def test_max_order_zero_leaves_marginal_dependence():
    dag = np.zeros((3, 3), dtype=bool)
    dag[0, 1] = dag[1, 2] = True
    assert rai(3, test=DSeparation(dag), max_order=0).skeleton.sum() == 6


def sample_discrete(dag, n, seed):
    """Binary data: a child follows the majority of its parents 85 times in 100."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, len(dag)), dtype=np.int64)
    done: list[int] = []
    while len(done) < len(dag):
        for v in range(len(dag)):
            parents = np.flatnonzero(dag[:, v])
            if v not in done and set(parents) <= set(done):
                p = np.full(n, 0.5)
                if len(parents):
                    p = np.where(x[:, parents].mean(axis=1) > 0.49, 0.85, 0.15)
                x[:, v] = rng.random(n) < p
                done.append(v)
    return x


@pytest.mark.parametrize("test", ["g2", "cmi"])
def test_recovers_a_collider_from_discrete_data(test):
    dag = np.zeros((4, 4), dtype=bool)
    dag[0, 2] = dag[1, 2] = dag[2, 3] = True
    x = sample_discrete(dag, 4000, 0)
    assert rai(x, test=test, threshold=0.01) == cpdag(dag)


@pytest.mark.parametrize("test", ["fisher_z", "gaussian"])
def test_recovers_a_collider_from_gaussian_data(test):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 4))
    x[:, 2] += x[:, 0] + x[:, 1]
    x[:, 3] += x[:, 2]
    dag = np.zeros((4, 4), dtype=bool)
    dag[0, 2] = dag[1, 2] = dag[2, 3] = True
    assert rai(x, test=test, threshold=0.01) == cpdag(dag)


def test_budget_ends_early_and_says_so(random_dag):
    dag = random_dag(0, 12, 0.3)
    x = sample_discrete(dag, 500, 0)
    with pytest.warns(UserWarning, match="budget was spent"):
        graph = rai(x, test="g2", max_tests=5)
    assert graph.skeleton.any()
