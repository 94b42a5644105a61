"""Draws from the posterior over all DAGs, p(G) ∝ exp(Σ score(x, parents)), by moves in the order of variables.

Given an order, a DAG is drawn exactly: each variable's parents are any of its candidates before it, and sums over all
sets of them stand in tables. Orders mix far better than graphs, but a graph with many orders would be drawn too often.
So the state is a graph *and* one of its orders: p(G)·r(order | G), where r puts each next variable uniformly among
those whose parents are placed. A proposal moves variables within the order, by the sums over sets, and draws a new
graph; it is taken with probability r(new order | new graph) / r(order | graph), and graphs then follow p(G) exactly.

Several chains go side by side, axis C of every array; K is the largest number of candidate parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from brainet_pl.structure.pdag import Bools, Ints, topological_order
from brainet_pl.structure.score import Growth, LocalScore

Floats = NDArray[np.float64]
MOVES = 4  # variables that are moved before a new graph is drawn
REDRAWS, REDRAWN = 4, 0.2  # times that some variables get new parents in the same order, and their share


@dataclass(frozen=True)
class Families:
    """Scores of all sets of candidate parents, summed over the subsets of each set.

    Attributes:
        candidates: (d, K) the candidates of each variable; d where there are fewer than K.
        stages: (K + 1, d, 2^K). In stage k the low k bits of an index allow candidates, and the others name exactly
            those that are parents; the entry is the log of the sum over all such sets. Stage 0 holds the scores
            themselves, stage K the sums over all subsets.
    """

    candidates: Ints
    stages: Floats

    @classmethod
    def tabulate(
        cls,
        candidates: Sequence[Sequence[int]],
        score: LocalScore,
        growth: Growth,
        edge_cost: float,
        most_parents: int | Ints,
        required: Bools | None = None,
    ) -> Families:
        """All families of some candidates of each variable; an edge costs `edge_cost` nats, and required ones stay.

        `most_parents` is one number, or one of each variable (d,).
        """
        d, K = len(candidates), max(map(len, candidates), default=0)
        most = np.broadcast_to(most_parents, d).tolist()
        table = np.full((d, 1 << K), -np.inf)
        padded = np.full((d, K), d, dtype=np.intp)
        for x, some in enumerate(candidates):
            ordered = sorted(some)
            padded[x, : len(ordered)] = ordered
            table[x, 0] = score(x, ())
            for size in range(min(len(ordered), most[x])):
                for places in combinations(range(len(ordered)), size):
                    first = places[-1] + 1 if places else 0
                    more = np.arange(first, len(ordered))
                    if len(more):
                        parents = tuple(ordered[i] for i in places)
                        index = sum(1 << i for i in places)
                        scores = growth(x, parents, np.array(ordered[first:], dtype=np.intp))
                        table[x, index | (1 << more)] = scores - edge_cost * (size + 1)
            if required is not None:
                needed = sum(1 << i for i, p in enumerate(ordered) if required[p, x])
                table[x, (np.arange(1 << K) & needed) != needed] = -np.inf
        return cls(padded, _sums(table))

    @property
    def d(self) -> int:
        """The number of variables."""
        return len(self.candidates)

    @property
    def K(self) -> int:
        """The largest number of candidates."""
        return int(self.candidates.shape[1])

    def total(self, families: Ints) -> Floats:
        """The score (C,) of graphs whose parents are given as bits (C, d)."""
        return np.asarray(self.stages[0][np.arange(self.d), families].sum(axis=-1))

    def dags(self, families: Ints) -> Bools:
        """The graphs (C, d, d) whose parents are given as bits (C, d)."""
        dags = np.zeros((len(families), self.d + 1, self.d), dtype=bool)
        chain, x, k = np.nonzero(families[..., None] >> np.arange(self.K) & 1)
        dags[chain, self.candidates[x, k], x] = True
        return dags[:, : self.d]

    def families(self, dag: Bools) -> Ints:
        """The parents of a DAG (d, d) as bits (d,); those that are no candidates are left out."""
        wide = np.vstack([dag, np.zeros(self.d, dtype=bool)])
        return np.asarray((wide[self.candidates, np.arange(self.d)[:, None]] << np.arange(self.K)).sum(axis=1))


def _sums(table: Floats) -> Floats:
    """(K + 1, d, 2^K) from scores (d, 2^K): stage by stage, one more bit is summed over."""
    stages = [table]
    for k in range(int(table.shape[1]).bit_length() - 1):
        pairs = stages[-1].reshape(len(table), -1, 2, 1 << k).copy()
        pairs[:, :, 1] = np.logaddexp(pairs[:, :, 0], pairs[:, :, 1])
        stages.append(pairs.reshape(table.shape))
    return np.stack(stages)


@dataclass
class PairProbabilities:
    """The probability of each arrow given all other edges of a graph: apart, joined one way, or the other.

    Averaged over draws of graphs these are the probabilities of arrows, as the shares of draws that have them are, but
    with far less noise: every draw says something about every pair, however unlikely.

    Attributes:
        score, growth: of a variable given its parents; with each of some candidates as one parent more.
        edge_cost: what an edge costs, in nats.
        allowed: (d, d) the arrows that may be there.
        required: (d, d) those that must.
        most_parents: (d,) of each variable, as in the tables that graphs are drawn from.
    """

    score: LocalScore
    growth: Growth
    edge_cost: float
    allowed: Bools
    required: Bools
    most_parents: Ints
    _gains: dict[tuple[int, tuple[int, ...]], Floats] = field(init=False, default_factory=dict)

    def __call__(self, dag: Bools) -> Floats:
        """The probabilities (d, d) given the DAG (d, d) but for the edge of the pair itself."""
        gains = np.stack([self._gain(x, tuple(np.flatnonzero(dag[:, x]).tolist())) for x in range(len(dag))], axis=1)
        gains[_other_path(dag).T | ~self.allowed] = -np.inf
        most = np.maximum(np.maximum(gains, gains.T), 0.0)
        weights = np.exp(gains - most)
        p = weights / (weights + weights.T + np.exp(-most))
        p[self.required] = 1.0
        p[self.required.T] = 0.0
        return np.asarray(p)

    def _gain(self, x: int, parents: tuple[int, ...]) -> Floats:
        """(d,) what each variable is worth as a parent of x beside its other parents, less the cost of its edge."""
        known = self._gains.get((x, parents))
        if known is None:
            known = np.full(len(self.allowed), -np.inf)
            here = self.score(x, parents)
            more = np.flatnonzero(self.allowed[:, x])
            more = more[~np.isin(more, parents)]
            if len(more) and len(parents) < self.most_parents[x]:
                known[more] = self.growth(x, parents, more) - here - self.edge_cost
            for place, parent in enumerate(parents):
                known[parent] = here - self.score(x, parents[:place] + parents[place + 1 :]) - self.edge_cost
            self._gains[x, parents] = known
        return known


def _other_path(dag: Bools) -> Bools:
    """(d, d) whether a path of arrows leads from i to j beside the arrow i → j itself."""
    reached = dag | np.eye(len(dag), dtype=bool)
    while True:
        further = (reached.astype(np.float32) @ reached.astype(np.float32)) > 0
        if (further == reached).all():
            break
        reached = further
    by_children = dag.astype(np.float32) @ reached.astype(np.float32)  # the children of i that j is reached from
    return np.asarray(by_children > dag)


class Chains:
    """C graphs, each with one of its orders, that follow the posterior as they go on.

    Attributes:
        rank: (C, d) the place of each variable in the order of its chain.
        families: (C, d) the parents of each variable, as bits of its candidates.
        accepted, proposed: graphs drawn, and those of them that were taken.
    """

    def __init__(self, families: Families, dags: Sequence[Bools], rng: np.random.Generator) -> None:
        self.tables, self.rng = families, rng
        self.families = np.stack([families.families(dag) for dag in dags])
        self.rank = np.stack([np.argsort(topological_order(dag)) for dag in families.dags(self.families)])
        self.accepted = self.proposed = 0
        self._powers = 1 << np.arange(families.K)
        d = families.d
        # bit_of[v, w]: the bit of v among the candidates of w, 0 where it is none
        self._bit_of = np.zeros((d + 1, d), dtype=np.int64)
        self._bit_of[families.candidates, np.arange(d)[:, None]] = self._powers
        self._bit_of = self._bit_of[:d]

    @property
    def scores(self) -> Floats:
        """The scores (C,) of the graphs."""
        return self.tables.total(self.families)

    def step(self) -> None:
        """Another order of the same graph, moves in it and a new graph, taken or not; then new parents of a few."""
        self.rank = self._order_of_graph()
        moved = self.rank
        for _ in range(MOVES):
            moved = self._move(moved)
        self._propose(moved, self.draw(self.allowed(moved)))
        for _ in range(REDRAWS):
            few = self.rng.random(self.families.shape) < REDRAWN
            self._propose(self.rank, np.where(few, self.draw(self.allowed(self.rank)), self.families))

    def _propose(self, rank: Ints, families: Ints) -> None:
        """Take the orders and graphs of those chains for which r(order | graph) allows it."""
        ratio = self._log_order(rank, families) - self._log_order(self.rank, self.families)
        taken = np.log(self.rng.random(len(ratio))) < ratio
        self.rank = np.where(taken[:, None], rank, self.rank)
        self.families = np.where(taken[:, None], families, self.families)
        self.accepted += int(taken.sum())
        self.proposed += len(taken)

    def allowed(self, rank: Ints) -> Ints:
        """The candidates before each variable, as bits (C, d)."""
        return np.asarray((self._of_candidates(rank) < rank[:, :, None]) @ self._powers)

    def draw(self, allowed: Ints) -> Ints:
        """Parents (C, d) drawn in proportion to exp(score) among the subsets of `allowed` (C, d), bit by bit."""
        variables, index = np.arange(self.tables.d), allowed.copy()
        dice = np.log(self.rng.random((self.tables.K, *allowed.shape)))
        for k in reversed(range(self.tables.K)):
            bit = 1 << k
            has = (index & bit) > 0
            stage = self.tables.stages[k]
            taken = dice[k] < stage[variables, index] - self.tables.stages[k + 1][variables, index]
            index = np.where(has & ~taken, index & ~bit, index)
        return index

    def _of_candidates(self, values: Ints, outside: int | None = None) -> Ints:
        """(C, d, K) a number of each variable's candidates, from one of each variable (C, d); large for none."""
        wide = np.concatenate([values, np.full((len(values), 1), 1 << 30 if outside is None else outside)], axis=1)
        return np.asarray(wide[:, self.tables.candidates])

    def _order_of_graph(self) -> Ints:
        """(C, d) ranks of an order of each graph: every next variable uniformly among those that may come.

        A variable that may come waits an exponential time. These have no memory, so the next is each with equal chance.
        """
        wait = self.rng.exponential(size=self.families.shape)
        has_parent = (self.families[..., None] & self._powers) > 0
        time = wait
        while True:
            wide = np.concatenate([time, np.zeros((len(time), 1))], axis=1)
            latest = np.where(has_parent, wide[:, self.tables.candidates], 0.0).max(axis=2, initial=0.0)
            later = wait + latest
            if (later == time).all():
                return np.argsort(np.argsort(time, axis=1), axis=1)
            time = later

    def _log_order(self, rank: Ints, families: Ints) -> Floats:
        """log r(order | graph), (C,): minus Σ log of how many variables might have come next."""
        has_parent = (families[..., None] & self._powers) > 0
        ready = np.where(has_parent, self._of_candidates(rank, 0) + 1, 0).max(axis=2, initial=0)
        chains, d = rank.shape
        change = np.zeros((chains, d + 1), dtype=np.int64)
        which = np.arange(chains)[:, None]
        np.add.at(change, (which, ready), 1)
        np.subtract.at(change, (which, rank + 1), 1)
        return np.asarray(-np.log(change.cumsum(axis=1)[:, :-1]).sum(axis=1))

    def _move(self, rank: Ints) -> Ints:
        """One variable of each chain put at a place drawn in proportion to the sums over all graphs of the order."""
        chains, d = rank.shape
        which, places, variables = np.arange(chains), np.arange(d), np.arange(d)
        v: Ints = np.asarray(self.rng.integers(d, size=chains))
        rest = rank - (rank > rank[which, v][:, None])  # places of the others, 0 … d - 2
        rest[which, v] = d
        sums = self.tables.stages[-1]
        allowed = self.allowed(rest)
        without = np.zeros((chains, d + 1))
        with_v = np.zeros((chains, d + 1))
        np.put_along_axis(without, rest, sums[variables, allowed], axis=1)
        np.put_along_axis(with_v, rest, sums[variables, allowed | self._bit_of[v]], axis=1)
        others = np.concatenate([rest, np.full((chains, 1), d)], axis=1)[which[:, None], self.tables.candidates[v]]
        of_v = (others[:, None, :] < places[:, None]) @ self._powers  # (C, d)
        total = sums[v[:, None], of_v]
        total[:, 1:] += without[:, : d - 1].cumsum(axis=1)
        total[:, : d - 1] += with_v[:, : d - 1][:, ::-1].cumsum(axis=1)[:, ::-1]
        place = np.argmax(total + self.rng.gumbel(size=total.shape), axis=1)
        moved = rest + (rest >= place[:, None])
        moved[which, v] = place
        return np.asarray(moved)
