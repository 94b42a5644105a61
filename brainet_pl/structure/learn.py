"""From a table of features to a tree (`learn_structure`) or to one graph (`rai`): checks, preparation, progress."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from brainet_pl.structure.brai import BRAI, Path
from brainet_pl.structure.canonical import CanonicalOrder, canonical_order
from brainet_pl.structure.discretize import discretize, normal_scores
from brainet_pl.structure.ggt import GGT, Branch, Leaf, Node, Tree
from brainet_pl.structure.independence import (
    ConditionalMutualInformation,
    FisherZ,
    GSquare,
    IndependenceTest,
    PartialCorrelation,
)
from brainet_pl.structure.pdag import PDAG, complete_graph
from brainet_pl.structure.rai import Budget, recursive_autonomy, repair
from brainet_pl.structure.score import FamilyScore, LocalScore, bdeu, bge, discrete_bic, gaussian_bic
from brainet_pl.structure.statistics import CodeTable, CountSample, bootstrap_weights, correlation

TestName = Literal["cmi", "g2", "gaussian", "fisher_z"]
ScoreName = Literal["bdeu", "bic", "bge"]
Weights = NDArray[np.int64]

# Information thresholds are in nats, the others are significance levels.
DEFAULT_THRESHOLD: dict[str, float] = {"cmi": 0.02, "g2": 0.05, "gaussian": 0.05, "fisher_z": 0.05}
DEFAULT_SCORE: dict[str, ScoreName] = {"cmi": "bdeu", "g2": "bdeu", "gaussian": "bge", "fisher_z": "bge"}
RECURSION_ORDER = 2  # of plain RAI before `repair` takes over: later calls find little and cost most


def learn_structure(
    features: Any,
    *,
    s: int = 2,
    max_order: int | None = 1,
    test: TestName = "cmi",
    threshold: float | None = None,
    bins: int = 3,
    score: ScoreName | None = None,
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
        features: (N, d) array or tensor. Integer columns with at most 16 levels are categories; all others are binned
            for the discrete tests and rank-normalised for the Gaussian ones.
        s: bootstrap samples at every node; 1 gives a single structure.
        max_order: largest condition set; the depth of the tree is at most `max_order + 1`. None: no limit.
        test: "cmi" and "gaussian" compare (conditional) mutual information in nats with `threshold`; "g2" and
            "fisher_z" are significance tests at level `threshold`. The first of each pair is discrete.
        threshold: None is 0.02 nats for "cmi", 0.05 for the others. 0 keeps every edge: the tree becomes an ensemble of
            s branches a level over all variables.
        bins: levels of a continuous column in the discrete tests and scores.
        score: "bdeu" (discrete), "bge" (Gaussian) or "bic"; None is the one that belongs to the test.
        ess: equivalent sample size of BDeu, weight of the prior of BGe.
        seed: of the bootstrap samples.
        max_rows: learn from a random sample of at most this many rows.
        max_tests, max_seconds: a budget; when it is spent, what is open becomes a leaf, with a warning.
        progress: show a bar with the numbers of tests and leaves when it takes longer than a second.
    """
    _check_choice("test", test, DEFAULT_THRESHOLD)
    _check_choice("score", score or DEFAULT_SCORE[test], ("bdeu", "bic", "bge"))
    _check_least(s=(s, 1), bins=(bins, 2), ess=(ess, 1e-12), max_rows=(max_rows, 2))
    data = _Data.prepare(features, bins, max_rows)
    threshold = _check_threshold(test, threshold)
    order = _check_order(max_order, data.d)
    if threshold == 0 and max_order is None:
        raise ValueError(
            "expected a max_order when threshold is 0, got None: nothing is ever separated, so the tree would have "
            f"{s}^{data.d} leaves; set max_order=1 for an ensemble of {s} stacked networks"
        )
    with tqdm(desc="learning structure", unit=" tests", disable=not progress, delay=1, leave=False) as bar:
        leaves = 0

        def on_leaf() -> None:
            nonlocal leaves
            leaves += 1
            bar.set_postfix(leaves=leaves, refresh=False)

        budget = Budget(max_tests, max_seconds, bar.update)
        learner = BRAI(
            s=s,
            max_order=order,
            test_on=_remember_last(lambda path: data.test(test, threshold, data.bootstrap(seed, path))),
            score=FamilyScore(data.score(score or DEFAULT_SCORE[test], ess, test)),
            budget=budget,
            on_leaf=on_leaf,
        )
        tree = learner.learn(data.d)
    if learner.cut_short:
        warnings.warn(
            f"the budget was spent after {budget.tests:,} tests: the tree is valid but smaller than the data would "
            f"give ({leaves} leaves); raise max_tests or max_seconds, or lower max_order",
            stacklevel=2,
        )
    settings = {
        "s": s,
        "max_order": max_order,
        "test": test,
        "threshold": threshold,
        "bins": bins,
        "score": score or DEFAULT_SCORE[test],
        "ess": ess,
        "seed": seed,
        "max_rows": max_rows,
        "tests": budget.tests,
        "cut_short": learner.cut_short,
        "data": data.digest,
    }
    return GGT(_rename(tree, data.columns), data.d, data.n, settings)


