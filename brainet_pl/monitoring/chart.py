"""The picture of a monitor: the evidence input by input, and the p-values of the signal that leads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from brainet_pl.evaluation.chart import Axis, Chart, Panel, Series, points
from brainet_pl.monitoring.drift import DriftState

Floats = NDArray[np.float64]
MOST_POINTS = 1500  # of a curve
TOP = 1e12  # evidence beyond it is drawn as this much
LOWEST = 1e-3  # evidence below it is drawn as this much


def drift_chart(state: DriftState, evidence: Floats, p_values: Mapping[str, Floats], alpha: float) -> Chart:
    """A chart of N inputs: evidence (N,) after each, and p-values (N,) of each signal."""
    number = np.arange(1, len(evidence) + 1)
    count = len(evidence)
    curve = thinned(evidence)
    high = min(10 * TOP, max(10 / alpha, 3 * float(evidence.max(initial=1.0))))
    low = min(LOWEST * 100, max(LOWEST, 0.5 * float(evidence.min(initial=1.0))))
    across = Axis("input", "count", low=1.0, high=float(max(2, count)))
    ends = [1.0, float(max(2, count))]
    marks = [Series(f"alarm at 1/α = {1 / alpha:g}", ends, [1 / alpha] * 2, "guide")]
    if state.alarm_at is not None:
        marks.append(Series("alarm", [state.alarm_at], [min(TOP, evidence[state.alarm_at - 1])], "points"))
    x, y = points(number[curve], np.clip(evidence[curve], low, TOP))
    line = Series("evidence of a change" + (f", cut at {TOP:.0e}" if high > TOP else ""), x, y)
    up = Axis("evidence", low=low, high=high, log=True)
    first = Panel("evidence", "Evidence that inputs have changed", across, up, [marks[0], line, *marks[1:]])
    of = p_values[state.leading]
    some = np.linspace(0, count - 1, min(count, MOST_POINTS)).astype(np.int64)
    dots = Series(f"p-value, {state.leading}", *points(number[some], of[some]), "points")
    since = [] if state.changed_at is None else [Series("change, estimated", [state.changed_at] * 2, [0, 1], "guide")]
    title = f"P-values of {state.leading}: spread evenly while nothing changes"
    second = Panel("p_values", title, across, Axis("p-value", low=0.0, high=1.0), [*since, dots])
    caption = (
        "The evidence of all signals together begins with 1; the largest part is drawn. While inputs are like the "
        "held-out data it ever reaches 1/α with a probability of at most α."
    )
    return Chart("drift", "shift", caption, summary(state, alpha), [first, second])


def thinned(values: Floats) -> NDArray[np.int64]:
    """The places of at most MOST_POINTS values, of every stretch the largest one and the last of all."""
    parts = np.array_split(np.arange(len(values)), min(len(values), MOST_POINTS)) if len(values) else []
    return np.unique([*(int(part[values[part].argmax()]) for part in parts), *([len(values) - 1] * (len(values) > 0))])


def summary(state: DriftState, alpha: float) -> str:
    """What a monitor has to say, in one or two sentences."""
    begin = f"{state.inputs:,} inputs, evidence {state.evidence:.3g} of {1 / alpha:g}"
    if not state.alarm:
        return f"{begin}: no sign that inputs have changed"
    column = "" if state.column is None else f" (column {state.column})"
    now = "" if state.evidence >= 1 / alpha else ", which has fallen since"
    return (
        f"{begin}{now}: ALARM at input {state.alarm_at:,}; inputs have changed since about input {state.changed_at:,}, "
        f"as {state.leading}{column} shows. Such an alarm is wrong with a probability of at most {alpha:g}"
    )
