"""Bets on many columns at a time, such as all features of a network: in bins, without p-values, so that it is cheap.

Gaps between held-out values (see `betting`) are put together to a few bins, narrow at both ends. The bin of a new value
then follows an urn too: a bin of a gaps has the probability u = (a + values in it so far) / (n + t). A bet is any
distribution q over bins that is fixed before the value comes, and pays q / u, which is 1 on average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainet_pl.monitoring.betting import EVEN, Capital, grow, urn_p_values

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CUTS = (0.004, 0.012, 0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.988, 0.996)  # of held-out values, below
TILTS = (0.25, 0.5)  # bets with the distribution functions p^a, and the same from above
KEEP = 0.97  # the share of the past that counts one input later, in a bet by past bins


class Columns:
    """Held-out values (n, d) of d columns, and the capital that was made by betting on new ones.

    Args:
        held: (n, d), or what `to_dict` gave.
        draw: random numbers that decide ties.
    """

    def __init__(self, held: Floats | Mapping[str, Any], draw: np.random.Generator) -> None:
        if isinstance(held, Mapping):
            self.size = int(held["size"])
            self._edges, self._ties = (np.array(held[key], dtype=np.float64) for key in ("edges", "ties"))
            cuts = np.array(held["cuts"], dtype=np.int64)
        else:
            self.size = len(held)
            cuts = np.unique(np.clip(np.rint(np.array(CUTS) * (self.size + 1)).astype(np.int64), 1, self.size))
            ties = np.broadcast_to(draw.random((self.size, 1)), held.shape)
            order = np.lexsort((ties, held), axis=0)[cuts - 1]
            self._edges, self._ties = (np.take_along_axis(one, order, axis=0) for one in (held, ties))  # (E, d)
        self.count = self._edges.shape[1]
        self._cuts = cuts
        ends = np.concatenate([[0], cuts, [self.size + 1]])
        self._gaps = np.diff(ends).astype(np.float64)  # of each bin
        p = ends / (self.size + 1)
        tilted = [np.diff(p**a) for a in TILTS] + [np.diff(1 - (1 - p) ** a) for a in TILTS]
        self._bets = np.log(np.array(tilted)).T  # (bins, K)
        self.reset()

    @classmethod
    def of(cls, name: str, values: Any, draw: np.random.Generator) -> Columns:
        """The columns of held-out values (n, d), in which NaN is as strange as can be, or of what `to_dict` gave."""
        if isinstance(values, Mapping):
            return cls(values, draw)
        table = np.asarray(values, dtype=np.float64)
        if not table.size:
            raise ValueError(f"expected held-out values of {name}, got none: give some, hundreds if you can")
        return cls(np.where(np.isnan(table), np.inf, table), draw)

    def reset(self) -> None:
        """Begin anew, with no input seen."""
        self._seen = np.zeros((self.count, len(self._gaps)))
        self._recent = np.zeros_like(self._seen)
        self.leading = 0  # the column with the most capital
        self.capital = Capital.initial(self.count, self._bets.shape[1] + 1)

    def advance(self, values: Floats, draws: Floats, before: int, horizon: int | None) -> tuple[Floats, Floats]:
        """Values (B, d) after so many inputs → the logarithm of all capital (B,), and p-values (B,) of what leads.

        Each column has an even part of α, and the one with the most capital counts. `draws` (2, B) decide ties.
        """
        size, steps = len(values), np.arange(len(values))[:, None]
        bins = self._bins(values, draws[0])
        here = np.arange(self.count), bins  # of every column its bin
        earlier, faded = _same_before(bins, KEEP)
        every = self.size + 1.0 + before + steps
        own = self._seen[here] + self._gaps[bins] + earlier
        log_urn = np.log(own / every)
        past = self._recent[here] * KEEP**steps + faded + EVEN / (self.size + 1) * self._gaps[bins]
        weight = (1 - KEEP ** (before + steps)) / (1 - KEEP) + EVEN
        paid = np.concatenate([self._bets[bins], np.log(past / weight)[..., None]], axis=2) - log_urn[..., None]
        self.capital, path = grow(self.capital, paid, before, horizon)
        self.leading = j = int(path[-1].argmax())
        urn = (self._seen[j] + self._gaps)[::-1].astype(np.int64)
        p_values, _ = urn_p_values(len(urn) - 1 - bins[:, j], urn, draws[1])
        flat = (bins + len(self._gaps) * np.arange(self.count)).ravel()
        aged = np.broadcast_to(KEEP ** (size - 1.0 - steps), bins.shape).ravel()
        shape = self._seen.shape
        self._seen = self._seen + np.bincount(flat, minlength=self._seen.size).reshape(shape)
        self._recent = self._recent * KEEP**size + np.bincount(flat, aged, self._seen.size).reshape(shape)
        return path.max(axis=1) - math.log(self.count), p_values

    def _bins(self, values: Floats, draws: Floats) -> Ints:
        """The bin (B, d) of every value: how many edges are below it."""
        bins = np.zeros(values.shape, dtype=np.int64)
        for edge, tie in zip(self._edges, self._ties, strict=True):
            bins += values > edge
            same = values == edge
            if same.any():
                bins += same & (draws[:, None] > tie)
        return bins

    def to_dict(self) -> dict[str, Any]:
        """The held-out values as far as they are needed, as JSON can hold them."""
        arrays = {"cuts": self._cuts, "edges": self._edges, "ties": self._ties}
        return {"size": self.size} | {name: array.tolist() for name, array in arrays.items()}

    def changed_at(self) -> int:
        """The number of inputs before which the column that leads is likely to have changed."""
        return int(self.capital.since[self.leading, self.capital.log[self.leading].argmax()])

    def state_dict(self) -> dict[str, Any]:
        """All that was seen, as JSON can hold it."""
        capital = [part.tolist() for part in self.capital]
        return {"seen": self._seen.tolist(), "recent": self._recent.tolist(), "capital": capital}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._seen, self._recent = (np.array(state[key]).reshape(self._seen.shape) for key in ("seen", "recent"))
        self.capital = Capital(*map(np.array, state["capital"]))


def _same_before(bins: Ints, keep: float) -> tuple[Floats, Floats]:
    """Bins (B, d) → how many inputs before each had the same one; and this number with older ones counting less."""
    steps = np.arange(len(bins))[:, None]
    order = bins.argsort(axis=0, kind="stable")
    ordered = np.take_along_axis(bins, order, axis=0)
    new = np.ones(bins.shape, dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    start = np.maximum.accumulate(np.where(new, steps, 0), axis=0)  # where the inputs of a bin begin
    sums = np.zeros((len(bins) + 1, bins.shape[1]))
    np.cumsum(keep ** (-1.0 - order), axis=0, out=sums[1:])
    count, faded = np.empty(bins.shape), np.empty(bins.shape)
    np.put_along_axis(count, order, (steps - start).astype(np.float64), axis=0)
    np.put_along_axis(faded, order, sums[:-1] - np.take_along_axis(sums, start, axis=0), axis=0)
    return count, faded * keep**steps
