"""Bets against "nothing has changed": capital that grows without limit only if something has.

Held-out values R_1 … R_n split the line into n + 1 gaps. While new values come from where R came from, the gap of the
t-th new value is g with probability (1 + how many of the t - 1 before it fell into g) / (n + t): Pólya's urn, exactly,
whatever the distribution. So ranks within the urn are independent and uniform, see `urn_p_values`, although ranks among
R alone are not: those share R, and a long stream would find out how R differs from its own distribution.

A bet f with ∫f = 1 on uniform p multiplies the capital by f(p), which is 1 on average. `grow` bets with a mixture of
densities, each from a mixture of starting times on. The capital begins with 1 and is a martingale, so by Ville's
inequality it ever reaches 1/α with a probability of at most α.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Densities of a beta distribution: first those that fall, for values that became strange, then those for values that
# became ordinary, and for both ends or the middle.
FALLING = ((0.1, 1.0), (0.25, 1.0), (0.5, 1.0), (0.75, 1.0))
OTHERS = ((1.0, 0.25), (1.0, 0.5), (1.0, 0.75), (0.5, 0.5), (0.75, 0.75), (1.5, 1.5), (2.5, 2.5))
# Histograms of what came before: bins, and the share of the past that counts one input later.
HISTOGRAMS = tuple((bins, keep) for bins in (4, 12, 24) for keep in (0.93, 0.98))
EVEN = 4.0  # inputs that an even histogram is worth
LATE = 10  # inputs before which a change counts as an early one
NEAR = 600.0  # logarithms this close can be added as they are
TINY = 1e-12  # the least p-value; a smaller one would be a matter of the random number


def urn_p_values(gaps: Ints, urn: Ints, draws: Floats) -> tuple[Floats, Ints]:
    """Gaps (B,) of new values and the urn (n + 1,) before them → p-values (B,) and the urn after them.

    A p-value is the share of the urn in gaps before the value's own, and a random part of its own. While new values
    are exchangeable with those that the urn knows, p-values are independent and uniform between 0 and 1.

    Args:
        gaps: of each value, the number of held-out values before it in the order: 0 to n.
        urn: ones, and one more for each value that has fallen into a gap.
        draws: (B,) independent uniform numbers between 0 and 1.
    """
    before = np.concatenate([[0], urn.cumsum()])
    earlier = np.tri(len(gaps), k=-1, dtype=bool)  # (B, B): j came before i
    lower = before[gaps] + ((gaps[None, :] < gaps[:, None]) & earlier).sum(axis=1)
    own = urn[gaps] + ((gaps[None, :] == gaps[:, None]) & earlier).sum(axis=1)
    after = urn + np.bincount(gaps, minlength=len(urn))
    return (lower + draws * own) / (before[-1] + np.arange(len(gaps))), after


def log_bets(p: Floats, falling: bool) -> Floats:
    """P-values (…,) → the logarithms (…, K) of what K bets pay on them; with `falling`, only those that fall in p."""
    low = np.log(np.clip(p, TINY, None))[..., None]
    high = np.log(np.clip(1.0 - p, TINY, None))[..., None]
    shapes = FALLING if falling else FALLING + OTHERS
    a, b = np.array(shapes).T
    logs = np.array([math.lgamma(x + y) - math.lgamma(x) - math.lgamma(y) for x, y in shapes])  # that it adds up to 1
    return np.asarray((a - 1.0) * low + (b - 1.0) * high + logs)


def log_histograms(p: Floats, counts: list[Floats]) -> tuple[Floats, list[Floats]]:
    """P-values (B, J) in their order → the logarithms (B, J, H) of what bets by past ones pay, and the counts after.

    Args:
        p: of J signals, each independent and uniform while nothing changes.
        counts: of each of `HISTOGRAMS`, (J, bins) past p-values in each bin, the older the less they count.
    """
    size, signals = p.shape
    paid, after = [], []
    for (bins, keep), count in zip(HISTOGRAMS, counts, strict=True):
        place = np.minimum((p * bins).astype(np.int64), bins - 1)
        hit = np.zeros((size, signals, bins))
        np.put_along_axis(hit, place[..., None], 1.0, axis=2)
        left = keep ** np.arange(size + 1)
        past = left[:, None, None] * count + (_weights(size, keep) @ hit.reshape(size, -1)).reshape(-1, *count.shape)
        own = np.take_along_axis(past[:-1], place[..., None], axis=2)[..., 0]
        every = past[:-1].sum(axis=2)
        paid.append(np.log((own + EVEN / bins) * bins / (every + EVEN)))
        after.append(past[-1])
    return np.stack(paid, axis=2), after


@lru_cache(maxsize=64)
def _weights(count: int, keep: float) -> Floats:
    """(B + 1, B) how much the j-th of B inputs counts when the i-th comes; the last row is after all of them."""
    age = np.arange(count + 1)[:, None] - 1 - np.arange(count)
    return np.where(age >= 0, keep ** np.maximum(age, 0), 0.0)


def waiting(t: Ints, horizon: int | None) -> Floats:
    """The share of the capital (…,) that has not been bet after t inputs (…,); what it loses starts to bet.

    Without a horizon it falls like 1/log t: a change after t inputs is found a little more than log t nats later than
    if its time were known. With one, it falls evenly until then, which is the procedure of Shiryaev and Roberts: a
    change at any time up to the horizon is found as soon.
    """
    if horizon is not None:
        return np.clip(1.0 - t / horizon, 0.0, None)
    return np.asarray(math.log(LATE) / np.log(t + LATE))


class Capital(NamedTuple):
    """The logarithms (J, K) of the capital of K bets on each of J signals; and how it came about."""

    log: Floats  # of what has started
    total: Floats  # sum of logarithms of what was paid since the beginning
    lowest: Floats  # the lowest total so far
    since: Ints  # the number of inputs before it was lowest: a change is most likely after them

    @classmethod
    def initial(cls, signals: int, bets: int) -> Capital:
        """The capital of so many signals and bets before any input was seen."""
        shape = (signals, bets)
        return cls(np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.int64))


def grow(capital: Capital, bets: Floats, seen: int, horizon: int | None) -> tuple[Capital, Floats]:
    """Bets (B, J, K) on the next B inputs → the capital after them, and the logarithm (B, J) of all of it on the way.

    S ← (S + what starts)·f(p) for each bet; all capital is the mean of S over bets and what is waiting.
    """
    steps = np.arange(seen, seen + len(bets) + 1)
    idle = waiting(steps, horizon)
    with np.errstate(divide="ignore"):
        starts = np.log(np.clip(-np.diff(idle), 0.0, None))[:, None, None]
        left = np.log(idle[1:])[:, None]
    paid = np.concatenate([np.zeros((1, *bets.shape[1:])), bets.cumsum(axis=0)])  # since before the first of them
    inside = _log_sums(np.concatenate([capital.log[None], starts - paid[:-1]]))[1:] + paid[1:]
    most = inside.max(axis=2)
    mean = np.log(np.exp(inside - most[..., None]).mean(axis=2)) + most
    path = np.logaddexp(mean, left)
    totals = capital.total + paid
    first = np.concatenate([capital.lowest[None], totals[1:]])
    place = first.argmin(axis=0)
    since = np.where(place == 0, capital.since, seen + place)
    return Capital(inside[-1], totals[-1], first.min(axis=0), since), path


def _log_sums(logs: Floats) -> Floats:
    """Logarithms (B, …) → those of their sums so far: at once where they are close enough, which is faster."""
    most, least = logs.max(axis=0), np.where(np.isneginf(logs), np.inf, logs).min(axis=0)
    if np.isneginf(most).any() or (most - least).max() > NEAR:
        return np.asarray(np.logaddexp.accumulate(logs, axis=0))
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(logs - most).cumsum(axis=0)) + most)
