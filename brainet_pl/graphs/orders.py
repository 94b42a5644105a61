"""Search over orders of variables: each variable takes its best parents among those before it.

An order decides at once what single changes of a graph decide one after the other, so a search over orders does not end
where a climb over graphs does (BOSS, Andrews et al. 2023). The best parents among a set of predecessors are found by
growing and shrinking; growths are kept as a tree for each variable, because orders that differ little ask for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from brainet_pl.structure.pdag import Bools
from brainet_pl.structure.score import Growth, LocalScore
from brainet_pl.structure.steps import SMALLEST_GAIN

MOST_WORK = 3_000_000  # questions for best parents in one search: about 15 seconds of one core
GROWTH = 30  # questions that one growth takes as long as
Found = tuple[float, tuple[int, ...]]  # a score, less the cost of its edges, and the sorted parents


@dataclass
class _Grown:
    """One set of parents of one variable, and what one parent more leads to."""

    parents: tuple[int, ...]  # sorted
    score: float
    better: list[tuple[int, int, float]] | None = None  # (bit, number, score with it) of what gains, the best first
    grown: dict[int, _Grown] = field(default_factory=dict)  # by the number of the parent more
    shrunk: Found | None = None


def _bits(members: Iterable[int]) -> int:
    return sum(1 << i for i in members)


@dataclass
class BestParents:
    """The best parents of a variable among a set of predecessors, by growing and then shrinking.

    Attributes:
        score: of a variable given sorted parents, in nats.
        growth: of a variable with each of some candidates as one parent more.
        allowed: (d, d) the arrows that may be used; [i, j] means i → j.
        edge_cost: what an edge costs by the prior over graphs, in nats.
        required: (d, d) the arrows that must be there, or None; without its required parents before it a variable has a
            score of minus infinity.
        most_parents: of a variable, or None.
        work: done so far, in questions for best parents; the same on every machine.
    """

    score: LocalScore
    growth: Growth
    allowed: Bools
    edge_cost: float
    required: Bools | None = None
    most_parents: int | None = None
    work: int = 0
    _known: dict[tuple[int, int], Found] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        fixed = np.zeros_like(self.allowed) if self.required is None else self.required
        self._candidates = [np.flatnonzero(column) for column in (self.allowed & ~fixed).T]
        parents = [tuple(np.flatnonzero(column).tolist()) for column in fixed.T]
        self._required = [_bits(of_x) for of_x in parents]
        self._allowed = [_bits(c.tolist()) | r for c, r in zip(self._candidates, self._required, strict=True)]
        self._roots = [_Grown(of_x, self._score(x, of_x)) for x, of_x in enumerate(parents)]

    def _score(self, x: int, parents: tuple[int, ...]) -> float:
        return self.score(x, parents) - self.edge_cost * len(parents)

    def of(self, x: int, before: int) -> Found:
        """The score of `x` with the best parents among the bits of `before`, and those parents."""
        self.work += 1
        required = self._required[x]
        if required & ~before:
            return -np.inf, ()
        before &= self._allowed[x]
        found = self._known.get((x, before))
        if found is None:
            node = self._roots[x]
            while True:
                for bit, more, score in self._grow(x, node) if node.better is None else node.better:
                    if before & bit:
                        if more not in node.grown:
                            node.grown[more] = _Grown(tuple(sorted((*node.parents, more))), score)
                        node = node.grown[more]
                        break
                else:
                    break
            found = self._known[x, before] = self._shrink(x, node)
        return found

    def dag_of(self, order: Sequence[int]) -> tuple[Bools, float]:
        """The DAG (d, d) of the best parents in an order, and its score less the cost of its edges."""
        dag = np.zeros(self.allowed.shape, dtype=bool)
        before, total = 0, 0.0
        for v in order:
            score, parents = self.of(v, before)
            dag[list(parents), v] = True
            before |= 1 << v
            total += score
        return dag, total

    def with_more(self, allowed: Bools) -> BestParents:
        """The same with further arrows allowed; the work done so far counts."""
        more = BestParents(self.score, self.growth, allowed, self.edge_cost, self.required, self.most_parents)
        more.work = self.work
        return more

    def _grow(self, x: int, node: _Grown) -> list[tuple[int, int, float]]:
        """The parents more that gain, the best first."""
        node.better = []
        candidates, parents = self._candidates[x], node.parents
        candidates = candidates[~np.isin(candidates, parents)] if parents else candidates
        full = self.most_parents is not None and len(parents) >= self.most_parents
        if len(candidates) and not full:
            self.work += GROWTH
            scores = self.growth(x, parents, candidates) - self.edge_cost * (len(parents) + 1)
            worth = np.flatnonzero(scores > node.score + SMALLEST_GAIN)
            worth = worth[np.argsort(-scores[worth], kind="stable")]
            more = candidates[worth].tolist()
            node.better = [(1 << c, c, score) for c, score in zip(more, scores[worth].tolist(), strict=True)]
        return node.better

    def _shrink(self, x: int, node: _Grown) -> Found:
        """The grown set without parents that turned out not to be needed, one after the other."""
        if node.shrunk is None:
            best, parents = node.score, node.parents
            while True:
                kept = self._required[x]
                without = [parents[:i] + parents[i + 1 :] for i, p in enumerate(parents) if not kept >> p & 1]
                fewer = [(self._score(x, less), less) for less in without]
                highest, less = max(fewer, default=(-np.inf, ()))
                if highest <= best + SMALLEST_GAIN:
                    break
                best, parents = highest, less
            node.shrunk = best, parents
        return node.shrunk


def improve_order(order: Sequence[int], best: BestParents, spent: Callable[[], bool] = lambda: False) -> list[int]:
    """The order in which no variable gains by moving anywhere else, from `order` by the best move of each in turn.

    It ends early where `spent` says so, or `best` has done `MOST_WORK`.

    With v taken out, the others have two scores each, with and without v before them, so that all places of v are
    weighed by 3·d questions for best parents.
    """
    order = list(order)
    improved = True
    while improved:
        improved = False
        for v in list(order):
            if spent() or best.work > MOST_WORK:
                return order
            improved |= _move(order, v, best)
    return order


def _move(order: list[int], v: int, best: BestParents) -> bool:
    """Move `v` within `order`, in place, to where the sum of scores is highest; says whether it gained."""
    place = order.index(v)
    others = order[:place] + order[place + 1 :]
    bit, before = 1 << v, 0
    itself, without, with_v = [best.of(v, 0)[0]], [], []
    for w in others:
        without.append(best.of(w, before)[0])
        with_v.append(best.of(w, before | bit)[0])
        before |= 1 << w
        itself.append(best.of(v, before)[0])
    totals = np.array(itself)
    totals[1:] += np.cumsum(without)
    totals[:-1] += np.cumsum(with_v[::-1])[::-1]
    highest = int(np.argmax(totals))
    if not totals[highest] > totals[place] + SMALLEST_GAIN:
        return False
    order[:] = [*others[:highest], v, *others[highest:]]
    return True
