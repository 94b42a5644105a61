"""Decomposable Bayesian scores log p(x | parents), always on the full data (line 3 of Algorithm 1).

A score is a function of one family, a variable and its sorted parents. Learners put a `functools.cache` in front of it,
because the leaves of a tree repeat most families. A subclass of `Score` gives such a function a name, and says which
data it reads and with which tests it goes; it is found by `find_score` from the moment its class is defined.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from brainet_pl.structure.data import DataKind, PreparedData, Weights, register
from brainet_pl.structure.statistics import CodeTable

Floats = NDArray[np.float64]
LocalScore = Callable[[int, tuple[int, ...]], float]

_named: dict[tuple[str, DataKind], type[Score]] = {}
_MAX_CODE = 1 << 40  # joint codes are renumbered before they can overflow 64 bits
_TINY_LOG = -600.0  # below exp(-600) the rising factorial takes its limit form


def family_counts(table: CodeTable, x: int, parents: tuple[int, ...]) -> NDArray[np.int64]:
    """Counts how often each level of `x` occurs with each configuration of `parents` that occurs at all, (q', r)."""
    code = np.zeros(table.num_rows, dtype=np.int64)
    size = 1
    for parent in parents:
        r = int(table.arities[parent])
        if size * r > _MAX_CODE:
            seen, code = np.unique(code, return_inverse=True)
            size = len(seen)
        code = code * r + table.codes[:, parent]
        size *= r
    r = int(table.arities[x])
    if size * r > 4 * table.num_rows:
        seen, code = np.unique(code, return_inverse=True)
        size = len(seen)
    counts = np.bincount(code * r + table.codes[:, x], minlength=size * r).reshape(size, r)
    return np.asarray(counts[counts.any(axis=1)])


def bdeu(table: CodeTable, ess: float) -> LocalScore:
    """Bayesian Dirichlet score with α = ess/(q·r), q the product of the parents' arities; natural logarithm.

    Σ_j [log Γ(α_j) - log Γ(α_j + n_j)] + Σ_jk [log Γ(α_jk + n_jk) - log Γ(α_jk)]
    """

    def local(x: int, parents: tuple[int, ...]) -> float:
        counts = family_counts(table, x, parents)
        log_configurations = float(np.log(table.arities[list(parents)]).sum())
        log_alpha = np.log(ess) - log_configurations
        log_levels = float(np.log(table.arities[x]))
        rise = _log_rise(log_alpha - log_levels, counts[counts > 0]).sum()
        return float(rise - _log_rise(log_alpha, counts.sum(axis=1)).sum())

    return local


def _log_rise(log_alpha: float, n: NDArray[np.int64]) -> Floats:
    """log Γ(α + n) - log Γ(α) for n ≥ 1; for hundreds of parents α underflows, and only log α + log Γ(n) is left."""
    if log_alpha < _TINY_LOG:
        return np.asarray(log_alpha + gammaln(n))
    alpha = np.exp(log_alpha)
    return np.asarray(gammaln(alpha + n) - gammaln(alpha))


def discrete_bic(table: CodeTable) -> LocalScore:
    """Σ n·log(n / n_parents) - ½·log N·q·(r-1); q, the product of the parents' arities, counts as N at most.

    More configurations than rows can't be seen, and hundreds of parents would make the penalty infinite.
    """

    def local(x: int, parents: tuple[int, ...]) -> float:
        counts = family_counts(table, x, parents)
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = counts * np.log(counts / counts.sum(axis=1, keepdims=True))
        log_q = min(float(np.log(table.arities[list(parents)]).sum()), np.log(table.num_rows))
        penalty = 0.5 * np.log(table.num_rows) * np.exp(log_q) * (table.arities[x] - 1)
        return float(np.nansum(terms) - penalty)

    return local


def gaussian_bic(correlation: Floats, n: int) -> LocalScore:
    """-N/2·(log 2πσ² + 1) - ½·log N·(|parents| + 2), σ² the residual variance of a standardised x."""

    def local(x: int, parents: tuple[int, ...]) -> float:
        log_variance = _log_det(correlation, (x, *parents)) - _log_det(correlation, parents)
        return float(-0.5 * n * (np.log(2 * np.pi) + log_variance + 1) - 0.5 * np.log(n) * (len(parents) + 2))

    return local


def bge(correlation: Floats, n: int, strength: float) -> LocalScore:
    """Bayesian Gaussian equivalent score of standardised data (Geiger & Heckerman 2002, Kuipers et al. 2014).

    Prior mean 0 with weight α_μ = `strength`, Wishart degrees α_w = d + α_μ + 1, prior matrix T = t·I.
    """
    d = len(correlation)
    a_w = d + strength + 1
    t = strength * (a_w - d - 1) / (strength + 1)
    posterior = t * np.eye(d) + n * correlation
    constant = -0.5 * n * np.log(np.pi) + 0.5 * np.log(strength / (strength + n))

    def local(x: int, parents: tuple[int, ...]) -> float:
        k = len(parents)
        prior_degrees = a_w - d + k
        gammas = gammaln(0.5 * (n + prior_degrees + 1)) - gammaln(0.5 * (prior_degrees + 1))
        prior = 0.5 * (prior_degrees + k + 1) * np.log(t)
        with_x, without = _log_det(posterior, (x, *parents)), _log_det(posterior, parents)
        data = 0.5 * (n + prior_degrees) * without - 0.5 * (n + prior_degrees + 1) * with_x
        return float(constant + gammas + prior + data)

    return local


def _log_det(matrix: Floats, variables: tuple[int, ...]) -> float:
    """log determinant of a principal submatrix; copied columns are kept off minus infinity."""
    if not variables:
        return 0.0
    sign, value = np.linalg.slogdet(matrix[np.ix_(variables, variables)])
    smallest = len(variables) * np.log(1e-12)
    return float(max(value, smallest)) if sign > 0 else smallest


class Score(ABC):
    """The base of all scores.

    Attributes:
        name: what `learn_structure(score=…)` calls it. Two scores may share a name if they go with different tests.
        kind: which prepared data it reads: "discrete" the codes `data.table`, "gaussian" the normal scores,
            by way of `data.correlation`.
        goes_with: the kinds of tests it may be combined with; its own kind alone if a subclass says nothing.
        version: goes into the key of cached trees; raise it when the values of a score of your own change.
    """

    name: ClassVar[str]
    kind: ClassVar[DataKind]
    goes_with: ClassVar[tuple[DataKind, ...]]
    version: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return
        kinds = get_args(DataKind)
        if getattr(cls, "kind", None) not in kinds:
            raise TypeError(
                f"expected the score {cls.__qualname__} to declare kind as one of {', '.join(kinds)}, "
                f"got {getattr(cls, 'kind', None)!r}: set it in the body of the class"
            )
        if "goes_with" not in cls.__dict__:
            cls.goes_with = (cls.kind,)
        for kind in cls.goes_with:
            register(_named, (cls.name, kind), cls)

    @classmethod
    @abstractmethod
    def on(cls, data: PreparedData, ess: float) -> LocalScore:
        """The score of a family on all rows of `data`; `ess` is the weight of the prior, where there is one."""
        raise NotImplementedError(f"expected {cls.__qualname__} to define `on`, got the one of the abstract base")

    @classmethod
    def on_sample(cls, data: PreparedData, ess: float, weights: Weights) -> LocalScore | None:
        """The score on a sample, rows counted as often as `weights` (N,) says; None where there is no such thing.

        The leaves of a tree are scored on all rows. Samples only make them differ in what they find.
        """
        return None


class BDeu(Score):
    """`bdeu` of the codes; continuous columns are binned, so it goes with every test."""

    name = "bdeu"
    kind = "discrete"
    goes_with = ("discrete", "gaussian")

    @classmethod
    def on(cls, data: PreparedData, ess: float) -> LocalScore:
        """The score with equivalent sample size `ess`."""
        return bdeu(data.table, ess)

    @classmethod
    def on_sample(cls, data: PreparedData, ess: float, weights: Weights) -> LocalScore | None:
        """The score on a sample, rows counted as often as `weights` (N,) says."""
        return bdeu(data.table.drawn(weights), ess)


class BGe(Score):
    """`bge` of the normal scores; every column has them, so it goes with every test."""

    name = "bge"
    kind = "gaussian"
    goes_with = ("discrete", "gaussian")

    @classmethod
    def on(cls, data: PreparedData, ess: float) -> LocalScore:
        """The score with a prior of weight `ess`."""
        return bge(data.correlation(), data.n, ess)

    @classmethod
    def on_sample(cls, data: PreparedData, ess: float, weights: Weights) -> LocalScore | None:
        """The score on a sample, rows counted as often as `weights` (N,) says."""
        return bge(data.correlation(weights), int(weights.sum()), ess)


class DiscreteBIC(Score):
    """`discrete_bic` of the codes, the form of "bic" for discrete tests."""

    name = "bic"
    kind = "discrete"

    @classmethod
    def on(cls, data: PreparedData, ess: float) -> LocalScore:
        """The score; it has no prior, so `ess` does not matter."""
        return discrete_bic(data.table)

    @classmethod
    def on_sample(cls, data: PreparedData, ess: float, weights: Weights) -> LocalScore | None:
        """The score on a sample, rows counted as often as `weights` (N,) says."""
        return discrete_bic(data.table.drawn(weights))


class GaussianBIC(Score):
    """`gaussian_bic` of the normal scores, the form of "bic" for Gaussian tests."""

    name = "bic"
    kind = "gaussian"

    @classmethod
    def on(cls, data: PreparedData, ess: float) -> LocalScore:
        """The score; it has no prior, so `ess` does not matter."""
        return gaussian_bic(data.correlation(), data.n)


def find_score(score: str | type[Score], kind: DataKind) -> type[Score]:
    """The score of a name for a test of this `kind`; a class is checked and handed back.

    Example:
        >>> find_score("bic", "gaussian").__name__
        'GaussianBIC'
    """
    chosen = _named.get((score, kind)) if isinstance(score, str) else score
    if not (inspect.isclass(chosen) and issubclass(chosen, Score) and kind in getattr(chosen, "goes_with", ())):
        known = sorted(name for name, goes_with in _named if goes_with == kind)
        raise ValueError(
            f"expected score to be one of {', '.join(known)} for a {kind} test, got {score!r}: "
            "choose one of these, None for the one that belongs to the test, or another test"
        )
    if inspect.isabstract(chosen):
        raise TypeError(f"expected a complete score, got {chosen.__qualname__} without `on`: define it in the class")
    return chosen