def rai(
    features: Any,
    *,
    test: TestName | IndependenceTest = "g2",
    threshold: float | None = None,
    max_order: int | None = None,
    bins: int = 3,
    max_rows: int | None = None,
    max_tests: int | None = None,
    max_seconds: float | None = None,
    second_pass: bool = True,
) -> PDAG:
    """Learn one structure by recursive autonomy identification, without bootstrap.

    Args:
        features: (N, d) as in `learn_structure`; with a test object, the number of variables d.
        test: a name as in `learn_structure`, or an object with a `margin` method, such as `DSeparation`.
        threshold: as in `learn_structure`.
        max_order: largest condition set; None: no limit.
        bins: levels of a continuous column.
        max_rows: learn from a random sample of at most this many rows.
        max_tests, max_seconds: a budget; when it is spent, the edges left stay.
        second_pass: test the edges that the recursion leaves once more, given all neighbours, and orient anew; False
            gives the recursion's own graph.
    """
    budget = Budget(max_tests, max_seconds)
    if isinstance(test, str):
        _check_choice("test", test, DEFAULT_THRESHOLD)
        data = _Data.prepare(features, bins, max_rows)
        columns, d = data.columns, data.d
        tester = data.test(test, _check_threshold(test, threshold), None)
    else:
        d, tester = int(features), test
        columns = np.arange(d)
    order = _check_order(max_order, d)
    nothing = np.empty(0, dtype=np.intp)
    first = min(order, RECURSION_ORDER) if second_pass else order
    A, _ = recursive_autonomy(complete_graph(d), np.arange(d), nothing, 0, first, tester, budget)
    if second_pass:
        A = repair(A, order, tester, budget)
    if budget.spent:
        warnings.warn(f"the budget was spent after {budget.tests:,} tests: edges not tested stay", stacklevel=2)
    return PDAG(A).permute(np.argsort(columns))


@dataclass
class _Data:
    """A checked table in canonical order, and what the tests and scores need of it, made when first asked for."""

    values: NDArray[Any]
    columns: NDArray[np.intp]
    digest: str
    bins: int

    @classmethod
    def prepare(cls, features: Any, bins: int, max_rows: int | None) -> _Data:
        values = _as_table(features)
        order: CanonicalOrder = canonical_order(values)
        rows = order.rows
        if max_rows is not None:
            rows = rows[:max_rows]  # sorted by hash: the first rows are a random sample
        return cls(values[rows][:, order.columns], order.columns, order.digest, bins)

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def d(self) -> int:
        return int(self.values.shape[1])

    @cached_property
    def table(self) -> CodeTable:
        return CodeTable(discretize(self.values, self.bins))

    @cached_property
    def scores(self) -> NDArray[np.float32]:
        return normal_scores(self.values)

    def bootstrap(self, seed: int, path: Path) -> Weights:
        return bootstrap_weights(self.n, seed, path)

    def test(self, name: str, threshold: float, weights: Weights | None) -> IndependenceTest:
        if name == "gaussian":
            return PartialCorrelation(correlation(self.scores, weights), threshold)
        if name == "fisher_z":
            return FisherZ(correlation(self.scores, weights), threshold, self.n)
        sample = CountSample(self.table, weights)
        return (ConditionalMutualInformation if name == "cmi" else GSquare)(sample, threshold)

    def score(self, name: ScoreName, ess: float, test: str) -> LocalScore:
        if name == "bdeu":
            return bdeu(self.table, ess)
        if name == "bge":
            return bge(correlation(self.scores), self.n, ess)
        if test in ("gaussian", "fisher_z"):
            return gaussian_bic(correlation(self.scores), self.n)
        return discrete_bic(self.table)


