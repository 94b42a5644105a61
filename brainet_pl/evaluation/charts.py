"""From the record of a test to its charts: every curve is computed here, once, for all who draw it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brainet_pl.evaluation.chart import Axis, Chart, Matrix, Panel, Series, points, readable, short
from brainet_pl.evaluation.record import MOST_TRACED, Measured, SetRecord, TestRecord
from brainet_pl.metrics.curves import (
    N_BINS,
    calibration_error,
    calibration_sums,
    risk_coverage,
    roc_curve,
    separation,
)
from brainet_pl.metrics.passes import pass_metrics

Floats = NDArray[np.float64]
MOST_POINTS = 160  # of a curve: finer than a screen shows
MOST_DOTS = 600  # of a cloud of samples
MOST_SHOWN = 3  # curves that a reader sees before asking for more
MOST_CLASSES = 60  # of a confusion matrix: larger ones can't be read
LEVELS = (*(0.05 * i for i in range(1, 20)), 0.99)  # of central intervals
SHARE = Axis("", "share", 0.0, 1.0)


def charts_of(
    record: TestRecord, found: Mapping[str, Measured], label: str | None = None, score: str | None = None
) -> list[Chart]:
    """All charts that a record has the numbers for.

    Args:
        record: gathered.
        found: set → score → measure → value, what `record.separations` gives.
        label: what calibration did, or None.
        score: the one that ranks samples; it is seen first where there are many.
    """
    known = record.known
    made: list[Chart] = []
    if "wrong" in known.answers and "confidence" in known.answers:
        made += _classification(record, label, score)
    elif "target" in known.answers and "std" in known.scores:
        made += _regression(known)
    made += _verdict(record)
    for part in record.unknown:
        made += _unknown(record, part, found.get(part.name, {}), score)
    return made


def _verdict(record: TestRecord) -> list[Chart]:
    """How many samples of each set look unknown, at every level; nothing where the model has no verdict."""
    sets = [part for part in record.sets.values() if part.known_p is not None and len(part)]
    if record.level is None or not sets:
        return []
    series, told = [Series("as promised", [0.0, 1.0], [0.0, 1.0], "guide")], []
    for part in sets:
        assert part.known_p is not None
        values, label = part.known_p.double().sort().values, "test set" if part.role == "known" else readable(part.name)
        share = float((values <= record.level).double().mean())
        x, y = np.r_[0.0, values.numpy(), 1.0], np.r_[0.0, np.arange(1, len(values) + 1) / len(values), 1.0]
        series.append(_curve(label, x, y, note=_percent(share)))
        told.append(f"{_percent(share)} of {label}")
    level = f"{100 * record.level:g}\u00a0%"
    return [
        Chart(
            "test/known",
            "test",
            "Which inputs look unknown: the share of each set whose p-value, known_p, is at most the level. Known "
            f"inputs follow the dotted line, unknown ones lie above it; the verdict is at {level}.",
            f"At the level of {level}, {', '.join(told)} look unknown",
            [
                Panel(
                    "known",
                    f"looks unknown at {level}",
                    SHARE._replace(label="level"),
                    SHARE._replace(label="share that looks unknown"),
                    series,
                )
            ],
        )
    ]


# -- curves -----------------------------------------------------------------------------------------------------------


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


def _curve(name: str, x: Any, y: Any, **more: Any) -> Series:
    return Series(name, *points(*(values.tolist() for values in thin(x, y))), **more)


class Bins(NamedTuple):
    """Confidences (N,) and hits (N,) in equal bins: counts, mean confidence, accuracy (NaN where empty), ECE."""

    counts: Floats
    confidence: Floats
    accuracy: Floats
    ece: float


def calibration_bins(confidence: Tensor, correct: Tensor, n_bins: int = N_BINS) -> Bins:
    """The numbers of a reliability diagram; a confidence of 1 belongs to the last bin."""
    return _bins(calibration_sums(confidence, correct, n_bins))


def _bins(sums: Tensor) -> Bins:
    """The same from the sums (bins, 3) of `calibration_sums`."""
    count, confidences, hits = sums.cpu().unbind(dim=1)
    return Bins(
        count.numpy(), (confidences / count).numpy(), (hits / count).numpy(), float(calibration_error(sums))
    )  # 0/0 is NaN: an empty bin


def wilson(rate: Floats, count: Floats, z: float = 1.96) -> tuple[Floats, Floats]:
    """Rates and counts → the ends of their 95 % intervals (Wilson), which stay within 0 and 1."""
    middle = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    return np.maximum(0.0, middle - half), np.minimum(1.0, middle + half)


def _few(names: Sequence[str], first: str | None) -> set[str]:
    """Of names from the best to the worst, the few to be seen at first; `first` is one of them."""
    ordered = sorted(names, key=lambda name: name != first)
    return set(ordered[:MOST_SHOWN])


def _percent(value: float) -> str:
    return f"{100 * value:.2f}\u00a0%"


# -- known inputs, classes --------------------------------------------------------------------------------------------


def _classification(record: TestRecord, label: str | None, score: str | None) -> list[Chart]:
    known = record.known
    wrong, confidence = known.answers["wrong"], known.answers["confidence"]
    shown = {"as predicted": (confidence, 1.0 - wrong)}
    if label is not None and "calibrated" in known.answers:
        shown = {"before calibration": (confidence, 1.0 - wrong), label: (known.answers["calibrated"], 1.0 - wrong)}
    made = [reliability(shown)]
    scores = known.rankable()
    if scores:
        made.append(risk_coverage_chart(scores, wrong, score))
    if known.sums is not None and len(record.steps) > 1:
        made.append(_passes(record))
    return made


def reliability(predictions: Mapping[str, tuple[Tensor, Tensor]], n_bins: int = N_BINS) -> Chart:
    """Label → (confidences (N,), hits (N,)), e.g. before and after scaling: accuracy against confidence, and counts."""
    sums = {name: calibration_sums(*pair, n_bins) for name, pair in predictions.items()}
    n = max(len(confidence) for confidence, _ in predictions.values())
    told = "; ".join(
        f"{name}, expected calibration error {_percent(float(calibration_error(part)))}" for name, part in sums.items()
    )
    return Chart(
        "test/reliability",
        "test",
        "Is the confidence right? On the dotted line it is; below it the model is too sure. Vertical lines are 95 % "
        "intervals.",
        f"Reliability diagram of {n:,} test samples: {told}",
        reliability_panels(sums),
    )


def reliability_panels(sums: Mapping[str, Tensor]) -> list[Panel]:
    """Label → (bins, 3) of `calibration_sums`: accuracy against confidence, and counts."""
    guide = Series("perfect calibration", [0.0, 1.0], [0.0, 1.0], "guide")
    curves, counts, sizes = [guide], [], set()
    for name, part in sums.items():
        bins = _bins(part)
        sizes.add(int(bins.counts.sum()))
        some = bins.counts > 0
        x, y = bins.confidence[some], bins.accuracy[some]
        low, high = wilson(y, bins.counts[some])
        xs, ys = points(x.tolist(), y.tolist())
        ends = [[short(v) for v in end.tolist()] for end in (low, high)]
        if len(xs) == len(x):
            curves.append(Series(name, xs, ys, note=f"ECE {_percent(bins.ece)}", low=ends[0], high=ends[1]))
        edges = [short(v) for v in np.linspace(0, 1, len(part) + 1).tolist()]
        counts.append(Series(name, edges, bins.counts.tolist(), "bars"))
    x_axis = SHARE._replace(label="confidence (largest class probability)")
    n = " and ".join(f"{size:,}" for size in sorted(sizes))
    return [
        Panel("reliability", f"Reliability, n = {n}", x_axis, SHARE._replace(label="accuracy in the bin"), curves),
        Panel("counts", "Samples", x_axis, Axis("samples (log scale)", "count", 0.8, log=True), counts),
    ]


def risk_coverage_chart(scores: Mapping[str, Tensor], wrong: Tensor, score: str | None = None) -> Chart:
    """Scores (N,) by name and errors (N,) → error rate of the answered share, with the best possible order below it."""
    n, coverage = len(wrong), (torch.arange(1, len(wrong) + 1).double() / len(wrong)).tolist()
    curves = {name: risk_coverage(values.cpu(), wrong.cpu()) for name, values in scores.items()}
    areas = {name: float(curve.mean()) for name, curve in curves.items()}
    order = sorted(areas, key=lambda name: areas[name])
    few = _few(order, score)
    best = risk_coverage(wrong.cpu(), wrong.cpu())
    late = max(float(curve[max(0, n // 20) :].max()) for curve in curves.values())  # the first few samples are noise
    top = max(0.002, 1.15 * float(wrong.double().mean()), 1.05 * late)
    lines = [
        _curve(readable(name), coverage, curves[name], note=_percent(areas[name]), shown=name in few) for name in order
    ]
    ideal = _curve("best possible", coverage, best, kind="guide", note=_percent(float(best.mean())))
    return Chart(
        "test/risk_coverage",
        "test",
        "What refusing to answer buys: the error rate when only the most certain share is answered. Behind the names: "
        "the area under each curve (AURC).",
        f"Error rate against coverage for {len(areas)} scores: {_percent(float(wrong.mean()))} when all are answered; "
        f"the smallest area, {_percent(areas[order[0]])}, is that of {readable(order[0])}",
        [
            Panel(
                "risk",
                f"Risk and coverage, n = {n:,}, {int(wrong.sum()):,} errors",
                SHARE._replace(label="answered, the most certain first (coverage)"),
                Axis("errors among the answered (risk)", "share", 0.0, short(top)),
                [ideal, *lines],
            )
        ],
    )


def _passes(record: TestRecord) -> Chart:
    """Metrics of the mean of the first t passes; one sequence of draws, so that small steps are its noise."""
    assert record.known.sums is not None
    curves, steps, n = pass_metrics(record.known.sums), [float(step) for step in record.steps], len(record.known)
    few = any(len(part) > MOST_TRACED for part in record.sets.values() if part.running)
    note = f"AUROC of {MOST_TRACED:,} samples of each set at the most. " if few else ""
    x_axis = Axis("passes averaged", "count")
    panels = []
    for name, values in curves.items():
        share = name != "NLL"
        middle, room = _narrow(values)
        y_axis = Axis(name if share else "NLL, nats", "share" if share else "number", *room)
        title = f"{name[0].upper()}{name[1:]} ↓"
        panels.append(Panel(name, title, x_axis, y_axis, [Series(middle, *points(steps, values))]))
    for score, by_set in _running_aurocs(record).items():
        every = [value for values in by_set.values() for value in values]
        series = [Series(readable(name), *points(steps, values)) for name, values in by_set.items()]
        y_axis = Axis("AUROC", "share", *_narrow(every)[1])
        panels.append(Panel(f"AUROC_{score}", f"AUROC, {readable(score)} ↑", x_axis, y_axis, series))
    return Chart(
        "test/passes",
        "test",
        f"What another pass buys: metrics of the mean of the first passes, as they were drawn. {note}".strip(),
        f"Metrics of the mean of the first t passes on {n:,} test samples, t from 1 to {record.steps[-1]}: negative "
        f"log-likelihood from {curves['NLL'][0]:.3f} to {curves['NLL'][-1]:.3f}, error from "
        f"{_percent(curves['error'][0])} to {_percent(curves['error'][-1])}",
        panels,
    )


def _narrow(values: Sequence[float]) -> tuple[str, tuple[float | None, float | None]]:
    """The name of the one line of a panel, and the ends of its axis where the values would not fill it but by noise."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or max(finite) - min(finite) >= 0.02:
        return "test set", (None, None)
    middle = max(0.5 * (max(finite) + min(finite)), 0.01)
    return "test set", (short(middle - 0.01), short(middle + 0.01))


