"""`threshold="auto"`: the threshold at which a table falls apart best.

A threshold in nats means something else for every kind of feature: neighbouring pixels share whole nats of information,
deep features hardly a tenth of one. What a network is wired by is not the threshold but the sets of variables that it
leads to. So a grid of thresholds is laid by the share of pairs that each keeps, structures of a few samples are learned
with each, and it is asked how much of all dependence their sets hold: their modularity (Newman & Girvan 2004). Of the
thresholds that are nearly the best, the one that keeps most pairs is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.independence import IndependenceTest, SingleMargins
from brainet_pl.structure.independence.base import Ints

Floats = NDArray[np.float64]
Sets = Sequence[Ints]

LARGEST_SHARE, RATIO = 0.75, 1.5  # of the pairs that the densest graph of the grid keeps; from one graph to the next
FEWEST_NEIGHBOURS = 1.2  # of a variable on average in the sparsest graph; with fewer, there is nothing left to split
FEWEST_GRAPHS = 4  # of a grid, however few variables there are
SAMPLES = 3  # of rows, whose structures are looked at for each threshold: one alone is a matter of luck
SEARCHED = 512  # variables at the most whose falling apart is looked at; of more, in one sample, a matrix for each test
NEARLY = 0.75  # of the largest modularity is as good
TINY = 1e-9
PATIENCE = 3  # denser graphs in a row that do not do better, after one that did: the others are denser still


class Choice(NamedTuple):
    """The threshold that was chosen, in nats, and what its sets are worth."""

    threshold: float | None  # None where no graph of the grid falls apart into sets that are worth anything
    modularity: float  # of its sets, the mean over samples, above 0 and below 1; 0 where there is none
    tried: tuple[tuple[float, float], ...]  # (threshold, modularity) of every graph looked at, sparse ones first


def strength_of(information: Floats) -> Floats:
    """Mutual information in nats (…) → 1 - exp(-2·I), from 0 to 1: of Gaussian variables, their squared correlation.

    >>> strength_of(np.array([0.0, np.inf])).tolist()
    [0.0, 1.0]
    """
    return np.asarray(-np.expm1(-2.0 * np.maximum(information, 0.0)))


def modularity(strength: Floats, sets: Sets) -> float:
    """The share of all dependence that lies within the sets, less what would lie there by chance.

    Args:
        strength: (d, d), symmetric, 0 or more; its diagonal does not count.
        sets: disjoint sets of variables, as arrays of their numbers, that are all of 0, …, d - 1 together.

    Example:
        Two pairs of dependent variables:

        >>> strength = np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]], dtype=float)
        >>> modularity(strength, [np.array([0, 1]), np.array([2, 3])])
        0.5
        >>> modularity(strength, [np.arange(4)]), modularity(strength, [np.array([0, 2]), np.array([1, 3])])
        (0.0, -0.5)
    """
    weight = strength - np.diag(strength.diagonal())
    degree = weight.sum(axis=1)
    total = degree.sum()
    if total <= 0:
        return 0.0
    inside = sum(weight[np.ix_(s, s)].sum() for s in sets)
    chance = sum(degree[s].sum() ** 2 for s in sets)
    return float(inside / total - chance / total**2)


def search_paths(d: int, depth: int) -> list[tuple[int, ...]]:
    """The samples that thresholds are compared on: those of the first branches of a tree of d variables, two levels.

    >>> search_paths(100, 2)
    [(0,), (0, 0), (1,), (1, 1), (2,), (2, 2)]
    """
    return [(t,) * n for t in range(SAMPLES if d <= SEARCHED else 1) for n in range(1, min(depth, 2) + 1)]


def searched_variables(variables: Ints, seed: int) -> Ints:
    """Those of the `variables` that a threshold is looked for with: all, or a random draw of `SEARCHED`, in order."""
    if len(variables) <= SEARCHED:
        return variables
    drawn = np.random.default_rng((seed, len(variables))).choice(variables, SEARCHED, replace=False)
    return np.sort(drawn)


def grid(information: Floats) -> list[float]:
    """Thresholds (nats) at which graphs keep ever more pairs of (d, d) `information`, the sparsest first.

    Every graph keeps `RATIO` times as many pairs as the one before, up to three quarters of them. Columns that depend
    on no other, because they never vary, do not count; nor do equal thresholds twice.
    """
    others = information.copy()
    np.fill_diagonal(others, 0.0)
    varies = np.flatnonzero((others > 1e-9).any(axis=0))
    d = len(varies)
    if d < 3:
        return []
    pairs = information[np.ix_(varies, varies)][np.triu_indices(d, 1)]
    shares = [LARGEST_SHARE]
    while len(shares) < FEWEST_GRAPHS or shares[-1] / RATIO * (d - 1) >= FEWEST_NEIGHBOURS:
        shares.append(shares[-1] / RATIO)
    ordered = np.sort(pairs)[::-1]
    kept = dict.fromkeys(round(share * len(ordered)) for share in reversed(shares))
    # Between two pairs, so that no pair lies on a threshold; the information of copies is infinite.
    thresholds = [0.5 * (ordered[m - 1] + ordered[m]) for m in kept if 0 < m < len(ordered)]
    return [float(t) for t in dict.fromkeys(thresholds) if 0 < t < np.inf]


def choose_threshold(
    information: Floats, split: Callable[[float], Sequence[Sets]], spent: Callable[[], bool] = lambda: False
) -> Choice:
    """The smallest threshold of the grid whose sets have nearly the largest modularity: it forgets the fewest pairs.

    Args:
        information: (d, d) mutual information of pairs, in nats.
        split: from a threshold to the sets of variables that it leads to, in each of a few samples; they are all of
            0, …, d - 1 together.
        spent: whether there is no time left: what was tried until then is all there is.
    """
    strength = strength_of(information)
    tried: list[tuple[float, float]] = []
    best, behind = 0.0, 0
    for candidate in grid(information):
        splits = split(candidate)
        if spent():
            break
        value = float(np.mean([modularity(strength, sets) for sets in splits]))
        tried.append((candidate, value))
        behind = 0 if value > best else behind + 1
        best = max(best, value)
        if best > TINY and behind == PATIENCE:
            break
    good = [(t, value) for t, value in tried if value > TINY and value >= NEARLY * best]
    threshold, worth = good[-1] if good else (None, 0.0)
    return Choice(threshold, worth, tuple(tried))


class AtThreshold:
    """A test in nats, made with the threshold `bound`, at another one; of some `variables` only, if they are given.

    All margins are information less a threshold, so they only shift, and what the test has summed over rows is summed
    once for all thresholds. Variables are numbered by their place in `variables` (k,), so that a graph of them has
    k rows and not as many as the table has columns.
    """

    keeps_all = False

    def __init__(self, test: IndependenceTest, bound: float, threshold: float, variables: Ints | None = None) -> None:
        self.test, self.shift, self.capped, self.variables = test, threshold - bound, test.capped, variables
        if hasattr(test, "list_length"):
            self.list_length = test.list_length
        if hasattr(test, "strength"):
            self.strength = test.strength if variables is None else test.strength[np.ix_(variables, variables)]
        if isinstance(test, SingleMargins):
            self.weakest = partial(self._weakest, test)  # so that this one is `SingleMargins` too

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the margins (L, R) of left × right given `condition`."""
        given = condition if self.variables is None else tuple(self.variables[list(condition)].tolist())
        return np.asarray(self.test.block(given, self._column(left), self._column(right)) - self.shift)

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes the margins (T,) of x (T,) and y (T,) given conditions (T, n)."""
        x, y, conditions = self._column(x), self._column(y), self._column(conditions)
        return np.asarray(self.test.pairs(x, y, conditions) - self.shift)

    def _weakest(self, test: SingleMargins, x: int, y: Ints, z: Ints) -> tuple[Floats, Ints]:
        end = x if self.variables is None else int(self.variables[x])
        margin, place = test.weakest(end, self._column(y), self._column(z))
        return margin - self.shift, place

    def _column(self, places: Ints) -> Ints:
        """The numbers of variables in the table."""
        return places if self.variables is None else self.variables[places]
