"""One graph instead of a tree: plain recursive autonomy identification, a second pass of tests, and a climb."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from brainet_pl._utils import checks
from brainet_pl._utils.warn import warn
from brainet_pl.graphs.climb import climb_from
from brainet_pl.graphs.knowledge import Knowledge, class_of
from brainet_pl.graphs.pdag import PDAG, orient_surest_first
from brainet_pl.structure import pdag
from brainet_pl.structure.autonomy import increase_separation, is_leaf
from brainet_pl.structure.constraints import Constraints, check_knowledge
from brainet_pl.structure.copies import find_copies
from brainet_pl.structure.data import PreparedData, column_names
from brainet_pl.structure.discretize import check_bins
from brainet_pl.structure.evidence import Budget, Evidence, remove_separated
from brainet_pl.structure.independence import IndependenceTest, Margins
from brainet_pl.structure.pdag import Bools, Ints, Separations
from brainet_pl.structure.score import find_score
from brainet_pl.structure.settings import AUTO, check_limits, check_order, check_rows, choose_test, warn_of_few_rows
from brainet_pl.structure.steps import MOST_ARROWS
from brainet_pl.structure.stream import learn_together

ESS = 5.0  # weight of the prior in the climb: better than 1 or 10 on most networks at 500 rows
RECURSION_ORDER = 1  # of plain RAI before the second pass takes over: later calls find little and cost most
REPAIR_ORDER = 3  # largest set weighed when a v-structure is decided; more only adds noise and time


def rai(
    features: Any,
    *,
    test: str | type[IndependenceTest] | Margins = AUTO,
    threshold: float | None = None,
    max_order: int | None = 3,
    bins: int = 3,
    max_rows: int | None = None,
    max_tests: int | None = None,
    max_seconds: float | None = None,
    second_pass: bool = True,
    climb: bool | None = None,
    knowledge: Knowledge | None = None,
) -> PDAG:
    """Learn one structure by recursive autonomy identification, without bootstrap.

    The recursion thins the complete graph; a second pass tests what is left without believing any direction, and
    directs it; then a search for a graph with a higher score begins where the tests ended, by greedy steps and by moves
    in the order of variables. With a perfect oracle and no limit on the order the result is the equivalence class of
    the true graph; where a limit, such as the default 3, is below the size of some separating set, as in dense graphs,
    the edge stays.

    Columns that determine each other are tested as one, and joined to the first of them afterwards.

    Args:
        features: An array, tensor (N, d), data frame or `FeatureStream`, as in `learn_structure`; with a test object,
            the number of variables d. The graph has the names of a data frame's columns.
        test: Name of a test or a subclass of `IndependenceTest`, as in `learn_structure`; or an object with the
            methods `block` and `pairs`, such as `DSeparation`. "auto" is "g2" for a table of categories and "fisher_z"
            for any other: a graph should have the weak edges too, which a tree for a network is better without.
        threshold: Threshold of the test, in its unit; None is the test's own, as in `learn_structure`. A test object
            brings its own.
        max_order: Size of the largest condition set. None: no limit.
        bins: Number of levels of a continuous column in the discrete tests, from 2 to 256.
        max_rows: Learn from a random sample of at most this many rows. None: from all.
        max_tests: Number of tests after which the edges left stay, with a warning. None: no limit.
        max_seconds: Time after which the edges left stay, with a warning. None: no limit.
        second_pass: Whether to test the edges that the recursion leaves once more, first given every single variable
            that depends on one of their ends, then given neighbours, and orient anew; False gives the recursion's own
            graph.
        climb: Whether to search, after the second pass, for a graph with a higher score, each edge at a cost of log d
            nats: by greedy steps, and by moves in the order of variables (as BOSS does). The search over orders ends
            after a fixed amount of work, some 15 seconds of one core. None: for significance tests only, because a
            threshold in nats asks for strong edges, and a score for all that the data support. A test object has no
            data to score.
        knowledge: Arrows that must or must not be there, and the order of groups of variables in time.

    Example:
        Two causes are independent until their effect is known, and that fixes both arrows. An oracle that reads a known
        graph finds them:

        >>> import numpy as np
        >>> from brainet_pl.structure import DSeparation
        >>> dag = np.array([[0, 0, 1], [0, 0, 1], [0, 0, 0]], dtype=bool)  # 0 → 2 ← 1
        >>> rai(3, test=DSeparation(dag)).directed.astype(int).tolist()
        [[0, 0, 1], [0, 0, 1], [0, 0, 0]]

        A significance test on data finds the same:

        >>> rng = np.random.default_rng(0)
        >>> a, b, noise = rng.integers(0, 2, size=(3, 1000))
        >>> rai(np.stack([a, b, a + b + noise], axis=1), test="g2", threshold=0.01).directed.astype(int).tolist()
        [[0, 0, 1], [0, 0, 1], [0, 0, 0]]
    """
    order, again = check_order(max_order), checks.flag("second_pass", second_pass)
    climbing = None if climb is None else checks.flag("climb", climb)
    bins, max_rows = check_bins(bins), check_rows(max_rows)
    budget = Budget(*check_limits(max_tests, max_seconds))
    if isinstance(test, str | type):

        def learn(table: Any) -> PDAG:
            data = PreparedData.prepare(table, bins, max_rows)
            warn_of_few_rows(data)
            problem = _of_data(data, column_names(table), choose_test(test, data, "fisher_z"), threshold)
            climbs = problem.is_significance_test if climbing is None else climbing
            return _learn_graph(problem, order, again, again and climbs, knowledge, budget)

        return learn_together(features, bins, max_rows, learn)
    for name, value in (("threshold", threshold), ("max_rows", max_rows), ("climb", climbing or None)):
        if value is not None:
            raise ValueError(
                f"expected no {name} beside a test object, got {value}: the object decides on its own; drop {name}"
            )
    return _learn_graph(_of_object(test, features), order, again, False, knowledge, budget)


class _Problem(NamedTuple):
    """What a graph is learned from, variables in canonical order."""

    test: Margins
    columns: Ints  # (d,) the user's number of each variable
    original: Ints  # (d,) for each variable the first that says the same
    names: tuple[str, ...] | None  # of the user's columns
    data: PreparedData | None  # behind the test; None where a test object has its own
    chosen: type[IndependenceTest] | None  # the class of the test on data

    @property
    def is_significance_test(self) -> bool:
        """Whether the threshold is a level, and not nats."""
        return self.chosen is not None and self.chosen.unit == "significance level"


def _of_data(
    data: PreparedData, names: tuple[str, ...] | None, chosen: type[IndependenceTest], threshold: float | None
) -> _Problem:
    """A test on all rows of a table."""
    test = chosen.on(data, None, chosen.check_threshold(threshold, data.d))
    return _Problem(test, data.columns, find_copies(data, chosen.kind), names, data, chosen)


def _of_object(test: Any, features: Any) -> _Problem:
    """A test object, with the number of variables in place of features."""
    if not (callable(getattr(test, "block", None)) and callable(getattr(test, "pairs", None))):
        raise ValueError(
            f"expected test to be a name, a subclass of IndependenceTest or an object with the methods block and "
            f"pairs, got {checks.shown(test)}: choose a name, or give the object both methods"
        )
    hint = "a test object has its own data, so give the number of variables in place of the features"
    d = checks.whole("features", features, 1, hint=hint)
    known = getattr(test, "num_variables", d)
    if known != d:
        raise ValueError(
            f"expected the number of variables of the test object, {known}, in place of features, got {d}: give "
            f"rai({known}, test=...)"
        )
    return _Problem(test, np.arange(d), np.arange(d), None, None, None)


def _learn_graph(
    problem: _Problem, order: int | None, again: bool, climb: bool, knowledge: Knowledge | None, budget: Budget
) -> PDAG:
    """The recursion, the second pass where `again` says so, the climb, and copies joined to their originals."""
    d, test, original = len(problem.columns), problem.test, problem.original
    most = d if order is None else min(order, d)
    X = np.flatnonzero(original == np.arange(d))
    start, constraints = pdag.complete_graph(d, X), None
    if knowledge is not None:
        constraints = check_knowledge(knowledge, problem.names, problem.columns, original)
        test, start = constraints.keep(test), constraints.start(start)
    first = min(most, RECURSION_ORDER) if again else most
    A, separations = recursive_autonomy(start, X, np.empty(0, dtype=np.intp), 0, first, test, budget)
    if again:
        skeleton, separations = retest_widely(A, X, separations, most, test, budget)
        A = orient_by_evidence(skeleton, separations, most, test, budget)
    if constraints is not None:
        A = class_of(constraints.extend(A), constraints)
    if climb and most:  # order 0 asks for dependence given nothing: no score does
        A = _climbed(problem, A, X, test, constraints, budget)
    if budget.spent:
        warn(f"the budget was spent after {budget.tests:,} tests: edges not tested stay")
    return PDAG(with_copies(A, original)).permute(np.argsort(problem.columns)).named(problem.names)


def _climbed(
    problem: _Problem, A: Bools, X: Ints, test: Margins, constraints: Constraints | None, budget: Budget
) -> Bools:
    """Where a climb from the graph ends, over as many pairs as it can weigh; the graph itself if it is too dense."""
    data, chosen = problem.data, problem.chosen
    assert data is not None
    assert chosen is not None
    scoring = find_score(chosen.default_score, chosen.kind)
    allowed = pdag.complete_graph(data.d, X)
    unexplained: Callable[[Bools], Bools] | None = None
    if chosen.kind == "discrete":  # each pair is counted anew
        allowed, unexplained = marginally_dependent(data.d, X, test, budget), find_unexplained(X, test, budget)
    if allowed.sum() > MOST_ARROWS:
        allowed, unexplained = A | A.T, None
    if allowed.sum() > MOST_ARROWS:
        return A
    score, growth = cache(scoring.on(data, ESS)), scoring.growth_on(data, ESS)
    return climb_from(A, allowed, unexplained, score, growth, float(np.log(data.d)), budget, constraints)


def recursive_autonomy(
    A: Bools, X: Ints, X_ex: Ints, n: int, max_order: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Plain RAI: Algorithm 1 with one pass instead of s, and the whole graph as its result."""
    if n > max_order or is_leaf(A, X, X_ex, n) or budget.spent:
        return A, pdag.join_separations([])
    A, separations = increase_separation(A, X, X_ex, n, test, budget)
    descendant, ancestors = pdag.find_autonomous(A, X)
    exogenous = np.sort(np.concatenate([X_ex, *ancestors]))
    calls = [(part, X_ex) for part in ancestors] + [(descendant, exogenous)]
    results = [recursive_autonomy(A, part, part_ex, n + 1, max_order, test, budget) for part, part_ex in calls]
    merged = np.logical_and.reduce([graph for graph, _ in results])
    return merged, pdag.join_separations([separations, *(more for _, more in results)])