def _running_aurocs(record: TestRecord) -> dict[str, dict[str, list[float]]]:
    """Score → set → AUROC of the mean of the first t passes, for each t."""
    sets = {part.name: part.running for part in record.unknown if part.running}
    found: dict[str, dict[str, list[float]]] = {}
    for score, inside in record.known.running.items():
        if inside.isnan().any() or any(score not in part or part[score].isnan().any() for part in sets.values()):
            continue
        found[score] = {
            name: [separation(a, b)["AUROC"] for a, b in zip(inside, part[score], strict=True)]
            for name, part in sets.items()
        }
    return found if sets else {}


def confusion(known: SetRecord, names: Sequence[str] | None = None) -> Matrix | None:
    """Labels against predictions; None where there are none, or too many classes to look at."""
    if "label" not in known.answers or "predicted" not in known.answers or not len(known):
        return None
    label, predicted = known.answers["label"].long(), known.answers["predicted"].long()
    classes = max(int(label.max()), int(predicted.max())) + 1 if names is None else len(names)
    if classes > MOST_CLASSES:
        return None
    counts = torch.zeros(classes, classes, dtype=torch.long)
    counts.index_put_((label, predicted), torch.ones_like(label), accumulate=True)
    return Matrix([str(i) for i in range(classes)] if names is None else list(names), counts.tolist())


