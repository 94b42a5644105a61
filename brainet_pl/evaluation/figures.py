"""Figures of a test as pure functions: arrays in, a matplotlib `Figure` out, no global state.

One style for all: Okabe–Ito colours, and with each colour its own dashes, marker or hatch, so that nothing is told by
colour alone. The background is solid white: a picture looks the same in W&B, in a paper and on a dark page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

from brainet_pl.evaluation.curves import N_BINS, calibration_error, calibration_sums, risk_coverage, roc_curve

Measured = Mapping[str, Mapping[str, float]]  # score → measure → value, as `curves.separation` gives them

Floats = NDArray[np.float64]
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
INK, FAINT = "#262626", "#6b6b6b"
WIDTH = 5.2  # inches: text of 9 points stays readable where the picture is as wide as a phone
MOST_POINTS = 400


class Line(NamedTuple):
    """How the i-th of several curves is drawn."""

    color: str
    linestyle: Any
    marker: str


def line(i: int) -> Line:
    """A style for curve i; colour, dashes and marker repeat with different periods, so the first 210 differ."""
    return Line(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])


def readable(name: str) -> str:
    """mutual_information → mutual information."""
    return name.replace("_", " ")


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


def _panels(rows: int, columns: int, height: float, **settings: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, **settings)
    return figure, [ax for row in axes for ax in row]


def _tidy(ax: Axes, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """The one look of all axes."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8, colors=INK)
    ax.set_xlabel(xlabel, fontsize=9, color=INK)
    ax.set_ylabel(ylabel, fontsize=9, color=INK)
    if title:
        ax.set_title(title, fontsize=9.5, color=INK, loc="left")


def _legend(owner: Any, **settings: Any) -> None:
    owner.legend(**({"fontsize": 8, "frameon": False, "handlelength": 3.2} | settings))


def _percent(axis: Any, decimals: int | None = 0) -> None:
    axis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))


class Bins(NamedTuple):
    """Confidences (N,) and hits (N,) in equal bins: counts, mean confidence, accuracy (NaN where empty), ECE."""

    counts: Floats
    confidence: Floats
    accuracy: Floats
    ece: float


def calibration_bins(confidence: Tensor, correct: Tensor, n_bins: int = N_BINS) -> Bins:
    """The numbers of a reliability diagram; a confidence of 1 belongs to the last bin."""
    sums = calibration_sums(confidence, correct, n_bins)
    count, confidences, hits = sums.cpu().unbind(dim=1)
    return Bins(
        count.numpy(), (confidences / count).numpy(), (hits / count).numpy(), float(calibration_error(sums))
    )  # 0/0 is NaN: an empty bin


def wilson(rate: Floats, count: Floats, z: float = 1.96) -> tuple[Floats, Floats]:
    """Rates and counts → the ends of their 95 % intervals (Wilson), which stay within 0 and 1."""
    middle = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    return np.maximum(0.0, middle - half), np.minimum(1.0, middle + half)


def reliability(predictions: Mapping[str, tuple[Tensor, Tensor]], n_bins: int = N_BINS) -> Figure:
    """Label → (confidences (N,), hits (N,)), e.g. before and after scaling: accuracy against confidence, and counts.

    Vertical lines are 95 % intervals of the accuracy of a bin.
    """
    figure, (top, bottom) = _panels(2, 1, 5.6, sharex=True, height_ratios=[2.6, 1])
    top.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (2, 2)), label="perfect calibration")
    n = 0
    for i, (label, (confidence, correct)) in enumerate(predictions.items()):
        bins, style, n = calibration_bins(confidence, correct, n_bins), line(i), len(confidence)
        some = bins.counts > 0
        x, y = bins.confidence[some], bins.accuracy[some]
        low, high = wilson(y, bins.counts[some])
        top.vlines(x, low, high, color=style.color, linewidth=1, alpha=0.6)
        name = f"{label}, ECE {100 * bins.ece:.2f} %"
        top.plot(x, y, **style._asdict(), markersize=5, linewidth=1.5, label=name)
        edges, hatch = np.linspace(0, 1, n_bins + 1), ("", "////", "....")[i % 3]
        kind: dict[str, Any] = {"color": style.color, "alpha": 0.55} if not i else {
            "facecolor": "none", "edgecolor": style.color, "hatch": hatch
        }  # fmt: skip
        bottom.bar(edges[:-1], bins.counts, np.diff(edges), align="edge", linewidth=1, **kind)
    _tidy(top, ylabel="accuracy in the bin", title=f"Reliability, test set, n = {n:,}, {n_bins} bins")
    _tidy(bottom, "confidence (largest class probability)", "samples\n(log scale)")
    bottom.set_yscale("log")
    bottom.set_ylim(bottom=0.8)
    top.set_xlim(0, 1.005)
    top.set_ylim(0, 1.02)
    for axis in (top.xaxis, top.yaxis):
        _percent(axis)
    handles, labels = top.get_legend_handles_labels()
    _legend(figure, handles=handles, labels=labels, loc="outside lower center", ncols=1)
    return figure