def find_unexplained(X: Ints, test: Margins, budget: Budget) -> Callable[[Bools], Bools]:
    """From a DAG (d, d) to the pairs of `X` (d, d) that are dependent given the parents of either end.

    Dependences that cancel, such as a direct one and one by another way, show only here and not given nothing.
    """

    @cache  # most parents stay from one DAG to the next
    def dependent(x: int, parents: tuple[int, ...]) -> Ints:
        others = np.setdiff1d(X, [x, *parents])
        if not len(others):
            return others
        budget.count(len(others))
        return np.asarray(others[test.block(parents, np.array([x]), others)[0] > 0])

    def unexplained(dag: Bools) -> Bools:
        pairs = np.zeros(dag.shape, dtype=bool)
        for x in X.tolist():
            parents = tuple(np.flatnonzero(dag[:, x]).tolist())
            if parents and not budget.spent:
                pairs[x, dependent(x, parents)] = True
        return pairs | pairs.T

    return unexplained


def retest_widely(
    A: Bools, X: Ints, separations: Separations, max_order: int, test: Margins, budget: Budget
) -> tuple[Bools, Separations]:
    """Second thoughts about the edges among `X` that the recursion left: no direction is believed any more.

    A weak dependence that an early test misses makes a false v-structure, which hides separating sets from later
    calls. So every remaining edge is tested given each single variable that depends on one of its ends, neighbour or
    not (one such test often does what would take two neighbours), and then given neighbours of either end up to
    `max_order`. Returns the skeleton, and `separations` with what was separated here.
    """
    skeleton = A | A.T
    if max_order < 1:
        return skeleton, separations
    dependent = marginally_dependent(len(A), X, test, budget)
    parts = [separations]
    for n in range(1, max_order + 1):
        candidates = dependent if n == 1 else skeleton
        if n > 1 and skeleton.sum(axis=0).max() <= n:
            break
        skeleton, removed = remove_separated(skeleton, skeleton, candidates, n, test, budget)
        parts.append(removed)
    return skeleton, pdag.join_separations(parts)


