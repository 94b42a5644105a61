"""Which columns a fitted network goes by: what it loses where the values of one are exchanged between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from brainet_pl.sklearn.folds import Roles
    from brainet_pl.sklearn.rows import RowEncoder

Floats = NDArray[np.float64]
MOST_ROWS = 2000  # held back in all, by which a column is judged
SEED = 0  # of the rows that exchange their values


class FitRows(NamedTuple):
    """The rows of a fit, as the network reads them.

    Attributes:
        rows: (N, k) numbers.
        target: (N,) targets.
        folds: the roles of the rows.
    """

    rows: Floats
    target: NDArray[Any]
    folds: Sequence[Roles]


def parts_of(encoder: RowEncoder, count: int) -> list[list[int]]:
    """For each of `count` columns of the user the numbers of what the network reads of it, its gaps included."""
    owners = [feature.column for feature in encoder.features()]
    names = list(dict.fromkeys(owners))[:count]
    return [[place for place, owner in enumerate(owners) if owner == name] for name in names]


def permutation_importances(network: Any, fit: FitRows, parts: Sequence[Sequence[int]]) -> Floats:
    """The nats (d,) of negative log-likelihood a row that each column is worth, on rows held back from its networks.

    The networks of each fold answer for the rows that they did not learn from, once as they are and once with the
    values of a column, and whether they are missing, exchanged between these rows.
    """
    import torch

    rng = np.random.default_rng(SEED)
    folds = [_few(fold.held, MOST_ROWS // len(fit.folds), rng) for fold in fit.folds]
    lost, count = np.zeros(len(parts)), 0
    for number, held in enumerate(folds):
        rows = torch.from_numpy(np.ascontiguousarray(fit.rows[held]))
        target = torch.from_numpy(np.ascontiguousarray(fit.target[held]))
        with network.fold(number):
            usual = _nll(network, rows, target)
            for place, columns in enumerate(parts):
                mixed = rows.clone()
                mixed[:, columns] = rows[torch.from_numpy(rng.permutation(len(held)))][:, columns]
                lost[place] += _nll(network, mixed, target) - usual
        count += len(held)
    return lost / max(1, count)


def _few(rows: NDArray[np.int64], most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return rows if len(rows) <= most else np.sort(rng.choice(rows, most, replace=False))


def _nll(network: Any, rows: Tensor, target: Tensor) -> float:
    """The sum of the negative log-likelihood of rows, by the networks of the fold that is chosen."""
    nll = network.task.nll(network.final_rows(rows), target)
    return float(nll.sum())