def score_histograms(
    known: Mapping[str, Tensor],
    unknown: Mapping[str, Tensor],
    name: str,
    measured: Measured,
    units: Mapping[str, str],
) -> Figure:
    """Scores (N,) of the test set and (M,) of the set `name`: a panel for each score, in shares of each set.

    The axis spans 98 % of the finite values of both sets; what lies beyond is counted in the bins at its ends.
    """
    rows = -(-len(known) // 2)
    figure, axes = _panels(rows, 2, 0.95 + 1.75 * rows)
    for ax, (score, inside) in zip(axes, known.items(), strict=False):
        inner, outer = inside.double().cpu().numpy(), unknown[score].double().cpu().numpy()
        edges = _edges(inner, outer)
        for i, (values, label) in enumerate(((inner, "test set"), (outer, readable(name)))):
            counts, _ = np.histogram(values.clip(edges[0], edges[-1]), edges)
            style: dict[str, Any] = (
                {"facecolor": "#8cc0e0", "edgecolor": BLUE}
                if not i
                else {"facecolor": "none", "edgecolor": VERMILLION, "hatch": "////", "hatch_linewidth": 0.6}
            )
            ax.stairs(
                counts / len(values), edges, fill=True, linewidth=1.1, **style, label=f"{label}, n = {len(values):,}"
            )
        unit = f" ({units[score]})" if units.get(score) else ""
        _tidy(ax, f"{readable(score)}{unit}", title=f"AUROC {measured[score]['AUROC']:.3f}")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        _percent(ax.yaxis, None)  # as many digits as the ticks need
    for ax in axes[0::2]:
        ax.set_ylabel("share of set", fontsize=9, color=INK)
    for ax in axes[len(known) :]:
        ax.set_visible(False)
    figure.suptitle(f"Scores of known and unknown inputs: {readable(name)}", fontsize=10, color=INK)
    handles, labels = axes[0].get_legend_handles_labels()
    _legend(figure, handles=handles, labels=labels, loc="outside lower center", ncols=2)
    return figure


def _edges(*values: Floats, bins: int = 30) -> Floats:
    every = np.concatenate(values)
    finite = every[np.isfinite(every)]
    if not len(finite):
        return np.linspace(0.0, 1.0, bins + 1)
    # quantiles of each set, so that a large set does not push a small one off the axis
    parts = [v[np.isfinite(v)] for v in values if np.isfinite(v).any()]
    low = min(float(np.quantile(v, 0.01)) for v in parts)
    high = max(float(np.quantile(v, 0.99)) for v in parts)
    if high - low < 1e-9 * max(1.0, abs(low)):
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, bins + 1)


