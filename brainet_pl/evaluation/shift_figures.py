"""What people look at after shifts of the test set: measures against severity, reliability, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from brainet_pl.evaluation.curves import N_BINS, calibration_error
from brainet_pl.evaluation.figures import FAINT, INK, line
from brainet_pl.evaluation.record import TestRecord
from brainet_pl.evaluation.shift import Shifted, means, parse_shift
from brainet_pl.evaluation.summary import Picture, TableData

WORDS = {"predicted": "as predicted", "final": "after calibration"}


def shift_table(shifts: Sequence[Shifted]) -> TableData:
    """Corruption × severity × measure, as a table for loggers; measures after calibration are `scaled_…`."""
    first = shifts[0]
    columns = ["corruption", "severity", "samples", *first.predicted, *(f"scaled_{m}" for m in first.final or ())]
    rows = [
        [s.corruption, s.severity, s.samples, *s.predicted.values(), *(s.final.values() if s.final else ())]
        for s in shifts
    ]
    return TableData("The same measures after each shift of the test set; severity 0 is the set itself", columns, rows)


def shift_pictures(record: TestRecord) -> dict[str, Picture]:
    """Measures against severity, and reliability of clean and shifted samples, by name; empty without shifts."""
    shifts = record.shifts()
    if not shifts:
        return {}
    worst = max(s.severity for s in shifts)
    measure = "ECE" if "ECE" in shifts[0].predicted else next(iter(shifts[0].predicted))
    ends = ", ".join(f"{WORDS[which]} {values[measure]:.4g}" for which, values in means(shifts, worst).items())
    names = len({s.corruption for s in shifts if s.severity})
    alt = (
        f"{', '.join(shifts[0].predicted)} against the severity of {names} corruptions; mean {measure} at severity "
        f"{worst}: {ends}"
    )
    drawn = {"shift/severity": Picture(severity_curves(shifts), alt, "shift")}
    bins = pooled_bins(record)
    if bins:
        told = "; ".join(
            f"{label}, calibration error {100 * float(calibration_error(b)):.2f} %" for label, b in bins.items()
        )
        drawn["shift/reliability"] = Picture(reliability(bins), f"Reliability diagram: {told}", "shift")
    return drawn


def pooled_bins(record: TestRecord) -> dict[str, Tensor]:
    """Label → (bins, 3) counts, confidences and hits of all clean and of all shifted samples, before and after."""
    found: dict[str, Tensor] = {}
    for name, sums in record.shift_sums.items():
        for which in WORDS if sums is not None else ():
            part = getattr(sums, which)
            if part is not None and "bins" in part:
                label = f"{'clean' if parse_shift(name) is None else 'shifted'}, {WORDS[which]}"
                found[label] = found[label] + part["bins"] if label in found else part["bins"]
    return found


def severity_curves(shifts: Sequence[Shifted]) -> Figure:
    """What was measured after each shift: a panel for each measure, its mean over corruptions against severity.

    Vertical lines reach from the least to the largest corruption. Severity 0 is the test set itself.
    """
    measures = list(shifts[0].predicted)
    severities = sorted({s.severity for s in shifts})
    rows = -(-len(measures) // 2)
    figure = Figure(figsize=(5.2, 0.9 + 1.95 * rows), layout="constrained", facecolor="white")
    axes: list[Axes] = list(np.ravel(figure.subplots(rows, 2, squeeze=False)))
    for ax, measure in zip(axes, measures, strict=False):
        for i, which in enumerate(WORDS):
            groups = [
                [part[measure] for s in shifts if s.severity == severity and (part := getattr(s, which)) is not None]
                for severity in severities
            ]
            if not all(groups):
                continue
            style, x = line(i), np.array(severities) + 0.08 * (2 * i - 1)
            ax.vlines(x, [min(g) for g in groups], [max(g) for g in groups], color=style.color, linewidth=1, alpha=0.6)
            mean = [float(np.mean(group)) for group in groups]
            ax.plot(x, mean, **style._asdict(), linewidth=1.5, markersize=4, label=WORDS[which])
        _tidy(ax, "severity of the shift", "", f"{measure} {'↑' if measure == 'Acc' else '↓'}")
        ax.set_xticks(severities, ["clean" if not severity else str(severity) for severity in severities])
        if measure in ("Acc", "ECE"):
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    for ax in axes[len(measures) :]:
        ax.set_visible(False)
    names, n = len({s.corruption for s in shifts if s.severity}), max(s.samples for s in shifts if s.severity)
    title = f"After a shift: mean, least and worst of {names} corruption{'s' * (names > 1)}, n = {n:,} each"
    figure.suptitle(title, fontsize=10, color=INK)
    _legend(figure, axes[0])
    return figure


def reliability(bins: Mapping[str, Tensor]) -> Figure:
    """Label → (bins, 3) of `calibration_sums`: accuracy against confidence, and the share of samples in each bin."""
    figure = Figure(figsize=(5.2, 5.6), layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    top.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (2, 2)), label="perfect calibration")
    for i, (label, sums) in enumerate(bins.items()):
        count, confidence, hits = sums.numpy().T
        some, style = count > 0, line(i)
        name = f"{label}: ECE {100 * float(calibration_error(sums)):.2f} %, n = {int(count.sum()):,}"
        drawn: dict[str, Any] = {**style._asdict(), "linewidth": 1.5, "markersize": 5}
        top.plot(confidence[some] / count[some], hits[some] / count[some], **drawn, label=name)
        bottom.stairs(count / count.sum(), np.linspace(0, 1, len(count) + 1), color=style.color, ls=style.linestyle)
    _tidy(top, "", "accuracy in the bin", f"Reliability of clean and shifted test samples, {N_BINS} bins")
    _tidy(bottom, "confidence (largest class probability)", "share of samples")
    top.set(xlim=(0, 1.005), ylim=(0, 1.02))
    for axis in (top.xaxis, top.yaxis, bottom.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(figure, top, 1)
    return figure


def _tidy(ax: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8, colors=INK)
    ax.set_xlabel(xlabel, fontsize=9, color=INK)
    ax.set_ylabel(ylabel, fontsize=9, color=INK)
    ax.set_title(title, fontsize=9.5, color=INK, loc="left")


def _legend(figure: Figure, ax: Axes, columns: int = 2) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles=handles, labels=labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False,
        handlelength=3.2,
    )  # fmt: skip
