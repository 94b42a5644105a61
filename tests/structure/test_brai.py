"""Algorithm 1 level by level: the same tree as by plain recursion, and a budget that all branches share."""

from functools import cache

import numpy as np
import pytest

from brainet_pl.graphs.pdag import cpdag
from brainet_pl.structure import Branch, DSeparation, Leaf, Node, PreparedData, find_test, learn, learn_structure
from brainet_pl.structure.autonomy import checked_votes, increase_separation, is_leaf
from brainet_pl.structure.brai import BRAI, samples_at, strongest_neighbours
from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.pdag import collider_votes, complete_graph, find_autonomous, join_separations
from brainet_pl.structure.score import bdeu
from brainet_pl.structure.statistics import bootstrap_weights, half_weights


@pytest.fixture
def table():
    """(500, 8) categories in two groups and a common effect."""
    rng = np.random.default_rng(0)
    x = np.empty((500, 8), dtype=np.int64)
    for j, parents in enumerate([(), (0,), (0,), (), (3,), (3,), (1, 4), (6,)]):
        noise = rng.integers(0, 3, size=500)
        x[:, j] = np.where(rng.random(500) < 0.75, sum(x[:, p] for p in parents) % 3, noise) if parents else noise
    return x


def recursive(learner, B, X, X_ex, n, path):
    """Algorithm 1 as it is printed, depth first."""
    if n > learner.max_order or is_leaf(B, X, X_ex, n):
        return learner._leaf(B, X, X_ex)
    branches = []
    for t in range(samples_at(learner.s, n)):
        here = (*path, t)
        test = learner.test_on(here)
        B_star, _ = increase_separation(B, X, X_ex, n, test, learner.budget, learner.check_colliders)
        X_D, X_A = find_autonomous(B_star, X)
        ancestors = tuple(recursive(learner, B_star, part, X_ex, n + 1, here) for part in X_A)
        exogenous = np.sort(np.concatenate([X_ex, *X_A]))
        branches.append(Branch(ancestors, recursive(learner, B_star, X_D, exogenous, n + 1, here)))
    return Node(tuple(X.tolist()), tuple(branches))


def learner_on(table, weights=half_weights, budget=None, seen=None, **settings):
    data = PreparedData.prepare(table, 3)

    def test_on(path):
        if seen is not None:
            seen.append(path)
        return find_test("g2").on(data, weights(data.n, 0, path), 0.05)

    score = cache(bdeu(data.table, 1.0))
    return BRAI(test_on=test_on, score=score, budget=budget or Budget(), **({"s": (2,), "max_order": 3} | settings))


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("searched", [False, True])
def test_level_by_level_is_the_recursion(table, check, searched):
    dependent = complete_graph(8) if searched else None
    learner = learner_on(table, check_colliders=check, dependent=dependent)
    expected = recursive(learner, complete_graph(8), np.arange(8), np.empty(0, dtype=np.intp), 0, ())
    assert learner.learn(8) == expected
    assert isinstance(expected, Node)


def test_each_sample_is_drawn_once_and_orders_follow_each_other(table):
    seen = []
    learner_on(table, seen=seen, s=(3,)).learn(8)
    assert len(seen) == len(set(seen)) > 3
    assert [len(path) for path in seen] == sorted(len(path) for path in seen)


def orders(node, depth=0):
    """The depth of every leaf."""
    if isinstance(node, Leaf):
        return [depth]
    return [o for branch in node.branches for child in branch.children for o in orders(child, depth + 1)]


def test_a_budget_is_spent_on_all_branches_alike(table):
    whole = learner_on(table, s=(3,))
    whole.learn(8)
    one_order = learner_on(table, s=(3,), max_order=0)
    one_order.learn(8)
    budget = Budget(max_tests=one_order.budget.tests)
    cut = learner_on(table, s=(3,), budget=budget)
    tree = cut.learn(8)
    assert cut.cut_short
    assert not one_order.cut_short
    assert set(orders(tree)) == {1}  # every branch has the tests of order 0, none those of order 1
    assert len(tree.branches) == 3
    assert whole.budget.tests > budget.tests


