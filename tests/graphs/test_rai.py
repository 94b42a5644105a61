import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl.graphs import cpdag, rai
from brainet_pl.graphs.plain_rai import marginally_dependent, retest_widely, with_copies
from brainet_pl.structure import DSeparation
from brainet_pl.structure.copies import find_copies
from brainet_pl.structure.data import PreparedData
from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.pdag import join_separations


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
            assert rai(len(dag), test=DSeparation(dag), max_order=None, second_pass=second_pass) == cpdag(dag)


@st.composite
def any_dag(draw):
    """A DAG of up to 12 variables and an average degree of 2 to 4, in any order."""
    d = draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dag = np.triu(rng.random((d, d)) < draw(st.floats(2, 4)) / (d - 1), 1)
    order = rng.permutation(d)
    return dag[np.ix_(order, order)]


@settings(max_examples=40, deadline=None)
@given(any_dag())
def test_exact_with_an_oracle_whatever_the_graph(dag):
    assert rai(len(dag), test=DSeparation(dag), max_order=None) == cpdag(dag)


@pytest.mark.slow
def test_exact_with_an_oracle_on_many_dense_graphs(random_dag):
    for seed in range(40):
        dag = random_dag(seed, 8 + seed % 5, 0.3 + 0.1 * (seed % 4))
        assert rai(len(dag), test=DSeparation(dag), max_order=None) == cpdag(dag), seed


def test_a_v_structure_whose_ends_only_a_large_set_separates():
    """Four common causes: no set of three separates the ends, and their effect is no common cause."""
    dag = np.zeros((7, 7), dtype=bool)
    dag[:4, 4] = dag[:4, 5] = True
    dag[[4, 5], 6] = True
    assert rai(7, test=DSeparation(dag), max_order=None) == cpdag(dag)
    assert rai(7, test=DSeparation(dag), max_order=3).skeleton[4, 5]  # the default says what it can't see


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


def test_single_conditions_need_not_be_neighbours():
    """2 and 3 depend on each other through 0 alone, whose edges are gone: no neighbour separates them."""
    dag = np.zeros((4, 4), dtype=bool)
    dag[0, 2] = dag[0, 3] = True
    A = np.zeros((4, 4), dtype=bool)
    A[2, 3] = A[3, 2] = True
    test, X = DSeparation(dag), np.arange(4)
    assert marginally_dependent(4, X, test, Budget())[2, 0]
    skeleton, found = retest_widely(A, X, join_separations([]), 3, test, Budget())
    assert not skeleton.any()
    assert found.pairs.tolist() == [[2, 3]]
    assert found.member.tolist() == [0]


def test_copies_are_tested_as_one_and_given_back():
    dag = np.zeros((4, 4), dtype=bool)
    dag[0, 2] = dag[1, 2] = dag[2, 3] = True
    x = sample_discrete(dag, 4000, 0)
    renamed = np.array([7, 5])[x[:, 2]]
    graph = rai(np.column_stack([x, renamed]))
    original, copy = (2, 4) if graph.skeleton[2].sum() > 1 else (4, 2)
    rest = [0, 1, original, 3]
    assert np.array_equal(graph.adjacency[np.ix_(rest, rest)], cpdag(dag).adjacency)
    assert np.flatnonzero(graph.skeleton[copy]).tolist() == [original]
    assert graph.directed[original, copy]  # two arrows point to the original, none to its copy


def test_a_lone_pair_of_copies_has_no_direction():
    coins = np.random.default_rng(0).integers(0, 2, size=(100, 2))
    assert rai(np.column_stack([coins, 1 - coins[:, 0]])).adjacency.astype(int).tolist() == [
        [0, 0, 1],
        [0, 0, 0],
        [1, 0, 0],
    ]


def test_what_counts_as_a_copy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 50))
    data = PreparedData.prepare(np.column_stack([a, b, np.exp(a), -a, np.ones(50), np.full(50, 2.0)]), bins=3)
    original = data.columns[find_copies(data, "gaussian")]
    by_column = dict(zip(data.columns.tolist(), original.tolist(), strict=True))
    assert by_column[0] == by_column[2] == by_column[3] in (0, 2, 3)
    assert (by_column[1], by_column[4], by_column[5]) == (1, 4, 5)
    assert with_copies(np.zeros((2, 2), dtype=bool), np.array([0, 0])).tolist() == [[False, True], [True, False]]


def test_a_function_of_a_variable_takes_no_edge_from_it_and_leaves_it_its_own():
    """w → x = f(w) → y keeps x — y though w determines x, and w → v has no edge from x, which w stands in for."""
    rng = np.random.default_rng(0)
    w = rng.integers(0, 4, size=4000)
    x = w // 2
    y = np.where(rng.random(4000) < 0.8, x, rng.integers(0, 2, size=4000))
    v = np.where(rng.random(4000) < 0.8, w, rng.integers(0, 4, size=4000))
    graph = rai(np.stack([w, x, y, v], axis=1), climb=False)
    assert {(int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(graph.skeleton)), strict=True)} == {
        (0, 1),
        (1, 2),
        (0, 3),
    }


def test_the_climb_mends_what_single_tests_get_wrong():
    dag = np.zeros((5, 5), dtype=bool)
    dag[0, 2] = dag[1, 2] = dag[2, 3] = dag[1, 4] = True
    wrong = dict.fromkeys((True, False), 0)
    for seed in range(10):
        x = sample_discrete(dag, 200, seed)
        for climb in wrong:
            wrong[climb] += rai(x, climb=climb).shd(cpdag(dag))
    assert wrong[True] < wrong[False]


def test_a_threshold_in_nats_is_not_overruled_by_a_score():
    rng = np.random.default_rng(0)
    a = rng.normal(size=3000)
    x = np.column_stack([a, 0.2 * a + rng.normal(size=3000)])
    assert not rai(x, test="gaussian", threshold=0.1).skeleton.any()
    assert rai(x, test="gaussian", threshold=0.001, climb=True).skeleton.any()
