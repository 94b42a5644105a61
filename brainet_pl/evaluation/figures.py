"""Charts as matplotlib figures, for loggers that take pictures and for files: a `Chart` in, a `Figure` out.

One style for all: Okabe–Ito colours, and with each colour its own dashes, marker or hatch, so that nothing is told by
colour alone. The background is solid white: a picture looks the same in W&B, in a paper and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from brainet_pl.evaluation.chart import Axis, Chart, Matrix, Panel, Series, limits, names_of

BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe–Ito; its yellow is too pale for lines on white
COLOURS = (BLUE, VERMILLION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1.2)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (8, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
HATCHES = ("", "////", "....", "xxxx")
INK, FAINT = "#262626", "#6b6b6b"
WIDTH = 5.2  # inches: text of 9 points stays readable where the picture is as wide as a phone


class LineStyle(NamedTuple):
    """How the i-th of several curves is drawn."""

    color: str
    linestyle: Any
    marker: str


def line(i: int) -> LineStyle:
    """A style for curve i; colour, dashes and marker repeat with different periods, so the first 210 differ."""
    return LineStyle(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])


def draw(chart: Chart) -> Figure:
    """All panels of a chart and all their series, one or two panels below each other, more in two columns."""
    count = len(chart.panels)
    columns = 1 if count <= 2 else 2
    rows = -(-count // columns)
    named = names_of(chart)
    curves = [series for series in named if series.kind != "guide"]
    style = {series.name: i for i, series in enumerate(curves)}
    single = len(named) == 1  # the titles say it all
    height = 0.5 + (3.4 if columns == 1 else 1.95) * rows + (0 if single else 0.12 * len(named))
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, panel in zip(axes, chart.panels, strict=False):
        _panel(ax, panel, style)
    for ax in axes[count:]:
        ax.set_visible(False)
    if not single:
        _legend(figure, axes[:count], named)
    return figure


def _legend(figure: Figure, axes: Sequence[Axes], named: Sequence[Series]) -> None:
    """One key below all panels, with the first handle of each name."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    shown = [series for series in named if series.name in handles]
    figure.legend(
        handles=[handles[series.name] for series in shown],
        labels=[f"{series.name}: {series.note}" if series.note else series.name for series in shown],
        loc="outside lower center",
        ncols=2 if len(named) > 3 else 1,
        fontsize=8,
        frameon=False,
        handlelength=3.2,
    )


def _panel(ax: Axes, panel: Panel, style: dict[str, int]) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8, colors=INK)
    ax.set_xlabel(panel.x.label, fontsize=9, color=INK)
    ax.set_ylabel(panel.y.label, fontsize=9, color=INK)
    ax.set_title(panel.title, fontsize=9.5, color=INK, loc="left")
    for series in panel.series:
        _series(ax, series, style.get(series.name, 0))
    xlim, ylim = (  # a little more, so that a line along an edge is not cut in half
        (low, high) if axis.log else (low - 0.01 * (high - low), high + 0.01 * (high - low))
        for axis, (low, high) in zip((panel.x, panel.y), limits(panel), strict=True)
    )
    _scale(panel.x, ax.xaxis)
    _scale(panel.y, ax.yaxis)
    if panel.y.log:
        ax.set_yscale("log")
    ax.set_xlim(*xlim)
    ax.set_ylim(*ylim)


def _scale(axis: Axis, spine: Any) -> None:
    if axis.unit == "share":
        spine.set_major_formatter(PercentFormatter(1.0, decimals=None))
    elif not axis.log:
        spine.set_major_locator(MaxNLocator(5, integer=axis.unit == "count"))


def _series(ax: Axes, series: Series, i: int) -> None:
    style = line(i)
    if series.kind == "guide":
        ax.plot(series.x, series.y, color=FAINT, linewidth=1, linestyle=(0, (2, 2)), label=series.name)
        return
    if series.kind == "bars":
        look: dict[str, Any] = {"facecolor": style.color, "alpha": 0.45, "edgecolor": style.color}
        if i:
            look = {"facecolor": "none", "edgecolor": style.color, "hatch": HATCHES[i % len(HATCHES)]}
            look["hatch_linewidth"] = 0.6
        ax.stairs(np.asarray(series.y), series.x, fill=True, linewidth=1.1, label=series.name, **look)
        return
    if series.low is not None and series.high is not None:
        alpha = 0.6 if series.kind == "line" else 0.25
        ax.vlines(series.x, series.low, series.high, color=style.color, linewidth=1, alpha=alpha)
    if series.kind == "points":
        ax.plot(series.x, series.y, color=style.color, linestyle="", marker="o", markersize=3, alpha=0.7,
                label=series.name)  # fmt: skip
        return
    every = max(1, len(series.x) // 7) if len(series.x) > 20 else 1
    ax.plot(series.x, series.y, **style._asdict(), linewidth=1.5, markersize=4, markevery=(every // 2, every),
            label=series.name)  # fmt: skip


def draw_matrix(matrix: Matrix) -> Figure:
    """Counts in cells, each shaded by its share of its row; numbers where there is room for them."""
    n = len(matrix.names)
    side = min(9.0, max(3.2, 0.38 * n + 1.4))
    figure = Figure(figsize=(side + 0.4, side), layout="constrained", facecolor="white")
    ax = figure.subplots()
    counts = np.asarray(matrix.counts, dtype=np.float64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    ax.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    for i, j in zip(*np.nonzero(counts), strict=True):
        if n <= 20:
            colour = "white" if shares[i, j] > 0.55 else INK
            ax.text(j, i, f"{int(counts[i, j])}", ha="center", va="center", fontsize=7, color=colour)
    ax.set_xticks(range(n), matrix.names, rotation=90 if n > 10 or max(map(len, matrix.names)) > 3 else 0, fontsize=7)
    ax.set_yticks(range(n), matrix.names, fontsize=7)
    ax.set_xlabel("predicted", fontsize=9, color=INK)
    ax.set_ylabel("true", fontsize=9, color=INK)
    ax.set_title(f"Confusion matrix, n = {int(counts.sum()):,}", fontsize=9.5, color=INK, loc="left")
    return figure
