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

from brainet_pl.monitoring.betting import BLOCK, EVEN, Capital, grow, in_blocks, urn_p_values

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
        self._bets = np.array(tilted)  # (K, bins)
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
        self._urn = np.tile([*self._gaps, 0.0], (self.count, 1))  # (d, bins + 1) gaps of a bin, and values in it
        self._recent = np.zeros_like(self._urn)
        self.leading = 0  # the column with the most capital
        self.capital = Capital.initial(len(self._bets) + 1, self.count)

    def advance(self, values: Floats, draws: Floats, before: int, horizon: int | None) -> tuple[Floats, Floats]:
        """Values (B, d) after so many inputs → the logarithm of all capital (B,), and p-values (B,) of what leads.

        Each column has an even part of α, and the one with the most capital counts. `draws` (2, B) decide ties.
        """
        steps = before + np.arange(len(values))[:, None]
        bins, urn = self._bins(values, draws[0]), self._urn.copy()
        own, past = self._count(bins)
        paid = np.empty((len(values), len(self._bets) + 1, self.count))
        for k, bet in enumerate(self._bets):
            bet.take(bins, out=paid[:, k])
        paid[:, -1] = past + (EVEN / (self.size + 1) * self._gaps).take(bins)
        paid[:, -1] /= (1 - KEEP**steps) / (1 - KEEP) + EVEN
        paid *= ((self.size + 1.0 + steps) / own)[:, None]
        self.capital, path = grow(self.capital, paid, before, horizon)
        self.leading = j = int(path[-1].argmax())
        p_values, _ = urn_p_values(len(self._gaps) - 1 - bins[:, j], urn[j, -2::-1].astype(np.int64), draws[1])
        return path.max(axis=1) - math.log(self.count), p_values

    def _count(self, bins: Ints) -> tuple[Floats, Floats]:
        """Count values in bins (B, d); what the urn (B, d), and recent values, had in the bin of each one before it."""
        size, count = bins.shape
        width = self._urn.shape[1]
        parts = in_blocks(bins.astype(np.uint8), width - 1)  # the last bin is for what fills up the last block
        own, past = np.zeros((2, *parts.shape))
        for lag in range(1, BLOCK):  # within a block
            same = parts[:, lag:] == parts[:, :-lag]
            own[:, lag:] += same
            past[:, lag:] += KEEP ** (lag - 1) * same
        places = parts + width * np.arange(count)
        places += (width * count * np.arange(len(parts)))[:, None, None]
        flat, every = places.ravel(), width * count * len(parts)
        ages = np.broadcast_to(KEEP ** np.arange(BLOCK - 1.0, -1.0, -1.0)[:, None], parts.shape).ravel()
        hits = np.bincount(flat, minlength=every).reshape(len(parts), count, width)
        aged = np.bincount(flat, ages, every).reshape(hits.shape)
        urn, recent = np.empty(hits.shape), np.empty(hits.shape)  # before each block
        for b in range(len(parts)):
            urn[b], recent[b] = self._urn, self._recent
            self._urn = self._urn + hits[b]
            self._recent = self._recent * KEEP**BLOCK + aged[b]
        self._recent /= KEEP ** (-size % BLOCK)
        self._urn[:, -1] = self._recent[:, -1] = 0.0
        own += urn.take(places)
        past += recent.take(places) * KEEP ** np.arange(BLOCK)[:, None]
        return own.reshape(-1, count)[:size], past.reshape(-1, count)[:size]

    def _bins(self, values: Floats, draws: Floats) -> Ints:
        """The bin (B, d) of every value: how many edges are below it."""
        edges = self._edges[:, None]
        above = (values > edges).view(np.uint8)  # (E, B, d)
        same = values == edges
        if same.any():
            above += same & (draws[:, None] > self._ties[:, None])
        bins: Ints = np.add.reduce(above, axis=0, dtype=np.uint8).astype(np.int64)
        return bins

    def to_dict(self) -> dict[str, Any]:
        """The held-out values as far as they are needed, as JSON can hold them."""
        arrays = {"cuts": self._cuts, "edges": self._edges, "ties": self._ties}
        return {"size": self.size} | {name: array.tolist() for name, array in arrays.items()}

    def changed_at(self) -> int:
        """The number of inputs before which the column that leads is likely to have changed."""
        return int(self.capital.since[self.capital.log[:, self.leading].argmax(), self.leading])

    def state_dict(self) -> dict[str, Any]:
        """All that was seen, as JSON can hold it."""
        capital = [part.tolist() for part in self.capital]
        return {"urn": self._urn.tolist(), "recent": self._recent.tolist(), "capital": capital}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._urn, self._recent = (np.array(state[key]).reshape(self._urn.shape) for key in ("urn", "recent"))
        self.capital = Capital(*map(np.array, state["capital"]))
