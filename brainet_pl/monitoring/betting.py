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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Densities of a beta distribution: first those that fall, for values that became strange, then those for values that
# became ordinary, and for both ends or the middle.
FALLING = ((0.1, 1.0), (0.25, 1.0), (0.5, 1.0), (0.75, 1.0))
OTHERS = ((1.0, 0.25), (1.0, 0.5), (1.0, 0.75), (0.5, 0.5), (0.75, 0.75), (1.5, 1.5), (2.5, 2.5))
# Histograms of what came before: bins, and the share of the past that counts one input later.
BINS, RATES = (4, 12, 24), (0.93, 0.98)
HISTOGRAMS = tuple((bins, keep) for bins in BINS for keep in RATES)
FIRST_BINS = np.cumsum((0, *BINS[:-1]))  # of each size, where its bins begin among all
EVEN = 4.0  # inputs that an even histogram is worth
LATE = 10  # inputs before which a change counts as an early one
BLOCK = 8  # inputs that are worked on one after the other; when a change began is told as exactly
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
    earlier, others = _earlier(len(gaps)), gaps[:, None]
    lower = before[gaps] + ((others < gaps) & earlier).sum(axis=0, dtype=np.uint16)
    own = urn[gaps] + ((others == gaps) & earlier).sum(axis=0, dtype=np.uint16)
    after = urn + np.bincount(gaps, minlength=len(urn))
    return (lower + draws * own) / (before[-1] + np.arange(len(gaps))), after


@lru_cache(maxsize=64)
def _earlier(count: int) -> NDArray[np.bool_]:
    """(B, B) whether the input of a row came before that of a column."""
    return np.triu(np.ones((count, count), dtype=bool), 1)


def beta_bets(p: Floats, falling: bool) -> Floats:
    """P-values (B, J) → what K bets pay on them (B, K, J); with `falling`, only those that fall in p."""
    low, high = np.log(np.clip(p, TINY, None)), np.log(np.clip(1.0 - p, TINY, None))
    a, b, scale = (part[:, None] for part in _shapes(falling))
    return np.asarray(np.exp((a - 1.0) * low[:, None] + (b - 1.0) * high[:, None] + scale))


@lru_cache(maxsize=2)
def _shapes(falling: bool) -> Floats:
    """(3, K) both parameters of the beta densities, and the logarithm by which each adds up to 1."""
    shapes = FALLING if falling else FALLING + OTHERS
    return np.array([(x, y, math.lgamma(x + y) - math.lgamma(x) - math.lgamma(y)) for x, y in shapes]).T


def histogram_bets(p: Floats, counts: Floats, seen: int) -> tuple[Floats, Floats]:
    """P-values (B, J) in their order → what bets by the p-values before them pay (B, H, J), and the counts after.

    Args:
        p: of J signals, each independent and uniform while nothing changes.
        counts: (rates, J, all bins) past p-values in each bin, the older the less they count.
        seen: how many p-values there were before.
    """
    size, signals = p.shape
    bins = np.array(BINS)[:, None]
    place = np.minimum((p[:, None] * bins).astype(np.int64), bins - 1) + FIRST_BINS[:, None]  # (B, sizes, J)
    place += counts.shape[2] * np.arange(signals)
    hit = np.zeros((size, signals * counts.shape[2]))
    hit[np.arange(size)[:, None, None], place] = 1.0
    weights, fade, total = _weights(size)
    past = (weights @ hit).reshape(len(RATES), size + 1, -1) + fade[..., None] * counts.reshape(len(RATES), 1, -1)
    own = past[:, np.arange(size)[:, None, None], place]  # (rates, B, sizes, J)
    every = total + fade[:, :-1] * ((1 - np.array(RATES) ** seen) / (1 - np.array(RATES)))[:, None] + EVEN
    paid = (own * bins + EVEN) / every[..., None, None]
    return paid.transpose(1, 2, 0, 3).reshape(size, -1, signals), past[:, -1].reshape(counts.shape)


