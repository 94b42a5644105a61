"""From a table of features to a tree: `learn_structure` prepares the data, searches a threshold, and learns."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from brainet_pl._utils import checks
from brainet_pl._utils.warn import warn
from brainet_pl.structure.brai import BRAI, NEIGHBOURS, autonomous_sets, samples_at
from brainet_pl.structure.constraints import Background, Constraints, check_knowledge
from brainet_pl.structure.copies import find_copies, tree_with_copies
from brainet_pl.structure.data import Path, PreparedData, TableData, column_names
from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.ggt import GGT, Branch, Leaf, Node, Tree
from brainet_pl.structure.independence import IndependenceTest, Margins
from brainet_pl.structure.pdag import Bools, complete_graph
from brainet_pl.structure.score import LocalScore, Score, find_score
from brainet_pl.structure.settings import AUTO, StructureSettings, choose_test, warn_of_few_rows
from brainet_pl.structure.statistics import bootstrap_weights, half_weights
from brainet_pl.structure.stream import learn_together
from brainet_pl.structure.threshold import AtThreshold, Choice, choose_threshold, search_paths, searched_variables

MATRICES = 32  # of (d, d) numbers of 64 bits: 21 to 24 were measured, docs/howto/machines.md
LEAF_BYTES = 4096  # of a variable in a leaf, with the scores that are kept of it
CONTAINER = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"  # Linux, versions 2 and 1
SEARCH_SHARE, TEST_SHARE = 0.5, 0.85  # of max_seconds, until a threshold is chosen and until the last test is begun
LEAF_PARENTS = 64  # of a variable: a score of hundreds of parents costs most of the time and says nothing


def learn_structure(
    features: Any,
    settings: StructureSettings | None = None,
    *,
    knowledge: Background | None = None,
    progress: bool = True,
    **changes: Any,
) -> GGT:
    """Learn many structures of `features` and couple them into a scored tree (Algorithm 1).

    The result depends on the content of `features` alone: not on the order of rows or columns, which are renumbered
    consistently, nor on the number of threads.

    Args:
        features: An array or tensor (N, d), a data frame, whose names the tree then has, or a `FeatureStream` of
            batches that are never held. Integer columns with at most 16 levels are categories; all others are binned
            for the discrete tests and rank-normalised for the Gaussian ones.
        settings: All settings in one object. None: the defaults of `StructureSettings`, which describes each of them.
        knowledge: Arrows that must or must not be there in every network of the tree, and the order of groups of
            variables in time.
        progress: Whether to show a bar with the numbers of tests and leaves when it takes longer than a second.
        changes: Settings of `StructureSettings` by name, such as `s=2`, in place of those of `settings`.

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
    chosen = replace(StructureSettings() if settings is None else settings, **changes)
    show, began = checks.flag("progress", progress), time.monotonic()
    return learn_together(
        features, chosen.bins, chosen.max_rows, lambda data: _learn_tree(data, chosen, knowledge, show, began)
    )


def _learn_tree(
    features: Any, settings: StructureSettings, knowledge: Background | None, show: bool, began: float
) -> GGT:
    """`learn_structure` in one process; `began` is when it was called, by `time.monotonic`."""
    names = column_names(features)
    data = PreparedData.prepare(features, settings.bins, settings.max_rows)
    check_memory(data, settings.samples)
    warn_of_few_rows(data)
    with tqdm(desc="learning structure", unit=" tests", disable=None if show else True, delay=1, leave=False) as bar:
        prepared = _prepare(data, settings, knowledge, names)
        leaves = _LeafCount(bar)
        # One clock for all, from the call on; the search may take half of the time, so that some is left for the tree.
        search = _budget(settings, SEARCH_SHARE, bar, began)
        choice, threshold, stopped_early = None, prepared.threshold, False
        if prepared.half_samples:
            bar.set_description("choosing a threshold")
            choice = _search(prepared, search)
            stopped_early = search.spent
            threshold = threshold if choice.threshold is None else choice.threshold
            bar.set_description("learning structure")
        budget = _budget(settings, TEST_SHARE, bar, began)
        learner = _learner(prepared, threshold, budget, leaves.add)
        tree = tree_with_copies(learner.learn(data.d, prepared.variables), prepared.original, learner.score)
    cut_short, tests = learner.cut_short or stopped_early, search.tests + budget.tests
    if cut_short:
        warn(
            f"the budget was spent after {tests:,} tests: the tree is valid but smaller than the "
            f"data would give ({leaves.count} leaves); raise max_tests or max_seconds, or lower max_order"
        )
    record = _record(prepared, threshold, choice) | {"tests": tests, "cut_short": cut_short}
    if knowledge is not None:
        record["knowledge"] = knowledge.to_dict()
    return GGT(_rename(tree, data.columns), data.d, data.n, record, names)


