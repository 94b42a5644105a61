"""Charts as data: what is drawn by matplotlib, in a page, and by loggers that have charts of their own.

A chart is made once, from the record of a test (`charts.py`) or from the history of a fit, and kept in `record.json`.
Nothing here needs torch, so that pages of many runs are made in a moment.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

SeriesKind = Literal["line", "points", "bars", "guide"]
AxisUnit = Literal["share", "number", "count"]
ChartGroup = Literal["test", "shift", "ood", "structure", "training"]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class Axis(Struct, frozen=True):
    """What an axis of a panel shows, and how far it reaches."""

    label: str  # with its unit
    unit: AxisUnit = "number"  # how its numbers read: a "share" of 1 as a percentage, a "count" without decimals
    low: float | None = None  # where it begins; None is where the data does
    high: float | None = None  # where it ends
    log: bool = False  # whether its scale is logarithmic

    def __post_init__(self) -> None:
        if self.log and not (self.low is not None and self.low > 0):
            raise ValueError("a number above 0 where the axis begins @ low")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError("a number above the lower end @ high")


class Series(Struct, frozen=True):
    """A curve, a cloud of points or a row of bars."""

    name: str  # what it is called; series of one name in several panels are one entry of the legend
    x: list[Finite]  # (N,) places; of bars (N + 1,), their edges
    y: list[Finite]  # (N,) values
    kind: SeriesKind = "line"  # through the points, "points" alone, "bars", or a thin dotted "guide" to compare with
    note: str = ""  # its number, behind the name in a legend
    low: list[Finite] | None = None  # (N,) lower ends of the intervals of y
    high: list[Finite] | None = None  # (N,) upper ends
    shown: bool = True  # whether it is there before the reader asks for it
    group: str = ""  # series of one group are drawn alike; "" is a group of its own

    def __post_init__(self) -> None:
        n = len(self.y)
        places = n + (self.kind == "bars")
        for name, values, count in (("x", self.x, places), ("low", self.low, n), ("high", self.high, n)):
            if values is not None and len(values) != count:
                raise ValueError(f"{count} numbers @ {name}")


class Panel(Struct, frozen=True):
    """One pair of axes with the series that are drawn in it."""

    key: str  # its name in the chart, for loggers
    title: str  # what it shows
    x: Axis  # the horizontal axis
    y: Axis  # the vertical axis
    series: list[Series]  # what is drawn, from back to front


class Chart(Struct, frozen=True):
    """Panels that belong together and are shown as one figure."""

    name: str  # as loggers have it: "test/reliability"
    group: ChartGroup  # the part of a report that it belongs to: "test", "shift", "ood", "structure" or "training"
    caption: str  # how to read it
    alt: str  # what it shows, in words and numbers
    panels: list[Panel]  # at least one
    choose: bool = False  # whether a reader looks at one panel at a time

    def __post_init__(self) -> None:
        if not self.panels:
            raise ValueError("at least one panel @ panels")


class Matrix(Struct, frozen=True):
    """Counts by two names: rows are what was, columns what was said."""

    names: list[str]  # (C,) of the classes
    counts: list[list[Count]]  # (C, C)

    def __post_init__(self) -> None:
        size = len(self.names)
        if len(self.counts) != size or any(len(row) != size for row in self.counts):
            raise ValueError(f"{size} rows of {size} counts @ counts")


def readable(name: str) -> str:
    """Makes a name readable: `mutual_information` becomes "mutual information", `one_minus_max_p` "1 − max p"."""
    return name.replace("_", " ").replace("one minus ", "1 − ")


def short(value: float) -> float:
    """A number as a chart needs it: five digits."""
    return float(f"{value:.5g}")


def points(x: Iterable[float], y: Iterable[float]) -> tuple[list[float], list[float]]:
    """The finite points of a curve, five digits each."""
    finite = [(short(a), short(b)) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    return [a for a, _ in finite], [b for _, b in finite]


def names_of(chart: Chart) -> list[Series]:
    """The first series of each name in a chart, those that are no guides first: the entries of its legend."""
    first: dict[str, Series] = {}
    for panel in chart.panels:
        for series in panel.series:
            first.setdefault(series.name, series)
    return sorted(first.values(), key=lambda series: series.kind == "guide")


def limits(panel: Panel) -> tuple[tuple[float, float], tuple[float, float]]:
    """Finds the (low, high) of both axes: as the axes say, else what the series need with a little room."""
    xs = [v for series in panel.series for v in series.x]
    ys = [v for series in panel.series for v in (*series.y, *(series.low or ()), *(series.high or ()))]
    if any(series.kind == "bars" for series in panel.series) and not panel.y.log:
        ys.append(0.0)
    return _span(panel.x, xs, 0.0), _span(panel.y, ys, 0.06)


def _span(axis: Axis, values: Sequence[float], room: float) -> tuple[float, float]:
    if axis.log:
        values = [value for value in values if value > 0]
    low = min(values, default=0.0) if axis.low is None else axis.low
    high = max(values, default=1.0) if axis.high is None else axis.high
    if axis.log:
        return low, max(high, 10 * low)
    wide = high - low
    if wide <= 1e-9 * max(1.0, abs(low)):
        wide = 0.1 * abs(low) or 0.02
        low, high = low - wide / 2, high + wide / 2
    return low - (room * wide if axis.low is None else 0.0), high + (room * wide if axis.high is None else 0.0)


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers between two ends, at most so many and at least two where there is room."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    for step in _round_steps(span / most):
        if whole and (step < 1 or step != round(step)):
            continue
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [round(i * step, 12) for i in range(first, last + 1)]
    return [low, high]


def _round_steps(least: float) -> list[float]:
    """Round numbers from about this size on: 1, 2, 2.5 and 5 times a power of ten."""
    exponent = math.floor(math.log10(least))
    return [digit * 10.0**power for power in (exponent, exponent + 1) for digit in (1, 2, 2.5, 5)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two ends."""
    return [10.0**e for e in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def as_text(value: float, unit: str, step: float | None = None) -> str:
    """A number as an axis or a pointer shows it; with the step of the ticks, as many decimals as that needs."""
    if unit == "share":
        return f"{_decimals(100 * value, None if step is None else 100 * step)}\u00a0%"
    if unit == "count" or (float(value).is_integer() and 1e3 <= abs(value) < 1e15):
        return f"{value:,.0f}"
    return _decimals(value, step)


def _decimals(value: float, step: float | None) -> str:
    if step is None or not step:
        return f"{value:.4g}"
    if not 1e-4 < abs(step) < 1e6:
        return f"{value:.3g}"
    places = max(0, -math.floor(math.log10(abs(step)) + 1e-9))
    places += round(step * 10**places, 6) != round(step * 10**places)  # steps of 2.5 need one more
    return f"{value:.{places}f}"