def _remember_last(make: Callable[[Path], IndependenceTest]) -> Callable[[Path], IndependenceTest]:
    """Keep the test of the current path and of sibling samples: autonomous sets of one branch ask for the same ones."""
    kept: dict[Path, IndependenceTest] = {}

    def get(path: Path) -> IndependenceTest:
        if path not in kept:
            # Samples of another branch of the same or a deeper level will not be asked for again.
            for old in [p for p in kept if p[: len(path) - 1] != path[:-1] and p != path[: len(p)]]:
                del kept[old]
            kept[path] = make(path)
        return kept[path]

    return get


def _rename(node: Tree, columns: NDArray[np.intp]) -> Tree:
    """From canonical column numbers to the user's; variables sorted, so that the form does not depend on the order."""
    if isinstance(node, Leaf):
        names = [int(columns[v]) for v in node.variables]
        parents = {x: tuple(sorted(int(columns[p]) for p in pa)) for x, pa in zip(names, node.parents, strict=True)}
        return Leaf(tuple(sorted(names)), tuple(parents[x] for x in sorted(names)), node.score)
    branches = []
    for branch in node.branches:
        ancestors = sorted((_rename(a, columns) for a in branch.ancestors), key=lambda tree: tree.variables)
        branches.append(Branch(tuple(ancestors), _rename(branch.descendant, columns)))
    return Node(tuple(sorted(int(columns[v]) for v in node.variables)), tuple(branches))


def _as_table(features: Any) -> NDArray[Any]:
    if hasattr(features, "detach"):
        features = features.detach().cpu().numpy()
    values = np.asarray(features)
    if values.ndim != 2 or not values.shape[0] or not values.shape[1]:
        raise ValueError(
            f"expected features of shape (rows, columns) with at least one of each, got {values.shape}: "
            "flatten images to one row each, and check that the data is not empty"
        )
    if values.dtype.kind not in "fiub":
        raise ValueError(f"expected numbers, got dtype {values.dtype}: encode categories as integers first")
    if values.dtype.kind == "f":
        bad = ~np.isfinite(values)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise ValueError(
                f"expected finite features, got {int(bad.sum()):,} NaN or infinite values, the first in row {row}, "
                f"column {column}: impute or drop them"
            )
        if values.dtype != np.float32:
            values = values.astype(np.float64)
    if len(values) < 2:
        raise ValueError("expected at least 2 rows, got 1: dependence can't be seen in one row")
    return values


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")


def _check_least(**limits: tuple[float | None, float]) -> None:
    for name, (value, least) in limits.items():
        if value is not None and not value >= least:
            raise ValueError(f"expected {name} of at least {least}, got {value}")


def _check_threshold(test: str, threshold: float | None) -> float:
    value = DEFAULT_THRESHOLD[test] if threshold is None else float(threshold)
    significance = test in ("g2", "fisher_z")
    if not value >= 0 or (significance and value > 1):
        bounds = "between 0 and 1 (a significance level)" if significance else "of at least 0 (nats)"
        raise ValueError(f"expected a threshold {bounds}, got {threshold}")
    return value


def _check_order(max_order: int | None, d: int) -> int:
    if max_order is None:
        return d
    if max_order < 0:
        raise ValueError(f"expected max_order of at least 0, or None for no limit, got {max_order}")
    return min(max_order, d)
