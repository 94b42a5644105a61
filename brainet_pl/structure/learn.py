"""From a table of features to a tree (`learn_structure`) or to one graph (`rai`): checks, preparation, progress."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from brainet_pl._utils import checks
from brainet_pl.structure.autonomy import (
    Budget,
    Unexplained,
    marginally_dependent,
    orient_by_evidence,
    recursive_autonomy,
    retest_widely,
)
from brainet_pl.structure.brai import BRAI, NEIGHBOURS, autonomous_sets, samples_at
from brainet_pl.structure.climb import MOST_ARROWS, climb_from
from brainet_pl.structure.copies import find_copies, tree_with_copies, with_copies
from brainet_pl.structure.data import Path, PreparedData, are_categories
from brainet_pl.structure.discretize import check_bins
from brainet_pl.structure.ggt import GGT, Branch, Leaf, Node, Tree
from brainet_pl.structure.independence import IndependenceTest, Margins, find_test
from brainet_pl.structure.pdag import PDAG, Bools, complete_graph
from brainet_pl.structure.score import FamilyScore, LocalScore, Score, find_score
from brainet_pl.structure.statistics import bootstrap_weights, half_weights
from brainet_pl.structure.stream import shared_by_processes
from brainet_pl.structure.threshold import Choice, at_threshold, choose_threshold, search_paths

Bootstrap = Literal["half", "paper"]
AUTO: Literal["auto"] = (
    "auto"  # as a test: the one that belongs to the data; as a threshold: the one that splits it best
)
SAMPLES = (4, 1)  # of the root, and of the nodes below it
MOST_SAMPLES = 1000  # samples of a node; a tree of more would not fit anywhere
LEAF_PARENTS = 64  # of a variable: a score of hundreds of parents costs most of the time and says nothing
RAI_ESS = 5.0  # weight of the prior in the climb of `rai`: better than 1 or 10 on most networks at 500 rows
RECURSION_ORDER = 1  # of plain RAI before the second pass takes over: later calls find little and cost most


@shared_by_processes
def learn_structure(
    features: Any,
    *,
    s: int | Sequence[int] = SAMPLES,
    max_order: int | None = 1,
    test: str | type[IndependenceTest] = AUTO,
    threshold: float | Literal["auto"] | None = AUTO,
    bootstrap: Bootstrap = "half",
    bins: int = 3,
    score: str | type[Score] | None = None,
    ess: float = 1.0,
    seed: int = 0,
    max_rows: int | None = None,
    max_tests: int | None = None,
    max_seconds: float | None = None,
    progress: bool = True,
) -> GGT:
    """Learn many structures of `features` and couple them into a scored tree (Algorithm 1).

    The result depends on the content of `features` alone: not on the order of rows or columns, which are renumbered
    consistently, nor on the number of threads.

    Args:
        features: (N, d) array or tensor, or a `FeatureStream` of batches that are never held. Integer columns with at
            most 16 levels are categories; all others are binned for the discrete tests and rank-normalised for the
            Gaussian ones.
        s: samples, and so branches, at every node, as in the paper; or a list of those of the root, of the nodes below
            it, and so on, the last for all that are deeper. (4, 1) is four whole structures; 1 gives a single one.
        max_order: largest condition set; the depth of the tree is at most `max_order + 1`. None: no limit.
        test: the name of a test, or a subclass of `IndependenceTest`. "cmi" and "gaussian" compare (conditional) mutual
            information in nats with `threshold`; "g2" and "fisher_z" are significance tests at level `threshold`. The
            first of each pair is discrete. "auto" is "g2" for a table of categories, "gaussian" for any other.
        threshold: of the test, in its unit. "auto" is the threshold, of a grid, at which the variables fall apart into
            the sets of largest modularity (see `structure.threshold`); it needs no labels. A significance test has its
            own level instead. None is the test's own: 0.02 nats for "cmi", 0.05 nats for "gaussian", the level 0.01 for
            "g2" and for "fisher_z", where it falls with the number of pairs: 2 / d(d - 1) for more than 14 variables. 0
            nats keep every edge: the tree becomes an ensemble of s branches a level over all variables.
        bootstrap: "half" draws half of the rows for each sample, believes a v-structure only if its ends compete, and
            with a significance test lets the score choose among the parents that a leaf could have. "paper" is
            Algorithm 1 to the letter: rows drawn with replacement, and no second thoughts. Its repeated rows look like
            dependence to a test, so its structures have many edges too many.
        bins: levels of a continuous column in the discrete tests and scores, from 2 to 256.
        score: "bdeu" (discrete), "bge" (Gaussian), "bic" (in the form of the test's kind), or a subclass of `Score`;
            None is the one that belongs to the test.
        ess: equivalent sample size of BDeu, weight of the prior of BGe.
        seed: of the random samples of rows.
        max_rows: learn from a random sample of at most this many rows. None: from all.
        max_tests: number of tests after which what is open becomes a leaf, with a warning. None: no limit.
        max_seconds: time after which what is open becomes a leaf, with a warning. None: no limit.
        progress: show a bar with the numbers of tests and leaves when it takes longer than a second.

    Example:
        Two copies of a coin, and a coin of its own: the first two depend on each other, the third on neither.

        >>> import numpy as np
        >>> coins = np.random.default_rng(0).integers(0, 2, size=(100, 2))
        >>> ggt = learn_structure(coins[:, [0, 0, 1]], progress=False)
        >>> ggt.num_subnetworks
        4
        >>> ggt.dag(ggt.map()).astype(int).tolist()
        [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    """
    samples = check_samples(s)
    order = _check_order(max_order)
    as_in_paper = _check_bootstrap(bootstrap) == "paper"
    bins, max_rows = check_bins(bins), _check_rows(max_rows)
    ess = checks.number("ess", ess, 1e-12, hint="it is the weight of the score's prior; 1 is common")
    seed = checks.whole("seed", seed, 0, hint="any number from 0 on will do")
    show = checks.flag("progress", progress)
    limits = _check_budget(max_tests, max_seconds)
    given = _given(threshold)
    if test != AUTO:
        find_test(test).check_threshold(given)  # before the data is looked at, which may take a while
    data = PreparedData.prepare(features, bins, max_rows)
    _warn_of_few_rows(data)
    chosen = choose_test(test, data)
    scoring = find_score(chosen.default_score if score is None else score, chosen.kind)
    searched = isinstance(threshold, str) and chosen.unit == "nats"  # of all words only "auto" comes as far as here
    threshold = chosen.check_threshold(given, data.d)
    if threshold == 0 and order is None:
        raise ValueError(
            "expected a max_order when threshold is 0, got None: nothing is ever separated, so the tree would have "
            f"{max(samples)}^{data.d} leaves; set max_order=1 for an ensemble of {samples[0]} stacked networks"
        )
    draw = bootstrap_weights if as_in_paper else half_weights
    depth = 2 if order is None else order + 1
    looked_at = search_paths(data.d, depth) if searched else []
    # A threshold is looked for in what is sure, whatever the tree is then learned from; half samples serve both.
    shared = [] if as_in_paper else looked_at
    data.announce(
        chain(
            (half_weights(data.n, seed, path) for path in looked_at),
            (draw(data.n, seed, path) for path in sample_paths(samples, depth) if path not in shared),
        )
    )
    own = threshold
    on_all = None if as_in_paper and not searched else chosen.on(data, None, own)
    original = np.arange(data.d) if as_in_paper or threshold == 0 else find_copies(data, chosen.kind)
    alone = np.flatnonzero(original == np.arange(data.d))
    with tqdm(desc="learning structure", unit=" tests", disable=None if show else True, delay=1, leave=False) as bar:
        leaves = 0
        search, choice = Budget(*limits, bar.update), None
        held: dict[Path, IndependenceTest] = {}
        if searched:
            bar.set_description("choosing a threshold")
            held = {path: chosen.on(data, half_weights(data.n, seed, path), own) for path in looked_at}
            assert on_all is not None
            choice = _search(on_all.block((), alone, alone) + own, data.d, alone, held, own, search)
            threshold = own if choice.threshold is None else choice.threshold
            bar.set_description("learning structure")

        def test_on(path: Path) -> Margins:
            if path in shared:
                return at_threshold(held[path], own, threshold)
            test = chosen.on(data, draw(data.n, seed, path), threshold)
            test.capped = not as_in_paper
            return test

        def on_leaf() -> None:
            nonlocal leaves
            leaves += 1
            bar.set_postfix(leaves=leaves, refresh=leaves % 64 == 1)  # drawing the bar takes longer than a leaf

        budget = Budget(*limits, bar.update)
        learner = BRAI(
            s=samples,
            max_order=data.d if order is None else min(order, data.d),
            test_on=test_on,
            score=FamilyScore(scoring.on(data, ess)),
            budget=budget,
            check_colliders=not as_in_paper,
            most_parents=None if as_in_paper else LEAF_PARENTS,
            strength=None if as_in_paper else getattr(on_all, "strength", None),
            dependent=None if as_in_paper else _dependent(on_all, data.d, budget),
            score_on=_score_on_samples(scoring, data, ess, seed),
            num_neighbours=0 if as_in_paper or threshold == 0 else NEIGHBOURS,
            on_leaf=on_leaf,
        )
        tree = learner.learn(data.d, alone)
        tree = tree_with_copies(tree, original, learner.score)
    if learner.cut_short or search.spent:
        warnings.warn(
            f"the budget was spent after {search.tests + budget.tests:,} tests: the tree is valid but smaller than the "
            f"data would give ({leaves} leaves); raise max_tests or max_seconds, or lower max_order",
            stacklevel=2,
        )
    settings = {
        "s": samples[0] if len(set(samples)) == 1 else list(samples),
        "max_order": order,
        "test": chosen.name,
        "threshold": threshold,
        "bootstrap": bootstrap,
        "bins": bins,
        "score": scoring.name,
        "ess": ess,
        "seed": seed,
        "max_rows": max_rows,
        "tests": search.tests + budget.tests,
        "cut_short": learner.cut_short or search.spent,
        "data": data.digest,
    }
    if choice is not None:
        settings |= {"threshold_by": AUTO, "modularity": choice.modularity, "thresholds_tried": len(choice.tried)}
    return GGT(_rename(tree, data.columns), data.d, data.n, settings)


@shared_by_processes
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
) -> PDAG:
    """Learn one structure by recursive autonomy identification, without bootstrap.

    The recursion thins the complete graph; a second pass tests what is left without believing any direction, and
    directs it; then greedy steps of the test's score begin where the tests ended. With a perfect oracle and no limit on
    the order the result is the equivalence class of the true graph; where a limit, such as the default 3, is below the
    size of some separating set, as in dense graphs, the edge stays.

    Columns that determine each other are tested as one, and joined to the first of them afterwards.

    Args:
        features: (N, d) array, tensor or `FeatureStream`, as in `learn_structure`; with a test object, the number of
            variables d.
        test: the name of a test or a subclass of `IndependenceTest`, as in `learn_structure`; or an object with the
            methods `block` and `pairs`, such as `DSeparation`. "auto" is "g2" for a table of categories and "fisher_z"
            for any other: a graph should have the weak edges too, which a tree for a network is better without.
        threshold: of the test, in its unit; None is the test's own, as in `learn_structure`. A test object brings its
            own.
        max_order: largest condition set. None: no limit.
        bins: levels of a continuous column in the discrete tests, from 2 to 256.
        max_rows: learn from a random sample of at most this many rows. None: from all.
        max_tests: number of tests after which the edges left stay, with a warning. None: no limit.
        max_seconds: time after which the edges left stay, with a warning. None: no limit.
        second_pass: test the edges that the recursion leaves once more, first given every single variable that depends
            on one of their ends, then given neighbours, and orient anew; False gives the recursion's own graph.
        climb: after the second pass, take greedy steps of the test's score, each edge at a cost of log d nats. None:
            for significance tests only, because a threshold in nats asks for strong edges, and a score for all that
            the data support. A test object has no data to score.

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
    order = _check_order(max_order)
    bins, max_rows = check_bins(bins), _check_rows(max_rows)
    again = checks.flag("second_pass", second_pass)
    climbing = None if climb is None else checks.flag("climb", climb)
    budget = Budget(*_check_budget(max_tests, max_seconds))
    tester: Margins
    score: FamilyScore | None = None
    if isinstance(test, str | type):
        data = PreparedData.prepare(features, bins, max_rows)
        _warn_of_few_rows(data)
        chosen = choose_test(test, data, "fisher_z")
        threshold = chosen.check_threshold(threshold, data.d)
        columns, d = data.columns, data.d
        original = find_copies(data, chosen.kind)
        tester = chosen.on(data, None, threshold)
        if again and (chosen.unit == "significance level" if climbing is None else climbing):
            score = FamilyScore(find_score(chosen.default_score, chosen.kind).on(data, RAI_ESS))
    else:
        tester, d = _check_object(test), _check_variables(features)
        for name, value in (("threshold", threshold), ("max_rows", max_rows), ("climb", climbing or None)):
            if value is not None:
                raise ValueError(
                    f"expected no {name} beside a test object, got {value}: the object decides on its own; drop {name}"
                )
        columns = original = np.arange(d)
        known = getattr(test, "num_variables", d)
        if known != d:
            raise ValueError(
                f"expected the number of variables of the test object, {known}, in place of features, got {d}: give "
                f"rai({known}, test=...)"
            )
    most = d if order is None else min(order, d)
    nothing = np.empty(0, dtype=np.intp)
    first = min(most, RECURSION_ORDER) if again else most
    X = np.flatnonzero(original == np.arange(d))
    start = np.zeros((d, d), dtype=bool)
    start[np.ix_(X, X)] = complete_graph(len(X))
    A, found = recursive_autonomy(start, X, nothing, 0, first, tester, budget)
    if again:
        skeleton, found = retest_widely(A, X, found, most, tester, budget)
        A = orient_by_evidence(skeleton, found, most, tester, budget)
    if score is not None and most:  # order 0 asks for dependence given nothing, which no score looks for
        allowed = marginally_dependent(d, X, tester, budget)
        unexplained: Callable[[Bools], Bools] = Unexplained(X, tester, budget)
        if allowed.sum() > MOST_ARROWS:
            allowed, unexplained = A | A.T, _nothing_more
        if allowed.sum() <= MOST_ARROWS:
            A = climb_from(A, allowed, unexplained, score, float(np.log(d)), budget)
    A = with_copies(A, original)
    if budget.spent:
        warnings.warn(f"the budget was spent after {budget.tests:,} tests: edges not tested stay", stacklevel=2)
    return PDAG(A).permute(np.argsort(columns))


def _search(
    information: NDArray[np.float64],
    d: int,
    X: NDArray[np.intp],
    tests: Mapping[Path, IndependenceTest],
    own: float,
    budget: Budget,
) -> Choice:
    """The threshold at which `X`, some of d variables, falls apart best.

    Args:
        information: (x, x) of the pairs of X, in nats.
        d: the number of all variables.
        X: (x,) the variables that count.
        tests: a test in nats with its `own` threshold on the sample of each of `search_paths`.
        own: that threshold.
        budget: when spent, no further threshold is tried.
    """
    order = max(map(len, tests)) - 1
    place = np.full(d, -1)
    place[X] = np.arange(len(X))

    def split(threshold: float) -> list[list[NDArray[np.intp]]]:
        def at(path: Path) -> Margins:
            return at_threshold(tests[path], own, threshold)

        samples = [path[0] for path in tests if len(path) == 1]
        sets = (autonomous_sets(d, X, order, at, budget, t) for t in samples)
        return [[place[found] for found in one] for one in sets]

    return choose_threshold(information, split, lambda: budget.spent)


def _score_on_samples(scoring: type[Score], data: PreparedData, ess: float, seed: int) -> Callable[[Path], LocalScore]:
    """The score on the bootstrap sample of a path; on all rows where a score knows no samples.

    A score is not misled by repeated rows as a test is: a parent more costs it the logarithm of their number.
    """

    @lru_cache(maxsize=4)  # leaves of one path follow each other
    def score_on(path: Path) -> LocalScore:
        local = scoring.on_sample(data, ess, bootstrap_weights(data.n, seed, path))
        return FamilyScore(scoring.on(data, ess) if local is None else local)

    return score_on


def _warn_of_few_rows(data: PreparedData) -> None:
    if data.n < data.d:
        warnings.warn(
            f"expected more rows than columns, got {data.n:,} rows of {data.d:,}: much that is found will be chance; "
            "give more rows, or fewer features",
            stacklevel=4,  # past the decorator of the caller
        )


def _nothing_more(dag: Bools) -> Bools:
    """No further pairs (d, d) to join."""
    return np.zeros_like(dag)


def choose_test(
    test: str | type[IndependenceTest], data: PreparedData | NDArray[Any], of_numbers: str = "gaussian"
) -> type[IndependenceTest]:
    """The test of a name or class; "auto" looks at the data, prepared or as a table (N, d)."""
    if isinstance(test, str) and test == AUTO:
        categories = data.only_categories if isinstance(data, PreparedData) else are_categories(data)
        return find_test("g2" if categories else of_numbers)
    return find_test(test)


def check_samples(s: Any) -> tuple[int, ...]:
    """The samples of the nodes of each level, from a number for all or a list.

    >>> check_samples(2), check_samples([4, 1])
    ((2,), (4, 1))
    """
    hint = "it is the number of samples of a node; 1 gives a single structure"
    if not isinstance(s, Sequence) or isinstance(s, str):
        return (checks.whole("s", s, 1, MOST_SAMPLES, hint=hint),)
    if not s:
        raise ValueError(f"expected s to have a number for the root, got an empty list: {hint}")
    return tuple(checks.whole("s", value, 1, MOST_SAMPLES, hint=hint) for value in s)


def sample_paths(s: tuple[int, ...], depth: int) -> Iterator[Path]:
    """Paths of the samples that a tree of at most this depth asks for, in the order in which `BRAI` does."""
    for length in range(1, depth + 1):
        yield from product(*(range(samples_at(s, level)) for level in range(length)))


def _dependent(test: IndependenceTest | None, d: int, budget: Budget) -> Bools | None:
    """(d, d) the pairs that depend on each other in all rows, for a significance test.

    None for a threshold in nats: it leaves weak dependences out on purpose, and the score would bring them back.
    """
    if test is None or test.unit == "nats":
        return None
    everything = np.arange(d)
    budget.count(d * (d - 1) // 2)
    return (test.block((), everything, everything) >= 0) & complete_graph(d)


def _rename(node: Tree, columns: NDArray[np.intp]) -> Tree:
    """From canonical column numbers to the user's; variables sorted, so that the form does not depend on the order."""
    if isinstance(node, Leaf):
        names = [int(columns[v]) for v in node.variables]
        parents = {x: tuple(sorted(int(columns[p]) for p in pa)) for x, pa in zip(names, node.parents, strict=True)}
        near = {x: tuple(int(columns[v]) for v in found) for x, found in zip(names, node.neighbours, strict=False)}
        names.sort()
        neighbours = tuple(near[x] for x in names if near)
        return Leaf(tuple(names), tuple(parents[x] for x in names), node.score, neighbours)
    branches = []
    for branch in node.branches:
        ancestors = sorted((_rename(a, columns) for a in branch.ancestors), key=lambda tree: tree.variables)
        branches.append(Branch(tuple(ancestors), _rename(branch.descendant, columns)))
    return Node(tuple(sorted(int(columns[v]) for v in node.variables)), tuple(branches))


def _given(threshold: float | Literal["auto"] | None) -> float | None:
    """What a test can check of a threshold: "auto" is none, any other word is for the test to refuse."""
    return None if isinstance(threshold, str) and threshold == AUTO else threshold


def _check_order(max_order: int | None) -> int | None:
    return checks.whole_or_none(
        "max_order", max_order, 0, "it is the size of the largest condition set; None: no limit"
    )


def _check_rows(max_rows: int | None) -> int | None:
    return checks.whole_or_none("max_rows", max_rows, 2, "dependence can't be seen in fewer; None learns from all rows")


def _check_bootstrap(bootstrap: str) -> str:
    if bootstrap not in get_args(Bootstrap):
        raise ValueError(
            f"expected bootstrap to be one of {', '.join(get_args(Bootstrap))}, got {checks.shown(bootstrap)}: half is "
            "the better one, paper is Algorithm 1 to the letter"
        )
    return bootstrap


def _check_budget(max_tests: int | None, max_seconds: float | None) -> tuple[int | None, float | None]:
    tests = checks.whole_or_none("max_tests", max_tests, 0, "None sets no limit")
    return tests, checks.number_or_none("max_seconds", max_seconds, 0, "None sets no limit")


def _check_object(test: Any) -> Margins:
    if not (callable(getattr(test, "block", None)) and callable(getattr(test, "pairs", None))):
        raise ValueError(
            f"expected test to be a name, a subclass of IndependenceTest or an object with the methods block and "
            f"pairs, got {checks.shown(test)}: choose a name, or give the object both methods"
        )
    tester: Margins = test
    return tester


def _check_variables(features: Any) -> int:
    hint = "a test object has its own data, so give the number of variables in place of the features"
    return checks.whole("features", features, 1, hint=hint)


def check_settings(
    *,
    s: int | Sequence[int],
    max_order: int | None,
    test: str | type[IndependenceTest],
    threshold: float | Literal["auto"] | None,
    bootstrap: Bootstrap,
    bins: int,
    score: str | type[Score] | None,
    ess: float,
    seed: int,
    max_rows: int | None,
    max_tests: int | None,
    max_seconds: float | None,
) -> None:
    """Refuse settings of `learn_structure` that it would refuse, without data."""
    given = _given(threshold)
    if test == AUTO:  # which it is, and so what a threshold means, is known once there is data
        checks.number_or_none("threshold", given, 0, "None is the test's own, 'auto' looks for the best")
    else:
        chosen = find_test(test)
        find_score(chosen.default_score if score is None else score, chosen.kind)
        chosen.check_threshold(given)
    check_samples(s)
    _check_order(max_order)
    _check_bootstrap(bootstrap)
    check_bins(bins)
    _check_rows(max_rows)
    checks.number("ess", ess, 1e-12, hint="it is the weight of the score's prior; 1 is common")
    checks.whole("seed", seed, 0, hint="any number from 0 on will do")
    _check_budget(max_tests, max_seconds)
