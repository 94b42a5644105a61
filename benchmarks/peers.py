"""Other programs that learn one graph of a table, behind one signature: rows in, `PDAG` out.

causal-learn's BDeu counts every column anew for every family (40 s of ALARM with 500 rows were not enough for BOSS), so
its searches are given the same numbers from this package's counts: what is compared is the search, not the counting.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import compress
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from brainet_pl.graphs import PDAG, cpdag
from brainet_pl.structure import PreparedData, find_score

SUMU_CANDIDATES, SUMU_DRAWS = 10, 300


@contextmanager
def counted_quickly(module: str, x: NDArray[Any]) -> Iterator[None]:
    """causal-learn's BDeu of `x` (N, d) in one of its modules, sample and structure prior 1, by quick counts."""
    score, rest = quick_bdeu(x), {"create": True}
    with mock.patch(f"causallearn.{module}.local_score_BDeu", score, **rest):
        yield


def quick_bdeu(x: NDArray[Any]) -> Callable[..., float]:
    """The function `local_score_BDeu` of causal-learn for the rows `x` (N, d)."""
    data = PreparedData.prepare(x, 3)
    place, d = np.argsort(data.columns), x.shape[1]
    local = cache(find_score("bdeu", "discrete").on(data, 1.0))
    yes, no = np.log(1 / (d - 1)), np.log(1 - 1 / (d - 1)) if d > 2 else 0.0

    def local_score_BDeu(rows: Any, i: int, parents: Any, parameters: Any = None) -> float:
        family = tuple(sorted(place[list(parents)].tolist()))
        return local(int(place[i]), family) + len(family) * yes + (d - 1 - len(family)) * no

    return local_score_BDeu


def causal_learn_pc(x: NDArray[Any], alpha: float = 0.05, test: str = "gsq") -> PDAG:
    """PC with the G² test, or Fisher's z, and the library's defaults."""
    from causallearn.search.ConstraintBased.PC import pc

    return _from_marks(pc(x, alpha=alpha, indep_test=test, show_progress=False).G.graph)


def _from_marks(marks: NDArray[Any]) -> PDAG:
    """A graph of causal-learn: i → j is marks[i, j] = -1, marks[j, i] = 1; i — j is -1, -1; a conflict is 1, 1."""
    return PDAG((marks == -1) | ((marks == 1) & (marks.T == 1)))


def causal_learn_boss(x: NDArray[Any], score: str) -> PDAG:
    """Best order score search with the library's defaults."""
    from causallearn.search.PermutationBased.BOSS import boss

    random.seed(0)  # it shuffles by the global generator
    with counted_quickly("search.PermutationBased.BOSS", x):
        return _from_marks(boss(x, score_func=score, verbose=False).graph)


def causal_learn_grasp(x: NDArray[Any], score: str) -> PDAG:
    """Greedy relaxation of the sparsest permutation with the library's defaults."""
    from causallearn.search.PermutationBased.GRaSP import grasp

    random.seed(0)
    with counted_quickly("search.PermutationBased.GRaSP", x):
        return _from_marks(grasp(x, score_func=score, verbose=False).graph)


def causal_learn_ges(x: NDArray[Any], score: str) -> PDAG:
    """Greedy equivalence search with the library's defaults."""
    from causallearn.search.ScoreBased.GES import ges

    with counted_quickly("search.ScoreBased.GES", x):
        return _from_marks(ges(x, score_func=score)["G"].graph)


def _pyagrum_learner(x: NDArray[np.int64]) -> tuple[Any, list[int]]:
    """A learner of the codes, and the column of each of its node numbers."""
    import pandas as pd
    import pyagrum as gum

    learner = gum.BNLearner(pd.DataFrame(x.astype(str), columns=[str(j) for j in range(x.shape[1])]))
    return learner, [int(learner.nameFromId(i)) for i in range(x.shape[1])]


def pyagrum_miic(x: NDArray[np.int64]) -> PDAG:
    """MIIC, pyAgrum's constraint-based learner, as an equivalence class."""
    learner, column = _pyagrum_learner(x)
    learner.useMIIC()
    graph = learner.learnPDAG()
    A = np.zeros((x.shape[1],) * 2, dtype=bool)
    for i, j in graph.arcs():
        A[column[i], column[j]] = True
    for i, j in graph.edges():
        A[column[i], column[j]] = A[column[j], column[i]] = True
    return PDAG(A)


def pyagrum_hill_climbing(x: NDArray[np.int64]) -> PDAG:
    """Greedy hill climbing with pyAgrum's default score, as the equivalence class of the DAG it ends in."""
    learner, column = _pyagrum_learner(x)
    learner.useGreedyHillClimbing()
    A = np.zeros((x.shape[1],) * 2, dtype=bool)
    for i, j in learner.learnDAG().arcs():
        A[column[i], column[j]] = True
    return cpdag(A)


def sumu_partitions(x: NDArray[Any], seconds: float, seed: int) -> tuple[NDArray[np.float64], int]:
    """(d, d) probabilities of arrows by sumu's Gadget (Viinikka et al. 2020), and the steps of its chains.

    A chain over ordered partitions, with the library's scores, prior and choice of candidates; other parents, up to two
    at once, are weighed too. It stops by processor time, and the first quarter of its partitions does not count. Chains
    that are coupled by temperature have fewer steps in the same time, and were further from the truth. The
    table of families is filled here, because the library's own function fails under numpy 2.
    """
    from sumu.gadget import Data, Gadget

    start, d = time.process_time(), x.shape[1]
    discrete, K = x.dtype.kind == "i", min(SUMU_CANDIDATES, d - 1)
    np.random.seed(seed)  # noqa: NPY002  # it draws by the global generator
    rows = Data(np.ascontiguousarray(x, dtype=np.int32 if discrete else np.float64), discrete=discrete)
    settings = {"ess": 10, "max_id": -1, "d": 2, "mc3_chains": 1, "tolerance": 2**-32, "cp_algo": "greedy-lite"}
    gadget = Gadget(data=rows, scoref="bdeu" if discrete else "bge", K=K, **settings)
    gadget._find_candidate_parents()
    local, bits = gadget.l_score._local, np.arange(1 << K)[:, None] >> np.arange(K) & 1
    families = [[np.array(list(compress(near, chosen)), dtype=np.int32) for chosen in bits] for near in gadget.C_array]
    gadget.score_array = np.array([[local(v, family) for family in of_v] for v, of_v in enumerate(families)])
    gadget._precompute_candidate_restricted_scoring()
    gadget._precompute_candidate_complement_scoring()
    gadget._init_mcmc()
    steps, partitions = 0, []
    while time.process_time() - start < seconds or not partitions:
        partition = gadget.mcmc.sample()[0]
        steps += 1
        if steps % d == 0:
            partitions.append(partition)
    partitions = partitions[len(partitions) // 4 :]
    gadget.Rs = partitions[:: -(-len(partitions) // SUMU_DRAWS)]
    shares = np.zeros((d, d))
    for dag in gadget._sample_dags()[0]:
        for v, *parents in dag:
            shares[list(*parents), v] += 1 / len(gadget.Rs)
    return shares, steps
