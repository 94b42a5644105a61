"""Charts of a test that predicts numbers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from brainet_pl.evaluation import chart_parts as parts
from brainet_pl.evaluation.chart import Axis, Chart, Panel, Series, points, short
from brainet_pl.evaluation.chart_parts import ANSWERED
from brainet_pl.evaluation.record import SetRecord

MOST_DOTS = 600  # of a cloud of samples
LEVELS = (*(0.05 * i for i in range(1, 20)), 0.99)  # of central intervals


def regression_charts(known: SetRecord) -> list[Chart]:
    """Predicted against true, coverage of intervals, errors against stated deviations, residuals, errors if refused."""
    mean, target = known.answers["predicted"].double(), known.answers["target"].double()
    std = known.scores["std"].double()
    fine = mean.isfinite() & target.isfinite() & std.isfinite() & (std > 0)
    if int(fine.sum()) < 2:
        return []
    mean, target, std = mean[fine], target[fine], std[fine]
    z, n = (target - mean) / std, len(mean)
    rmse = float((target - mean).square().mean().sqrt())
    return [
        _predicted(mean, target, std, rmse),
        _coverage(z),
        _spread(target - mean, std, n),
        _residuals(mean, target, z),
        _refusal(known, fine, target - mean),
    ]


def _predicted(mean: Tensor, target: Tensor, std: Tensor, rmse: float) -> Chart:
    few = _spread_out(len(mean), MOST_DOTS)
    ends = [short(float(v)) for v in (min(target.min(), mean.min()), max(target.max(), mean.max()))]
    x, y = points(target[few].tolist(), mean[few].tolist())
    half = (1.96 * std[few]).tolist()
    low, high = ([short(b + sign * h) for b, h in zip(y, half, strict=True)] for sign in (-1, 1))
    n, room = len(mean), 0.04 * (ends[1] - ends[0])
    span = (short(ends[0] - room), short(ends[1] + room))
    cut = "" if len(x) == n else f"; {len(x):,} of {n:,} are drawn"
    return parts.make_chart(
        "test/predicted",
        f"Each dot is a test sample; on the dotted line the prediction is right. Lines are 95 % intervals{cut}.",
        f"Predicted against true values of {n:,} test samples, root of the mean square error {rmse:.4g}",
        Panel(
            "predicted",
            f"Predicted against true, n = {n:,}",
            parts.axis_between("true value", *span),
            parts.axis_between("predicted value", *span),
            [parts.diagonal("right", *span), Series("samples", x, y, "points", low=low, high=high)],
        ),
    )


def _coverage(z: Tensor) -> Chart:
    """Coverage of central intervals against their level, and how far above or below it is."""
    central = torch.special.erf(z.abs() / math.sqrt(2))
    rate = np.array([float((central <= level).double().mean()) for level in LEVELS])
    low, high = ([0.0, *parts.shortened(ends)] for ends in parts.wilson(rate, np.full(len(LEVELS), float(len(z)))))
    gap = parts.percent(float(np.mean(np.abs(rate - np.array(LEVELS)))))
    x, y = points([0.0, *LEVELS], [0.0, *rate.tolist()])
    at95 = float((central <= 0.95).double().mean())
    curve = Series("test set", x, y, note=f"mean gap {gap}", low=low, high=high)
    x_axis, y_axis = parts.share_axis("level of the interval"), parts.share_axis("targets inside")
    return parts.make_chart(
        "test/coverage",
        "Do the intervals hold what they promise? On the dotted line they do; below it they are too narrow. Vertical "
        "lines are 95 % intervals.",
        f"Share of targets inside central intervals against their level, {len(z):,} test samples: "
        f"{parts.percent(at95)} inside the 95 % interval, mean gap {gap}",
        Panel("coverage", "Coverage against level", x_axis, y_axis, [parts.diagonal("perfect intervals"), curve]),
    )


def _spread(error: Tensor, std: Tensor, n: int) -> Chart:
    """Root of the mean square error against the stated deviation, in bins of equal counts."""
    bins = torch.argsort(std).tensor_split(min(10, max(1, n // 5)))
    x, y = ([float(values[b].square().mean().sqrt()) for b in bins] for values in (std, error))
    high = short(1.1 * max(*x, *y))
    return parts.make_chart(
        "test/spread",
        "Are uncertain predictions worse? On the dotted line the error is what the model says of itself; above it the "
        "model is too sure. Bins of equally many samples.",
        f"Error against stated standard deviation in {len(bins)} bins: from {y[0]:.3g} where {x[0]:.3g} is stated to "
        f"{y[-1]:.3g} where {x[-1]:.3g} is stated",
        Panel(
            "spread",
            "Error against stated deviation",
            parts.axis_between("stated standard deviation", 0.0, high),
            parts.axis_between("root of the mean square error", 0.0, high),
            [parts.diagonal("as stated", 0.0, high), Series("test set", *points(x, y))],
        ),
    )


def _residuals(mean: Tensor, target: Tensor, z: Tensor) -> Chart:
    few = _spread_out(len(mean), MOST_DOTS)
    edges = np.linspace(-4, 4, 33)
    counts, _ = np.histogram(z.numpy().clip(-4, 4), edges)
    grid = np.linspace(-4, 4, 81)
    density = np.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi) * (edges[1] - edges[0])
    x, y = points(mean[few].tolist(), (target - mean)[few].tolist())
    bell = Series("as stated", *points(grid.tolist(), density.tolist()), "guide")
    return parts.make_chart(
        "test/residuals",
        "What is left: true minus predicted value, in stated deviations and against the prediction. Values beyond ±4 "
        "are in the end bins.",
        f"Residuals of {len(z):,} test samples in stated deviations: mean {float(z.mean()):.2f}, standard deviation "
        f"{float(z.std()):.2f}; a perfect model has 0 and 1",
        Panel(
            "standardised",
            "Residuals in stated deviations",
            Axis("(true − predicted) / stated deviation", "number", -4.0, 4.0),
            Axis("share of samples", "share", 0.0),
            [Series("test set", parts.shortened(edges), parts.shortened(counts / len(z)), "bars"), bell],
        ),
        Panel(
            "residuals",
            "Residuals against the prediction",
            Axis("predicted value"),
            Axis("true − predicted"),
            [Series("right", [min(x), max(x)], [0.0, 0.0], "guide"), Series("test set", x, y, "points")],
        ),
    )


def _refusal(known: SetRecord, fine: Tensor, error: Tensor) -> Chart:
    """Root of the mean square error of the most certain share, by each score."""
    square = error.square()

    def errors(order: Tensor) -> Tensor:
        return (square[order].cumsum(0) / torch.arange(1, len(square) + 1)).sqrt()

    curves = {name: errors(torch.argsort(values[fine], stable=True)) for name, values in known.rankable().items()}
    best = errors(torch.argsort(square))
    lines, _, late = parts.selective_curves(curves, best, "std", lambda curve: "")
    y_axis = parts.axis_between("RMSE of the answered", 0.0, short(1.05 * late))
    return parts.make_chart(
        "test/refusal",
        "What refusing to answer buys: the error when only the most certain share is answered.",
        f"Root of the mean square error against coverage for {len(curves)} scores: {float(best[-1]):.4g} when all are "
        "answered",
        Panel("refusal", "Error and coverage", parts.share_axis(ANSWERED), y_axis, lines),
    )


def _spread_out(n: int, most: int) -> Tensor:
    """At most so many of n numbers, evenly spread."""
    return torch.arange(n) if n <= most else torch.linspace(0, n - 1, most).long()
