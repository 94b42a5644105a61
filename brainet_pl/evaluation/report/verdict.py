"""What a test found, in a few plain sentences: the first thing on a page."""

from __future__ import annotations

from typing import Literal, NamedTuple

from brainet_pl.evaluation.chart import Chart, readable
from brainet_pl.evaluation.schema import Record

Tone = Literal["good", "fair", "poor", "plain"]


class Line(NamedTuple):
    """A sentence, and how good the news is; the sentence says it too."""

    text: str
    tone: Tone = "plain"


def verdict_of(record: Record) -> list[Line]:
    """The sentences that a record allows: answers, calibration, unknown inputs, refusing to answer."""
    values = {metric.key: metric.value for metric in record.metrics if metric.value is not None}
    charts = {chart.name: chart for chart in record.charts}
    samples = next((part.samples for part in record.sets if part.role == "known"), 0)
    lines = [_accuracy(values, samples), _calibration(values, charts), _scaled(values), _errors(values, samples)]
    lines += [_intervals(values), *_unknown(record), _look_unknown(record), _refusal(values)]
    return [line for line in lines if line is not None]


def _percent(value: float) -> str:
    """Two digits of a share: 1.5 %, 97 %, 0.04 %."""
    shown = 100 * value
    return f"{shown:.0f}\u00a0%" if shown >= 9.95 else f"{shown:.2g}\u00a0%"


def _tone(value: float, good: float, fair: float) -> Tone:
    return "good" if value <= good else "fair" if value <= fair else "poor"


def _accuracy(values: dict[str, float], samples: int) -> Line | None:
    accuracy = values.get("test/cls/Acc")
    return None if accuracy is None else Line(f"{100 * accuracy:.1f}\u00a0% of {samples:,} test samples are right.")


def _calibration(values: dict[str, float], charts: dict[str, Chart]) -> Line | None:
    error = values.get("test/cal/ECE")
    if error is None:
        return None
    tone = _tone(error, 0.02, 0.05)
    if tone == "good":
        return Line(f"Calibrated within {_percent(error)}: the confidence can be read as a probability.", tone)
    lean = _lean(charts.get("test/reliability"))
    how = "off" if lean is None else "too sure" if lean > 0 else "not sure enough"
    return Line(f"Confidence is {how} by {_percent(error)} on average.", tone)


def _lean(chart: Chart | None) -> float | None:
    """Mean confidence minus accuracy, from the bins of a reliability chart; None without one."""
    if chart is None or len(chart.panels) < 2:
        return None
    curve = next((series for series in chart.panels[0].series if series.kind == "line"), None)
    bars = chart.panels[1].series[0].y if chart.panels[1].series else []
    counts = [count for count in bars if count > 0]
    if curve is None or len(counts) != len(curve.x):
        return None
    return sum(n * (x - y) for n, x, y in zip(counts, curve.x, curve.y, strict=True)) / sum(counts)


def _scaled(values: dict[str, float]) -> Line | None:
    before, after = values.get("test/cal/ECE"), values.get("test/scaled/cal/ECE")
    if before is None or after is None:
        return None
    tone = _tone(after, 0.02, 0.05)
    return Line(f"After calibration on validation data it is right within {_percent(after)}.", tone)


def _errors(values: dict[str, float], samples: int) -> Line | None:
    error = values.get("test/reg/RMSE")
    if error is None:
        return None
    return Line(f"Predictions of {samples:,} test samples are off by {error:.3g}, in units of the target (RMSE).")


def _intervals(values: dict[str, float]) -> Line | None:
    error, inside = values.get("test/cal/QCE"), values.get("test/cal/coverage95")
    if error is None or inside is None:
        return None
    tone = _tone(error, 0.025, 0.06)
    promise = "hold what they promise within" if tone == "good" else "miss what they promise by"
    how = "" if tone == "good" else ", too narrow" if inside < 0.94 else ", too wide" if inside > 0.96 else ""
    return Line(f"Intervals {promise} {_percent(error)}{how}: {100 * inside:.1f}\u00a0% of the targets are "
                "inside the 95\u00a0% interval.", tone)  # fmt: skip


def _unknown(record: Record) -> list[Line]:
    """Of 100 unknown inputs, how many rank above a known one: that is what an AUROC says."""
    found = {row.set: row.AUROC for row in record.separation if row.score == record.headline_score}
    lines = []
    for part in record.sets:
        value = found.get(part.name) if part.role != "known" else None
        if value is not None:
            above = f"{100 * value:.0f}"
            lines.append(
                Line(
                    f"{above} of 100 unknown inputs ({readable(part.name)}) rank above a known one, by "
                    f"{readable(record.headline_score or '')}; chance is 50.",
                    _tone(1 - value, 0.05, 0.15),
                )
            )
    return lines


def _look_unknown(record: Record) -> Line | None:
    """How many inputs of each set look unknown; of known ones the level is promised, within two standard errors."""
    judged = [part for part in record.sets if part.unknown is not None and part.samples]
    if not judged or record.level is None:
        return None
    level = record.level
    tone: Tone = "plain"
    for part in judged:
        if part.role == "known":
            error = (level * (1 - level) / part.samples) ** 0.5
            tone = "good" if (part.unknown or 0) / part.samples <= level + 2 * error else "fair"
    names = ["test samples" if part.role == "known" else readable(part.name) for part in judged]
    counts = [(part.unknown or 0) / part.samples for part in judged]
    shares = [f"{_percent(count)} of {name}" for count, name in zip(counts, names, strict=True)]
    listed = shares[0] if len(shares) == 1 else f"{', '.join(shares[:-1])} and {shares[-1]}"
    return Line(f"{listed} look unknown; at most {_percent(level)} of known inputs are meant to.", tone)


def _refusal(values: dict[str, float]) -> Line | None:
    accuracy, risk = values.get("test/cls/Acc"), values.get("test/sc/Risk@80Cov")
    if accuracy is None or risk is None or accuracy >= 1:
        return None
    return Line(f"Answering only the surest 80\u00a0% takes errors from {_percent(1 - accuracy)} to {_percent(risk)}.")
