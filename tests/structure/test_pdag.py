from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from brainet_pl.graphs.pdag import PDAG, cpdag
from brainet_pl.structure import pdag
from brainet_pl.structure.pdag import dag_extension, find_autonomous, meek


def is_acyclic(dag):
    alive = np.ones(len(dag), dtype=bool)
    while alive.any():
        sources = alive & ~(dag & alive[:, None]).any(axis=0)
        if not sources.any():
            return False
        alive &= ~sources
    return True


def v_structures(dag):
    skeleton = dag | dag.T
    found = set()
    for z in range(len(dag)):
        for x, y in combinations(np.flatnonzero(dag[:, z]), 2):
            if not skeleton[x, y]:
                found.add((int(x), z, int(y)))
    return found


def equivalence_class(dag):
    """All DAGs with the same skeleton and v-structures, by trying every order of the variables."""
    skeleton, target, d = dag | dag.T, v_structures(dag), len(dag)
    members = set()
    for order in permutations(range(d)):
        place = np.argsort(order)
        other = skeleton & (place[:, None] < place[None, :])
        if v_structures(other) == target:
            members.add(other.tobytes())
    return [np.frombuffer(m, dtype=bool).reshape(d, d) for m in members]


@pytest.mark.parametrize("seed", range(30))
def test_cpdag_is_what_all_members_of_the_class_share(random_dag, seed):
    dag = random_dag(seed, 5, 0.5)
    union = np.logical_or.reduce(equivalence_class(dag))
    np.testing.assert_array_equal(cpdag(dag).adjacency, union)


@given(seed=st.integers(0, 10_000), d=st.integers(2, 12), p=st.floats(0.1, 0.9))
def test_extension_of_a_cpdag_is_a_member_of_its_class(random_dag, seed, d, p):
    dag = random_dag(seed, d, p)
    member = dag_extension(cpdag(dag).adjacency)
    assert is_acyclic(member)
    assert cpdag(member) == cpdag(dag)


@given(st.integers(0, 10_000), st.integers(1, 10), st.floats(0, 1))
def test_extension_of_any_graph_is_a_dag_with_its_skeleton(seed, d, p):
    rng = np.random.default_rng(seed)
    A = (rng.random((d, d)) < p) & ~np.eye(d, dtype=bool)
    dag = dag_extension(A)
    assert is_acyclic(dag)
    np.testing.assert_array_equal(dag | dag.T, A | A.T)


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 10), st.floats(0, 1))
def test_autonomous_sets_partition_and_close(seed, d, p):
    rng = np.random.default_rng(seed)
    A = (rng.random((d, d)) < p) & ~np.eye(d, dtype=bool)
    X = np.sort(rng.permutation(d)[: max(1, d - 1)])
    descendant, ancestors = find_autonomous(A, X)
    together = np.sort(np.concatenate([descendant, *ancestors]))
    np.testing.assert_array_equal(together, X)
    outside = np.setdiff1d(X, descendant)
    assert not A[np.ix_(descendant, outside)].any()  # no arrow and no undirected edge leaves the descendant set
    for a, b in combinations(ancestors, 2):
        assert not A[np.ix_(a, b)].any()
        assert not A[np.ix_(b, a)].any()


def test_autonomous_sets_of_a_known_graph():
    A = np.zeros((6, 6), dtype=bool)
    A[0, 1] = A[1, 0] = True  # 0 — 1 → 4, 2 → 4, 3 alone, 4 → 5
    A[1, 4] = A[2, 4] = A[4, 5] = True
    descendant, ancestors = find_autonomous(A, np.arange(6))
    assert descendant.tolist() == [3, 5]
    assert [a.tolist() for a in ancestors] == [[0, 1, 2, 4]]
    descendant, ancestors = find_autonomous(A, np.array([0, 1, 2, 4]))
    assert descendant.tolist() == [4]
    assert [a.tolist() for a in ancestors] == [[0, 1], [2]]


def meek_by_products(A):
    """Meek's rules as products of whole matrices: every round asks everything anew."""
    A = A.copy()
    while True:
        undirected, directed, skeleton = A & A.T, A & ~A.T, A | A.T
        ask = (directed.T.astype(int) @ ~skeleton > 0) | (directed.astype(int) @ directed > 0)
        ask &= undirected
        for a, b in zip(*np.nonzero(undirected & ~ask), strict=True):
            k = np.flatnonzero(undirected[a] & directed[:, b])
            ask[a, b] = not skeleton[np.ix_(k, k)][np.triu_indices(len(k), 1)].all()
        ask &= ~ask.T
        if not ask.any():
            return A
        A &= ~ask.T


@pytest.mark.parametrize("looks", [0, 1, 16])
def test_meek_against_products_of_matrices(looks, monkeypatch):
    monkeypatch.setattr(pdag, "FIRST_LOOKS", looks)
    monkeypatch.setattr(pdag, "_LIST_BYTES", 30)
    rng = np.random.default_rng(looks)
    changed = 0
    for _ in range(300):
        d = int(rng.integers(2, 12))
        A = np.triu(rng.random((d, d)) < rng.random(), 1)
        A = A | A.T
        A &= ~np.triu(rng.random((d, d)) < 0.2, 1)
        A &= ~np.tril(rng.random((d, d)) < 0.2, -1)
        expected = meek_by_products(A)
        np.testing.assert_array_equal(meek(A), expected)
        changed += (expected != A).any()
    assert changed > 50


def test_meek_does_not_depend_on_the_order_of_variables():
    rng = np.random.default_rng(0)
    for _ in range(50):
        A = (rng.random((7, 7)) < 0.5) & ~np.eye(7, dtype=bool)
        order = rng.permutation(7)
        np.testing.assert_array_equal(meek(A)[np.ix_(order, order)], meek(A[np.ix_(order, order)]))


def test_shd_counts_pairs():
    a, b = np.zeros((2, 3, 3), dtype=bool)
    a[0, 1] = a[1, 2] = True
    b[1, 0] = b[0, 2] = True
    assert PDAG(a).shd(PDAG(b)) == 3  # one turned, one missing, one extra
    with pytest.raises(ValueError, match="square adjacency"):
        PDAG(np.ones((2, 2), dtype=bool))
    assert not PDAG(a).adjacency.flags.writeable


@given(seed=st.integers(0, 10_000), d=st.integers(1, 12), p=st.floats(0, 0.5))
def test_both_ways_to_find_components_agree(seed, d, p):
    rng = np.random.default_rng(seed)
    A = (rng.random((d, d)) < p) & ~np.eye(d, dtype=bool)
    for connection in ("strong", "weak"):
        dense = pdag._components(A, connection)
        _, sparse = connected_components(csr_array(A), directed=True, connection=connection)
        np.testing.assert_array_equal(dense[:, None] == dense, sparse[:, None] == sparse)
        assert sorted(set(dense.tolist())) == list(range(dense.max() + 1))
