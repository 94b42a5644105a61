"""Charts as drawings for a page: where each line, bar, tick and word stands; the template writes them as SVG.

A drawing is complete without a script. What a script adds, the value under a pointer and lines that come and go, it
finds in `Plot.data`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from brainet_pl.evaluation.chart import (
    Axis,
    AxisUnit,
    Chart,
    Panel,
    Series,
    as_text,
    limits,
    log_ticks,
    names_of,
    short,
    ticks,
)
from brainet_pl.metrics.catalogue import facts_of

WIDTH, HEIGHT = 340.0, 244.0  # of a panel, in its own units: about the width of a phone, so that words keep their size
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 8.0, 38.0
MOST_HIDDEN_KEYS = 2  # of a legend; more are folded away
STYLES = 7  # colours with dashes in style.css
OWN_CURVES = {"train/loss": "Training loss", "train/lr": "Learning rate"}  # what is no metric


class Tick(NamedTuple):
    """A number on an axis and its place."""

    at: float
    text: str


class Bar(NamedTuple):
    """A rectangle of a drawing, with the text that is shown under the pointer."""

    x: float
    y: float
    width: float
    height: float


class Mark(NamedTuple):
    """A series as shapes: its number in the legend, its style, and what there is to draw.

    Attributes:
        number: place in the legend.
        style: number of its colour and dashes; None is that of a guide.
        path: of a line, "" if there is none.
        dots: (x, y) of points.
        bars: rectangles.
        intervals: (x, low, high).
        shown: whether it is visible at first.
        hatched: whether bars are drawn as outlines, above those before.
    """

    number: int
    style: int | None
    path: str
    dots: list[tuple[float, float]]
    bars: list[Bar]
    intervals: list[tuple[float, float, float]]
    shown: bool
    hatched: bool


class Plot(NamedTuple):
    """One panel of a chart, as what is drawn of it."""

    key: str
    title: str
    xlabel: str
    ylabel: str
    xticks: list[Tick]
    yticks: list[Tick]
    marks: list[Mark]
    data: dict[str, Any]


class LegendKey(NamedTuple):
    """An entry of a legend, which shows and hides its series."""

    number: int
    style: int | None
    name: str
    note: str
    shown: bool
    kind: str


class Drawing(NamedTuple):
    """A chart, drawn: its panels, its legend (empty where there is nothing to tell apart), and its words.

    Attributes:
        choose: whether a reader looks at one panel at a time.
        switch: whether there are lines to show and hide.
        alone: whether it has a row of the page for itself, with its words beside it.
    """

    name: str
    plots: list[Plot]
    keys: list[LegendKey]
    caption: str
    alt: str
    choose: bool
    switch: bool
    alone: bool = False

    @property
    def folded(self) -> list[LegendKey]:
        """Keys of lines that are hidden at first, where they are many: the page folds them away."""
        hidden = [key for key in self.keys if not key.shown]
        return hidden if len(hidden) > MOST_HIDDEN_KEYS else []

    @property
    def span(self) -> int:
        """How many columns of a page it takes: one for each panel that is seen at once, three at the most."""
        return 1 if self.choose else min(3, len(self.plots))


def styles_of(charts: Iterable[Chart]) -> dict[str, int]:
    """Name of a thing that is drawn → its style, the same in all charts and other than those that it is drawn with.

    Things that are never in one chart may share a style: there are few. More than `STYLES` in one chart repeat.
    """
    beside: dict[str, set[str]] = {}
    for chart in charts:
        things = [series.group or series.name for series in names_of(chart) if series.kind != "guide"]
        for thing in things:
            beside.setdefault(thing, set()).update(things)
    styles: dict[str, int] = {}
    for thing, others in beside.items():
        taken = {styles[other] for other in others if other in styles}
        styles[thing] = next((i for i in range(STYLES) if i not in taken), len(styles) % STYLES)
    return styles


def drawing_of(chart: Chart, styles: Mapping[str, int] | None = None) -> Drawing:
    """Turns a chart into the drawings of its panels; `styles` are those of all charts of a page."""
    named = names_of(chart)
    styles = styles_of([chart]) if styles is None else styles
    index = {series.name: i for i, series in enumerate(named)}
    plots = [_plot(panel, index, styles) for panel in chart.panels]
    keys = [_key(series, index, styles) for series in named] if len(named) > 1 else []
    lines = sum(series.kind != "guide" for series in named)
    return Drawing(chart.name, plots, keys, chart.caption, chart.alt, chart.choose, switch=lines > 1)


def _style(series: Series, styles: Mapping[str, int]) -> int | None:
    return None if series.kind == "guide" else styles[series.group or series.name] % STYLES


def _key(series: Series, index: dict[str, int], styles: Mapping[str, int]) -> LegendKey:
    return LegendKey(index[series.name], _style(series, styles), series.name, series.note, series.shown, series.kind)


def _plot(panel: Panel, index: dict[str, int], styles: Mapping[str, int]) -> Plot:
    xlim, ylim = limits(panel)
    x = _Scale(panel.x, xlim, LEFT, WIDTH - RIGHT)
    y = _Scale(panel.y, ylim, HEIGHT - BOTTOM, TOP)
    bars = [series.name for series in panel.series if series.kind == "bars"]
    marks, pointed = [], []
    for series in panel.series:
        number = index[series.name]
        above = series.kind == "bars" and series.name != bars[0]
        marks.append(_mark(series, x, y, number, _style(series, styles), hatched=above))
        if series.kind != "guide":
            pointed.append({"i": number, "name": series.name, "kind": series.kind, "x": series.x, "y": series.y})
    data = {"x": x.data(), "y": y.data(), "series": pointed}
    return Plot(panel.key, panel.title, panel.x.label, panel.y.label, x.ticks(), y.ticks(), marks, data)


class _Scale:
    """From values to places."""

    def __init__(self, axis: Axis, ends: tuple[float, float], first: float, last: float) -> None:
        self.axis, self.first, self.last = axis, first, last
        self.low, self.high = (math.log10(v) for v in ends) if axis.log else ends
        self.ends = ends

    def at(self, value: float) -> float:
        if self.axis.log:
            value = math.log10(max(value, 10.0**self.low))
        value = min(max(value, self.low), self.high)
        return round(self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first), 1)

    def ticks(self) -> list[Tick]:
        values = log_ticks(*self.ends) if self.axis.log else ticks(*self.ends, whole=self.axis.unit == "count")
        step = values[1] - values[0] if len(values) > 1 and not self.axis.log else None
        return [Tick(self.at(value), as_text(value, self.axis.unit, step)) for value in values]

    def data(self) -> dict[str, Any]:
        return {
            "label": self.axis.label, "unit": self.axis.unit, "log": self.axis.log, "low": self.low, "high": self.high,
            "first": self.first, "last": self.last,
        }  # fmt: skip


def _mark(series: Series, x: _Scale, y: _Scale, number: int, style: int | None, hatched: bool) -> Mark:
    path, dots = "", []
    if series.kind != "bars":
        places = [(x.at(a), y.at(b)) for a, b in zip(series.x, series.y, strict=True)]
        if series.kind != "points" and places:
            path = "M" + "L".join(f"{a:g} {b:g}" for a, b in places)
        if series.kind == "points" or (series.kind == "line" and len(places) <= 20):
            dots = places
    bars = _bars(series, x, y) if series.kind == "bars" else []
    return Mark(number, style, path, dots, bars, _intervals(series, x, y), series.shown, hatched)


def _bars(series: Series, x: _Scale, y: _Scale) -> list[Bar]:
    """A bar for each value above 0, from the foot of the panel."""
    floor, bars = y.at(y.ends[0]), []
    for left, right, value in zip(series.x[:-1], series.x[1:], series.y, strict=True):
        if value > 0:
            a, b, top = x.at(left), x.at(right), y.at(value)
            bars.append(Bar(a, top, round(b - a, 1), round(floor - top, 1)))
    return bars


def _intervals(series: Series, x: _Scale, y: _Scale) -> list[tuple[float, float, float]]:
    """Place and both ends of the interval of each value, where a series has such."""
    if series.low is None or series.high is None or series.kind == "bars":
        return []
    ends = zip(series.x, series.low, series.high, strict=True)
    return [(x.at(a), y.at(low), y.at(high)) for a, low, high in ends]


def chart_of_history(history: dict[str, tuple[list[float], list[float]]], keys: Sequence[str]) -> Chart | None:
    """Training curves: a panel for each metric of these keys that has at least two values.

    A key of the catalogue, such as `cls/Acc`, stands for the metric in training and validation.
    """
    panels: dict[str, Panel] = {}
    described = []
    for key in keys:
        facts, own = facts_of(key), OWN_CURVES.get(key)
        title = own or (f"{facts.title}, nats" if facts.unit == "nats" else facts.title)
        unit: AxisUnit = "share" if facts.unit == "share" else "number"
        stages = {key: "training"} if own else {f"train/{key}": "training", f"val/{key}": "validation"}
        for name, stage in stages.items():
            steps, values = history.get(name, ([], []))
            if len(values) < 2:
                continue
            panel = panels.setdefault(title, Panel(title, title, Axis("optimiser steps", "count"), Axis("", unit), []))
            panel.series.append(Series(stage, *_few(steps, values)))
            described.append(f"{name} from {values[0]:.4g} to {values[-1]:.4g}")
    if not panels:
        return None
    alt = f"Training curves: {', '.join(described)}"
    return Chart("training", "training", "While fitting.", alt, list(panels.values()))


def _few(steps: list[float], values: list[float], most: int = 200) -> tuple[list[float], list[float]]:
    """Finite values, at most so many: means of equally many neighbours."""
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    size = -(-len(finite) // most) if finite else 1
    places, means = [], []
    for first in range(0, len(finite), size):
        neighbours = finite[first : first + size]
        places.append(neighbours[-1][0])
        means.append(short(sum(value for _, value in neighbours) / len(neighbours)))
    return places, means
