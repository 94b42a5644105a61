"""Conditional-independence tests, all answering one question: how far are pairs from being called independent?

The answer is a margin: below zero means independent, and the smaller the more so; exactly zero means that there was
nothing to test, because the condition set determines one of the pair. It can be asked for a block of pairs
left × right given one condition set (`block`), or for a list of pairs each with its own (`pairs`); the two differ only
in cost. Tests never see a graph, and graphs never see data.

A test is one subclass of `IndependenceTest` that declares what it is. A subclass with a `name` is found by that name
from the moment its class is defined, whether it stands in this package or in a user's script.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.checks import shown
from brainet_pl.structure.data import DataKind, PreparedData, Weights, register

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]
Unit = Literal["nats", "significance level"]

_named: dict[str, type[IndependenceTest]] = {}


class Margins(Protocol):
    """What the recursion asks of a test: any object with these two methods will do.

    An object may also have `keeps_all`; if that is true, no pair is ever called independent and nothing is tested. With
    `strength`, (d, d) numbers that rise with the dependence of two variables given nothing, condition sets are drawn
    from the strongest where there are very many; with `weakest` (`SingleMargins`) single conditions are tested faster.
    `dependence(left, right)`, numbers (L, R) of the same meaning, stands in for margins that can't rank strong
    dependences: p-values are 0 for all of them.
    """

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the margins (L, R) of left × right given `condition`."""
        ...

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes the margins (T,) of x (T,) and y (T,) given conditions (T, n)."""
        ...


@runtime_checkable
class SingleMargins(Margins, Protocol):
    """A test that finds the best of many single conditions by itself."""

    def weakest(self, x: int, y: Ints, z: Ints) -> tuple[Floats, Ints]:
        """Finds the smallest margin of `x` and each of `y` (Y,) given one of `z` (Z,), and its place in z.

        z = y is no condition; where there is no other, the margin is infinite.
        """
        ...


class IndependenceTest(ABC):
    """The base of all tests on data; an instance is bound to one sample and one threshold.

    Attributes:
        name: what `learn_structure(test=…)` calls it; a subclass without its own name is not registered.
        kind: which prepared data it reads: "discrete" the codes `data.table`, "gaussian" the normal scores,
            best by way of `data.correlation`. A score named "bic" takes the form that belongs to this kind.
        unit: of the threshold: "nats" (of information, 0 or more) or "significance level" (between 0 and 1).
        default_threshold: the threshold where the user gives none; `default_for` may lower it for many variables.
        default_score: the name of the score that belongs to the test.
        version: goes into the key of cached trees; raise it when the answers of a test of your own change.
        keeps_all: no pair can be called independent, so nothing needs to be tested.
        capped: where an end of an edge has very many potential parents, condition sets are drawn from the strongest
            of them, if the test has a `strength`. False draws from all, as the paper does.
    """

    name: ClassVar[str]
    kind: ClassVar[DataKind]
    unit: ClassVar[Unit]
    default_threshold: ClassVar[float]
    default_score: ClassVar[str]
    version: ClassVar[int] = 1
    keeps_all: bool = False
    capped: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _check_declaration(cls)
            register(_named, cls.name, cls)

    @classmethod
    @abstractmethod
    def on(cls, data: PreparedData, weights: Weights | None, threshold: float) -> IndependenceTest:
        """The test on a sample: `weights` (N,) counts how often each row is drawn, None is every row once."""
        raise NotImplementedError(f"expected {cls.__qualname__} to define `on`, got the one of the abstract base")

    @abstractmethod
    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the margins (L, R) of left × right given `condition`."""

    @abstractmethod
    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes the margins (T,) of x (T,) and y (T,) given conditions (T, n)."""

    @classmethod
    def default_for(cls, d: int) -> float:
        """The threshold for `d` variables where the user gives none."""
        return float(cls.default_threshold)

    @classmethod
    def check_threshold(cls, threshold: float | None, d: int = 1) -> float:
        """The threshold for `d` variables as a plain number; refuses what has no meaning in the test's unit.

        None is the default, which for some tests depends on `d`.
        """
        try:
            value = float(cls.default_for(d) if threshold is None else threshold)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf or (cls.unit == "significance level" and value > 1):
            bounds = {"nats": "of at least 0 (nats)", "significance level": "between 0 and 1 (a significance level)"}
            raise ValueError(
                f"expected a threshold {bounds[cls.unit]} for the test {cls.name!r}, got {threshold!r}: "
                f"None takes {cls.default_threshold}"
            )
        return value


def _check_declaration(cls: type[IndependenceTest]) -> None:
    """Refuse a test that does not say what it is when its class is defined, not in the midst of learning."""
    declared = {"name": (), "kind": get_args(DataKind), "unit": get_args(Unit), "default_score": ()}
    for attribute, choices in declared.items():
        value = getattr(cls, attribute, None)
        if not isinstance(value, str) or not value or (choices and value not in choices):
            expected = " or ".join(map(repr, choices)) or "a name"
            raise TypeError(
                f"expected {cls.__qualname__}.{attribute} to be {expected}, got {value!r}: "
                "declare it in the body of the class"
            )
    if not isinstance(getattr(cls, "default_threshold", None), int | float):
        raise TypeError(
            f"expected {cls.__qualname__}.default_threshold to be a number, got "
            f"{getattr(cls, 'default_threshold', None)!r}: declare it in the body of the class"
        )
    cls.check_threshold(None)


def known_tests() -> list[str]:
    """The names of all tests that are defined so far, sorted."""
    return sorted(_named)


def find_test(test: str | type[IndependenceTest]) -> type[IndependenceTest]:
    """The test of a name; a class is checked and handed back.

    Example:
        >>> find_test("cmi").unit
        'nats'
    """
    if isinstance(test, str) and test in _named:
        chosen = _named[test]
    elif inspect.isclass(test) and issubclass(test, IndependenceTest):
        chosen = test
    else:
        raise ValueError(
            f"expected test to be one of {', '.join(known_tests())} or a subclass of IndependenceTest, "
            f"got {shown(test)}: choose one of these, or define a subclass with this name (and import its module) first"
        )
    if inspect.isabstract(chosen) or not hasattr(chosen, "name"):
        missing = sorted(chosen.__abstractmethods__) or ["name"]
        raise TypeError(
            f"expected a complete independence test, got {chosen.__qualname__} without {', '.join(missing)}: "
            "define what is missing in the class"
        )
    return chosen