class ClassNumbers(NamedTuple):
    """What is known of one class: its samples, recall, precision, their harmonic mean, confidence, and its gap."""

    name: str
    samples: int
    recall: float | None
    precision: float | None
    f1: float | None
    confidence: float | None
    overconfidence: float | None


def class_numbers(known: SetRecord, names: Sequence[str] | None = None) -> list[ClassNumbers]:
    """Numbers of each class; `overconfidence` is the mean confidence of what is called so, minus the precision."""
    if not {"label", "predicted", "confidence"} <= set(known.answers) or not len(known):
        return []
    label, predicted = known.answers["label"].long(), known.answers["predicted"].long()
    confidence = known.answers["confidence"].double()
    classes = max(int(label.max()), int(predicted.max())) + 1 if names is None else len(names)
    of, called = (torch.bincount(v, minlength=classes).double() for v in (label, predicted))
    hits = torch.bincount(label[label == predicted], minlength=classes).double()
    sure = torch.zeros(classes, dtype=torch.float64).index_add_(0, predicted, confidence)
    recall, precision, mean = hits / of, hits / called, sure / called
    f1 = 2 * hits / (of + called)
    made = []
    for i, numbers in enumerate(zip(recall.tolist(), precision.tolist(), f1.tolist(), mean.tolist(), strict=True)):
        r, p, f, c = (_finite(value) for value in numbers)
        over = None if c is None or p is None else c - p
        made.append(ClassNumbers(str(i) if names is None else names[i], int(of[i]), r, p, f, c, over))
    return made


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- known inputs, numbers --------------------------------------------------------------------------------------------


