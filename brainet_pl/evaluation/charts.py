"""From the record of a test to its charts: every curve is computed once, for all who draw it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from brainet_pl.evaluation.chart import Axis, AxisUnit, Chart, Matrix, Panel, Series, points, readable, short
from brainet_pl.evaluation.chart_parts import (
    ANSWERED,
    Floats,
    axis_between,
    curve,
    diagonal,
    few_shown,
    make_chart,
    percent,
    selective_curves,
    share_axis,
    shortened,
    wilson,
)
from brainet_pl.evaluation.record import MOST_TRACED, Measured, SetRecord, TestRecord
from brainet_pl.evaluation.regression_charts import regression_charts
from brainet_pl.metrics.curves import N_BINS, calibration_error, calibration_sums, risk_coverage, roc_curve, separation
from brainet_pl.metrics.passes import pass_metrics

MOST_CLASSES = 60  # of a confusion matrix: larger ones can't be read


def charts_of(
    record: TestRecord,
    found: Mapping[str, Measured],
    label: str | None = None,
    ranking: str | None = None,
    headline: str | None = None,
    promised: Sequence[tuple[float, float]] = (),
) -> list[Chart]:
    """All charts that a gathered record, and what its `separations` found, have the numbers for.

    `label` says what calibration did. Where there are many scores, `ranking` is seen first on the known set and
    `headline` on unknown sets. `promised` are shares of inputs that may be answered, and at most so many errors.
    """
    known = record.known
    made: list[Chart] = []
    if "wrong" in known.answers and "confidence" in known.answers:
        made += _classification(record, label, ranking, promised)
    elif "target" in known.answers and "std" in known.scores:
        made += regression_charts(known)
    made += _verdict(record)
    for part in record.unknown:
        made += _unknown(record, part, found.get(part.name, {}), headline)
    return made


def _verdict(record: TestRecord) -> list[Chart]:
    """How many samples of each set look unknown, at every level; nothing where the model has no verdict."""
    sets = [part for part in record.sets.values() if part.known_p is not None and len(part)]
    if record.level is None or not sets:
        return []
    series, shares = [diagonal("as promised")], []
    for part in sets:
        assert part.known_p is not None
        values, label = part.known_p.double().sort().values, "test set" if part.role == "known" else readable(part.name)
        share = percent(float((values <= record.level).double().mean()))
        x, y = np.r_[0.0, values.numpy(), 1.0], np.r_[0.0, np.arange(1, len(values) + 1) / len(values), 1.0]
        series.append(curve(label, x, y, note=share))
        shares.append(f"{share} of {label}")
    level = f"{100 * record.level:g}\u00a0%"
    x_axis, y_axis = share_axis("level"), share_axis("share that looks unknown")
    return [
        make_chart(
            "test/known",
            "Which inputs look unknown: the share of each set whose p-value, known_p, is at most the level. Known "
            f"inputs follow the dotted line, unknown ones lie above it; the verdict is at {level}.",
            f"At the level of {level}, {', '.join(shares)} look unknown",
            Panel("known", f"looks unknown at {level}", x_axis, y_axis, series),
        )
    ]


class Bins(NamedTuple):
    """Confidences (N,) and hits (N,) in equal bins: counts, mean confidence, accuracy (NaN where empty), ECE."""

    counts: Floats
    confidence: Floats
    accuracy: Floats
    ece: float


def bins_of(sums: Tensor) -> Bins:
    """The numbers of a reliability diagram from the sums (bins, 3) of `calibration_sums`."""
    count, confidences, hits = sums.cpu().unbind(dim=1)  # 0/0 is NaN: an empty bin
    return Bins(count.numpy(), (confidences / count).numpy(), (hits / count).numpy(), float(calibration_error(sums)))


def join_small_bins(sums: Tensor, least: int = 10) -> Tensor:
    """Neighbouring bins (bins, 3) in one until each has `least` samples: a point of one sample says 0 or 100 %.

    >>> join_small_bins(torch.tensor([[1.0, 0, 0], [9.0, 5, 4], [0.0, 0, 0], [20.0, 18, 19], [2.0, 2, 2]]))
    tensor([[10.,  5.,  4.],
            [22., 20., 21.]])
    """
    joined = [torch.zeros_like(sums[0])]
    for one in sums:
        if joined[-1][0] >= least and one[0]:
            joined.append(torch.zeros_like(one))
        joined[-1] = joined[-1] + one
    if len(joined) > 1 and joined[-1][0] < least:
        last = joined.pop()
        joined[-1] = joined[-1] + last
    return torch.stack(joined)


# -- known inputs, classes --------------------------------------------------------------------------------------------


def _classification(
    record: TestRecord, label: str | None, score: str | None, promised: Sequence[tuple[float, float]]
) -> list[Chart]:
    known = record.known
    wrong, confidence = known.answers["wrong"], known.answers["confidence"]
    shown = {"as predicted": (confidence, 1.0 - wrong)}
    if label is not None and "calibrated" in known.answers:
        shown = {"before calibration": (confidence, 1.0 - wrong), label: (known.answers["calibrated"], 1.0 - wrong)}
    made = [reliability(shown)]
    scores = known.rankable()
    if scores:
        made.append(risk_coverage_chart(scores, wrong, score, promised))
    if known.sums is not None and len(record.steps) > 1:
        made.append(_passes(record))
    return made


def reliability(predictions: Mapping[str, tuple[Tensor, Tensor]], n_bins: int = N_BINS) -> Chart:
    """Label → (confidences (N,), hits (N,)), e.g. before and after scaling: accuracy against confidence, and counts."""
    sums = {name: calibration_sums(*pair, n_bins) for name, pair in predictions.items()}
    n = max(len(confidence) for confidence, _ in predictions.values())
    errors = {name: percent(float(calibration_error(part))) for name, part in sums.items()}
    return make_chart(
        "test/reliability",
        "Is the confidence right? On the dotted line it is; below it the model is too sure. Vertical lines are 95 % "
        "intervals; bins of fewer than 10 samples are joined with their neighbours.",
        f"Reliability diagram of {n:,} test samples: "
        + "; ".join(f"{name}, expected calibration error {error}" for name, error in errors.items()),
        *reliability_panels(sums),
    )


def reliability_panels(sums: Mapping[str, Tensor]) -> list[Panel]:
    """Label → (bins, 3) of `calibration_sums`: accuracy against confidence, and counts."""
    curves, counts, sizes = [diagonal("perfect calibration")], [], set()
    for name, part in sums.items():
        bins, drawn = bins_of(part), bins_of(join_small_bins(part))
        sizes.add(int(bins.counts.sum()))
        x, y = drawn.confidence, drawn.accuracy
        low, high = wilson(y, drawn.counts)
        xs, ys = points(x.tolist(), y.tolist())
        if len(xs) == len(x):
            note = f"ECE {percent(bins.ece)}"
            curves.append(Series(name, xs, ys, note=note, low=shortened(low), high=shortened(high)))
        counts.append(Series(name, shortened(np.linspace(0, 1, len(part) + 1)), bins.counts.tolist(), "bars"))
    x_axis = share_axis("confidence (largest class probability)")
    n = " and ".join(f"{size:,}" for size in sorted(sizes))
    return [
        Panel("reliability", f"Reliability, n = {n}", x_axis, share_axis("accuracy in the bin"), curves),
        Panel("counts", "Samples", x_axis, Axis("samples (log scale)", "count", 0.8, log=True), counts),
    ]


def risk_coverage_chart(
    scores: Mapping[str, Tensor],
    wrong: Tensor,
    score: str | None = None,
    promised: Sequence[tuple[float, float]] = (),
) -> Chart:
    """Scores (N,) by name and errors (N,) → error rate of the answered share, with the best possible order below it.

    Above it lies what calibration data promise: shares and the error rates that these do not exceed.
    """
    curves = {name: risk_coverage(values.cpu(), wrong.cpu()) for name, values in scores.items()}

    def area(curve: Tensor) -> str:
        return percent(float(curve.mean()))

    lines, order, late = selective_curves(curves, risk_coverage(wrong.cpu(), wrong.cpu()), score, area)
    top = max(0.002, 1.15 * float(wrong.double().mean()), 1.05 * late)
    possible = [(share, error) for share, error in promised if share > 0]
    top = max(top, min(0.5, 2.5 * possible[0][1])) if possible else top  # so that some of the curve is in sight
    kept = [(share, error) for share, error in possible if error <= top]
    if kept:
        lines.append(curve("promised", *map(np.asarray, zip(*kept, strict=True)), note="95 % sure"))
    return make_chart(
        "test/risk_coverage",
        "What refusing to answer buys: the error rate when only the most certain share is answered. Behind the names: "
        "the area under each curve (AURC), that is, where samples are ordered by that score."
        + (" Calibration data promise that errors stay below the line “promised”." if kept else ""),
        f"Error rate against coverage for {len(curves)} scores: {percent(float(wrong.mean()))} when all are answered; "
        f"the smallest area, {area(curves[order[0]])}, is that of {readable(order[0])}",
        Panel(
            "risk",
            f"Risk and coverage, n = {len(wrong):,}, {int(wrong.sum()):,} errors",
            share_axis(ANSWERED),
            Axis("errors among the answered (risk)", "share", 0.0, short(top)),
            lines,
        ),
    )


def _passes(record: TestRecord) -> Chart:
    """Metrics of the mean of the first t passes; one sequence of draws, so that small steps are its noise."""
    assert record.known.sums is not None
    curves, steps, n = pass_metrics(record.known.sums), [float(step) for step in record.steps], len(record.known)
    x_axis = Axis("passes averaged", "count")
    panels = []
    for name, values in curves.items():
        y_axis = _narrow(values, "NLL, nats", "number") if name == "NLL" else _narrow(values, name, "share")
        title = f"{name[0].upper()}{name[1:]}, lower is better"
        panels.append(Panel(name, title, x_axis, y_axis, [Series("test set", *points(steps, values))]))
    for score, by_set in _running_aurocs(record).items():
        series, every = [], []
        for name, values in by_set.items():
            series.append(Series(readable(name), *points(steps, values)))
            every += values
        y_axis = _narrow(every, "AUROC", "share")
        panels.append(Panel(f"AUROC_{score}", f"AUROC, {readable(score)}", x_axis, y_axis, series))
    few = any(len(part) > MOST_TRACED for part in record.sets.values() if part.running)
    note = f" AUROC of {MOST_TRACED:,} samples of each set at the most." if few else ""
    return make_chart(
        "test/passes",
        f"What another pass buys: metrics of the mean of the first passes, as they were drawn.{note}",
        f"Metrics of the mean of the first t passes on {n:,} test samples, t from 1 to {record.steps[-1]}: negative "
        f"log-likelihood from {curves['NLL'][0]:.3f} to {curves['NLL'][-1]:.3f}, error from "
        f"{percent(curves['error'][0])} to {percent(curves['error'][-1])}",
        *panels,
    )


def _narrow(values: Sequence[float], label: str, unit: AxisUnit) -> Axis:
    """An axis for these values that is not so short that noise would fill it."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or max(finite) - min(finite) >= 0.02:
        return Axis(label, unit)
    middle = max(0.5 * (max(finite) + min(finite)), 0.01)
    return axis_between(label, short(middle - 0.01), short(middle + 0.01), unit)


