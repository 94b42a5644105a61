"""How far the posterior over structures can be believed: `python benchmarks/structure.py posterior --data DIR`.

Known networks and random linear-Gaussian DAGs, samples of 500 and 5,000 rows. Probabilities of edges by
`structure_posterior`, which samples all DAGs, and by the tree (exact, at its default temperature) stand beside the
shares of edges in bootstrapped peers that had the time of the slower of the two. A cell is one sample; what is stored
is not run again.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bif import read_bif
from common.tables import table
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from brainet_pl.structure import GGT, PreparedData, find_score, learn_structure, rai, structure_posterior
from brainet_pl.structure.pdag import dag_extension
from brainet_pl.structure.plain_rai import ESS

NETWORKS = ["alarm", "child", "insurance", "hailfinder", "hepar2"]
SIZES = [500, 5000]
GAUSSIANS = [(50, 2), (50, 4)]  # variables, average degree
S = 5  # samples a node
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
    sums = [np.bincount(place, weights=w, minlength=BINS) for w in (None, p[kept], true[kept].astype(float))]
    gap = np.abs(sums[1] - sums[2]).sum() / max(1, kept.sum())
    return {
        "ap": float(average_precision_score(true, p)),
        "brier": float(((p - true) ** 2).sum() / true.sum()),
        "ece": float(gap),
        "bins": [part.tolist() for part in sums],
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


def score_of(x: NDArray[Any], discrete: bool, ess: float = 1.0) -> Callable[[Dag], float]:
    """BDeu or BGe of a DAG over the columns of `x`, as the tree scores its leaves."""
    data = PreparedData.prepare(x, 3)
    local = find_score("bdeu" if discrete else "bge", "discrete" if discrete else "gaussian").on(data, ess)
    place = np.argsort(data.columns)

    def score(dag: Dag) -> float:
        families = ((x, np.sort(place[np.flatnonzero(dag[:, x])])) for x in range(len(dag)))
        return sum(local(int(place[x]), tuple(parents.tolist())) for x, parents in families)

    return score


def bootstrapped(learner: Learner, x: NDArray[Any], seconds: float, seed: int) -> tuple[NDArray[np.float64], int]:
    """(d, d) shares of edges over as many bootstrap samples as fit into the time, at least one; and how many."""
    shares, start, b = np.zeros((x.shape[1],) * 2), time.perf_counter(), 0
    while not b or (time.perf_counter() - start) * (b + 1) / b < seconds:
        rows = np.random.default_rng([seed, b]).integers(0, len(x), len(x))
        varies = np.flatnonzero((x[rows] != x[rows[0]]).any(axis=0))
        graph = learner(x[rows][:, varies])
        shares[np.ix_(varies, varies)] += graph | graph.T
        b += 1
    return shares / b, b


def cell(dag: Dag, x: NDArray[Any], fresh: NDArray[Any], peers: dict[str, Learner], discrete: bool) -> dict[str, Any]:
    """All measures of one sample."""
    test = "g2" if discrete else "fisher_z"
    true = joined(dag)
    start = time.perf_counter()
    ggt: GGT = learn_structure(x, s=S, test=test, progress=False)
    seconds = time.perf_counter() - start
    score, held_out = score_of(x, discrete), Predictive(x, fresh, discrete)
    best = ggt.dag(ggt.map())
    draws = np.stack([held_out(ggt.dag(way)) for way in ggt.sample(DRAWS)])
    start = time.perf_counter()
    sampled = structure_posterior(x, test=test, draws=SAMPLED)
    sampled_seconds = time.perf_counter() - start
    own, cost = score_of(x, discrete, ESS), float(np.log(x.shape[1]))  # the score that rai and the posterior share
    climbed = dag_extension(rai(x, test=test).adjacency)
    few = sampled.draws[:: max(1, len(sampled.draws) // DRAWS)]
    sampled_draws = np.stack([held_out(dag) for dag in few])
    result: dict[str, Any] = {
        "seconds": seconds,
        "posterior seconds": sampled_seconds,
        "posterior": edge_measures(joined(sampled.edge_probabilities), true),
        "posterior disagreement": sampled.disagreement,
        "posterior MAP less rai": sampled.map_score - (own(climbed) - cost * int(climbed.sum())),
        "posterior held out, average": float((np.logaddexp.reduce(sampled_draws, axis=0) - np.log(len(few))).mean()),
        "posterior held out, MAP": float(held_out(sampled.map).mean()),
        "subnetworks": float(min(ggt.num_subnetworks, 10**300)),
        "map score": score(best),
        "rai score": score(dag_extension(rai(x, test=test, climb=False).adjacency)),
        "rai climbed score": score(climbed),
        "paper score": score(paper_map(x, test)),
        "true score": score(dag),
        "held out, average": float((np.logaddexp.reduce(draws, axis=0) - np.log(DRAWS)).mean()),
        "held out, MAP": float(held_out(best).mean()),
        "tree": edge_measures(joined(ggt.edge_probabilities()), true),
    }
    for name, learner in peers.items():
        shares, samples = bootstrapped(learner, x, max(seconds, sampled_seconds), 0)
        result[name] = edge_measures(shares[np.triu_indices(len(shares), 1)], true) | {"samples": samples}
    return result


def paper_map(x: NDArray[Any], test: str) -> Dag:
    """The MAP network of Algorithm 1 to the letter, with the same settings."""
    ggt = learn_structure(x, s=S, test=test, bootstrap="paper", max_seconds=60, progress=False)
    return ggt.dag(ggt.map())


def cells(data: Path, seeds: int, peers: dict[str, Learner]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The name of every cell and how to compute it."""
    from structure import linear_gaussian

    for seed in range(seeds):
        for name in NETWORKS:
            for n in SIZES:

                def known(name: str = name, n: int = n, seed: int = seed) -> dict[str, Any]:
                    network = read_bif(data / "networks" / f"{name}.bif")
                    both = network.sample(n + 1000, seed)
                    return cell(network.dag, both[:n], both[n:], peers, discrete=True)

                yield f"{name}/{n}/{seed}", known
        for d, degree in GAUSSIANS:
            for n in SIZES:

                def random(d: int = d, degree: int = degree, n: int = n, seed: int = seed) -> dict[str, Any]:
                    dag, both = linear_gaussian(d, degree, n + 1000, seed)
                    ours = {"rai, bootstrapped": peers["rai, bootstrapped"]}
                    return cell(dag, both[:n], both[n:], ours, discrete=False)

                yield f"Gaussian {d}, degree {degree}/{n}/{seed}", random