def _regression(known: SetRecord) -> list[Chart]:
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
    dots = Series(
        "samples",
        x,
        y,
        "points",
        low=[short(b - h) for b, h in zip(y, half, strict=True)],
        high=[short(b + h) for b, h in zip(y, half, strict=True)],
    )
    n, room = len(mean), 0.04 * (ends[1] - ends[0])
    span = (short(ends[0] - room), short(ends[1] + room))
    cut = "" if len(x) == n else f"; {len(x):,} of {n:,} are drawn"
    return Chart(
        "test/predicted",
        "test",
        f"Each dot is a test sample; on the dotted line the prediction is right. Lines are 95 % intervals{cut}.",
        f"Predicted against true values of {n:,} test samples, root of the mean square error {rmse:.4g}",
        [
            Panel(
                "predicted",
                f"Predicted against true, n = {n:,}",
                Axis("true value", "number", *span),
                Axis("predicted value", "number", *span),
                [Series("right", list(span), list(span), "guide"), dots],
            )
        ],
    )


def _coverage(z: Tensor) -> Chart:
    """Coverage of central intervals against their level, and how far above or below it is."""
    central = torch.special.erf(z.abs() / math.sqrt(2))
    levels = [0.0, *LEVELS]
    inside = [float((central <= level).double().mean()) if level else 0.0 for level in levels]
    rate, count = np.array(inside[1:]), np.full(len(LEVELS), float(len(z)))
    low, high = wilson(rate, count)
    ends = [[0.0, *(short(v) for v in end.tolist())] for end in (low, high)]
    gap = float(np.mean(np.abs(rate - np.array(LEVELS))))
    x, y = points(levels, inside)
    at95 = float((central <= 0.95).double().mean())
    return Chart(
        "test/coverage",
        "test",
        "Do the intervals hold what they promise? On the dotted line they do; below it they are too narrow. Vertical "
        "lines are 95 % intervals.",
        f"Share of targets inside central intervals against their level, {len(z):,} test samples: {_percent(at95)} "
        f"inside the 95 % interval, mean gap {_percent(gap)}",
        [
            Panel(
                "coverage",
                "Coverage against level",
                SHARE._replace(label="level of the interval"),
                SHARE._replace(label="targets inside"),
                [
                    Series("perfect intervals", [0.0, 1.0], [0.0, 1.0], "guide"),
                    Series("test set", x, y, note=f"mean gap {_percent(gap)}", low=ends[0], high=ends[1]),
                ],
            )
        ],
    )


