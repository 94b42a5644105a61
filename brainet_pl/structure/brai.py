"""Algorithm 1: recursion over resampled data, from features to a scored tree of structures.

The recursion goes level by level, all calls of one order before those of the next: a budget that ends early then leaves
every branch tested to the same order, and one sample at a time serves all autonomous sets that share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby

import numpy as np

from brainet_pl.structure.autonomy import increase_separation, is_leaf
from brainet_pl.structure.constraints import Constraints
from brainet_pl.structure.data import Path
from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.ggt import Branch, Leaf, Node, Tree
from brainet_pl.structure.independence import Margins
from brainet_pl.structure.independence.base import Floats
from brainet_pl.structure.pdag import Bools, Ints, complete_graph, dag_extension, find_autonomous
from brainet_pl.structure.score import LocalScore
from brainet_pl.structure.steps import MOST_ARROWS, improve_parents

LARGEST = 1e3  # margin that is told apart from larger ones
NEIGHBOURS = 32  # of a variable that a leaf remembers: how many of them a network reads is its own choice


@dataclass
class Call:
    """One call of Algorithm 1: endogenous `X`, exogenous `X_ex`, the graph `B` that they share with their siblings."""

    B: Bools
    X: Ints
    X_ex: Ints
    path: Path = ()  # the branch numbers from the root down; calls of one path share each of their s samples
    branches: list[list[Call]] = field(
        default_factory=list
    )  # calls of each branch, the descendant's last; a leaf has none


@dataclass
class BRAI:
    """What stays the same through the recursion."""

    s: tuple[int, ...]  # samples, and so branches, of the nodes of each level; the last for all that are deeper
    max_order: int  # largest condition set; a call beyond it is a leaf
    # The independence test on the sample of a path. A path holds the branch numbers from the root down; the autonomous
    # sets of one branch share its path and so each of its s samples.
    test_on: Callable[[Path], Margins]
    score: LocalScore  # of a variable given its parents, on the full data
    budget: Budget  # when spent, every further call is a leaf
    check_colliders: bool = False  # v-structures must explain away (`increase_separation`); the paper does not ask
    most_parents: int | None = None  # of a variable in a leaf. None: all that its graph gives it, as in the paper
    strength: Floats | None = None  # (d, d) numbers that rise with the dependence of two variables
    # (d, d) pairs that depend on each other in the full data; the parents of a leaf are then searched for among them by
    # the score. None: a leaf's parents are those of its graph, as in the paper.
    dependent: Bools | None = None
    score_on: Callable[[Path], LocalScore] | None = None  # on the sample of a path, for that search; None: on all rows
    num_neighbours: int = 0  # of a variable in a leaf: those it depends on most in its sample; the paper has none
    on_leaf: Callable[[], None] = lambda: None
    constraints: Constraints | None = None  # what is known before the data; the tests keep required edges
    _neighbours: list[Ints] = field(default_factory=list, init=False)  # (d, k) by branch of the root
    cut_short: bool = field(default=False, init=False)

    def learn(self, d: int, X: Ints | None = None) -> Tree:
        """The tree over d variables, or those of them in `X`, from a complete graph."""
        X = np.arange(d) if X is None else X
        start = complete_graph(d, X)
        if self.constraints is not None:
            start = self.constraints.start(start)
        root = Call(start, X, np.empty(0, dtype=np.intp))
        level, n = [root], 0
        while level:
            level = self._next_level(level, n)
            n += 1
        return self._tree(root)

    def _next_level(self, calls: list[Call], n: int) -> list[Call]:
        """Test and decompose all calls of order n that are no leaves; returns the calls that they make."""
        split = [call for call in calls if n <= self.max_order and not is_leaf(call.B, call.X, call.X_ex, n)]  # line 2
        for path, together in groupby(split, key=lambda call: call.path):
            self._split(list(together), n, path)
        following: list[Call] = []
        for call in split:
            following += chain.from_iterable(call.branches)
        return following

    def _split(self, calls: list[Call], n: int, path: Path) -> None:
        """Lines 6 to 12 for all calls of order n that share a path: the calls that each of the s samples leads to."""
        for t in range(samples_at(self.s, n)):  # line 6
            if self.budget.spent:
                break
            test = self.test_on((*path, t))  # line 7: the sample is drawn inside
            if not path and self.num_neighbours:
                self._neighbours.append(strongest_neighbours(test, calls[0].X, self.num_neighbours))
            for call in calls:
                call.branches.append(branch(call, n, (*path, t), test, self.budget, self.check_colliders))
        self.cut_short |= self.budget.spent

    def _tree(self, call: Call) -> Tree:
        """Lines 13 to 16, from finished calls."""
        if not call.branches:
            return self._leaf(call.B, call.X, call.X_ex, call.path)  # lines 3–5
        branches = []
        for calls in call.branches:
            *ancestors, descendant = (self._tree(child) for child in calls)
            branches.append(Branch(tuple(ancestors), descendant))
        return Node(tuple(call.X.tolist()), tuple(branches))

    def _leaf(self, B: Bools, X: Ints, X_ex: Ints, path: Path = ()) -> Leaf:
        """Lines 3–5: parents from a DAG that the leaf's graph stands for, and their score."""
        scope = np.concatenate([X_ex, X])
        dag = np.zeros((len(scope), len(scope)), dtype=bool)
        ours = np.arange(len(X_ex), len(scope))
        dag[: len(X_ex), ours] = B[np.ix_(X_ex, X)]
        dag[np.ix_(ours, ours)] = dag_extension(B[np.ix_(X, X)])
        if self.most_parents is not None:
            dag = self._without_crowds(dag, ours, scope, self.most_parents)
        if self.constraints is not None:
            dag = self.constraints.permute(scope).repair(dag, ours)
        if self.dependent is not None:
            dag = self._improved(dag, ours, scope, path)
        parents = [tuple(np.sort(scope[dag[:, j]]).tolist()) for j in ours]
        score = sum(self.score(int(x), p) for x, p in zip(X, parents, strict=True))
        self.on_leaf()
        near = self._neighbours[path[0]] if self._neighbours and path else None
        neighbours = () if near is None else tuple(tuple(near[x].tolist()) for x in X.tolist())
        return Leaf(tuple(X.tolist()), tuple(parents), score, neighbours)

    def _without_crowds(self, dag: Bools, ours: Ints, scope: Ints, most: int) -> Bools:
        """Only the `most` best of a variable's parents: the strongest, or those that alone raise its score most."""
        for j in ours[dag[:, ours].sum(axis=0) > most]:
            x, parents = int(scope[j]), np.flatnonzero(dag[:, j])
            if self.strength is None:
                alone = np.array([self.score(x, (int(p),)) for p in scope[parents]])
            else:
                alone = self.strength[scope[parents], x]
            dag[parents[np.argsort(-alone, kind="stable")[most:]], j] = False
        return dag

    def _improved(self, dag: Bools, ours: Ints, scope: Ints, path: Path) -> Bools:
        """Better parents among all dependent pairs; among the graph's own if those are too many, or as they are.

        The first branch of a node asks all rows, the others a sample: what one sample finds and another does not is
        doubtful, and an average over branches should say so.
        """
        assert self.dependent is not None
        score = self.score_on(path) if self.score_on is not None and path and path[-1] else self.score
        within = self.dependent[np.ix_(scope, scope)]

        def by_place(x: int, parents: tuple[int, ...]) -> float:
            return score(int(scope[x]), tuple(sorted(int(scope[p]) for p in parents)))

        fixed = None
        if self.constraints is not None:
            known = self.constraints.permute(scope)
            within, fixed = within & known.allowed, known.required
        for candidates in (within, dag | dag.T if fixed is None else dag):
            if candidates[:, ours].sum() <= MOST_ARROWS:
                return improve_parents(dag, ours, candidates, by_place, lambda: self.budget.spent, fixed)
        return dag