@lru_cache(maxsize=64)
def _weights(count: int) -> tuple[Floats, Floats, Floats]:
    """How much the j-th of B inputs counts when the i-th comes, and after all of them, for both rates.

    (rates · (B + 1), B); what one of before them counts, (rates, B + 1); and all of them together, (rates, B).
    """
    age = np.arange(count + 1)[:, None] - 1 - np.arange(count)
    weights = np.stack([np.where(age >= 0, keep ** np.maximum(age, 0), 0.0) for keep in RATES])
    fade: Floats = np.array(RATES)[:, None] ** np.arange(count + 1.0)
    return weights.reshape(-1, count), fade, np.asarray(weights[:, :-1].sum(axis=2))


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
    """The logarithms (K, J) of the capital of K bets on each of J signals; and how it came about."""

    log: Floats  # of what has started
    total: Floats  # sum of logarithms of what was paid since the beginning
    lowest: Floats  # the lowest total so far
    since: Ints  # the number of inputs before it was lowest: a change is most likely after them

    @classmethod
    def initial(cls, bets: int, signals: int) -> Capital:
        """The capital of so many bets and signals before any input was seen."""
        shape = (bets, signals)
        return cls(np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.int64))


def grow(capital: Capital, paid: Floats, seen: int, horizon: int | None) -> tuple[Capital, Floats]:
    """What bets pay (B, K, J) on the next B inputs → the capital after them, and the logarithm (B, J) of all of it.

    S ← (S + what starts)·f(p) for each bet; all capital is the mean of S over bets and what is waiting. Blocks of
    inputs are worked on side by side, each as if nothing had been there before, and then joined: S in a block is what
    started in it, and the product of f times S before it. S is counted in units of its value at the beginning; inputs
    on which it still grows beyond all numbers are taken in two parts.
    """
    size, blocks = len(paid), -(-len(paid) // BLOCK)
    idle = waiting(np.arange(seen, seen + size + 1), horizon)
    scale = np.maximum(capital.log, 0.0)
    most = scale.max(axis=0)
    started = np.zeros((blocks * BLOCK, 1, 1))
    started[:size, 0, 0] = np.clip(-np.diff(idle), 0.0, None)
    if most.any():
        started = started * np.exp(-scale)
    factors = in_blocks(paid, 1.0)
    inside, product = np.empty_like(factors), np.empty_like(factors)  # (blocks, BLOCK, K, J)
    with np.errstate(over="ignore", invalid="ignore"):
        new, times = np.zeros_like(factors[:, 0]), np.ones_like(factors[:, 0])
        for t in range(BLOCK):
            np.add(new, started[t::BLOCK], out=inside[:, t])
            new = np.multiply(inside[:, t], factors[:, t], out=inside[:, t])
            times = np.multiply(times, factors[:, t], out=product[:, t])
        before, now = np.empty_like(times), np.exp(capital.log - scale)
        for b in range(blocks):
            before[b] = now
            now = now * times[b] + new[b]
    if size > 1 and not np.isfinite(now).all():
        half = size // 2
        capital, first = grow(capital, paid[:half], seen, horizon)
        capital, second = grow(capital, paid[half:], seen + half, horizon)
        return capital, np.concatenate([first, second])
    totals = capital.total + np.log(times).cumsum(axis=0)  # after every block
    product *= before[:, None]
    inside += product
    if most.any():
        inside *= np.exp(scale - most)
    with np.errstate(divide="ignore"):
        log = np.log(now) + scale
        all_bets = inside.reshape(-1, *capital.log.shape)[:size].mean(axis=1)
        path = np.log(all_bets + idle[1:, None] * np.exp(-most)) + most
    low = totals.min(axis=0)
    since = seen + np.minimum((totals.argmin(axis=0) + 1) * BLOCK, size)
    since = np.where(low < capital.lowest, since, capital.since)
    return Capital(log, totals[-1], np.minimum(low, capital.lowest), since), path


def in_blocks(values: NDArray[Any], fill: float) -> NDArray[Any]:
    """Cut values (B, …) into blocks (blocks, BLOCK, …), the last one filled up."""
    lacking = -len(values) % BLOCK
    if lacking:
        values = np.concatenate([values, np.full((lacking, *values.shape[1:]), fill, values.dtype)])
    return values.reshape(-1, BLOCK, *values.shape[1:])