def test_with_an_oracle_every_collider_explains_away(random_dag):
    """So the check never loses a true v-structure: both kinds of votes are equal once the skeleton is right."""
    compared = set()
    for seed in range(100):
        dag = random_dag(seed, 8, 0.1 if seed % 2 else 0.3)  # sparse ones are right after order 0
        test, d = DSeparation(dag), len(dag)
        A, everything, nothing = complete_graph(d), np.arange(d), np.empty(0, dtype=np.intp)
        for n in range(3):
            thinner, found = increase_separation(A, everything, nothing, n, test, Budget())
            A = thinner | thinner.T
            plain = collider_votes(A, found, np.ones(d, dtype=bool))
            if (cpdag(dag).skeleton == A).all() and plain.any():  # edges that a later order removes mislead both
                assert (plain == checked_votes(A, found, np.ones(d, dtype=bool), n, test, Budget())).all()
                compared.add((seed, n))
    assert {n for _, n in compared} >= {0, 1}
    assert len(compared) > 10


class WeakChain:
    """0 → 1 → 2 with ends so weakly dependent that no test of the pair alone sees it."""

    def block(self, condition, left, right):
        return np.array([[self.margin(x, y, condition) for y in right] for x in left])

    def pairs(self, x, y, conditions):
        return np.array([self.margin(a, b, tuple(z)) for a, b, z in zip(x, y, conditions.tolist(), strict=True)])

    @staticmethod
    def margin(x, y, condition):
        return -1.0 if {x, y} == {0, 2} else 1.0


def test_a_weak_chain_makes_no_collider():
    start = (complete_graph(3), np.arange(3), np.empty(0, dtype=np.intp), 0, WeakChain(), Budget())
    plain, _ = increase_separation(*start)
    assert plain.astype(int).tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]  # 0 → 1 ← 2, which is wrong
    checked, _ = increase_separation(*start, check_colliders=True)
    assert checked.astype(int).tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


def test_later_orders_are_checked_too():
    """x ⟂ y | a only: the set that separates stays in the condition when the middle is asked."""
    asked = []

    class Watch(WeakChain):
        def pairs(self, x, y, conditions):
            asked.extend(zip(x.tolist(), y.tolist(), map(tuple, conditions.tolist()), strict=True))
            return np.full(len(x), -1.0)

    A = complete_graph(4)
    A[0, 2] = A[2, 0] = False
    found = join_separations([])._replace(pairs=np.array([[0, 2]]), owner=np.array([0]), member=np.array([3]))
    votes = checked_votes(A, found, np.ones(4, dtype=bool), 1, Watch(), Budget())
    assert asked == [(0, 2, (3, 1))]
    assert not votes.any()
    spent = Budget(max_tests=0)
    assert checked_votes(A, found, np.ones(4, dtype=bool), 1, Watch(), spent)[[0, 2], 1].all()  # untested: all vote


def test_half_of_the_rows_does_not_look_like_dependence():
    """Of independent columns a test at 5 % should call 5 % dependent; repeated rows make it three times as many."""
    x = np.random.default_rng(0).integers(0, 3, size=(400, 60))
    data = PreparedData.prepare(x, 3)
    share = {}
    for weights in (half_weights, bootstrap_weights):
        margins = find_test("g2").on(data, weights(data.n, 0, (0,)), 0.05).block((), np.arange(60), np.arange(60))
        share[weights] = (margins[np.triu_indices(60, 1)] >= 0).mean()
    assert share[half_weights] < 0.08
    assert share[bootstrap_weights] > 0.15