def branch(call: Call, n: int, path: Path, test: Margins, budget: Budget, check_colliders: bool) -> list[Call]:
    """Lines 8 to 12: the calls that one sample leads to."""
    X, X_ex = call.X, call.X_ex
    B_star, _ = increase_separation(call.B, X, X_ex, n, test, budget, check_colliders)  # line 8
    X_D, X_A = find_autonomous(B_star, X)  # line 9
    exogenous = np.sort(np.concatenate([X_ex, *X_A]))
    ancestors = [Call(B_star, X_Ai, X_ex, path) for X_Ai in X_A]  # lines 10–11
    return [*ancestors, Call(B_star, X_D, exogenous, path)]  # line 12


def samples_at(s: tuple[int, ...], level: int) -> int:
    """How many samples a node of a level has; the root's level is 0.

    >>> samples_at((4, 1), 0), samples_at((4, 1), 2)
    (4, 1)
    """
    return s[min(level, len(s) - 1)]


def strongest_neighbours(test: Margins, X: Ints, most: int) -> Ints:
    """For each variable of X the `most` others of X that the test finds most dependent on it, the strongest first.

    Returns (d, k) for numbers of variables up to the largest of X; rows of others hold nothing of use. Margins, or the
    test's own `dependence`, are compared to six digits, below which they depend on the order of sums; of equal ones the
    first variable counts.
    """
    k = min(most, len(X) - 1)
    neighbours = np.zeros((int(X.max()) + 1, k), dtype=np.intp)
    if not k:
        return neighbours
    by_strength: Callable[[Ints, Ints], Floats] = getattr(test, "dependence", partial(test.block, ()))
    margins = np.array(by_strength(X, X), dtype=np.float64)
    np.fill_diagonal(margins, -np.inf)
    # Places make equal margins differ by less than the digits that count: then the largest can be looked for alone.
    keys = -np.clip(np.round(margins, 6), -LARGEST, LARGEST) + 1e-12 * np.arange(len(X))
    near = np.argpartition(keys, k - 1, axis=1)[:, :k]
    order = np.argsort(np.take_along_axis(keys, near, axis=1), axis=1)
    neighbours[X] = X[np.take_along_axis(near, order, axis=1)]
    return neighbours


def autonomous_sets(
    d: int, X: Ints, max_order: int, test_on: Callable[[Path], Margins], budget: Budget, t: int
) -> list[Ints]:
    """The sets that branch t of every node of a tree over `X` leads to, with checked colliders: they make up X."""
    level, sets = [Call(complete_graph(d, X), X, np.empty(0, dtype=np.intp))], []
    for n in range(max_order + 1):
        following = []
        test = test_on((t,) * (n + 1))
        for call in level:
            if budget.spent or is_leaf(call.B, call.X, call.X_ex, n):
                sets.append(call.X)
                continue
            following += branch(call, n, (), test, budget, check_colliders=True)
        level = following
    return sets + [call.X for call in level]