def _running_aurocs(record: TestRecord) -> dict[str, dict[str, list[float]]]:
    """Score → set → AUROC of the mean of the first t passes, for each t."""
    sets = {part.name: part.running for part in record.unknown if part.running}
    aurocs: dict[str, dict[str, list[float]]] = {}
    for score, inside in record.known.running.items() if sets else ():
        traces = {name: running[score] for name, running in sets.items() if score in running}
        if len(traces) < len(sets) or any(trace.isnan().any() for trace in (inside, *traces.values())):
            continue
        aurocs[score] = {}
        for name, trace in traces.items():
            aurocs[score][name] = [separation(*pair)["AUROC"] for pair in zip(inside, trace, strict=True)]
    return aurocs


class _Answers(NamedTuple):
    """Labels (N,), predictions (N,) and the names of all classes."""

    label: Tensor
    predicted: Tensor
    names: list[str]


def _answers(known: SetRecord, names: Sequence[str] | None) -> _Answers | None:
    """What was right and what was said; None where there are no labels. Without names, classes are numbers."""
    if not {"label", "predicted"} <= set(known.answers) or not len(known):
        return None
    label, predicted = known.answers["label"].long(), known.answers["predicted"].long()
    count = max(int(label.max()), int(predicted.max())) + 1
    return _Answers(label, predicted, [str(i) for i in range(count)] if names is None else list(names))


