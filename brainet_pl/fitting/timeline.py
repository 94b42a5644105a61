"""Where the time of a fit went, in one line."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_SHARE = 0.02  # of the whole: shorter stages are counted as the rest


class Timeline:
    """Counts the seconds of stages that follow one another.

    >>> clock = iter([0.0, 0.0, 41.0, 47.0, 60.0, 61.0])
    >>> timeline = Timeline(lambda: next(clock))
    >>> for stage in ("network", "structure", "training", "report"):
    ...     timeline.begin(stage)
    >>> timeline.describe()
    'network 41 s, structure 6 s, training 13 s, rest 1 s'

    Args:
        clock: gives the seconds of now.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since, self._stage = clock(), ""
        self.seconds: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """End the stage before, and begin another or go on with an earlier one."""
        now = self._clock()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._since, self._stage = now, stage

    def describe(self) -> str:
        """The seconds of each stage, and of all that took little."""
        self.begin("")
        total, rest, parts = sum(self.seconds.values()), 0.0, []
        for stage, seconds in self.seconds.items():
            if stage and seconds >= LEAST_SHARE * total:
                parts.append(f"{stage} {_shown(seconds)}")
            else:
                rest += seconds
        return ", ".join([*parts, f"rest {_shown(rest)}"])


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
