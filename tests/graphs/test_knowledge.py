"""Background knowledge: what contradicts itself is refused, and no graph breaks what is known."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl.graphs import Knowledge, cpdag, rai, structure_posterior
from brainet_pl.graphs.knowledge import class_of
from brainet_pl.structure import DSeparation, learn_structure
from brainet_pl.structure.cache import cache_key
from brainet_pl.structure.settings import StructureSettings


def random_knowledge(rng, d, dag):
    """Knowledge that the DAG (d, d) does not break, or another DAG's."""
    order = rng.permutation(d)
    other = np.zeros((d, d), dtype=bool)
    other[np.ix_(order, order)] = np.triu(rng.random((d, d)) < 0.5, 1)
    truth = dag if rng.random() < 0.5 else other
    arrows, missing = np.argwhere(truth), np.argwhere(~truth & ~np.eye(d, dtype=bool))
    pick = lambda pairs, share: [tuple(map(int, pair)) for pair in pairs if rng.random() < share]  # noqa: E731
    place = np.empty(d, dtype=int)
    place[order if truth is other else topological(dag)] = np.arange(d)
    tiers = [[v for v in range(d) if place[v] < d // 2], [v for v in range(d) if place[v] >= d // 2]]
    return Knowledge(pick(arrows, 0.3), pick(missing, 0.2), tiers if rng.random() < 0.5 else [])


def topological(dag):
    left, order = list(range(len(dag))), []
    while left:
        v = next(v for v in left if not dag[left, v].any())
        left.remove(v)
        order.append(v)
    return order


def breaks(graph, known):
    """Whether an arrow is missing that is required, or one is there that is not allowed; edges may be undirected."""
    arrows = graph & ~graph.T
    return bool((known.required & ~arrows).any() or (arrows & ~known.allowed).any() or (graph & ~known.allowed).any())


def all_dags(d):
    from itertools import product

    pairs = [(i, j) for i in range(d) for j in range(i)]
    for states in product(range(3), repeat=len(pairs)):
        dag = np.zeros((d, d), dtype=bool)
        for (i, j), state in zip(pairs, states, strict=True):
            dag[i, j], dag[j, i] = state == 1, state == 2
        power = np.linalg.matrix_power(dag.astype(int) + np.eye(d, dtype=int), d)
        if (power * power.T == np.eye(d)).all():
            yield dag


@pytest.mark.parametrize("d", [3, 4])
def test_a_class_is_all_equivalent_dags_that_break_nothing(d):
    """Every arrow that some equivalent DAG has is in the class, and no other: one loop over all DAGs."""
    every = list(all_dags(d))
    classes = [cpdag(dag).adjacency.tobytes() for dag in every]
    rng = np.random.default_rng(d)
    tried = 0
    for _ in range(150):
        i = int(rng.integers(len(every)))
        knowledge = random_knowledge(rng, d, every[i])
        known = knowledge.on(d, None)
        if breaks(every[i], known):
            continue
        tried += 1
        members = [dag for dag, its in zip(every, classes, strict=True) if its == classes[i] and not breaks(dag, known)]
        assert (class_of(every[i], known) == np.logical_or.reduce(members)).all()
    assert tried > 40


def test_the_fourth_rule_is_needed():
    """a — b, a — c → d → b, a — d: with c → d and d → b known, a → b follows."""
    a, b, c, d = range(4)
    dag = np.zeros((4, 4), dtype=bool)
    dag[a, b] = dag[a, c] = dag[a, d] = dag[c, d] = dag[d, b] = True
    known = Knowledge(required=[(c, d), (d, b)]).on(4, None)
    found = class_of(dag, known)
    assert found[a, b]
    assert not found[b, a]
    assert found[a, c] == found[c, a]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.integers(2, 7))
def test_an_extension_breaks_nothing(seed, d):
    rng = np.random.default_rng(seed)
    A = (rng.random((d, d)) < 0.4) & ~np.eye(d, dtype=bool)
    knowledge = random_knowledge(rng, d, np.triu(np.ones((d, d), dtype=bool), 1))
    known = knowledge.on(d, None)
    dag = known.extend(A)
    assert not breaks(dag, known)
    assert len(topological(dag)) == d  # no cycle
    assert not (dag & ~(A | A.T | known.required)).any()


@pytest.mark.parametrize(
    ("knowledge", "message"),
    [
        (Knowledge(required=[(0, 1)], forbidden=[(0, 1)]), "0 → 1 required and forbidden"),
        (Knowledge(required=[(1, 0)], tiers=[[0], [1]]), "1 → 0 required and against its tiers"),
        (Knowledge(required=[(0, 1), (1, 2), (2, 0)]), "cycle of required arrows and tiers among 0, 1, 2"),
        (Knowledge(required=[(1, 2), (2, 0)], tiers=[[0], [1]]), "cycle"),
        (Knowledge(tiers=[[0, 1], [1]]), "1 in tiers 0 and 1"),
        (Knowledge(required=[(0, 7)]), "columns 0 to 2, got 7"),
        (Knowledge(required=[("a", "b")]), "columns 0 to 2, got 'a'"),
        (Knowledge(required=[(0, 0)]), "between two variables"),
        (Knowledge(required=[0, 1]), "pairs"),
        (Knowledge(tiers=["ab"]), "list of variables"),
        ({"required": [(0, 1)]}, "to be a Knowledge"),
    ],
)
@pytest.mark.parametrize("learn", [rai, learn_structure])
def test_contradictions_are_refused(knowledge, message, learn):
    x = np.random.default_rng(0).normal(size=(60, 3))
    with pytest.raises(ValueError, match=message):
        learn(x, knowledge=knowledge)


def chain(n=800):
    """a → b → c, and d on its own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 4))
    x[:, 1] += x[:, 0]
    x[:, 2] += x[:, 1]
    return pd.DataFrame(x, columns=list("abcd"))


def arrows(graph):
    return {(graph.names[i], graph.names[j]) for i, j in np.argwhere(graph.directed)}


def test_names_in_and_names_out():
    graph = rai(chain())
    assert graph.names == tuple("abcd")
    assert not arrows(graph)
    assert learn_structure(chain(), progress=False).names == tuple("abcd")
    assert structure_posterior(chain(100), draws=20).graph().names == tuple("abcd")
    assert rai(chain().to_numpy()).names is None
    with pytest.raises(ValueError, match="'a' twice"):
        rai(pd.DataFrame(np.zeros((5, 2)), columns=["a", "a"]))


def test_one_known_arrow_directs_a_chain():
    assert arrows(rai(chain(), knowledge=Knowledge(required=[("a", "b")]))) == {("a", "b"), ("b", "c")}
    assert arrows(rai(chain(), knowledge=Knowledge(forbidden=[("b", "c")]))) == {("c", "b"), ("b", "a")}
    assert arrows(rai(chain(), knowledge=Knowledge(tiers=[["c"], ["a", "b"]]))) == {("c", "b"), ("b", "a")}


@pytest.mark.parametrize("settings", [{}, {"test": "gaussian"}, {"test": "cmi"}, {"second_pass": False}])
def test_required_arrows_are_there_and_forbidden_ones_are_not(settings):
    knowledge = Knowledge(required=[("d", "a")], forbidden=[("b", "c"), ("c", "b")])
    graph = rai(chain(), knowledge=knowledge, **settings)
    assert ("d", "a") in arrows(graph)
    assert not graph.skeleton[1, 2]


def test_an_oracle_and_knowledge():
    dag = np.zeros((3, 3), dtype=bool)
    dag[0, 1] = dag[1, 2] = True
    graph = rai(3, test=DSeparation(dag), knowledge=Knowledge(required=[(0, 1)]))
    assert (graph.adjacency == dag).all()


@pytest.mark.parametrize("test", ["gaussian", "fisher_z", "g2"])
def test_no_network_of_a_tree_breaks_what_is_known(test):
    knowledge = Knowledge(required=[("d", "a")], forbidden=[("a", "c"), ("c", "a")], tiers=[["c"], ["a", "b"]])
    ggt = learn_structure(chain(), test=test, s=3, knowledge=knowledge, progress=False)
    known = knowledge.on(4, ggt.names)
    for way in ggt.enumerate():
        assert not breaks(ggt.dag(way), known)
    assert ggt.settings["knowledge"]["required"] == [["d", "a"]]
    assert type(ggt).from_json(ggt.to_json()) == ggt


def test_no_draw_breaks_what_is_known():
    knowledge = Knowledge(required=[("d", "a")], tiers=[["c"], ["a", "b"]])
    found = structure_posterior(chain(300), knowledge=knowledge, draws=100)
    known = knowledge.on(4, found.names)
    assert not any(breaks(dag, known) for dag in found.draws)
    assert not breaks(found.map, known)
    assert ("c", "b") in arrows(found.graph())  # an edge that only its tiers direct


def test_knowledge_makes_another_tree_in_the_cache():
    x = chain().to_numpy()
    assert cache_key(x, StructureSettings()) == cache_key(x, StructureSettings(), None)
    assert cache_key(x, StructureSettings()) != cache_key(x, StructureSettings(), Knowledge(required=[(0, 1)]))


def test_copies_and_constants():
    x = chain().assign(copy=lambda frame: 2 * frame["a"], constant=1.0)
    graph = rai(x)
    assert graph.skeleton[0, 4]
    assert not graph.skeleton[5].any()
    with pytest.raises(ValueError, match="says the same as"):
        rai(x, knowledge=Knowledge(required=[("a", "b"), ("copy", "c")]))
    with pytest.warns(UserWarning, match="more rows than columns"):
        rai(chain().head(3))


def test_columns_of_words_are_levels():
    rng = np.random.default_rng(0)
    colour = rng.choice(["red", "green", "blue"], 400)
    frame = pd.DataFrame({"colour": colour, "warm": colour == "red", "coin": rng.integers(0, 2, 400)})
    graph = rai(frame)
    assert graph.skeleton.astype(int).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    frame.loc[3, "colour"] = None
    with pytest.raises(ValueError, match="1 missing values in 'colour'"):
        rai(frame)
