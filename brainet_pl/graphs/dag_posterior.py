"""The posterior over all DAGs of a table: `rai` and the tree of `learn_structure` propose, a sampler weighs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl._utils.warn import warn
from brainet_pl.graphs.climb import climb_from
from brainet_pl.graphs.export import Edge, edge_table
from brainet_pl.graphs.knowledge import Knowledge, class_of
from brainet_pl.graphs.networks import with_networks
from brainet_pl.graphs.orders import BestParents, improve_order
from brainet_pl.graphs.pdag import PDAG
from brainet_pl.graphs.plain_rai import ESS, rai
from brainet_pl.graphs.sampler import Chains, Families, PairProbabilities
from brainet_pl.structure.constraints import Constraints, check_knowledge
from brainet_pl.structure.copies import find_copies
from brainet_pl.structure.data import DataKind, PreparedData, Weights, column_names
from brainet_pl.structure.discretize import check_bins
from brainet_pl.structure.evidence import Budget
from brainet_pl.structure.ggt import GGT
from brainet_pl.structure.independence import IndependenceTest, find_test
from brainet_pl.structure.learn import learn_structure
from brainet_pl.structure.pdag import Bools, Ints, dag_extension, topological_order
from brainet_pl.structure.score import Growth, LocalScore, Score, find_score
from brainet_pl.structure.settings import AUTO, SAMPLES, check_limits, check_rows, choose_test, warn_of_few_rows
from brainet_pl.structure.statistics import bootstrap_weights

Floats = NDArray[np.float64]
Source = Literal["score", "tree"]
PROPOSED = 3  # networks of the tree that chains begin from, beside that of `rai`
FAR = 20.0  # nats: a beginning so much worse than the best is in no chain's reach, and not worth one
CANDIDATES = 10  # for the parents of a variable; more where its best parents are more
MOST_CANDIDATES = 14
MOST_LEVELLED = 4  # parents of a variable in a table of counts, unless a beginning has more: their cells are empty
UNLIKELY = 6.0  # nats that a parent may cost beside the best ones and still be a candidate
MOST_VARIABLES = 300
BURN_IN = 0.25  # share of the steps before the first that counts
STEPS = 8  # from one draw that is kept to the next
SHARE = 1 / 3  # of the bootstrap samples in the probabilities and draws
EDGE_COST: dict[DataKind, float] = {  # times log d, by what the score is made of
    "discrete": 1.0,  # weak edges are more often true than their probabilities would say with 1.5
    "gaussian": 1.5,  # and more often chance with 1
}
SAMPLE_CHAINS, SAMPLE_STEPS = 4, 4  # of a bootstrap sample: what differs between samples is more than within one
DOUBTFUL = 0.5  # difference of an edge's probability between chains that is warned of


@dataclass(frozen=True, eq=False)
class StructurePosterior:
    """Draws from the posterior over DAGs, p(G) ∝ exp(score(G) - edge_cost·|edges|), and what they say about edges.

    A third of the draws are of bootstrap samples of the rows, unless `bootstraps` was 0.

    Attributes:
        draws: (n, d, d) DAGs; [i, j] means i → j.
        scores: (n,) their scores, in nats, less the cost of their edges.
        edge_probabilities: (d, d) the probability of each arrow.
        map: (d, d) the best DAG that was met, and then climbed from.
        map_score: its score.
        disagreement: the largest difference of an edge's probability between a chain and all of them: 0 is best.
        equivalent: (d, d) the graph of all DAGs that are equivalent to the best one and break nothing known.
        names: of the variables, where the data had some.
        settings: what they were drawn with: test, score, ess, edge_cost, bins, seed and max_rows.
    """

    draws: Bools
    scores: Floats
    edge_probabilities: Floats
    map: Bools
    map_score: float
    disagreement: float
    equivalent: Bools
    names: tuple[str, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def joined_probabilities(self) -> Floats:
        """The probability that two variables are joined, whatever the direction, (d, d)."""
        return np.asarray(np.minimum(self.edge_probabilities + self.edge_probabilities.T, 1.0))

    def graph(self) -> PDAG:
        """The equivalence class of the best DAG, with the directions that knowledge adds."""
        return PDAG(self.equivalent, self.names)

    def edges(self, least: float = 0.05) -> list[Edge]:
        """The edges that are at least `least` probable, the likeliest first, with the probabilities of both arrows."""
        return edge_table(self.graph(), self.edge_probabilities, least)

    def tree(self, features: Any, **settings: Any) -> GGT:
        """The tree of `learn_structure`, with draws of this posterior as its networks; for heads and densities.

        The sets of variables that a head is wired by stay those of the tests. The parents that a density is made of,
        and the scores that branches are weighed by, are those of different draws, one for each branch of the root.

        Args:
            features: The table that the draws are of.
            settings: Of `learn_structure`. Its knowledge is about the sets; that of the draws they have already.
        """
        bins, max_rows, seed = (self.settings[name] for name in ("bins", "max_rows", "seed"))
        data = PreparedData.prepare(features, bins, max_rows)
        if data.d != self.draws.shape[1]:
            raise ValueError(
                f"expected the {self.draws.shape[1]} columns that the draws are of, got {data.d}: give the same table"
            )
        scoring = find_score(self.settings["score"], find_test(self.settings["test"]).kind)
        local, place = scoring.on(data, self.settings["ess"]), np.argsort(data.columns)

        def score(x: int, parents: tuple[int, ...]) -> float:
            return local(int(place[x]), tuple(sorted(place[list(parents)].tolist())))

        ggt = learn_structure(features, **settings)
        order = np.random.default_rng(seed).permutation(len(self.draws))
        different = {self.draws[i].tobytes(): self.draws[i] for i in order}
        root = with_networks(ggt.root, list(different.values()), score)
        record = {**ggt.settings, "score": scoring.name, "ess": self.settings["ess"], "posterior": "score"}
        return GGT(root, data.d, ggt.num_rows, record, self.names)


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
    bootstraps: int = 4,
    seed: int = 0,
    max_rows: int | None = None,
    max_seconds: float | None = None,
    knowledge: Knowledge | None = None,
) -> StructurePosterior:
    """Draw DAGs from their posterior given a table: which edges are sure, and which are not.

    `rai` and the networks of a small tree (`learn_structure`) are where chains begin, and they choose the candidates
    for each variable's parents; a sampler over orders of variables then draws DAGs in proportion to their scores. Each
    draw gives every edge a probability given its other edges, and the mean of these is the edge's. The same is done for
    a few bootstrap samples of the rows. Beside the candidates nothing is approximate: on few variables, and with
    `bootstraps=0`, the draws agree with an enumeration of all DAGs.

    Args:
        features: An array, tensor (N, d), data frame or `FeatureStream`, as in `rai`; at most 300 columns.
        posterior: "score" samples all DAGs by their scores; "tree" is the paper's, over the sub-networks of a tree of
            `learn_structure` at its own temperature.
        test: The test of `rai` and the tree, which also says whether columns are categories. "auto" is as in `rai`.
        score: "bdeu", "bge", "bic" or a subclass of `Score`; None is the one that belongs to the test.
        ess: Equivalent sample size of BDeu, weight of the prior of BGe.
        edge_cost: What each edge costs by the prior over graphs, in nats. None is log d for categories and 1.5 log d
            for numbers; log d expects about one parent a variable; 0 takes all DAGs as equally likely before the data
            are seen.
        bins: Number of levels of a continuous column in the discrete tests and scores.
        draws: Number of DAGs to keep.
        chains: Number of chains that share the work and are compared with each other.
        bootstraps: Number of samples of rows, drawn with replacement, whose posteriors make up a third of all
            probabilities and draws: what depends on a few rows is then doubtful, as it should be. 0 is the posterior of
            the score given all rows, and nothing else.
        seed: Seed of the draws.
        max_rows: Learn from a random sample of at most this many rows. None: from all.
        max_seconds: Time after which no further step is begun; there are then fewer draws. None: no limit.
        knowledge: Arrows that must or must not be there, and the order of groups of variables in time.

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
    bootstraps = checks.whole("bootstraps", bootstraps, 0, 1000, hint="0 is the posterior of the score given all rows")
    seed = checks.whole("seed", seed, 0, hint="any number from 0 on will do")
    ess = checks.number("ess", ess, 1e-12, hint="it is the weight of the score's prior")
    edge_cost = checks.number_or_none("edge_cost", edge_cost, 0, "None is log d for categories, 1.5 log d for numbers")
    _, max_seconds = check_limits(None, max_seconds)
    budget = Budget(max_seconds=max_seconds)
    data = PreparedData.prepare(features, bins, max_rows)
    if data.d > MOST_VARIABLES:
        raise ValueError(
            f"expected at most {MOST_VARIABLES} columns to sample structures of, got {data.d}: rai and learn_structure "
            "take more"
        )
    warn_of_few_rows(data)
    chosen = choose_test(test, data, "fisher_z")
    scoring = find_score(chosen.default_score if score is None else score, chosen.kind)
    cost = EDGE_COST[scoring.kind] * float(np.log(data.d)) if edge_cost is None else edge_cost
    names = column_names(features)
    if knowledge is not None:
        knowledge = knowledge.numbered(data.d, names)
    problem = _Problem(data, chosen, scoring, ess, cost, knowledge, names, seed, budget)
    problem.check()
    found = _of_tree(problem, draws) if posterior == "tree" else _sampled(problem, draws, chains, bootstraps)
    found = problem.without_false_directions(found)
    back = np.argsort(data.columns)
    every = np.ix_(back, back)
    return replace(
        found,
        draws=found.draws[:, back][:, :, back],
        edge_probabilities=found.edge_probabilities[every],
        map=found.map[every],
        equivalent=found.equivalent[every],
        names=names,
        settings={
            "test": chosen.name,
            "score": scoring.name,
            "ess": ess,
            "edge_cost": cost,
            "bins": bins,
            "seed": seed,
            "max_rows": max_rows,
        },
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


@dataclass(frozen=True)
class _Problem:
    """What structures are sampled of, and how they are weighed; variables are in canonical order."""

    data: PreparedData
    test: type[IndependenceTest]
    scoring: type[Score]
    ess: float
    edge_cost: float
    knowledge: Knowledge | None  # about the user's column numbers
    names: tuple[str, ...] | None  # of the user's columns
    seed: int
    budget: Budget

    @cached_property
    def prior(self) -> _Scores:
        """The scores on all rows."""
        return self.prior_on(None)

    def prior_on(self, weights: Weights | None) -> _Scores:
        """The scores on a sample, rows counted as often as `weights` (n,) says."""
        data = self.data if weights is None else self.data.resampled(weights)
        return _Scores(cache(self.scoring.on(data, self.ess)), self.scoring.growth_on(data, self.ess), self.edge_cost)

    @cached_property
    def original(self) -> Ints:
        """(d,) for each column the first that says the same."""
        return find_copies(self.data, self.test.kind)

    @cached_property
    def known(self) -> Constraints:
        """What no DAG may break: what is known, copies as children of the first and no more, no edge of constants."""
        d, own = self.data.d, self.original == np.arange(self.data.d)
        copied = _copied(self.original)
        known = Knowledge().on(d, None)
        if self.knowledge is not None:
            known = check_knowledge(self.knowledge, self.names, self.data.columns, self.original)
        free = own & _varying(self.data, self.test.kind)
        allowed = known.allowed & free & free[:, None] | known.required | copied
        return Constraints(known.required | copied, allowed, known.before)

    def check(self) -> None:
        """Refuse knowledge that can't be true, in the names of columns, before anything is learned."""
        self.known  # noqa: B018

    def without_false_directions(self, found: StructurePosterior) -> StructurePosterior:
        """Both directions between a column and its copy alike: which of the two speaks for both is our choice."""
        copied = _copied(self.original)
        both = copied | copied.T
        edges = found.edge_probabilities
        edges = np.where(both, (edges + edges.T) / 2, edges)
        joined = found.equivalent | found.equivalent.T
        return replace(found, edge_probabilities=edges, equivalent=found.equivalent | both & joined)

    def tree(self, s: Any = SAMPLES) -> GGT:
        """A tree of `learn_structure` for the same test and score."""
        settings: dict[str, Any] = {"s": s, "ess": self.ess, "seed": self.seed, "max_seconds": self.budget.left}
        return learn_structure(
            self.data, test=self.test, score=self.scoring, knowledge=self.knowledge, progress=False, **settings
        )


def _of_tree(problem: _Problem, draws: int) -> StructurePosterior:
    """The paper's: draws and exact probabilities of a tree's sub-networks."""
    ggt, order = problem.tree(), problem.data.columns
    every = np.ix_(order, order)
    dags = np.stack([ggt.dag(way) for way in ggt.sample(draws, rng=problem.seed)])[:, order][:, :, order]
    best = ggt.dag(ggt.map())[every]
    scores, edges = np.array([problem.prior(dag) for dag in dags]), ggt.edge_probabilities()[every]
    return StructurePosterior(dags, scores, edges, best, problem.prior(best), 0.0, class_of(best, problem.known))


def _sampled(problem: _Problem, draws: int, chains: int, bootstraps: int) -> StructurePosterior:
    """Chains from the best networks that `rai`, the tree and a search over orders propose; then the same, shorter, for
    bootstrap samples of the rows."""
    prior, known, budget, seed = problem.prior, problem.known, problem.budget, problem.seed
    starts = _starts(problem)
    most = MOST_LEVELLED if problem.test.kind == "discrete" else MOST_CANDIDATES
    of_all = draws - round(SHARE * draws) if bootstraps else draws
    found = _explore(prior, known, starts, of_all, chains, STEPS, most, np.random.default_rng(seed), budget)
    disagreement = found.disagreement
    if disagreement > DOUBTFUL:
        warn(
            f"expected chains to agree about edges, got probabilities that differ by {disagreement:.2f}: take more "
            f"draws, such as {4 * draws:,}"
        )
    dags, edges, of_samples = [found.dags[-of_all:]], found.by_chain.mean(axis=0), []
    for number in range(bootstraps):
        if budget.spent:
            break
        few = (draws - of_all) * (number + 1) // bootstraps - (draws - of_all) * number // bootstraps
        rng = np.random.default_rng([seed, number])
        on_sample = problem.prior_on(bootstrap_weights(problem.data.n, seed, (number,)))
        start = _best_in_order(found.best, on_sample, known, budget)
        more = _explore(on_sample, known, [start], few, min(chains, SAMPLE_CHAINS), SAMPLE_STEPS, most, rng, budget)
        dags.append(more.dags[len(more.dags) - few :])
        of_samples.append(more.by_chain.mean(axis=0))
    if of_samples:
        edges = (1 - SHARE) * edges + SHARE * np.mean(of_samples, axis=0)
    climbed = climb_from(
        class_of(found.best, known), known.allowed, None, prior.local, prior.growth, prior.edge_cost, budget, known
    )
    best = max((found.best, known.extend(climbed)), key=prior)
    every = np.concatenate(dags)
    scores = np.array([prior(dag) for dag in every])
    return StructurePosterior(every, scores, edges, best, prior(best), disagreement, class_of(best, known))


@dataclass(frozen=True)
class _Explored:
    """What chains met: draws (n, d, d), probabilities of arrows by chain (C, d, d), and the best DAG (d, d)."""

    dags: Bools
    by_chain: Floats
    best: Bools

    @property
    def disagreement(self) -> float:
        """The largest difference of a pair's probability to be joined between a chain and all of them."""
        joined = self.by_chain + self.by_chain.transpose(0, 2, 1)
        return float(np.abs(joined - joined.mean(axis=0)).max())


def _explore(
    prior: _Scores,
    known: Constraints,
    starts: list[Bools],
    draws: int,
    chains: int,
    every: int,
    most: int,
    rng: np.random.Generator,
    budget: Budget,
) -> _Explored:
    """At least `draws` DAGs, of `chains` chains after each `every` steps; fewer where the budget is spent."""
    candidates = _candidates(starts, prior, known)
    size = np.maximum(most, np.stack(starts).sum(axis=1).max(axis=0) + 1)
    tables = Families.tabulate(candidates, prior.local, prior.growth, prior.edge_cost, size, known.required)
    given_rest = PairProbabilities(prior.local, prior.growth, prior.edge_cost, known.allowed, known.required, size)
    group = Chains(tables, [starts[i % len(starts)] for i in range(chains)], rng)
    steps = max(1, round(every * -(-draws // chains) / (1 - BURN_IN)))
    first = int(BURN_IN * steps)
    kept: list[Bools] = []
    by_chain = np.zeros((chains, *known.allowed.shape))
    best, highest = starts[0], prior(starts[0])
    for step in range(steps):
        if budget.spent and kept:
            break
        group.step()
        scores = group.scores
        top = int(np.argmax(scores))
        if scores[top] > highest:
            best, highest = tables.dags(group.families)[top], float(scores[top])
        if (step >= first and (steps - 1 - step) % every == 0) or budget.spent:
            dags = tables.dags(group.families)
            by_chain += [given_rest(dag) for dag in dags]
            kept.append(dags)
    return _Explored(np.concatenate(kept), by_chain / len(kept), best)


def _best_in_order(dag: Bools, prior: _Scores, known: Constraints, budget: Budget) -> Bools:
    """The better of a DAG and that in which a search over orders from it ends."""
    best = BestParents(prior.local, prior.growth, known.allowed, prior.edge_cost, known.required)
    improved, _ = best.dag_of(improve_order(topological_order(dag), best, lambda: budget.spent))
    return max((dag, improved), key=prior)


def _varying(data: PreparedData, kind: DataKind) -> Bools:
    """(d,) the columns that vary: no data speak for or against an edge of another, and none is drawn."""
    if kind == "discrete":
        return np.asarray((data.table.codes != data.table.codes[0]).any(axis=0))
    return np.asarray((data.correlation() != np.eye(data.d)).any(axis=0))  # without a second column none is asked for


def _copied(original: Ints) -> Bools:
    """(d, d) arrows from each column to its copies."""
    arrows = np.zeros((len(original), len(original)), dtype=bool)
    arrows[original, np.arange(len(original))] = original != np.arange(len(original))
    return arrows


def _starts(problem: _Problem) -> list[Bools]:
    """DAGs (d, d) of the posterior's best regions, the best first: from `rai` and a tree, each improved over orders."""
    prior, known, order, budget = problem.prior, problem.known, problem.data.columns, problem.budget
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few rows and spent budgets: said once is enough
        graph = rai(problem.data, test=problem.test, climb=True, max_seconds=budget.left, knowledge=problem.knowledge)
        tree = problem.tree((PROPOSED, 1))
    proposed = [dag_extension(graph.permute(order).adjacency)]
    proposed += [tree.dag(way)[np.ix_(order, order)] for way in tree.sample_uniform(PROPOSED, rng=problem.seed)]
    found = [_best_in_order(known.extend(dag), prior, known, budget) for dag in proposed]
    found.sort(key=lambda dag: -prior(dag))
    return [dag for dag in found if prior(dag) > prior(found[0]) - FAR]


def _candidates(starts: list[Bools], prior: _Scores, known: Constraints) -> list[list[int]]:
    """The likeliest parents of each variable: the best DAG's, neighbours in any DAG, and those that cost least."""
    dag = starts[0]
    joined = np.sum([start | start.T for start in starts], axis=0)
    candidates: list[list[int]] = []
    for x in range(len(dag)):
        parents = np.flatnonzero(dag[:, x])
        others = np.flatnonzero(known.allowed[:, x] & ~dag[:, x])
        if not len(others):
            candidates.append(parents.tolist())
            continue
        given = tuple(parents.tolist())
        gain = prior.growth(x, given, others) - prior.local(x, given) - prior.edge_cost
        near = joined[x, others]
        order = np.lexsort((-gain, -near))
        likely = [int(others[i]) for i in order if near[i] or gain[i] > -UNLIKELY]
        most = min(max(CANDIDATES, len(parents) + 2), MOST_CANDIDATES)
        required = np.flatnonzero(known.required[:, x]).tolist()
        ranked = dict.fromkeys([*required, *parents.tolist(), *likely])
        candidates.append(list(ranked)[:most])
    return candidates
