"""Decomposable Bayesian scores log p(x | parents), always on the full data (line 3 of Algorithm 1).

A score is a function of one family, a variable and its sorted parents. Learners put a `functools.cache` in front of it,
because the leaves of a tree repeat most families. A subclass of `Score` gives such a function a name, and says which
data it reads and with which tests it goes; it is found by `find_score` from the moment its class is defined.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from brainet_pl.structure.data import DataKind, PreparedData, register
from brainet_pl.structure.statistics import CodeTable

Floats = NDArray[np.float64]
LocalScore = Callable[[int, tuple[int, ...]], float]
# Scores (C,) of x given sorted parents and one of C candidates more: what `LocalScore` says C times, in one go.
Growth = Callable[[int, tuple[int, ...], NDArray[np.intp]], Floats]

_named: dict[tuple[str, DataKind], type[Score]] = {}
_GROWN_CELLS = 1 << 21  # rows, or cells, times candidates that are counted together
_MAX_CODE = 1 << 40  # joint codes are renumbered before they can overflow 64 bits
_TINY_LOG = -600.0  # below exp(-600) the rising factorial takes its limit form


def one_by_one(score: LocalScore) -> Growth:
    """The scores with one parent more, by asking for each of them."""

    def growth(x: int, parents: tuple[int, ...], candidates: NDArray[np.intp]) -> Floats:
        return np.array([score(x, tuple(sorted((*parents, c)))) for c in candidates.tolist()])

    return growth


def parent_codes(table: CodeTable, parents: tuple[int, ...]) -> tuple[NDArray[np.int64], int]:
    """The number of the configuration of `parents` in each row (N,), and how many numbers there are at most."""
    code = np.zeros(table.num_rows, dtype=np.int64)
    size = 1
    for parent in parents:
        r = int(table.arities[parent])
        if size * r > _MAX_CODE:
            seen, code = np.unique(code, return_inverse=True)
            size = len(seen)
        code = code * r + table.codes[:, parent]
        size *= r
    if size > table.num_rows:
        seen, code = np.unique(code, return_inverse=True)
        size = len(seen)
    return code, size


def family_counts(table: CodeTable, x: int, parents: tuple[int, ...]) -> NDArray[np.int64]:
    """Counts how often each level of `x` occurs with each configuration of `parents` that occurs at all, (q', r)."""
    code, size = parent_codes(table, parents)
    r = int(table.arities[x])
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


def bdeu_growth(table: CodeTable, ess: float) -> Growth:
    """`bdeu` of x with each of C candidates as one parent more, from one histogram of all of them together."""

    def growth(x: int, parents: tuple[int, ...], candidates: NDArray[np.intp]) -> Floats:
        log_alpha = np.log(ess) - np.log(table.arities[list(parents)]).sum() - np.log(table.arities[candidates])
        log_levels = np.log(table.arities[x])
        values = np.empty(len(candidates))
        for part, counts in grown_counts(table, x, parents, candidates):  # (c, q, most levels, r)
            given = counts.sum(axis=3)
            rise = _log_rise_each(log_alpha[part] - log_levels, counts.reshape(len(counts), -1))
            values[part] = rise - _log_rise_each(log_alpha[part], given.reshape(len(counts), -1))
        return values

    return growth


def grown_counts(
    table: CodeTable, x: int, parents: tuple[int, ...], candidates: NDArray[np.intp]
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64]]]:
    """Places among the candidates, and for them counts (c, q, most levels, r): parents seen × candidate × x.

    Candidates with as many levels stand together; as many at a time as memory allows.
    """
    code, q = parent_codes(table, parents)
    r = int(table.arities[x])
    code = code * r + table.codes[:, x]
    levels = table.arities[candidates]
    for most in np.unique(levels):
        places = np.flatnonzero(levels == most)
        cells = q * int(most) * r
        step = max(1, _GROWN_CELLS // max(cells, table.num_rows))
        for start in range(0, len(places), step):
            part = places[start : start + step]
            every = table.codes[:, candidates[part]].T.astype(np.int64)
            every *= q * r
            every += code
            every += (np.arange(len(part)) * cells)[:, None]
            counts = np.bincount(every.ravel(), minlength=len(part) * cells)
            yield part, counts.reshape(len(part), int(most), q, r).swapaxes(1, 2)


def _log_rise_each(log_alpha: Floats, n: NDArray[np.int64]) -> Floats:
    """Σ log Γ(α + n) - log Γ(α) over the positive numbers of each row of `n` (C, m), α by row (C,)."""
    row, column = np.nonzero(n)
    positive, of_row = n[row, column], log_alpha[row]
    alpha = np.exp(of_row)
    with np.errstate(over="ignore"):
        rise = np.where(of_row < _TINY_LOG, of_row + gammaln(positive), gammaln(alpha + positive) - gammaln(alpha))
    return np.asarray(np.bincount(row, weights=rise, minlength=len(n)), dtype=np.float64)


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


def gaussian_bic_growth(correlation: Floats, n: int) -> Growth:
    """`gaussian_bic` of x with each of C candidates as one parent more, from one factorisation."""
    singly = one_by_one(gaussian_bic(correlation, n))

    def growth(x: int, parents: tuple[int, ...], candidates: NDArray[np.intp]) -> Floats:
        try:
            _, _, rest = _residuals(correlation, x, parents, candidates)
        except np.linalg.LinAlgError:  # parents that determine each other
            return singly(x, parents, candidates)
        penalty = 0.5 * np.log(n) * (len(parents) + 3)
        return np.asarray(-0.5 * n * (np.log(2 * np.pi) + np.log(rest) + 1) - penalty)

    return growth


def bge(correlation: Floats, n: int, strength: float) -> LocalScore:
    """Bayesian Gaussian equivalent score of standardised data (Geiger & Heckerman 2002, Kuipers et al. 2014).

    Prior mean 0 with weight α_μ = `strength`, Wishart degrees α_w = d + α_μ + 1, prior matrix T = t·I.
    """
    posterior, terms = _bge_parts(correlation, n, strength)

    def local(x: int, parents: tuple[int, ...]) -> float:
        return float(terms(len(parents), _log_det(posterior, parents), _log_det(posterior, (x, *parents))))

    return local


def bge_growth(correlation: Floats, n: int, strength: float) -> Growth:
    """`bge` of x with each of C candidates as one parent more, from one factorisation."""
    posterior, terms = _bge_parts(correlation, n, strength)

    def growth(x: int, parents: tuple[int, ...], candidates: NDArray[np.intp]) -> Floats:
        log_det, candidate, rest = _residuals(posterior, x, parents, candidates)
        without = log_det + np.log(candidate)
        return terms(len(parents) + 1, without, without + np.log(rest))

    return growth


def _bge_parts(correlation: Floats, n: int, strength: float) -> tuple[Floats, Callable[[int, Any, Any], Floats]]:
    """The posterior matrix R (d, d), and the score from the number of parents, log|R_parents| and log|R_x,parents|."""
    d = len(correlation)
    a_w = d + strength + 1
    t = strength * (a_w - d - 1) / (strength + 1)
    constant = -0.5 * n * np.log(np.pi) + 0.5 * np.log(strength / (strength + n))

    def terms(k: int, without: Any, with_x: Any) -> Floats:
        prior_degrees = a_w - d + k
        gammas = gammaln(0.5 * (n + prior_degrees + 1)) - gammaln(0.5 * (prior_degrees + 1))
        prior = 0.5 * (prior_degrees + k + 1) * np.log(t)
        data = 0.5 * (n + prior_degrees) * without - 0.5 * (n + prior_degrees + 1) * with_x
        return np.asarray(constant + gammas + prior + data)

    return t * np.eye(d) + n * correlation, terms


def _residuals(
    matrix: Floats, x: int, parents: tuple[int, ...], candidates: NDArray[np.intp]
) -> tuple[float, Floats, Floats]:
    """log|matrix_parents|, what is left of each candidate (C,) given the parents, and of x given that candidate too."""
    log_det, of_x, of_c, cross = 0.0, matrix[x, x], matrix.diagonal()[candidates], matrix[x, candidates]
    smallest = 1e-12 * of_x
    if parents:
        rows = matrix[list(parents)]  # (k, d)
        inner = rows[:, list(parents)]
        inner.flat[:: len(inner) + 1] += smallest
        root = np.linalg.cholesky(inner)
        half = np.linalg.solve(root, rows)  # whole rows are faster than chosen columns
        log_det = 2.0 * float(np.log(root.diagonal()).sum())
        to_x, to_c = half[:, x], half[:, candidates]
        of_x = of_x - to_x @ to_x
        of_c = of_c - np.einsum("kc,kc->c", to_c, to_c)
        cross = cross - to_x @ to_c
    of_c = np.maximum(of_c, smallest)
    return log_det, of_c, np.maximum(of_x - cross**2 / of_c, smallest)


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
    def growth_on(cls, data: PreparedData, ess: float) -> Growth:
        """The scores of a variable with each of some candidates as one parent more, which `rai`'s search asks for.

        They are computed one by one unless a subclass knows a faster way.
        """
        return one_by_one(cls.on(data, ess))


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
    def growth_on(cls, data: PreparedData, ess: float) -> Growth:
        """The scores with one parent more."""
        return bdeu_growth(data.table, ess)


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
    def growth_on(cls, data: PreparedData, ess: float) -> Growth:
        """The scores with one parent more."""
        return bge_growth(data.correlation(), data.n, ess)


class DiscreteBIC(Score):
    """`discrete_bic` of the codes, the form of "bic" for discrete tests."""

    name = "bic"
    kind = "discrete"

    @classmethod
    def on(cls, data: PreparedData, ess: float) -> LocalScore:
        """The score; it has no prior, so `ess` does not matter."""
        return discrete_bic(data.table)


class GaussianBIC(Score):
    """`gaussian_bic` of the normal scores, the form of "bic" for Gaussian tests."""

    name = "bic"
    kind = "gaussian"

    @classmethod
    def on(cls, data: PreparedData, ess: float) -> LocalScore:
        """The score; it has no prior, so `ess` does not matter."""
        return gaussian_bic(data.correlation(), data.n)

    @classmethod
    def growth_on(cls, data: PreparedData, ess: float) -> Growth:
        """The scores with one parent more."""
        return gaussian_bic_growth(data.correlation(), data.n)


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
