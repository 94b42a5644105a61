"""Times of several calls that are compared, by `torch.utils.benchmark`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.benchmark import Measurement, Timer


def race(
    calls: Mapping[str, Callable[[], Any]],
    seconds: float,
    number: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Measurement]:
    """Seconds of each call, measured in turns, so that a noisy moment hits all.

    Args:
        calls: name → what is timed, with as many threads as torch has now.
        seconds: how long the race lasts; each call is timed once at the least.
        number: calls in a row that make one time. Before them `Timer` makes two that do not count.
        clock: `time.process_time` leaves out what other programs take.
    """
    threads = torch.get_num_threads()  # Timer alone would take one
    timers = {
        name: Timer("call()", timer=clock, globals={"call": call}, num_threads=threads) for name, call in calls.items()
    }
    turns: dict[str, list[Measurement]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while True:
        for name, timer in timers.items():
            turns[name].append(timer.timeit(number))
        if time.perf_counter() >= end:
            return {name: Measurement.merge(found)[0] for name, found in turns.items()}