def ood_curves(known: Mapping[str, Tensor], unknown: Mapping[str, Tensor], name: str, measured: Measured) -> Figure:
    """Scores of the test set and of the set `name` → ROC above precision and recall, the best score first."""
    order = sorted(known, key=lambda score: -measured[score]["AUROC"])
    figure, (roc, pr) = _panels(2, 1, 6.9 + 0.16 * len(order))
    n_id, n_ood = (len(next(iter(part.values()))) for part in (known, unknown))
    roc.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (2, 2)))
    base = n_ood / (n_id + n_ood)
    pr.axhline(base, color=FAINT, linewidth=1, linestyle=(0, (2, 2)))
    for score in order:
        style = line(list(known).index(score))
        curve = roc_curve(known[score], unknown[score])
        label = f"{readable(score)}: {measured[score]['AUROC']:.3f} / {measured[score]['AUPR_out']:.3f}"
        drawn = {**style._asdict(), "linewidth": 1.5, "markersize": 4, "label": label}
        for ax, x, y in ((roc, curve.fpr, curve.tpr), (pr, curve.tpr[1:], curve.precision[1:])):
            xs, ys = thin(x, y)
            every = max(1, len(xs) // 7)
            ax.plot(xs, ys, **drawn, markevery=(every // 2, every))
    _tidy(roc, "known inputs flagged (FPR)", "unknown inputs flagged (TPR)",
          f"ROC: {readable(name)}, n = {n_ood:,}, against test set, n = {n_id:,}")  # fmt: skip
    _tidy(pr, "unknown inputs flagged (recall)", "unknown among flagged (precision)", "Precision and recall")
    for ax in (roc, pr):
        ax.set_xlim(-0.01, 1.01)
        ax.set_ylim(-0.01, 1.02)
        _percent(ax.xaxis)
        _percent(ax.yaxis)
    handles, labels = roc.get_legend_handles_labels()
    columns = 2 if len(order) > 1 else 1
    _legend(figure, handles=handles, labels=labels, loc="outside lower center", ncols=columns, title="AUROC / AUPR-out",
            title_fontsize=8)  # fmt: skip
    return figure


def risk_coverage_curves(scores: Mapping[str, Tensor], wrong: Tensor) -> Figure:
    """Scores (N,) by name and errors (N,) → error rate of the answered share, with the best possible order below it."""
    figure, (ax,) = _panels(1, 1, 3.9 + 0.1 * len(scores))
    n, coverage = len(wrong), torch.arange(1, len(wrong) + 1).double() / len(wrong)
    curves = {score: risk_coverage(values.cpu(), wrong.cpu()) for score, values in scores.items()}
    for score in sorted(curves, key=lambda name: float(curves[name].mean())):
        xs, ys = thin(coverage, curves[score])
        every = max(1, len(xs) // 7)
        label = f"{readable(score)}: {100 * float(curves[score].mean()):.2f} %"
        style = line(list(scores).index(score))
        ax.plot(xs, ys, **style._asdict(), linewidth=1.5, markersize=4, markevery=(every // 2, every), label=label)
    best = risk_coverage(wrong.cpu(), wrong.cpu())
    ax.plot(
        *thin(coverage, best),
        color=FAINT,
        linewidth=1,
        linestyle=(0, (2, 2)),
        label=f"best possible: {100 * float(best.mean()):.2f} %",
    )
    _tidy(ax, "answered samples, the most certain first (coverage)", "errors among the answered (risk)",
          f"Risk and coverage, test set, n = {n:,}, {int(wrong.sum()):,} errors")  # fmt: skip
    ax.set_xlim(0, 1)
    top = max(0.002, 1.15 * float(wrong.double().mean()))
    late = max(float(c[max(0, n // 20) :].max()) for c in curves.values())  # the first few samples are noise
    ax.set_ylim(0, max(top, 1.05 * late))
    _percent(ax.xaxis)
    _percent(ax.yaxis, None)
    _legend(figure, loc="outside lower center", ncols=2, title="AURC", title_fontsize=8)
    return figure


def pass_curves(
    steps: Sequence[int],
    metrics: Mapping[str, Sequence[float]],
    aurocs: Mapping[str, Mapping[str, Sequence[float]]],
    n: int,
    note: str = "",
) -> Figure:
    """Numbers of passes (S,); metric → (S,) on n test samples; score → set → (S,) AUROC: a panel for each.

    One sequence of draws, as the test made it: small steps up and down are its noise. A note stands below the title.
    """
    rows = -(-(len(metrics) + len(aurocs)) // 2)
    figure, axes = _panels(rows, 2, 0.9 + 1.95 * rows)
    for i, (ax, (metric, values)) in enumerate(zip(axes, metrics.items(), strict=False)):
        ax.plot(steps, values, **line(i)._asdict(), linewidth=1.5, markersize=3.5)
        unit = "nats" if metric == "NLL" else "% of samples"
        _tidy(ax, "passes averaged", unit, f"{metric} {'' if metric == 'NLL' else '(%) '}↓")
        if metric != "NLL":
            _percent(ax.yaxis, None)
            ax.set_ylabel("")
    sets = sorted({name for by_set in aurocs.values() for name in by_set})
    for ax, (score, by_set) in zip(axes[len(metrics) :], aurocs.items(), strict=False):
        for name, values in by_set.items():
            ax.plot(
                steps, values, **line(sets.index(name))._asdict(), linewidth=1.5, markersize=3.5, label=readable(name)
            )
        _tidy(ax, "passes averaged", "", f"AUROC, {readable(score)} ↑")
        _legend(ax, loc="best", handlelength=2.4)
    for ax in axes[: len(metrics) + len(aurocs)]:
        low, high = ax.get_ylim()
        if high - low < 0.02:  # noise of a sample or two must not fill the panel
            middle = max(0.5 * (low + high), 0.01)
            ax.set_ylim(middle - 0.01, middle + 0.01)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for ax in axes[len(metrics) + len(aurocs) :]:
        ax.set_visible(False)
    title = f"What another pass buys, test set, n = {n:,}"
    figure.suptitle(f"{title}\n{note}" if note else title, fontsize=10, color=INK)
    return figure


def training_curves(series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Metric → (steps, values): a panel for each, against optimiser steps."""
    rows = -(-len(series) // 2)
    figure, axes = _panels(rows, 2, 0.5 + 1.95 * rows)
    for i, (ax, (name, (x, y))) in enumerate(zip(axes, series.items(), strict=False)):
        xs, ys = thin(x, y)
        ax.plot(xs, ys, **line(i)._asdict(), linewidth=1.3, markersize=3, markevery=max(1, len(xs) // 8))
        _tidy(ax, "optimiser steps", "", name)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for ax in axes[len(series) :]:
        ax.set_visible(False)
    return figure
