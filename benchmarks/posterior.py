"""How far the posterior over structures can be believed: `python benchmarks/structure.py posterior --data DIR`.

Known networks and random linear-Gaussian DAGs, samples of 500 and 5,000 rows that no setting was chosen on.
Probabilities of edges by `structure_posterior`, which samples all DAGs, and by the tree (exact, at its default
temperature) stand beside the shares of edges in bootstrapped peers and beside a published sampler of DAGs (sumu); each
peer had the processor time of `structure_posterior`. What is stored is one sample; what is stored is not run again.
The pairs of all samples of a cell are binned together before their calibration error is taken: a sample has too few.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bif import read_bif
from common.edges import calibration_error, error_by_chance, pooled
from common.store import stamp
from common.tables import table
from numpy.typing import NDArray
from peers import causal_learn_boss, pyagrum_hill_climbing, sumu_partitions
from sklearn.metrics import average_precision_score

from brainet_pl.graphs import rai, structure_posterior
from brainet_pl.graphs.plain_rai import ESS
from brainet_pl.structure import GGT, PreparedData, find_score, learn_structure
from brainet_pl.structure.pdag import dag_extension

NETWORKS = ["alarm", "child", "insurance", "hailfinder", "hepar2"]
SIZES = [500, 5000]
GAUSSIANS = [(50, 2), (50, 4)]  # variables, average degree
FIRST_SEED = 40  # samples before were looked at while settings were chosen
MCMC = "partition MCMC"
ONLY_DISCRETE = ["hill climbing, bootstrapped"]
SAMPLED = 1000  # DAGs drawn from the posterior over all of them
DRAWS = 50  # sub-networks in the average of held-out likelihoods
BINS = 10
Dag = NDArray[np.bool_]
Learner = Callable[[NDArray[Any]], NDArray[np.bool_]]


def joined(adjacency: NDArray[Any]) -> NDArray[Any]:
    """(pairs,) the upper triangle of a symmetric sum."""
    both = adjacency + adjacency.T if adjacency.dtype != bool else adjacency | adjacency.T
    return both[np.triu_indices(len(both), 1)]


def edge_measures(p: NDArray[np.float64], true: NDArray[np.bool_]) -> dict[str, Any]:
    """Average precision, Brier score for each true edge, and the calibration of pairs with p > 0.05 with its sums."""
    p = np.clip(p, 0.0, 1.0)
    kept = p > 0.05
    place = np.minimum((p[kept] * BINS).astype(int), BINS - 1)
    sums = [np.bincount(place, weights=w, minlength=BINS).tolist() for w in (None, p[kept], true[kept].astype(float))]
    return {
        "ap": float(average_precision_score(true, p)),
        "brier": float(((p - true) ** 2).sum() / true.sum()),
        "ece": calibration_error(sums),
        "bins": sums,
    }


class Predictive:
    """Held-out log-likelihood of rows (T, d) under a DAG whose parameters come from training rows (N, d)."""

    def __init__(self, train: NDArray[Any], test: NDArray[Any], discrete: bool) -> None:
        self.train, self.test, self.discrete = train, test, discrete
        self._known: dict[tuple[int, tuple[int, ...]], NDArray[np.float64]] = {}

    def __call__(self, dag: Dag) -> NDArray[np.float64]:
        """(T,)"""
        return np.sum([self._family(x, tuple(np.flatnonzero(dag[:, x]).tolist())) for x in range(len(dag))], axis=0)

    def _family(self, x: int, parents: tuple[int, ...]) -> NDArray[np.float64]:
        if (x, parents) not in self._known:
            family = self._table if self.discrete else self._line
            self._known[x, parents] = family(x, list(parents))
        return self._known[x, parents]

    def _table(self, x: int, parents: list[int]) -> NDArray[np.float64]:
        """The BDeu posterior mean with an equivalent sample size of 1."""
        both = np.concatenate([self.train, self.test])
        levels = both.max(axis=0) + 1
        which = (
            np.unique(both[:, parents], axis=0, return_inverse=True)[1].ravel() if parents else np.zeros(len(both), int)
        )
        n = len(self.train)
        counts = np.full((which.max() + 1, levels[x]), 1.0 / (levels[x] * np.prod(levels[parents], dtype=float)))
        np.add.at(counts, (which[:n], self.train[:, x]), 1.0)
        return np.log(counts / counts.sum(axis=1, keepdims=True))[which[n:], self.test[:, x]]

    def _line(self, x: int, parents: list[int]) -> NDArray[np.float64]:
        """Least squares."""
        design, new = (np.c_[np.ones(len(rows)), rows[:, parents]] for rows in (self.train, self.test))
        weights, *_ = np.linalg.lstsq(design, self.train[:, x], rcond=None)
        variance = np.mean((self.train[:, x] - design @ weights) ** 2)
        return -0.5 * (np.log(2 * np.pi * variance) + (self.test[:, x] - new @ weights) ** 2 / variance)


@dataclass
class GraphScore:
    """The score of a DAG as the sum over its families."""

    local: Callable[[int, tuple[int, ...]], float]

    def __call__(self, dag: Dag) -> float:
        """In nats."""
        return sum(self.local(x, tuple(np.flatnonzero(dag[:, x]).tolist())) for x in range(len(dag)))


def score_of(x: NDArray[Any], discrete: bool, ess: float) -> GraphScore:
    """BDeu or BGe of a DAG over the columns of `x`, as the tree scores its leaves."""
    data = PreparedData.prepare(x, 3)
    local = find_score("bdeu" if discrete else "bge", "discrete" if discrete else "gaussian").on(data, ess)
    place = np.argsort(data.columns)

    def family(x: int, parents: tuple[int, ...]) -> float:
        return local(int(place[x]), tuple(sorted(place[list(parents)].tolist())))

    return GraphScore(family)


def bootstrapped(learner: Learner, x: NDArray[Any], seconds: float, seed: int) -> tuple[NDArray[np.float64], int]:
    """(d, d) shares of edges over as many bootstrap samples as fit into the time, at least one; and how many."""
    shares, start, b = np.zeros((x.shape[1],) * 2), time.process_time(), 0
    while not b or (time.process_time() - start) * (b + 1) / b < seconds:
        rows = np.random.default_rng([seed, b]).integers(0, len(x), len(x))
        varies = np.flatnonzero((x[rows] != x[rows[0]]).any(axis=0))
        graph = learner(x[rows][:, varies])
        shares[np.ix_(varies, varies)] += graph | graph.T
        b += 1
    return shares / b, b


def cell(dag: Dag, x: NDArray[Any], fresh: NDArray[Any], peers: dict[str, Learner], discrete: bool) -> dict[str, Any]:
    """All measures of one sample; every peer has the processor time of `structure_posterior`."""
    test = "g2" if discrete else "fisher_z"
    true = joined(dag)
    start = time.process_time()
    sampled = structure_posterior(x, test=test, draws=SAMPLED)
    seconds = time.process_time() - start
    start = time.process_time()
    ggt: GGT = learn_structure(x, test=test, progress=False)
    tree_seconds = time.process_time() - start
    own, cost = score_of(x, discrete, ESS), sampled.settings["edge_cost"]  # the score of the posterior
    climbed = dag_extension(rai(x, test=test).adjacency)
    held_out = Predictive(x, fresh, discrete)
    few = sampled.draws[:: max(1, len(sampled.draws) // DRAWS)]
    average = np.logaddexp.reduce([held_out(draw) for draw in few], axis=0) - np.log(len(few))
    result: dict[str, Any] = {
        "seconds": seconds,
        "tree seconds": tree_seconds,
        "disagreement": sampled.disagreement,
        "MAP less rai": sampled.map_score - (own(climbed) - cost * int(climbed.sum())),
        "MAP less truth": sampled.map_score - (own(dag) - cost * int(dag.sum())),
        "held out, average less MAP": float((average - held_out(sampled.map)).mean()),
        "posterior": edge_measures(joined(sampled.edge_probabilities), true),
        "tree": edge_measures(joined(ggt.edge_probabilities()), true),
    }
    for name, learner in peers.items():
        shares, samples = bootstrapped(learner, x, seconds, 0)
        result[name] = edge_measures(shares[np.triu_indices(len(shares), 1)], true) | {"samples": samples}
    shares, samples = sumu_partitions(x, seconds, 0)
    result[MCMC] = edge_measures(joined(shares), true) | {"samples": samples}
    return result


def cells(data: Path, seeds: int, peers: dict[str, Learner]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The name of every cell and how to compute it."""
    from structure import linear_gaussian

    def known(name: str, n: int, seed: int) -> dict[str, Any]:
        network = read_bif(data / "networks" / f"{name}.bif")
        both = network.sample(n + 1000, seed)
        return cell(network.dag, both[:n], both[n:], peers, discrete=True)

    def random(d: int, degree: int, n: int, seed: int) -> dict[str, Any]:
        dag, both = linear_gaussian(d, degree, n + 1000, seed)
        of_numbers = {name: peer for name, peer in peers.items() if name not in ONLY_DISCRETE}
        return cell(dag, both[:n], both[n:], of_numbers, discrete=False)

    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for n in SIZES:
            for name in NETWORKS:
                yield f"{name}/{n}/{seed}", partial(known, name, n, seed)
            for d, degree in GAUSSIANS:
                yield f"Gaussian {d}, degree {degree}/{n}/{seed}", partial(random, d, degree, n, seed)


