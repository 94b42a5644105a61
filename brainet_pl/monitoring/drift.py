"""`DriftMonitor`: an alarm when the inputs of a model change, without labels, with a bound on false alarms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brainet_pl._utils import checks
from brainet_pl.monitoring.betting import (
    BINS,
    FALLING,
    HISTOGRAMS,
    OTHERS,
    RATES,
    Capital,
    beta_bets,
    grow,
    histogram_bets,
    urn_p_values,
)
from brainet_pl.monitoring.columns import Columns

Floats = NDArray[np.float64]
KNOWN_P = "known_p"
CHUNK = 64  # inputs that are worked on at a time: work grows with its square
STATE_FORMAT = 2  # of what `state_dict` gives
MOST_LOG = 700.0  # evidence is shown up to e^700


@dataclass(frozen=True)
class DriftState:
    """What a monitor knows after the inputs so far.

    Attributes:
        inputs: how many there were.
        evidence: that inputs have changed. It begins with 1; an alarm is raised at 1/α.
        alarm: whether it ever got there.
        alarm_at: the input with which it did, counted from 1; None before that.
        changed_at: where there is an alarm, the first input that is likely to be among the changed ones.
        leading: the signal with the most evidence.
        column: the number of its column with the most evidence, where it has several.
        signals: the evidence of each signal, as it counts towards the alarm.
        path: (B,) the evidence after each input of the last update.
        p_values: (B,) of each signal for the inputs of the last update; independent and uniform while nothing changes.
            Of a signal with several columns, those of the column that led at the time.
    """

    inputs: int
    evidence: float
    alarm: bool
    alarm_at: int | None
    changed_at: int | None
    leading: str
    column: int | None
    signals: Mapping[str, float]
    path: Floats
    p_values: Mapping[str, Floats]


class DriftMonitor:
    """Raises an alarm when the inputs of a model are no longer like the held-out data, as far as its answers tell.

    **The guarantee**: while new inputs are exchangeable with the held-out samples (such as independent ones from the
    same source, in any order), the probability that an alarm is *ever* raised is at most α, for any number of inputs
    and any number of held-out samples. With several signals that holds for all of them together. It needs no labels.

    Held-out samples are to be ones that nothing was trained or chosen on: a model looks better on those, and after many
    inputs the difference would be an alarm.

    Args:
        reference: signal → its values (n,) on held-out data, in which it may rise or fall. Or a number n, for `known_p`
            of a model with n validation samples; a number in the mapping is the same for a single signal. Of p-values
            only a fall is noticed, that is, stranger inputs. Values (n, d) are d columns, such as features, which have
            one part in α together.
        alpha: the probability of a false alarm.
        horizon: the number of inputs in which a change is expected. None is any number: the guarantee and the alarm
            have no end. With a number, changes until then are found earlier (the procedure of Shiryaev and Roberts);
            the guarantee holds for ever.
        weights: signal → its part in α; None shares it evenly.
        seed: of the random numbers that break ties.

    >>> rng = np.random.default_rng(0)
    >>> monitor = DriftMonitor({"energy": rng.normal(size=500)})
    >>> monitor.update(rng.normal(size=300)).alarm
    False
    >>> state = monitor.update(rng.normal(2.0, size=50))
    >>> state.alarm, state.alarm_at, state.changed_at
    (True, 310, 301)
    """

    def __init__(
        self,
        reference: int | Mapping[str, ArrayLike | int | Mapping[str, Any]],
        *,
        alpha: float = 0.05,
        horizon: int | None = None,
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        given = reference if isinstance(reference, Mapping) else {KNOWN_P: reference}
        if not given:
            raise ValueError("expected at least one signal to watch, got none: give held-out values by name")
        if not 0 < checks.share("alpha", alpha) < 1:
            raise ValueError(f"expected alpha between 0 and 1, got {alpha}: 0.05 is usual")
        self.alpha = float(alpha)
        self.horizon = checks.whole_or_none("horizon", horizon, 1, "None watches without end")
        self.names = tuple(given)
        self._parts = _shares(self.names, weights)
        self._seed = checks.whole("seed", seed, 0)
        draw = np.random.default_rng([self._seed, 0])
        self._tables = {name: Columns.of(name, values, draw) for name, values in given.items() if _is_table(values)}
        self._references = {
            name: _Reference(name, given[name], draw) for name in self.names if name not in self._tables
        }
        kinds = {name: one.falling for name, one in self._references.items()}
        self._groups = {kind: [name for name in kinds if kinds[name] == kind] for kind in set(kinds.values())}
        self.reset()

    def reset(self) -> None:
        """Begin anew, as after an alarm whose cause was found: evidence is 1, and α counts from here."""
        self._rng = np.random.default_rng([self._seed, 1])
        self._urns = {name: np.ones(one.size + 1, dtype=np.int64) for name, one in self._references.items()}
        every = len(FALLING) + len(OTHERS) + len(HISTOGRAMS)
        self._capitals = {
            falling: Capital.initial(len(FALLING) if falling else every, len(names))
            for falling, names in self._groups.items()
        }
        self._counts = np.zeros((len(RATES), len(self._groups.get(False, ())), sum(BINS)))
        for table in self._tables.values():
            table.reset()
        self._seen = 0
        self._alarm_at: int | None = None
        self._changed_at: int | None = None
        self._evidence: dict[str, float] = {name: math.log(self._parts[name]) for name in self.names}

    def update(self, values: ArrayLike | Mapping[str, ArrayLike]) -> DriftState:
        """See the values of one input or of B inputs, in their order: a number or (B,), or those of every signal."""
        columns = self._columns(values)
        count = len(next(iter(columns.values())))
        paths, found = [], []
        for start in range(0, count, CHUNK):
            path, p = self._advance({name: column[start : start + CHUNK] for name, column in columns.items()})
            paths.append(path)
            found.append(p)
        path = np.concatenate([np.empty(0), *paths])
        p_values = {name: np.concatenate([np.empty(0), *(p[name] for p in found)]) for name in self.names}
        leading = max(self._evidence, key=lambda name: self._evidence[name])
        return DriftState(
            self._seen,
            _exp(self._evidence[leading]),
            self._alarm_at is not None,
            self._alarm_at,
            self._changed_at,
            leading,
            self._tables[leading].leading if leading in self._tables else None,
            {name: _exp(value) for name, value in self._evidence.items()},
            np.exp(np.minimum(path, MOST_LOG)),
            p_values,
        )

    def _advance(self, columns: Mapping[str, Floats]) -> tuple[Floats, dict[str, Floats]]:
        """See at most CHUNK inputs; the logarithm of the evidence after each (B,), and their p-values."""
        before, p_values, paths = self._seen, {}, {}
        for name, reference in self._references.items():
            gaps = reference.gaps(columns[name], self._rng)
            p_values[name], self._urns[name] = urn_p_values(gaps, self._urns[name], self._rng.random(len(gaps)))
        for falling, names in self._groups.items():
            p = np.stack([p_values[name] for name in names], axis=1)
            paid = beta_bets(p, falling)
            if not falling:
                more, self._counts = histogram_bets(p, self._counts, before)
                paid = np.concatenate([paid, more], axis=1)
            self._capitals[falling], found = grow(self._capitals[falling], paid, before, self.horizon)
            for j, name in enumerate(names):
                paths[name] = found[:, j] + math.log(self._parts[name])
                self._evidence[name] = float(paths[name][-1])
        for name, table in self._tables.items():
            draws = self._rng.random((2, len(columns[name])))
            found, p_values[name] = table.advance(columns[name], draws, before, self.horizon)
            paths[name] = found + math.log(self._parts[name])
            self._evidence[name] = float(paths[name][-1])
        # Not the sum: what a signal's own past does not tell of its next rank, the past of another may, so that only
        # each capital by itself is a martingale. α is shared among them instead.
        most = np.max(list(paths.values()), axis=0)
        self._seen += len(most)
        over = np.flatnonzero(most >= -math.log(self.alpha))
        if self._alarm_at is None and len(over):
            self._alarm_at = before + int(over[0]) + 1
            name = max(paths, key=lambda name: float(paths[name][over[0]]))
            self._changed_at = min(self._since(name) + 1, self._alarm_at)
        return most, p_values

    def _since(self, name: str) -> int:
        """The number of inputs before which a signal is likely to have changed."""
        if name in self._tables:
            return self._tables[name].changed_at()
        falling = self._references[name].falling
        capital, j = self._capitals[falling], self._groups[falling].index(name)
        return int(capital.since[capital.log[:, j].argmax(), j])

    def _columns(self, values: ArrayLike | Mapping[str, ArrayLike]) -> dict[str, Floats]:
        if not isinstance(values, Mapping):
            if len(self.names) > 1:
                raise ValueError(f"expected values of {', '.join(self.names)} by name, got one column: give a mapping")
            values = {self.names[0]: values}
        missing = [name for name in self.names if name not in values]
        if missing:
            raise ValueError(f"expected values of every signal, got none of {', '.join(missing)}: give them too")
        columns = {name: _numbers(name, values[name], self._tables.get(name)) for name in self.names}
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"expected as many values of every signal, got {sizes}: give one of each for every input")
        return columns

    # -- keeping ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that was seen, as plain values that JSON can hold; the reference is not among them."""
        return {
            "format": STATE_FORMAT,
            "seen": self._seen,
            "alarm_at": self._alarm_at,
            "changed_at": self._changed_at,
            "evidence": dict(self._evidence),
            "urns": {name: urn.tolist() for name, urn in self._urns.items()},
            "counts": self._counts.tolist(),
            "tables": {name: table.state_dict() for name, table in self._tables.items()},
            "capitals": [[part.tolist() for part in self._capitals[kind]] for kind in sorted(self._groups)],
            "random": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another monitor with the same reference was."""
        if state.get("format") != STATE_FORMAT:
            raise ValueError(
                f"expected the state of a monitor in format {STATE_FORMAT}, got {state.get('format')}: "
                "another version of brainet_pl saved it, and its evidence can't be carried over. Go on without it, "
                "which is as after reset(), or update() a new monitor with the inputs seen so far, in their order"
            )
        sizes: dict[str, Any] = {name: one.size + 1 for name, one in self._references.items()}
        sizes |= {name: table.count for name, table in self._tables.items()}
        found = {name: len(urn) for name, urn in state["urns"].items()}
        found |= {name: len(kept["urn"]) for name, kept in state["tables"].items()}
        if found != sizes:
            raise ValueError(
                f"expected the state of a monitor with {sizes} gaps, got {found}: give the reference that it had"
            )
        self._seen, self._alarm_at, self._changed_at = state["seen"], state["alarm_at"], state["changed_at"]
        self._evidence = dict(state["evidence"])
        self._urns = {name: np.array(urn, dtype=np.int64) for name, urn in state["urns"].items()}
        self._counts = np.array(state["counts"]).reshape(self._counts.shape)
        kinds = zip(sorted(self._groups), state["capitals"], strict=True)
        self._capitals = {kind: Capital(*map(np.array, parts)) for kind, parts in kinds}
        for name, table in self._tables.items():
            table.load_state_dict(state["tables"][name])
        self._rng.bit_generator.state = state["random"]


class _Reference:
    """Held-out values of a signal, and into which gap between them a new one falls.

    Each value, held-out or new, has a random number beside it that decides ties, so that no two are alike.
    """

    def __init__(self, name: str, values: Any, draw: np.random.Generator) -> None:
        self.falling = isinstance(values, int | np.integer) and not isinstance(values, bool)
        if self.falling:
            self.size = checks.whole(f"validation samples behind {name}", values, 1, 10**7)
            return
        column = _numbers(name, values)
        if len(column) < 1:
            raise ValueError(f"expected held-out values of {name}, got none: give some, hundreds if you can")
        self.size = len(column)
        self._levels, place = np.unique(-column, return_inverse=True)  # searchsorted wants them to rise
        self._keys = np.sort(place + draw.random(self.size))  # a level, and a part of 1 that decides ties

    def gaps(self, values: Floats, draw: np.random.Generator) -> NDArray[np.int64]:
        """Values (B,) → how many held-out values (B,) are above each; of p-values, how many are at least as strange."""
        if self.falling:
            p = np.where(np.isposinf(values), 0.0, values)  # NaN, see `_numbers`
            bad = (p < 0) | (p > 1)
            if bad.any():
                raise ValueError(f"expected p-values between 0 and 1, got {p[bad][0]:g}: give the column known_p")
            rounded: NDArray[np.int64] = np.clip(np.rint(p * (self.size + 1)).astype(np.int64) - 1, 0, self.size)
            return rounded
        place = np.searchsorted(self._levels, -values)
        tied = self._levels[np.minimum(place, len(self._levels) - 1)] == -values
        keys = place + np.where(tied, draw.random(len(values)), 0.0)
        found: NDArray[np.int64] = np.searchsorted(self._keys, keys).astype(np.int64)
        return found


def _is_table(values: Any) -> bool:
    return isinstance(values, Mapping) or (not isinstance(values, int) and np.ndim(values) == 2)


def _numbers(name: str, values: ArrayLike, table: Columns | None = None) -> Floats:
    """Values (B,), or one; of a table (B, d). NaN is as strange as can be."""
    column = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if table is not None and not column.size:
        column = column.reshape(0, table.count)
    if table is not None and column.shape[1:] != (table.count,):
        raise ValueError(
            f"expected values (B, {table.count}) of {name}, got the shape {column.shape}: give all columns"
        )
    if table is None and column.ndim != 1:
        raise ValueError(f"expected values (B,) of {name}, got the shape {column.shape}: give one number an input")
    return np.where(np.isnan(column), np.inf, column)


def _shares(names: tuple[str, ...], weights: Mapping[str, float] | None) -> dict[str, float]:
    """The part of each signal in α; together 1."""
    if weights is None:
        return {name: 1.0 / len(names) for name in names}
    if set(weights) != set(names):
        raise ValueError(f"expected weights of {', '.join(names)}, got those of {', '.join(weights)}: name the same")
    positive = {name: checks.above_zero(f"weight of {name}", weights[name]) for name in names}
    return {name: weight / sum(positive.values()) for name, weight in positive.items()}


def _exp(log: float) -> float:
    return math.exp(min(log, MOST_LOG))
