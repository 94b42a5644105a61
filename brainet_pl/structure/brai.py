"""Algorithm 1: recursion over bootstrap samples, from features to a scored tree of structures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from brainet_pl.structure.autonomy import Budget, increase_separation, is_leaf
from brainet_pl.structure.ggt import Branch, Leaf, Node, Tree
from brainet_pl.structure.independence import Margins
from brainet_pl.structure.pdag import Bools, Ints, complete_graph, dag_extension, find_autonomous
from brainet_pl.structure.score import FamilyScore

Path = tuple[int, ...]


@dataclass
class BRAI:
    """What stays the same through the recursion.

    Attributes:
        s: bootstrap samples, and so branches, of every node.
        max_order: largest condition set; a call beyond it is a leaf.
        test_on: the independence test on the bootstrap sample of a path. A path holds the branch numbers from the root
            down; the autonomous sets of one branch share its path and so each of its s samples.
        score: of a variable given its parents, on the full data.
        budget: when spent, every further call is a leaf.
    """

    s: int
    max_order: int
    test_on: Callable[[Path], Margins]
    score: FamilyScore
    budget: Budget
    on_leaf: Callable[[], None] = lambda: None
    cut_short: bool = field(default=False, init=False)

    def learn(self, d: int) -> Tree:
        """The tree over d variables, from a complete graph."""
        return self._learn(complete_graph(d), np.arange(d), np.empty(0, dtype=np.intp), 0, ())

    def _learn(self, B: Bools, X: Ints, X_ex: Ints, n: int, path: Path) -> Tree:
        if n > self.max_order or is_leaf(B, X, X_ex, n):  # line 2
            return self._leaf(B, X, X_ex)  # lines 3–5
        if self.budget.spent:
            self.cut_short = True
            return self._leaf(B, X, X_ex)
        branches = []
        for t in range(self.s):  # line 6
            here = (*path, t)
            test = self.test_on(here)  # line 7: the sample is drawn inside
            B_star, _ = increase_separation(B, X, X_ex, n, test, self.budget)  # line 8
            self.cut_short |= self.budget.spent
            X_D, X_A = find_autonomous(B_star, X)  # line 9
            ancestors = [self._learn(B_star, X_Ai, X_ex, n + 1, here) for X_Ai in X_A]  # lines 10–11
            exogenous = np.sort(np.concatenate([X_ex, *X_A]))
            descendant = self._learn(B_star, X_D, exogenous, n + 1, here)  # line 12
            branches.append(Branch(tuple(ancestors), descendant))  # lines 13–15
        return Node(tuple(X.tolist()), tuple(branches))  # line 16

    def _leaf(self, B: Bools, X: Ints, X_ex: Ints) -> Leaf:
        """Lines 3–5: parents from a DAG that the leaf's graph stands for, and their score."""
        outer = B[np.ix_(X_ex, X)]
        inner = dag_extension(B[np.ix_(X, X)])
        parents = []
        for j in range(len(X)):
            found = np.concatenate([X_ex[outer[:, j]], X[inner[:, j]]])
            parents.append(tuple(np.sort(found).tolist()))
        score = sum(self.score(int(x), p) for x, p in zip(X, parents, strict=True))
        self.on_leaf()
        return Leaf(tuple(X.tolist()), tuple(parents), score)