def posterior(data: Path, seeds: int, out: Path, match: str = "") -> None:
    """Compute what is missing, print the table, draw the figure."""
    warnings.filterwarnings("ignore")

    def boss(x: NDArray[Any]) -> NDArray[np.bool_]:
        score = "local_score_BDeu" if x.dtype.kind == "i" else "local_score_BIC_from_cov"
        return causal_learn_boss(x, score).adjacency

    peers: dict[str, Learner] = {
        "BOSS, bootstrapped": boss,
        "hill climbing, bootstrapped": lambda x: pyagrum_hill_climbing(x).adjacency,
    }
    path = out / "structure_posterior.json"

    def read() -> dict[str, Any]:
        stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return {name: content for name, content in stored.items() if int(name.rsplit("/", 1)[1]) >= FIRST_SEED}

    known = read()
    for name, compute in cells(data, seeds, peers):
        if name not in known and match in name:
            found = compute() | {"measured": stamp()}
            known = read() | {name: found}  # another call may have added cells
            path.write_text(json.dumps(known, indent=1))
            print(name, {k: round(v, 3) for k, v in known[name].items() if isinstance(v, float)}, flush=True)
    show(known, [*peers, MCMC])
    draw(known, [*peers, MCMC], out / "structure_posterior.png")


def show(known: dict[str, Any], peers: list[str]) -> None:
    """Means over seeds, and the bars: calibration, ranking of edges, and the best network beside that of `rai`."""
    rows, calibrated, ahead, best = [], 0, 0, 0
    for group in dict.fromkeys(name.rsplit("/", 1)[0] for name in known):
        found = [content for name, content in known.items() if name.rsplit("/", 1)[0] == group]

        def mean(key: str, method: str | None = None, found: list[dict[str, Any]] = found) -> float:
            contents = found if method is None else [c[method] for c in found if method in c]
            return float(np.mean([c[key] for c in contents])) if contents else float("nan")

        def error(method: str, found: list[dict[str, Any]] = found) -> float:
            bins = [c[method]["bins"] for c in found if method in c]
            return calibration_error(pooled(bins)) if bins else float("nan")

        ap, others = mean("ap", "posterior"), [mean("ap", peer) for peer in peers]
        chance = error_by_chance(pooled(c["posterior"]["bins"] for c in found))
        calibrated += error("posterior") <= 0.05
        ahead += ap >= np.nanmax(others)
        best += mean("MAP less rai") > -1e-6
        rows.append(
            [
                group,
                f"{mean('MAP less rai'):+.1f}",
                f"{mean('MAP less truth'):+.0f}",
                f"{ap:.3f} / {mean('ap', 'tree'):.3f}",
                " / ".join("–" if np.isnan(other) else f"{other:.3f}" for other in others),
                f"{error('posterior'):.3f} / {error('tree'):.3f}",
                f"{chance:.3f}",
                " / ".join("–" if np.isnan(error(peer)) else f"{error(peer):.3f}" for peer in peers),
                f"{mean('brier', 'posterior'):.2f}",
                f"{mean('disagreement'):.2f}",
                f"{mean('held out, average less MAP'):+.3f}",
                f"{mean('seconds'):.1f}",
            ]
        )
    header = ["cell", "MAP less rai", "MAP less truth", "AP / tree's", "AP of peers", "ECE / tree's", "by chance"]
    table([*header, "ECE of peers", "Brier", "disagreement", "held out, average less MAP", "seconds"], rows)
    print(f"peers: {', '.join(peers)}")
    print(
        f"of {len(rows)} cells: ECE at most 0.05 in {calibrated}, AP at least that of every peer in {ahead},", end=" "
    )
    print(f"MAP not below rai in {best}")


def draw(known: dict[str, Any], peers: list[str], path: Path) -> None:
    """Edges that are there against the probability given to them, over all cells with rows of one size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, len(SIZES), sharey=True)
    for ax, n in zip(axes, SIZES, strict=True):
        ax.plot([0, 1], [0, 1], color="gray", lw=1)
        for method, style in zip(["posterior", "tree", *peers], ("o-", "D--", "s--", "^--", "v--"), strict=True):
            found = [c[method]["bins"] for name, c in known.items() if name.split("/")[1] == str(n) and method in c]
            if not found:
                continue
            count, p, there = np.sum(found, axis=0)
            kept = count >= 10
            label = {"posterior": "posterior over all DAGs", "tree": "posterior of the tree"}.get(method, method)
            ax.plot(p[kept] / count[kept], there[kept] / count[kept], style, ms=4, label=label)
        ax.set_title(f"{n:,} rows", fontsize=10)
        ax.set_xlabel("probability of an edge")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("share of such edges that are true")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