def _budget(settings: StructureSettings, share: float, bar: tqdm[Any], began: float) -> Budget:
    """The tests that may be made, and a share of the time."""
    seconds = None if settings.max_seconds is None else settings.max_seconds * share
    return Budget(settings.max_tests, seconds, bar.update, start=began)


class _LeafCount:
    """Counts leaves and shows their number beside the bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self.bar, self.count = bar, 0

    def add(self) -> None:
        """One leaf more."""
        self.count += 1
        self.bar.set_postfix(leaves=self.count, refresh=self.count % 64 == 1)  # drawing takes longer than a leaf


def _record(prepared: _Prepared, threshold: float, choice: Choice | None) -> dict[str, Any]:
    """What a tree remembers of how it was learned."""
    settings = prepared.settings
    record: dict[str, Any] = {
        "s": settings.samples[0] if len(set(settings.samples)) == 1 else list(settings.samples),
        "max_order": settings.max_order,
        "test": prepared.test.name,
        "threshold": threshold,
        "bootstrap": settings.bootstrap,
        "bins": settings.bins,
        "score": prepared.scoring.name,
        "ess": settings.ess,
        "seed": settings.seed,
        "max_rows": settings.max_rows,
        "data": prepared.data.digest,
    }
    if choice is not None:
        record |= {"threshold_by": AUTO, "modularity": choice.modularity, "thresholds_tried": len(choice.tried)}
    return record


@dataclass(frozen=True)
class _Prepared:
    """Data and settings, with all that is decided before the first test."""

    data: PreparedData
    settings: StructureSettings
    test: type[IndependenceTest]
    scoring: type[Score]
    threshold: float  # the one that was given, or the test's own
    half_samples: dict[Path, IndependenceTest]  # on which thresholds are compared; empty where none is searched
    on_all_rows: IndependenceTest | None  # the test on all rows, where it is needed
    original: NDArray[np.intp]  # (d,) for each column the first one that determines it and is determined by it
    constraints: Constraints | None  # what is known before the data

    @property
    def variables(self) -> NDArray[np.intp]:
        """The columns that are no copies of others."""
        return np.flatnonzero(self.original == np.arange(self.data.d))


def _prepare(
    data: PreparedData, settings: StructureSettings, knowledge: Background | None, names: tuple[str, ...] | None
) -> _Prepared:
    """Choose test, score and threshold, announce all samples that will be asked for, and find copies of columns."""
    order, as_in_paper = settings.max_order, settings.as_in_paper
    test = choose_test(settings.test, data)
    scoring = find_score(test.default_score if settings.score is None else settings.score, test.kind)
    threshold = test.check_threshold(settings.given_threshold, data.d)
    _check_depth(threshold, settings, data.d)
    depth = 2 if order is None else order + 1
    searched = search_paths(data.d, depth) if settings.threshold == AUTO and test.unit == "nats" else []
    data.announce(_samples(data.n, settings, depth, searched))
    on_all_rows = None if as_in_paper and not searched else test.on(data, None, threshold)
    original = np.arange(data.d) if as_in_paper or threshold == 0 else find_copies(data, test.kind)
    half_samples = {path: test.on(data, half_weights(data.n, settings.seed, path), threshold) for path in searched}
    known = None if knowledge is None else check_knowledge(knowledge, names, data.columns, original)
    return _Prepared(data, settings, test, scoring, threshold, half_samples, on_all_rows, original, known)


def _check_depth(threshold: float, settings: StructureSettings, d: int) -> None:
    if threshold == 0 and settings.max_order is None:
        raise ValueError(
            "expected a max_order when threshold is 0, got None: nothing is ever separated, so the tree would have "
            f"{max(settings.samples)}^{d} leaves; set max_order=1 for {settings.samples[0]} stacked networks"
        )


def _samples(n: int, settings: StructureSettings, depth: int, searched: list[Path]) -> Iterator[NDArray[np.int64]]:
    """The samples of n rows that will be asked for, as row weights (n,): for the search of a threshold, then the tree.

    A threshold is looked for in what is sure, whatever the tree is then learned from; half samples serve both.
    """
    for path in searched:
        yield half_weights(n, settings.seed, path)
    draw = bootstrap_weights if settings.as_in_paper else half_weights
    for path in sample_paths(settings.samples, depth):
        if settings.as_in_paper or path not in searched:
            yield draw(n, settings.seed, path)


def _search(prepared: _Prepared, budget: Budget) -> Choice:
    """The threshold at which the variables fall apart best; when the budget is spent, no further one is tried.

    Of many variables some are looked at: a search over all would take many times as long as the tree itself.
    """
    tests, X = prepared.half_samples, searched_variables(prepared.variables, prepared.settings.seed)
    assert prepared.on_all_rows is not None
    information = prepared.on_all_rows.block((), X, X) + prepared.threshold  # (x, x), in nats
    order, every = max(map(len, tests)) - 1, np.arange(len(X))

    def split(threshold: float) -> list[list[NDArray[np.intp]]]:
        def at(path: Path) -> Margins:
            return AtThreshold(tests[path], prepared.threshold, threshold, X)

        samples = [path[0] for path in tests if len(path) == 1]
        return [autonomous_sets(len(X), every, order, at, budget, t) for t in samples]

    return choose_threshold(information, split, lambda: budget.spent)


def _learner(prepared: _Prepared, threshold: float, budget: Budget, on_leaf: Callable[[], None]) -> BRAI:
    """The recursion over canonical columns: the paper's to the letter, or with what makes it better."""
    data, settings = prepared.data, prepared.settings

    def test_on(path: Path) -> Margins:
        test = _test_on_sample(prepared, threshold, path)
        return test if prepared.constraints is None else prepared.constraints.keep(test)

    # A score is not misled by repeated rows as a test is: a parent more costs it the logarithm of their number.
    @lru_cache(maxsize=4)  # leaves of one path follow each other
    def score_on(path: Path) -> LocalScore:
        sample = data.resampled(bootstrap_weights(data.n, settings.seed, path))
        return cache(prepared.scoring.on(sample, settings.ess))

    more: dict[str, Any] = {}
    if not settings.as_in_paper:
        more = {
            "check_colliders": True,
            "most_parents": LEAF_PARENTS,
            "strength": getattr(prepared.on_all_rows, "strength", None),
            "dependent": _dependent(prepared.on_all_rows, data.d, budget),
            "score_on": score_on,
            "num_neighbours": 0 if threshold == 0 else NEIGHBOURS,
        }
    return BRAI(
        s=settings.samples,
        max_order=data.d if settings.max_order is None else min(settings.max_order, data.d),
        test_on=test_on,
        score=cache(prepared.scoring.on(data, settings.ess)),
        budget=budget,
        on_leaf=on_leaf,
        constraints=prepared.constraints,
        **more,
    )