def orient_by_evidence(
    skeleton: Bools, separations: Separations, max_order: int, test: Margins, budget: Budget
) -> Bools:
    """Direct the edges of a finished skeleton: v-structures, the surest first, then Meek's rules.

    The ends of each open triple x — z — y are tested given neighbours of either end, and the set that makes them most
    independent says whether z is in the middle. Where none of these sets separates them, the one in
    `separations`, which did, decides: with a perfect oracle every decision is therefore right.
    """
    d = len(skeleton)
    common = (skeleton.astype(np.float32) @ skeleton.astype(np.float32)) > 0
    open_ends = common & ~skeleton & pdag.complete_graph(d)
    evidence = Evidence.none(d)
    for n in range(min(max_order, REPAIR_ORDER) + 1):
        evidence.collect(open_ends, skeleton, n, test, budget)
    evidence.add(separations, open_ends & (evidence.best >= 0), test, budget)
    chosen = evidence.separations(open_ends & (evidence.best < 0))
    x, y = chosen.pairs.T
    return orient_surest_first(skeleton, chosen, np.argsort(evidence.best[x, y], kind="stable"))


def marginally_dependent(d: int, X: Ints, test: Margins, budget: Budget) -> Bools:
    """Says which pairs (d, d) of `X` the test does not call independent given nothing."""
    inside = pdag.complete_graph(d, X)
    evidence = Evidence.none(d)
    evidence.collect(inside, inside, 0, test, budget)
    return inside & (evidence.best >= 0)


def with_copies(A: Bools, original: Ints) -> Bools:
    """The graph with each copy joined to its `original` (d,), as a child that nothing else is joined to.

    The edge itself can be turned unless something already points to the original, as in any such graph.
    """
    copies = np.flatnonzero(original != np.arange(len(A)))
    if not len(copies):
        return A
    A = A.copy()
    A[copies, original[copies]] = A[original[copies], copies] = True
    return pdag.meek(A)