def test_the_paper_s_samples_and_leaves_are_still_to_be_had(table):
    paper = learn_structure(table, s=2, test="g2", threshold=0.05, max_order=3, bootstrap="paper", progress=False)
    learner = learner_on(PreparedData.prepare(table, 3).values, weights=bootstrap_weights)
    expected = recursive(learner, complete_graph(8), np.arange(8), np.empty(0, dtype=np.intp), 0, ())
    columns = PreparedData.prepare(table, 3).columns
    names = {tuple(sorted(columns[list(leaf.variables)].tolist())) for leaf in leaves(expected)}
    assert names == {leaf.variables for leaf in leaves(paper.root)}
    assert sorted(leaf.score for leaf in leaves(expected)) == sorted(leaf.score for leaf in leaves(paper.root))
    half = learn_structure(table, s=2, test="g2", threshold=0.05, max_order=3, progress=False)
    assert half.score(half.map()) > paper.score(paper.map())


def leaves(node):
    if isinstance(node, Leaf):
        return [node]
    return [leaf for branch in node.branches for child in branch.children for leaf in leaves(child)]


def test_copies_stay_together_and_hang_on_their_original(table):
    """A column and its copy determine each other; without care each hides the other's dependences."""
    renamed = np.array([2, 0, 1])[table[:, 3]]
    plain = learn_structure(table, s=3, progress=False)
    ggt = learn_structure(np.c_[table, renamed], s=3, progress=False)
    together = [node for node in ggt.nodes if 3 in node.variables or 8 in node.variables]
    assert together
    assert all({3, 8} <= set(node.variables) for node in together)
    for leaf in together:
        if isinstance(leaf, Leaf):
            parents = dict(zip(leaf.variables, leaf.parents, strict=True))
            assert (parents[8] == (3,)) != (parents[3] == (8,))  # which is the first is decided by the content
    score = cache(bdeu(PreparedData.prepare(np.c_[table, renamed], 3).table, 1.0))
    assert score(0, ()) < 0
    for way in ggt.sample(5, rng=0):  # the score is that of all families, copies included
        columns = PreparedData.prepare(np.c_[table, renamed], 3).columns
        place, dag = np.argsort(columns), ggt.dag(way)
        families = ((place[x], tuple(np.sort(place[np.flatnonzero(dag[:, x])]).tolist())) for x in range(9))
        assert ggt.score(way) == pytest.approx(sum(score(int(x), parents) for x, parents in families))
    assert plain.num_variables == 8
    paper = learn_structure(np.c_[table, renamed], s=3, bootstrap="paper", progress=False)
    assert paper.num_variables == 9


def seen_by(monkeypatch, name, usual=None):
    """What `learn_structure` hands to the learner under this name."""
    handed = []
    plain = learn.BRAI
    monkeypatch.setattr(learn, "BRAI", lambda **settings: handed.append(settings.get(name, usual)) or plain(**settings))
    return handed


@pytest.mark.parametrize("bootstrap", ["half", "paper"])
def test_each_kind_of_sample_is_drawn_and_searched_as_it_says(table, monkeypatch, bootstrap):
    drawn = []
    for name in ("half_weights", "bootstrap_weights"):
        real = getattr(learn, name)
        monkeypatch.setattr(learn, name, lambda *a, name=name, real=real: drawn.append((name, a[2])) or real(*a))
    checked, dependent = seen_by(monkeypatch, "check_colliders", False), seen_by(monkeypatch, "dependent")
    learn_structure(table, s=2, max_order=1, bootstrap=bootstrap, progress=False)
    half = bootstrap == "half"
    assert checked == [half]
    assert (dependent[0] is not None) == half
    tests = {path for name, path in drawn if name == ("half_weights" if half else "bootstrap_weights")}
    assert {(0,), (1,)} <= tests
    searched = {path for name, path in drawn if half and name == "bootstrap_weights"}
    assert all(path[-1] for path in searched)  # the first branch of a node asks all rows
    assert bool(searched) == half


def test_a_single_branch_has_the_parents_that_all_rows_want(table):
    """With s = 1 no sample of rows is asked for parents: no single change of them scores better."""
    ggt = learn_structure(table, s=1, max_order=1, progress=False)
    data = PreparedData.prepare(table, 3)
    score, place = cache(bdeu(data.table, 1.0)), np.argsort(data.columns)
    for leaf in leaves(ggt.root):
        for x, parents in zip(leaf.variables, leaf.parents, strict=True):
            now = score(int(place[x]), tuple(sorted(place[list(parents)].tolist())))
            for gone in parents:
                rest = tuple(sorted(int(place[p]) for p in parents if p != gone))
                assert score(int(place[x]), rest) <= now + 1e-9


