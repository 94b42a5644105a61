"""The posterior over all DAGs of a table: `rai` and the tree of `learn_structure` propose, a sampler weighs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl.structure import pdag
from brainet_pl.structure.climb import climb_from
from brainet_pl.structure.copies import find_copies
from brainet_pl.structure.data import PreparedData
from brainet_pl.structure.discretize import check_bins
from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.independence import IndependenceTest
from brainet_pl.structure.learn import learn_structure
from brainet_pl.structure.orders import BestParents, improve_order
from brainet_pl.structure.pdag import PDAG, Bools, Ints, cpdag, dag_extension, topological_order
from brainet_pl.structure.plain_rai import ESS, rai
from brainet_pl.structure.sampler import Chains, Families
from brainet_pl.structure.score import Growth, LocalScore, Score, find_score
from brainet_pl.structure.settings import AUTO, check_limits, check_rows, choose_test

Floats = NDArray[np.float64]
Source = Literal["score", "tree"]
PROPOSED = 3  # networks of the tree that chains begin from, beside that of `rai`
FAR = 20.0  # nats: a beginning so much worse than the best is in no chain's reach, and not worth one
CANDIDATES = 10  # for the parents of a variable; more where its best parents are more
MOST_CANDIDATES = 14
MOST_LEVELLED = 6  # parents of a variable in a table of counts: more leave most of its cells empty
UNLIKELY = 6.0  # nats that a parent may cost beside the best ones and still be a candidate
MOST_VARIABLES = 300
BURN_IN = 0.25  # share of the steps before the first that counts
STEPS = 8  # from one draw that is kept to the next
DOUBTFUL = 0.5  # difference of an edge's probability between chains that is warned of


@dataclass(frozen=True, eq=False)
class StructurePosterior:
    """Draws from the posterior over DAGs, p(G) ∝ exp(score(G) - edge_cost·|edges|), and what they say about edges.

    Attributes:
        draws: (n, d, d) DAGs; [i, j] means i → j.
        scores: (n,) their scores, in nats, less the cost of their edges.
        edge_probabilities: (d, d) the probability of each arrow.
        map: (d, d) the best DAG that was met, and then climbed from.
        map_score: its score.
        disagreement: the largest difference of an edge's probability between a chain and all of them: 0 is best.
    """

    draws: Bools
    scores: Floats
    edge_probabilities: Floats
    map: Bools
    map_score: float
    disagreement: float

    @property
    def joined_probabilities(self) -> Floats:
        """(d, d) the probability that two variables are joined, whatever the direction."""
        return np.asarray(np.minimum(self.edge_probabilities + self.edge_probabilities.T, 1.0))

    def graph(self) -> PDAG:
        """The equivalence class of the best DAG."""
        return cpdag(self.map)


def structure_posterior(
    features: Any,
    *,
    posterior: Source = "score",
    test: str | type[IndependenceTest] = AUTO,
    score: str | type[Score] | None = None,
    ess: float = ESS,
    edge_cost: float | None = None,
    bins: int = 3,
    draws: int = 1000,
    chains: int = 8,
    seed: int = 0,
    max_rows: int | None = None,
    max_seconds: float | None = None,
) -> StructurePosterior:
    """Draw DAGs from their posterior given a table: which edges are sure, and which are not.

    `rai` and the networks of a small tree (`learn_structure`) are where chains begin, and they choose the candidates
    for each variable's parents; a sampler over orders of variables then draws DAGs in proportion to their scores. The
    probability of an edge is its share among the draws. Beside the candidates nothing is approximate: on few variables
    the draws agree with an enumeration of all DAGs.

    Args:
        features: An array or tensor (N, d) or a `FeatureStream`, as in `rai`; at most 300 columns.
        posterior: "score" samples all DAGs by their scores; "tree" is the paper's, over the sub-networks of a tree of
            `learn_structure` at its own temperature.
        test: The test of `rai` and the tree, which also says whether columns are categories. "auto" is as in `rai`.
        score: "bdeu", "bge", "bic" or a subclass of `Score`; None is the one that belongs to the test.
        ess: Equivalent sample size of BDeu, weight of the prior of BGe.
        edge_cost: What each edge costs by the prior over graphs, in nats. None is log d, which expects about one parent
            a variable; 0 takes all DAGs as equally likely before the data are seen.
        bins: Number of levels of a continuous column in the discrete tests and scores.
        draws: Number of DAGs to keep.
        chains: Number of chains that share the work and are compared with each other.
        seed: Seed of the draws.
        max_rows: Learn from a random sample of at most this many rows. None: from all.
        max_seconds: Time after which no further step is begun; there are then fewer draws. None: no limit.

    Example:
        Two causes of one effect: that both are joined to it is sure, the directions nearly so.

        >>> rng = np.random.default_rng(0)
        >>> a, b, noise = rng.normal(size=(3, 500))
        >>> found = structure_posterior(np.stack([a, b, a + b + noise], axis=1), draws=100)
        >>> found.edge_probabilities.round(1).tolist()
        [[0.0, 0.1, 0.9], [0.1, 0.0, 0.9], [0.1, 0.1, 0.0]]
        >>> found.map.astype(int).tolist()
        [[0, 0, 1], [0, 0, 1], [0, 0, 0]]
    """
    checks.one_of("posterior", posterior, get_args(Source), "score is that of all DAGs, tree the paper's")
    bins, max_rows = check_bins(bins), check_rows(max_rows)
    draws = checks.whole("draws", draws, 1, hint="it is the number of DAGs to keep")
    chains = checks.whole("chains", chains, 1, 1000, hint="they are compared with each other; 8 is usual")
    seed = checks.whole("seed", seed, 0, hint="any number from 0 on will do")
    ess = checks.number("ess", ess, 1e-12, hint="it is the weight of the score's prior")
    edge_cost = checks.number_or_none("edge_cost", edge_cost, 0, "None is log d")
    _, max_seconds = check_limits(None, max_seconds)
    budget = Budget(max_seconds=max_seconds)
    data = PreparedData.prepare(features, bins, max_rows)
    if data.d > MOST_VARIABLES:
        raise ValueError(
            f"expected at most {MOST_VARIABLES} columns to sample structures of, got {data.d}: rai and learn_structure "
            "take more"
        )
    chosen = choose_test(test, data, "fisher_z")
    scoring = find_score(chosen.default_score if score is None else score, chosen.kind)
    cost = float(np.log(data.d)) if edge_cost is None else edge_cost
    prior = _Scores(cache(scoring.on(data, ess)), scoring.growth_on(data, ess), cost)
    back = np.argsort(data.columns)
    if posterior == "tree":
        found = _of_tree(data, chosen, scoring, ess, prior, draws, seed)
    else:
        found = _sampled(data, chosen, scoring, ess, prior, draws, chains, seed, budget)
    every = np.ix_(back, back)
    return StructurePosterior(
        found.draws[:, back][:, :, back],
        found.scores,
        found.edge_probabilities[every],
        found.map[every],
        found.map_score,
        found.disagreement,
    )


@dataclass(frozen=True)
class _Scores:
    """The score of a family, of its growths, and the cost of an edge."""

    local: LocalScore
    growth: Growth
    edge_cost: float

    def __call__(self, dag: Bools) -> float:
        """The score of a DAG (d, d), less the cost of its edges."""
        parents = (tuple(np.flatnonzero(column).tolist()) for column in dag.T)
        return sum(self.local(x, p) for x, p in enumerate(parents)) - self.edge_cost * int(dag.sum())


def _of_tree(
    data: PreparedData,
    test: type[IndependenceTest],
    scoring: type[Score],
    ess: float,
    prior: _Scores,
    draws: int,
    seed: int,
) -> StructurePosterior:
    """The paper's: draws and exact probabilities of a tree's sub-networks."""
    ggt = learn_structure(data, test=test, score=scoring, ess=ess, seed=seed, progress=False)
    order = data.columns
    dags = np.stack([ggt.dag(way) for way in ggt.sample(draws, rng=seed)])[:, order][:, :, order]
    best = ggt.dag(ggt.map())[np.ix_(order, order)]
    edges = ggt.edge_probabilities()[np.ix_(order, order)]
    scores = np.array([prior(dag) for dag in dags])
    return StructurePosterior(dags, scores, edges, best, prior(best), 0.0)


def _sampled(
    data: PreparedData,
    test: type[IndependenceTest],
    scoring: type[Score],
    ess: float,
    prior: _Scores,
    draws: int,
    chains: int,
    seed: int,
    budget: Budget,
) -> StructurePosterior:
    """Chains from the best networks that `rai`, the tree and a search over orders propose."""
    original = find_copies(data, test.kind)
    starts = _starts(data, test, scoring, ess, prior, original, seed, budget)
    most = MOST_LEVELLED if test.kind == "discrete" else MOST_CANDIDATES
    candidates = _candidates(starts, prior, original)
    tables = Families.tabulate(candidates, prior.local, prior.growth, prior.edge_cost, most, _copied(original))
    rng = np.random.default_rng(seed)
    group = Chains(tables, [starts[i % len(starts)] for i in range(chains)], rng)
    steps = max(1, round(STEPS * -(-draws // chains) / (1 - BURN_IN)))
    first = int(BURN_IN * steps)
    kept: list[Ints] = []
    sums, counted = np.zeros((chains, data.d, data.d)), 0
    best, highest = starts[0], prior(starts[0])
    for step in range(steps):
        if budget.spent and counted:
            break
        group.step()
        top = int(np.argmax(group.scores))
        if group.scores[top] > highest:
            best, highest = tables.dags(group.families)[top], float(group.scores[top])
        if step >= first or budget.spent:
            sums += tables.dags(group.families)
            counted += 1
            if (steps - 1 - step) % STEPS == 0 or budget.spent:
                kept.append(group.families)
    families = np.concatenate(kept or [group.families])[-draws:]
    shares = sums / counted
    joined = shares + shares.transpose(0, 2, 1)
    disagreement = float(np.abs(joined - joined.mean(axis=0)).max())
    if disagreement > DOUBTFUL:
        warnings.warn(
            f"expected chains to agree about edges, got probabilities that differ by {disagreement:.2f}: raise draws",
            stacklevel=3,
        )
    best = _climbed(best, prior, original, budget)
    return StructurePosterior(
        tables.dags(families), tables.total(families), shares.mean(axis=0), best, prior(best), disagreement
    )


def _copied(original: Ints) -> Bools:
    """(d, d) arrows from each column to its copies."""
    arrows = np.zeros((len(original), len(original)), dtype=bool)
    arrows[original, np.arange(len(original))] = original != np.arange(len(original))
    return arrows


def _starts(
    data: PreparedData,
    test: type[IndependenceTest],
    scoring: type[Score],
    ess: float,
    prior: _Scores,
    original: Ints,
    seed: int,
    budget: Budget,
) -> list[Bools]:
    """DAGs (d, d) of the posterior's best regions, the best first: from `rai` and a tree, each improved over orders."""
    order, copied = data.columns, _copied(original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few rows and spent budgets: said once is enough
        graph = rai(data, test=test, climb=True, max_seconds=budget.left)
        settings: dict[str, Any] = {"s": (PROPOSED, 1), "ess": ess, "seed": seed, "max_seconds": budget.left}
        tree = learn_structure(data, test=test, score=scoring, progress=False, **settings)
    proposed = [dag_extension(graph.permute(order).adjacency)]
    proposed += [tree.dag(way)[np.ix_(order, order)] for way in tree.sample_uniform(PROPOSED, rng=seed)]
    own = original == np.arange(data.d)
    best = BestParents(
        prior.local, prior.growth, own & own[:, None] & pdag.complete_graph(data.d) | copied, prior.edge_cost, copied
    )
    found = []
    for dag in proposed:
        dag = dag & own & own[:, None] | copied
        improved, _ = best.dag_of(improve_order(topological_order(dag), best, lambda: budget.spent))
        found.append(max((dag, improved), key=prior))
    found.sort(key=lambda dag: -prior(dag))
    return [dag for dag in found if prior(dag) > prior(found[0]) - FAR]


def _climbed(dag: Bools, prior: _Scores, original: Ints, budget: Budget) -> Bools:
    """The DAG, or a better one that single steps and moves from it find."""
    own = original == np.arange(len(dag))
    inside = own & own[:, None]
    allowed = pdag.complete_graph(len(dag)) & inside
    A = climb_from(cpdag(dag & inside).adjacency, allowed, None, prior.local, prior.growth, prior.edge_cost, budget)
    return max((dag, dag_extension(A) | _copied(original)), key=prior)


def _candidates(starts: list[Bools], prior: _Scores, original: Ints) -> list[list[int]]:
    """The likeliest parents of each variable: the best DAG's, neighbours in any DAG, and those that cost least."""
    dag, d = starts[0], len(original)
    joined = np.sum([start | start.T for start in starts], axis=0)
    own = original == np.arange(d)
    candidates: list[list[int]] = []
    for x in range(d):
        parents = np.flatnonzero(dag[:, x])
        others = np.flatnonzero(own & ~dag[:, x] & (np.arange(d) != x))
        if not own[x] or not len(others):
            candidates.append(parents.tolist())
            continue
        given = tuple(parents.tolist())
        gain = prior.growth(x, given, others) - prior.local(x, given) - prior.edge_cost
        near = joined[x, others]
        order = np.lexsort((-gain, -near))
        likely = [int(others[i]) for i in order if near[i] or gain[i] > -UNLIKELY]
        most = min(max(CANDIDATES, len(parents) + 2), MOST_CANDIDATES)
        candidates.append([*parents.tolist()[:MOST_CANDIDATES], *likely][: max(most, 1)])
    return candidates