def _test_on_sample(prepared: _Prepared, threshold: float, path: Path) -> Margins:
    """The test on the sample of a path, at the threshold that was chosen."""
    data, as_in_paper = prepared.data, prepared.settings.as_in_paper
    if not as_in_paper and path in prepared.half_samples:
        return AtThreshold(prepared.half_samples[path], prepared.threshold, threshold)
    draw = bootstrap_weights if as_in_paper else half_weights
    test = prepared.test.on(data, draw(data.n, prepared.settings.seed, path), threshold)
    test.capped = not as_in_paper
    return test


def sample_paths(s: tuple[int, ...], depth: int) -> Iterator[Path]:
    """Paths of the samples that a tree of at most this depth asks for, in the order in which `BRAI` does."""
    for length in range(1, depth + 1):
        yield from product(*(range(samples_at(s, level)) for level in range(length)))


def check_memory(data: PreparedData, s: tuple[int, ...]) -> None:
    """Refuse more features than the memory of this machine has room for, before a day of work ends in a MemoryError.

    The estimate is at least what is needed, and less than twice that. A stream holds no rows.
    """
    d, rows = data.d, data.n if isinstance(data, TableData) else 0
    leaves = samples_at(s, 0) * samples_at(s, 1)  # deeper ones have fewer variables
    needed, there = 8 * (MATRICES * d * d + rows * d) + LEAF_BYTES * leaves * d, physical_memory()
    if there is not None and needed > there:
        raise ValueError(
            f"expected at most {math.isqrt(there // (8 * MATRICES)):,} features, whose {MATRICES} matrices of "
            f"(features, features) fit into the {there / 2**30:.0f} GiB of this machine, got {d:,} of {data.n:,} "
            f"samples, which take {needed / 2**30:.0f} GiB with s={s[0]}: give the features of a backbone in place of "
            "raw inputs, choose the columns that tell the target most, or project them, as "
            "sklearn.decomposition.PCA does"
        )


def physical_memory() -> int | None:
    """Bytes of memory of this machine, or of the container that this process may not leave; None where unknown."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for file in CONTAINER:
        with contextlib.suppress(OSError, ValueError):  # none there, or the word "max"
            there = min(there, int(pathlib.Path(file).read_text()))
    return there


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
    variables = columns[list(node.variables)]
    if isinstance(node, Leaf):
        order = np.argsort(variables)
        parents = [tuple(np.sort(columns[list(node.parents[i])]).tolist()) for i in order]
        neighbours = [tuple(columns[list(node.neighbours[i])].tolist()) for i in order] if node.neighbours else []
        return Leaf(tuple(variables[order].tolist()), tuple(parents), node.score, tuple(neighbours))
    branches = []
    for branch in node.branches:
        ancestors = sorted((_rename(a, columns) for a in branch.ancestors), key=lambda tree: tree.variables)
        branches.append(Branch(tuple(ancestors), _rename(branch.descendant, columns)))
    return Node(tuple(np.sort(variables).tolist()), tuple(branches))