def test_a_leaf_keeps_the_strongest_of_very_many_parents(features, monkeypatch):
    whole = learn_structure(features, threshold=0.005, progress=False)
    most = max(len(parents) for leaf in leaves(whole.root) for parents in leaf.parents)
    assert most > 2
    monkeypatch.setattr(learn, "LEAF_PARENTS", 2)
    capped = learn_structure(features, threshold=0.005, progress=False)
    strength = np.abs(PreparedData.prepare(features, 3).correlation())
    place = np.argsort(PreparedData.prepare(features, 3).columns)
    fewer = 0
    for one, other in zip(leaves(whole.root), leaves(capped.root), strict=True):
        assert one.variables == other.variables
        for x, every, kept in zip(one.variables, one.parents, other.parents, strict=True):
            expected = sorted(every, key=lambda p, x=x: -strength[place[p], place[x]])[:2]
            assert sorted(expected) == sorted(kept)
            fewer += len(kept) < len(every)
    assert fewer
    paper = learn_structure(features, threshold=0.005, bootstrap="paper", progress=False)
    assert max(len(parents) for leaf in leaves(paper.root) for parents in leaf.parents) > 2


def test_neighbours_are_those_with_the_largest_margins_in_the_sample_of_the_branch(features):
    """Against a loop over all pairs of the half of the rows that a branch of the root was learned from."""
    x = features[:, :9]
    ggt = learn_structure(x, s=(3, 1), threshold=0.02, test="gaussian", progress=False, seed=5)
    data = PreparedData.prepare(x, 3)
    number = {int(name): place for place, name in enumerate(data.columns)}
    for t, way in enumerate(ggt.enumerate()):
        test = find_test("gaussian").on(data, half_weights(data.n, 5, (t,)), 0.02)
        for leaf in ggt.leaves(way):
            for v, near in zip(leaf.variables, leaf.neighbours, strict=True):
                margin = {
                    u: float(test.block((), np.array([number[v]]), np.array([number[u]]))[0, 0])
                    for u in range(9)
                    if u != v
                }
                assert sorted(near) == sorted(margin)
                assert [margin[u] for u in near] == pytest.approx(sorted(margin.values(), reverse=True), abs=1e-6)


@pytest.mark.parametrize("settings", [{"bootstrap": "paper"}, {"threshold": 0.0}])
def test_the_paper_s_tree_and_the_ensemble_know_no_neighbours(features, settings):
    ggt = learn_structure(features[:, :6], test="gaussian", progress=False, **settings)
    assert not any(node.neighbours for node in ggt.nodes if isinstance(node, Leaf))


def test_copies_have_the_neighbours_of_their_original(features):
    ggt = learn_structure(np.c_[features[:, :5], features[:, 2]], test="gaussian", progress=False)
    for leaf in (node for node in ggt.nodes if isinstance(node, Leaf)):
        near = dict(zip(leaf.variables, leaf.neighbours, strict=True))
        assert (2 in near) == (5 in near)
        if 2 in near:
            assert near[2] == near[5]
            assert len(near[2]) == 4


def test_of_equal_neighbours_the_first_counts():
    class Table:
        """Margins from a table of few different numbers, copies included."""

        def block(self, condition, left, right):
            return margins[np.ix_(left, right)]

    rng = np.random.default_rng(0)
    margins = rng.choice([-1.0, 0.25, 0.25 + 4e-7, 2.0, np.inf], size=(40, 40))
    margins = np.maximum(margins, margins.T)
    X = np.sort(rng.permutation(40)[:25])
    found = strongest_neighbours(Table(), X, 7)
    for x in X:
        others = [y for y in X if y != x]
        assert found[x].tolist() == sorted(others, key=lambda y: (-round(margins[x, y], 6), y))[:7]
    assert strongest_neighbours(Table(), X[:1], 7).shape[1] == 0