def posterior(data: Path, seeds: int, out: Path) -> None:
    """Compute what is missing, print the table, draw the figure."""
    from structure import pyagrum_hill_climbing, pyagrum_miic

    warnings.filterwarnings("ignore")
    peers: dict[str, Learner] = {
        "rai, bootstrapped": lambda x: rai(x, test="g2" if x.dtype.kind == "i" else "fisher_z", climb=False).adjacency,
        "MIIC, bootstrapped": lambda x: pyagrum_miic(x).adjacency,
        "hill climbing, bootstrapped": lambda x: pyagrum_hill_climbing(x).adjacency,
    }
    path = out / "structure_posterior.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name, compute in cells(data, seeds, peers):
        if "posterior" not in known.get(name, {}):  # also what was stored before all DAGs were sampled
            known[name] = compute()
            path.write_text(json.dumps(known, indent=1))
            print(name, {k: round(v, 3) for k, v in known[name].items() if isinstance(v, float)}, flush=True)
    known = {name: content for name, content in known.items() if "posterior" in content}
    show(known, list(peers))
    draw(known, list(peers), out / "structure_posterior.png")


def show(known: dict[str, Any], peers: list[str]) -> None:
    """Means over seeds."""
    rows = []
    for group in dict.fromkeys(name.rsplit("/", 1)[0] for name in known):
        found = [content for name, content in known.items() if name.rsplit("/", 1)[0] == group]

        def mean(key: str, found: list[dict[str, Any]] = found) -> float:
            return float(np.mean([c[key] for c in found]))

        def measured(method: str, key: str, found: list[dict[str, Any]] = found) -> float:
            return float(np.mean([c[method][key] for c in found if method in c]))

        others = [measured(peer, "ap") for peer in peers if peer in found[0]]
        rows.append(
            [
                group,
                f"{mean('posterior MAP less rai'):+.1f}",
                f"{mean('map score') - mean('rai climbed score'):+.0f}",
                f"{measured('posterior', 'ap'):.3f} / {measured('tree', 'ap'):.3f}",
                " / ".join(f"{ap:.3f}" for ap in others),
                f"{measured('posterior', 'brier'):.2f} / {measured('tree', 'brier'):.2f}",
                f"{measured('posterior', 'ece'):.3f} / {measured('tree', 'ece'):.3f}",
                f"{mean('posterior held out, average') - mean('held out, average'):+.3f}",
                f"{mean('posterior seconds'):.1f} / {mean('seconds'):.1f}",
            ]
        )
    header = ["cell", "MAP less rai", "the tree's less rai", "AP / tree's", "AP of peers", "Brier / tree's"]
    table([*header, "ECE / tree's", "held out, average less the tree's", "seconds / tree's"], rows)


def draw(known: dict[str, Any], peers: list[str], path: Path) -> None:
    """Edges that are there against the probability given to them, over all cells with rows of one size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, len(SIZES), sharey=True)
    for ax, n in zip(axes, SIZES, strict=True):
        ax.plot([0, 1], [0, 1], color="gray", lw=1)
        for method, style in zip(["posterior", "tree", *peers], ("o-", "D--", "s--", "^--", "v--"), strict=True):
            found = [c[method]["bins"] for name, c in known.items() if name.split("/")[1] == str(n) and method in c]
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
