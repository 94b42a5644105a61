"""What is said of a number beside its mean: quantiles and intervals of any level, by rows that were held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl._utils.warn import warn

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]


def quantiles(final: Floats, held: Floats, target: Floats, levels: Sequence[float]) -> Floats:
    """Quantiles (N, L) of numbers with means and variances `final` (N, 2), in the order of `levels`.

    How far the truth lies from the mean, in predicted deviations, is taken from rows that were held back. Of rows like
    those a share of at most q lies below the quantile of a q under one half, and of at least q below that of any other.

    Args:
        final: (N, 2) means and variances.
        held: (H, 2) those of the rows held back.
        target: (H,) what came of these.
        levels: (L,) shares between 0 and 1.

    >>> held = np.stack([np.zeros(9), np.ones(9)], axis=1)
    >>> quantiles(np.array([[10.0, 4.0]]), held, np.arange(-4.0, 5.0), [0.1, 0.5, 0.9]).tolist()
    [[2.0, 10.0, 18.0]]
    """
    shares = np.array([checks.share("levels", level) for level in levels], dtype=np.float64)
    distances = np.sort((target - held[:, 0]) / np.sqrt(held[:, 1]))
    count = len(distances)
    place = (count + 1) * shares
    place = np.where(shares < 0.5, np.floor(place + 1e-9), np.ceil(place - 1e-9)).astype(np.int64)
    if ((place < 1) | (place > count)).any():
        warn(
            f"expected at least {int(np.ceil(1 / min(shares.min(), 1 - shares.max()))) - 1} rows held back in fit for "
            f"quantiles of {', '.join(f'{share:g}' for share in shares)}, got {count}: the outermost are those of the "
            "rows there are; give more rows"
        )
    far = distances[np.clip(place, 1, count) - 1]
    return np.asarray(final[:, :1] + np.sqrt(final[:, 1:]) * far)


def intervals(final: Tensor, held: tuple[Tensor, Tensor], level: float | Sequence[float], method: str) -> Floats:
    """The ends (N, 2) of intervals of one level, or (N, L, 2) of several."""
    from brainet_pl.calibration import Conformal

    levels = [level] if isinstance(level, int | float) else list(level)
    found = []
    for one in levels:
        ends = Conformal(method, one).fit(*held)(final)  # type: ignore[arg-type]
        found.append(np.stack([ends["lower"].numpy(), ends["upper"].numpy()], axis=1))
    return found[0] if isinstance(level, int | float) else np.stack(found, axis=1)