def confusion(known: SetRecord, names: Sequence[str] | None = None) -> Matrix | None:
    """Labels against predictions; None where there are none, or too many classes to look at."""
    found = _answers(known, names)
    if found is None or len(found.names) > MOST_CLASSES:
        return None
    counts = torch.zeros(len(found.names), len(found.names), dtype=torch.long)
    answered = found.predicted >= 0
    label = found.label[answered]
    counts.index_put_((label, found.predicted[answered]), torch.ones_like(label), accumulate=True)
    return Matrix(found.names, counts.tolist())


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
    found = _answers(known, names)
    if found is None or "confidence" not in known.answers:
        return []
    label, predicted, classes = found.label, found.predicted, len(found.names)
    answered = predicted >= 0  # a prediction of NaN has the class -1: a sample of its class, and a miss
    of, called = (torch.bincount(v, minlength=classes).double() for v in (label, predicted[answered]))
    confidence = known.answers["confidence"].double()[answered]
    hits = torch.bincount(label[label == predicted], minlength=classes).double()
    sure = torch.zeros(classes, dtype=torch.float64).index_add_(0, predicted[answered], confidence)
    shares = torch.stack([hits / of, hits / called, 2 * hits / (of + called), sure / called], dim=1)
    made = []
    for name, count, numbers in zip(found.names, of.tolist(), shares.tolist(), strict=True):
        recall, precision, f1, sureness = (value if math.isfinite(value) else None for value in numbers)
        over = None if sureness is None or precision is None else sureness - precision
        made.append(ClassNumbers(name, int(count), recall, precision, f1, sureness, over))
    return made


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
            share = shortened(counts / len(values))
            series.append(Series(label, shortened(edges), share, "bars", note=f"n = {len(values):,}"))
        unit = f" ({units[key]})" if units.get(key) else ""
        title = f"{readable(key)}: AUROC {measured[key]['AUROC']:.3f}"
        panels.append(Panel(key, title, Axis(f"{readable(key)}{unit}"), Axis("share of set", "share", 0.0), series))
    return make_chart(
        f"ood/{name}/histograms",
        "Each score on the test set and on the unknown set. Values beyond the axis are in its end bins.",
        f"Histograms of {len(known)} scores on the test set and on {readable(name)}",
        *panels,
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
    few = few_shown(order, score)
    n_id, n_ood = (len(next(iter(part.values()))) for part in (known, unknown))
    base = short(n_ood / (n_id + n_ood))
    roc, recall = [diagonal("by chance")], [Series("by chance", [0.0, 1.0], [base, base], "guide")]
    for key in order:
        rates = roc_curve(known[key], unknown[key])
        note = f"{measured[key]['AUROC']:.3f} / {measured[key]['AUPR_out']:.3f}"
        roc.append(curve(readable(key), rates.fpr, rates.tpr, note=note, shown=key in few))
        recall.append(curve(readable(key), rates.tpr[1:], rates.precision[1:], note=note, shown=key in few))
    listed = ", ".join(f"{readable(key)} {measured[key]['AUROC']:.3f}" for key in order)
    return make_chart(
        f"ood/{name}/curves",
        f"Unknown inputs, {readable(name)}, n = {n_ood:,}, are the positive class; known are the test set, n = "
        f"{n_id:,}. Dotted: a score that knows nothing. Behind the names: AUROC / AUPR.",
        f"ROC and precision-recall curves on {readable(name)}; AUROC: {listed}",
        Panel("roc", "ROC", share_axis("known inputs flagged (FPR)"), share_axis("unknown inputs flagged (TPR)"), roc),
        Panel(
            "pr",
            "Precision and recall",
            share_axis("unknown inputs flagged (recall)"),
            share_axis("unknown among flagged (precision)"),
            recall,
        ),
    )
