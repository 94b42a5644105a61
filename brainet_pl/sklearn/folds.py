"""What each row of a table does in a fit: which networks learn from it, and for which it is held back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import GroupShuffleSplit, train_test_split

from brainet_pl._utils.warn import warn

Ints = NDArray[np.int64]
LEAST_ROWS = 40  # below it no row can be spared for calibration
MEMBERS = 5  # networks by default
MOST_CROSSED = 10_000  # rows up to which there are as many; one network of more has rows enough to hold back
MOST_HELD = 0.3  # share of few rows that an only network holds back
WANTED = 20  # rows held back by which a p-value can be as small as 0.05


class Roles(NamedTuple):
    """Numbers of rows by what they do for the members of one fold, see `brainet_pl.sklearn.training.Fold`."""

    train: Ints
    select: Ints
    held: Ints


def roles_of(
    rows: int, classes: Ints | None, groups: Ints | None, members: int | None, fraction: float, seed: int
) -> list[Roles]:
    """What the rows do for the members of each fold, by their numbers.

    Args:
        rows: how many there are.
        classes: (N,) of a classification, which every fold has its share of.
        groups: (N,) what hangs together, such as the patient of each row: no group is on both sides of a fold.
        members: folds; None chooses by the number of rows.
        fraction: the share that an only member holds back; 0 holds nothing back.
        seed: of what is drawn.
    """
    every = np.arange(rows)
    if rows < LEAST_ROWS:
        warn(
            f"probabilities are not calibrated, and nothing can be called unknown: expected at least {LEAST_ROWS} "
            f"rows to hold some back, got {rows}; give more rows"
        )
    if rows < LEAST_ROWS or not fraction:
        return [Roles(every, every[:0], every[:0])]
    count = members or (MEMBERS if rows <= MOST_CROSSED else 1)
    if count == 1:
        size = max(fraction, min(MOST_HELD, WANTED / rows))
        if groups is not None:
            train, others = _split_groups(every, groups, size, seed)
            return [Roles(train, *_split_groups(others, groups, 0.5, seed))]
        train, others = _split(every, classes, size, seed)
        return [Roles(train, *_split(others, classes, 0.5, seed))]
    if groups is None:
        fold = folds_of(np.zeros(rows, dtype=np.int64) if classes is None else classes, count, seed)
    else:
        fold = folds_by_group(groups, count, seed)
    found = []
    for number in range(int(fold.max()) + 1):
        held = np.flatnonzero(fold == number)
        found.append(Roles(np.setdiff1d(every, held), held, held))
    return found


def roles_beside(rows: int, given: int, seed: int) -> list[Roles]:
    """All of `rows` rows train; of as many `given` ones that follow them half choose the epoch, half calibrate."""
    order = rows + np.random.default_rng(seed).permutation(given)
    return [Roles(np.arange(rows), np.sort(order[: given // 2]), np.sort(order[given // 2 :]))]


def _split(rows: Ints, classes: Ints | None, size: float, seed: int) -> tuple[Ints, Ints]:
    """Rows in two parts by chance, the second a share of `size`, each class evenly where there is enough of it."""
    counts = None if classes is None else np.unique(classes[rows], return_counts=True)[1]
    # Every class needs two rows, and either side a row of every class, to be split evenly.
    even = counts is not None and counts.min() >= 2 and min(size, 1 - size) * len(rows) >= len(counts)
    first, second = train_test_split(
        rows, test_size=size, random_state=seed, stratify=classes[rows] if even and classes is not None else None
    )
    return first, second


def _split_groups(rows: Ints, groups: Ints, size: float, seed: int) -> tuple[Ints, Ints]:
    """Rows in two parts by chance, the second a share of `size` of the groups."""
    split = GroupShuffleSplit(1, test_size=size, random_state=seed)
    first, second = next(split.split(rows, groups=groups[rows]))
    return rows[first], rows[second]


def folds_of(classes: Ints, folds: int, seed: int) -> Ints:
    """The fold (N,) that holds each row back, drawn by chance and even within each class (N,).

    The only row of a class is in none, -1: what no network has seen can't be calibrated.

    >>> folds_of(np.array([0, 0, 0, 0, 1, 1, 2]), 2, seed=0).tolist()
    [0, 1, 0, 1, 0, 1, -1]
    """
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    found = np.empty(len(classes), dtype=np.int64)
    found[order] = np.arange(len(classes)) % folds
    found[np.bincount(classes)[classes] < 2] = -1
    return found


def folds_by_group(groups: Ints, folds: int, seed: int) -> Ints:
    """The fold (N,) that holds each row back, all rows of a group (N,) in one; large groups are placed first.

    >>> folds_by_group(np.array([0, 0, 0, 1, 1, 2]), 2, seed=0).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    names, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise ValueError(f"expected rows of at least two groups, got {len(names)}: leave groups out")
    sizes, fold = np.zeros(min(folds, len(names)), dtype=np.int64), np.empty(len(names), dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(names))
    for name in order[np.argsort(-counts[order], kind="stable")]:
        fold[name] = sizes.argmin()
        sizes[fold[name]] += counts[name]
    return np.asarray(fold[place.ravel()])


def group_numbers(groups: Any, rows: int) -> Ints | None:
    """Groups (N,) of any kind as numbers; None where there are none."""
    if groups is None:
        return None
    given = np.asarray(groups)
    if given.shape != (rows,):
        raise ValueError(f"expected a group for each of {rows} rows, got shape {given.shape}: give one for each")
    kinds = given.astype(str) if given.dtype.kind == "O" else given
    return np.asarray(np.unique(kinds, return_inverse=True)[1].ravel().astype(np.int64))
