"""What several charts of a test are made of: axes, guides, thinned curves, intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brainet_pl.evaluation.chart import Axis, AxisUnit, Chart, Panel, Series, points, readable, short

Floats = NDArray[np.float64]
MOST_POINTS = 160  # of a curve: finer than a screen shows
MOST_SHOWN = 3  # curves that a reader sees before asking for more
ANSWERED = "answered, the most certain first (coverage)"


def make_chart(name: str, caption: str, alt: str, *panels: Panel, choose: bool = False) -> Chart:
    """A chart of the group that its name begins with."""
    return Chart(name, "ood" if name.startswith("ood/") else "test", caption, alt, list(panels), choose)


def share_axis(label: str) -> Axis:
    """An axis from 0 to 100 %."""
    return Axis(label, "share", 0.0, 1.0)


def axis_between(label: str, low: float, high: float, unit: AxisUnit = "number") -> Axis:
    """An axis with these ends; where they leave it no length, it reaches as far as the data."""
    return Axis(label, unit, low, high) if low < high else Axis(label, unit)


def diagonal(name: str, low: float = 0.0, high: float = 1.0) -> Series:
    """The dotted line on which both axes have the same value."""
    return Series(name, [low, high], [low, high], "guide")


def thin(x: Any, y: Any, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Curve (N,) → at most `most` of its points, spread evenly along its drawn length, ends included."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(xs) <= most:
        return xs, ys
    scale = [max(float(np.ptp(v)), np.finfo(np.float64).tiny) for v in (xs, ys)]
    length = np.r_[0.0, np.cumsum(np.abs(np.diff(xs)) / scale[0] + np.abs(np.diff(ys)) / scale[1])]
    keep = np.searchsorted(length, np.linspace(0.0, length[-1], most)).clip(0, len(xs) - 1)
    keep = np.unique(np.r_[0, keep[1:-1], len(xs) - 1])
    return xs[keep], ys[keep]


def curve(name: str, x: Any, y: Any, **more: Any) -> Series:
    """A line along at most `MOST_POINTS` points."""
    return Series(name, *points(*(values.tolist() for values in thin(x, y))), **more)


def wilson(rate: Floats, count: Floats, z: float = 1.96) -> tuple[Floats, Floats]:
    """Rates and counts → the ends of their 95 % intervals (Wilson), which stay within 0 and 1."""
    middle = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    return np.maximum(0.0, middle - half), np.minimum(1.0, middle + half)


def few_shown(names: Sequence[str], first: str | None) -> set[str]:
    """Of names from the best to the worst, the few to be seen at first; `first` is one of them."""
    ordered = sorted(names, key=lambda name: name != first)
    return set(ordered[:MOST_SHOWN])


def percent(value: float) -> str:
    """A share of 1 as a percentage of two decimals."""
    return f"{100 * value:.2f}\u00a0%"


def shortened(values: Floats) -> list[float]:
    """Numbers (N,) of five digits each."""
    return [short(value) for value in values.tolist()]


def selective_curves(
    curves: Mapping[str, Tensor], best: Tensor, score: str | None, note: Callable[[Tensor], str]
) -> tuple[list[Series], list[str], float]:
    """Errors (N,) when the k + 1 most certain samples are answered, by each score, and in the best possible order.

    Gives the series, the scores from the smallest area on, and the largest error but for the first samples, noise.
    """
    n = len(best)
    coverage = (torch.arange(1, n + 1).double() / n).tolist()
    order = sorted(curves, key=lambda name: float(curves[name].mean()))
    few = few_shown(order, score)
    late = max((float(curve[max(0, n // 20) :].max()) for curve in curves.values()), default=1.0)
    lines = [
        curve(readable(name), coverage, curves[name], note=note(curves[name]), shown=name in few) for name in order
    ]
    return [curve("best possible", coverage, best, kind="guide", note=note(best)), *lines], order, late
