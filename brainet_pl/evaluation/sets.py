"""The names of the sets of a test, from the loaders that a Trainer was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brainet_pl._utils.framework import pl, rank_zero_info
from brainet_pl._utils.lightning_private import data_given
from brainet_pl.evaluation.record import MEANS, Role
from brainet_pl.metrics.sets import TEST, check_set_names
from brainet_pl.metrics.shift import is_shift


class EvaluatesAllSets:
    """Marks a callback that evaluates every test set, not the known one alone."""


def test_sets(trainer: pl.Trainer) -> dict[str, Role]:
    """Name → role of every test loader, in their order; the first is the known test set.

    Loaders are named by the dictionary that `test_dataloader` returned or `trainer.test(dataloaders=…)` was given. A
    loader without a name gets one. Of the datamodule or module that gave the loaders, the attribute `near` names the
    unknown sets that resemble the training data; loaders given to `trainer.test` itself have none. A loader called
    `shift/<corruption>/<severity>`, or `shift` for many of them, holds known samples, labelled, after a shift.
    """
    loaders: Any = trainer.test_dataloaders
    names = _named(loaders) if isinstance(loaders, Mapping) else _numbered(loaders)
    near = tuple(getattr(data_given(trainer.test_loop), "near", ()))
    unknown = [name for name in names[1:] if not is_shift(name)]
    if unknown:  # unless none of them is evaluated
        check_set_names(unknown, near)
    return {name: _role(i, name, near) for i, name in enumerate(names)}


def _named(loaders: Mapping[Any, Any]) -> list[str]:
    """The names that loaders were given."""
    names = [str(name) for name in loaders]
    if TEST in names[1:]:
        raise ValueError(
            f"expected the known test set {TEST!r} as the first of the test loaders, and once, got "
            f"{', '.join(names)}: put it first"
        )
    check_set_names(names[1:])
    taken = [name for name in names if name in MEANS.values()]
    if taken:
        raise ValueError(
            f"expected names other than {' and '.join(MEANS.values())}, which are the means over sets of a kind, "
            f"got {', '.join(taken)}: rename the set"
        )
    return names


def _numbered(loaders: Any) -> list[str]:
    """Names for loaders that have none."""
    count = len(loaders) if isinstance(loaders, list | tuple) else 1
    names = [TEST, *(f"loader_{i}" for i in range(1, count))]
    if count > 1:
        rank_zero_info(
            f"test loaders without names are called {', '.join(names)}: the first is the known set, the others are "
            "taken as unknown; return a dictionary of loaders from test_dataloader to name them"
        )
    return names


def _role(place: int, name: str, near: tuple[str, ...]) -> Role:
    if is_shift(name):
        if not place:
            raise ValueError(f"expected the known test set {TEST!r} as the first of the test loaders, got {name!r}")
        return "shift"
    return "known" if place == 0 else "near" if name in near else "far"


test_sets.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks of the name