def _spread(error: Tensor, std: Tensor, n: int) -> Chart:
    """Root of the mean square error against the stated deviation, in bins of equal counts."""
    bins = torch.argsort(std).tensor_split(min(10, max(1, n // 5)))
    x = [float(std[b].square().mean().sqrt()) for b in bins]
    y = [float(error[b].square().mean().sqrt()) for b in bins]
    high = short(1.1 * max(*x, *y))
    return Chart(
        "test/spread",
        "test",
        "Are uncertain predictions worse? On the dotted line the error is what the model says of itself; above it the "
        "model is too sure. Bins of equally many samples.",
        f"Error against stated standard deviation in {len(bins)} bins: from {y[0]:.3g} where {x[0]:.3g} is stated to "
        f"{y[-1]:.3g} where {x[-1]:.3g} is stated",
        [
            Panel(
                "spread",
                "Error against stated deviation",
                Axis("stated standard deviation", "number", 0.0, high),
                Axis("root of the mean square error", "number", 0.0, high),
                [
                    Series("as stated", [0.0, high], [0.0, high], "guide"),
                    Series("test set", *points(x, y)),
                ],
            )
        ],
    )


def _residuals(mean: Tensor, target: Tensor, z: Tensor) -> Chart:
    few = _spread_out(len(mean), MOST_DOTS)
    edges = np.linspace(-4, 4, 33)
    counts, _ = np.histogram(z.numpy().clip(-4, 4), edges)
    grid = np.linspace(-4, 4, 81)
    density = np.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi) * (edges[1] - edges[0])
    x, y = points(mean[few].tolist(), (target - mean)[few].tolist())
    ends = [min(x), max(x)]
    bell = Series("as stated", *points(grid.tolist(), density.tolist()), "guide")
    share = [short(v) for v in (counts / len(z)).tolist()]
    return Chart(
        "test/residuals",
        "test",
        "What is left: true minus predicted value, in stated deviations and against the prediction. Values beyond ±4 "
        "are in the end bins.",
        f"Residuals of {len(z):,} test samples in stated deviations: mean {float(z.mean()):.2f}, standard deviation "
        f"{float(z.std()):.2f}; a perfect model has 0 and 1",
        [
            Panel(
                "standardised",
                "Residuals in stated deviations",
                Axis("(true − predicted) / stated deviation", "number", -4.0, 4.0),
                Axis("share of samples", "share", 0.0),
                [Series("test set", [short(v) for v in edges.tolist()], share, "bars"), bell],
            ),
            Panel(
                "residuals",
                "Residuals against the prediction",
                Axis("predicted value"),
                Axis("true − predicted"),
                [Series("right", ends, [0.0, 0.0], "guide"), Series("test set", x, y, "points")],
            ),
        ],
    )


def _refusal(known: SetRecord, fine: Tensor, error: Tensor) -> Chart:
    """Root of the mean square error of the most certain share, by each score."""
    square, n = error.square(), len(error)
    coverage = (torch.arange(1, n + 1).double() / n).tolist()

    def curve(order: Tensor) -> Tensor:
        return (square[order].cumsum(0) / torch.arange(1, n + 1)).sqrt()

    curves = {name: curve(torch.argsort(values[fine], stable=True)) for name, values in known.rankable().items()}
    ideal = curve(torch.argsort(square))
    order = sorted(curves, key=lambda name: float(curves[name].mean()))
    late = max((float(c[max(0, n // 20) :].max()) for c in curves.values()), default=1.0)
    few = _few(order, "std")
    return Chart(
        "test/refusal",
        "test",
        "What refusing to answer buys: the error when only the most certain share is answered.",
        f"Root of the mean square error against coverage for {len(curves)} scores: {float(ideal[-1]):.4g} when all are "
        "answered",
        [
            Panel(
                "refusal",
                "Error and coverage",
                SHARE._replace(label="answered, the most certain first (coverage)"),
                Axis("RMSE of the answered", "number", 0.0, short(1.05 * late)),
                [
                    _curve("best possible", coverage, ideal, kind="guide"),
                    *(_curve(readable(name), coverage, curves[name], shown=name in few) for name in order),
                ],
            )
        ],
    )


def _spread_out(n: int, most: int) -> Tensor:
    """At most so many of n numbers, evenly spread."""
    return torch.arange(n) if n <= most else torch.linspace(0, n - 1, most).long()


# -- unknown inputs ---------------------------------------------------------------------------------------------------


def _unknown(record: TestRecord, part: SetRecord, measured: Measured, score: str | None) -> list[Chart]:
    known, outside = record.known.rankable(), part.rankable()
    inside = {name: known[name] for name in measured if name in known}
    if not inside:
        return []
    return [
        histograms(inside, outside, part.name, measured, record.units, score),
        separation_curves(inside, outside, part.name, measured, score),
    ]


def histograms(
    known: Mapping[str, Tensor],
    unknown: Mapping[str, Tensor],
    name: str,
    measured: Measured,
    units: Mapping[str, str],
    score: str | None = None,
) -> Chart:
    """Scores (N,) of the test set and (M,) of the set `name`: a panel for each score, in shares of each set.

    The axis spans 98 % of the finite values of both sets; what lies beyond is counted in the bins at its ends.
    """
    panels = []
    for key in sorted(known, key=lambda name: (name != score, -measured[name]["AUROC"])):
        inner, outer = known[key].double().cpu().numpy(), unknown[key].double().cpu().numpy()
        edges = _edges(inner, outer)
        series = []
        for values, label in ((inner, "test set"), (outer, readable(name))):
            counts, _ = np.histogram(values.clip(edges[0], edges[-1]), edges)
            share = [short(v) for v in (counts / len(values)).tolist()]
            series.append(Series(label, [short(v) for v in edges.tolist()], share, "bars", note=f"n = {len(values):,}"))
        unit = f" ({units[key]})" if units.get(key) else ""
        title = f"{readable(key)}: AUROC {measured[key]['AUROC']:.3f}"
        panels.append(Panel(key, title, Axis(f"{readable(key)}{unit}"), Axis("share of set", "share", 0.0), series))
    return Chart(
        f"ood/{name}/histograms",
        "ood",
        "Each score on the test set and on the unknown set. Values beyond the axis are in its end bins.",
        f"Histograms of {len(known)} scores on the test set and on {readable(name)}",
        panels,
        choose=True,
    )


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


def separation_curves(
    known: Mapping[str, Tensor],
    unknown: Mapping[str, Tensor],
    name: str,
    measured: Measured,
    score: str | None = None,
) -> Chart:
    """Scores of the test set and of the set `name` → ROC, precision and recall, the best score first."""
    order = sorted(known, key=lambda key: -measured[key]["AUROC"])
    few = _few(order, score)
    n_id, n_ood = (len(next(iter(part.values()))) for part in (known, unknown))
    base = short(n_ood / (n_id + n_ood))
    roc, recall = (
        [Series("by chance", [0.0, 1.0], [0.0, 1.0], "guide")],
        [Series("by chance", [0.0, 1.0], [base, base], "guide")],
    )
    for key in order:
        curve = roc_curve(known[key], unknown[key])
        note = f"{measured[key]['AUROC']:.3f} / {measured[key]['AUPR_out']:.3f}"
        roc.append(_curve(readable(key), curve.fpr, curve.tpr, note=note, shown=key in few))
        recall.append(_curve(readable(key), curve.tpr[1:], curve.precision[1:], note=note, shown=key in few))
    listed = ", ".join(f"{readable(key)} {measured[key]['AUROC']:.3f}" for key in order)
    return Chart(
        f"ood/{name}/curves",
        "ood",
        f"Unknown inputs, {readable(name)}, n = {n_ood:,}, are the positive class; known are the test set, n = "
        f"{n_id:,}. Dotted: a score that knows nothing. Behind the names: AUROC / AUPR.",
        f"ROC and precision-recall curves on {readable(name)}; AUROC: {listed}",
        [
            Panel(
                "roc",
                "ROC",
                SHARE._replace(label="known inputs flagged (FPR)"),
                SHARE._replace(label="unknown inputs flagged (TPR)"),
                roc,
            ),
            Panel(
                "pr",
                "Precision and recall",
                SHARE._replace(label="unknown inputs flagged (recall)"),
                SHARE._replace(label="unknown among flagged (precision)"),
                recall,
            ),
        ],
    )
