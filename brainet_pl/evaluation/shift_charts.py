"""What people look at after shifts of the test set: measures against severity, reliability, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from brainet_pl.evaluation.chart import Axis, Chart, Panel, Series, points, short
from brainet_pl.evaluation.charts import reliability_panels
from brainet_pl.evaluation.record import TestRecord
from brainet_pl.evaluation.summary import LoggedTable
from brainet_pl.metrics.catalogue import CATALOGUE, SHIFTED
from brainet_pl.metrics.curves import calibration_error
from brainet_pl.metrics.shift import ShiftResult, means, parse_shift

WORDS = {"predicted": "as predicted", "final": "after calibration"}


def shift_table(shifts: Sequence[ShiftResult]) -> LoggedTable:
    """Corruption × severity × measure, as a table for loggers; measures after calibration are `scaled_…`."""
    first = shifts[0]
    columns = ["corruption", "severity", "samples", *first.predicted, *(f"scaled_{m}" for m in first.final or ())]
    rows = [
        [s.corruption, s.severity, s.samples, *s.predicted.values(), *(s.final.values() if s.final else ())]
        for s in shifts
    ]
    return LoggedTable(
        "The same measures after each shift of the test set; severity 0 is the set itself", columns, rows
    )


def shift_charts(record: TestRecord) -> list[Chart]:
    """Measures against severity, and reliability of clean and shifted samples; none without shifts."""
    shifts = record.shifts()
    if not shifts:
        return []
    made = [severity_chart(shifts)]
    bins = pooled_bins(record)
    if bins:
        errors = {label: f"{100 * float(calibration_error(part)):.2f} %" for label, part in bins.items()}
        made.append(
            Chart(
                "shift/reliability",
                "shift",
                "Is the confidence still right? Clean and shifted test samples, as predicted and calibrated.",
                "Reliability diagram: " + "; ".join(f"{label}, calibration error {e}" for label, e in errors.items()),
                reliability_panels(bins),
            )
        )
    return made


def severity_chart(shifts: Sequence[ShiftResult]) -> Chart:
    """A panel for each measure: its mean over corruptions against severity, with the least and the worst corruption.

    Severity 0 is the test set itself.
    """
    severities = sorted({s.severity for s in shifts})
    names, n = len({s.corruption for s in shifts if s.severity}), max(s.samples for s in shifts if s.severity)
    panels = [_severity_panel(shifts, severities, measure) for measure in shifts[0].predicted]
    worst = severities[-1]
    measure = "ECE" if "ECE" in shifts[0].predicted else next(iter(shifts[0].predicted))
    ends = ", ".join(f"{WORDS[which]} {values[measure]:.4g}" for which, values in means(shifts, worst).items())
    many = f"{names} corruption{'s' * (names > 1)}"
    return Chart(
        "shift/severity",
        "shift",
        f"The same measures after {many} of the test samples, n = {n:,} each: means; vertical lines reach from the "
        "least to the worst corruption.",
        f"{', '.join(shifts[0].predicted)} against the severity of {many}; mean {measure} at severity {worst}: {ends}",
        [panel for panel in panels if panel.series],
    )


def _severity_panel(shifts: Sequence[ShiftResult], severities: Sequence[int], measure: str) -> Panel:
    """One measure against severity, as predicted and calibrated; no line where a severity has no number."""
    lines = []
    for which in WORDS:
        line = _line_over_severities(shifts, severities, measure, which)
        if line is not None:
            lines.append(line)
    facts = CATALOGUE[SHIFTED[measure]]
    unit, good = ", nats" if facts.unit == "nats" else "", "higher" if facts.higher_is_better else "lower"
    x_axis = Axis("severity of the shift (0: none)", "count")
    y_axis = Axis("", "share" if facts.unit == "share" else "number")
    return Panel(measure, f"{facts.title}{unit}, {good} is better", x_axis, y_axis, lines)


def _line_over_severities(
    shifts: Sequence[ShiftResult], severities: Sequence[int], measure: str, which: str
) -> Series | None:
    """The mean, least and worst of a measure at each severity; None where one of them has no number."""
    groups = [_numbers_at(shifts, severity, which, measure) for severity in severities]
    if not all(groups):
        return None
    xs, ys = points(map(float, severities), [sum(group) / len(group) for group in groups])
    if len(xs) < len(severities):
        return None
    low, high = [short(min(group)) for group in groups], [short(max(group)) for group in groups]
    return Series(WORDS[which], xs, ys, low=low, high=high)


def _numbers_at(shifts: Sequence[ShiftResult], severity: int, which: str, measure: str) -> list[float]:
    """A measure after each corruption of one severity, as predicted or calibrated."""
    parts = [getattr(shift, which) for shift in shifts if shift.severity == severity]
    return [part[measure] for part in parts if part is not None]


def pooled_bins(record: TestRecord) -> dict[str, Tensor]:
    """Label → (bins, 3) counts, confidences and hits of all clean and of all shifted samples, before and after."""
    pooled: dict[str, Tensor] = {}
    for name, sums in record.shift_sums.items():
        if sums is None:
            continue
        state = "clean" if parse_shift(name) is None else "shifted"
        for which, words in WORDS.items():
            bins = (getattr(sums, which) or {}).get("bins")
            label = f"{state}, {words}"
            if bins is not None:
                pooled[label] = pooled[label] + bins if label in pooled else bins
    return pooled
