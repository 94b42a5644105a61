"""Numbers of configurations, how they differ, and whether that is more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from scipy import stats

from brainet_pl.evaluation.chart import readable
from brainet_pl.evaluation.compare.runs import Member, RunGroup, differing, group_runs
from brainet_pl.evaluation.report.read import History
from brainet_pl.evaluation.report.verdict import CALIBRATED
from brainet_pl.evaluation.schema import MetricValue
from brainet_pl.metrics.catalogue import SEPARATION, facts_of

# Keys of the numbers that are compared, in their order.
LEAST_SEEDS = 3  # fewer runs tell nothing of how much runs differ
COMPARED = ("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE", "sc/AURC", "reg/RMSE", "reg/NLL", "cal/QCE", "cal/coverage95")


class Value(NamedTuple):
    """A number of a configuration: mean and standard deviation over its runs, by seed or folder.

    The deviation is None of fewer than three runs.
    """

    mean: float
    deviation: float | None
    values: dict[Any, float]


class Difference(NamedTuple):
    """How a configuration differs from another.

    Attributes:
        value: mean of this one minus that of the other.
        error: standard error of that difference; None of fewer than three runs.
        paired: whether it was taken seed by seed.
        runs: seeds that both share, or the lesser number of runs.
    """

    value: float
    error: float | None
    paired: bool
    runs: int

    @property
    def clear(self) -> bool:
        """Whether it exceeds two standard errors."""
        return self.error is not None and abs(self.value) > 2 * self.error


class Comparison(NamedTuple):
    """Configurations and their numbers; the first is what the others are compared with.

    `by` names the score behind the numbers of unknown sets, of each configuration.
    """

    groups: list[RunGroup]
    metrics: list[MetricValue]
    values: list[dict[str, Value]]
    differences: list[dict[str, Difference]]
    settings: dict[str, list[str]]
    by: list[str]


def numbers_of(member: Member) -> dict[str, MetricValue]:
    """The numbers of a run's test that are compared, those of unknown sets by the score that stands for the model."""
    if member.record is None:
        return {}
    tested = {metric.key: metric for metric in member.record.metrics if metric.value is not None}
    numbers = {}
    for key in COMPARED:
        if f"test/{key}" in tested:
            numbers[key] = replace(tested[f"test/{key}"], key=key)
    scaled = tested.get(f"{CALIBRATED}cal/ECE")
    if scaled is not None:
        numbers["scaled/cal/ECE"] = replace(scaled, key="scaled/cal/ECE", title=f"{scaled.title}, calibrated")
    for row in member.record.separation:
        if row.score != member.record.headline_score:
            continue
        for name in ("AUROC", "FPR95"):
            key, value = f"ood/{row.set}/{name}", row.value(name)
            if value is not None:
                numbers[key] = MetricValue(key, value, f"{name}, {readable(row.set)}", "share", SEPARATION[name])
    return numbers


def validated(history: History) -> dict[str, MetricValue]:
    """The numbers of a run's validation at the epoch of the lowest NLL, or the last, under keys of their own."""
    by = next((key for key in ("val/cls/NLL", "val/reg/NLL") if key in history), None)
    steps, values = history[by] if by else ([], [])
    best = steps[min(range(len(values)), key=lambda i: values[i])] if values else None
    found = {}
    for key in COMPARED:
        there, numbers = history.get(f"val/{key}", ([], []))
        if numbers:
            value, facts = numbers[there.index(best) if best in there else -1], facts_of(key)
            title = f"{facts.title}, validation"
            found[f"val/{key}"] = MetricValue(f"val/{key}", value, title, facts.unit, facts.better)
    return found


def value_of(values: Mapping[Any, float]) -> Value:
    """Numbers of runs by their seeds → mean and deviation."""
    listed = list(values.values())
    deviation = statistics.stdev(listed) if len(listed) >= LEAST_SEEDS else None
    return Value(statistics.fmean(listed), deviation, dict(values))


def difference(one: Value, other: Value) -> Difference:
    """Mean of one minus mean of the other, with its standard error.

    Seed by seed where at least three seeds are shared: s / √n of the differences. Else as of independent runs,
    √(s₁²/n₁ + s₂²/n₂), where both have at least three.

    >>> difference(value_of({0: 1.0, 1: 2.0, 2: 3.0}), value_of({0: 0.5, 1: 1.0, 2: 3.0}))
    Difference(value=0.5, error=0.2886751345948129, paired=True, runs=3)
    """
    shared = [seed for seed in one.values if seed in other.values and isinstance(seed, int)]
    if len(shared) >= LEAST_SEEDS:
        gaps = [one.values[seed] - other.values[seed] for seed in shared]
        return Difference(statistics.fmean(gaps), float(stats.sem(gaps)), True, len(gaps))
    runs = [list(value.values.values()) for value in (one, other)]
    fewest = min(map(len, runs))
    error = math.hypot(*map(stats.sem, runs)) if fewest >= LEAST_SEEDS else None
    return Difference(one.mean - other.mean, error, False, fewest)


def chance(count: int) -> float:
    """How often a difference that is not there exceeds two standard errors, of so many paired runs (Student's t).

    >>> round(chance(3), 2), round(chance(5), 2)
    (0.18, 0.12)
    """
    return float(2 * stats.t.sf(2, count - 1))


def compare(members: Sequence[Member], against: str | None = None) -> Comparison:
    """Group runs and compare every group with one: the first, or the one of that name."""
    groups = _with_first(group_runs(members), against)
    measured = _measured(groups)
    metrics: dict[str, MetricValue] = {}
    for runs in measured:
        for numbers in runs:
            metrics |= numbers
    values = [_values_of(group, runs, metrics) for group, runs in zip(groups, measured, strict=True)]
    differences = []
    for row in values:
        shared = [key for key in metrics if key in row and key in values[0]]
        differences.append({key: difference(row[key], values[0][key]) for key in shared})
    firsts = [group.members[0] for group in groups]
    return Comparison(groups, list(metrics.values()), values, differences, differing(firsts), list(map(_by, groups)))


def _with_first(groups: list[RunGroup], name: str | None) -> list[RunGroup]:
    """The groups, that of a name first."""
    if name is None:
        return groups
    names = [group.name for group in groups]
    if name not in names:
        raise ValueError(f"expected --against to be one of {', '.join(names)}, got {name!r}")
    return sorted(groups, key=lambda group: group.name != name)


def _measured(groups: Sequence[RunGroup]) -> list[list[dict[str, MetricValue]]]:
    """The numbers of each run of each group; where a run was not tested, those of validation too, which all have."""
    counted = [member for group in groups for member in group.members]
    untested = any(member.record is None for member in counted)
    measured = []
    for group in groups:
        runs = []
        for member in group.members:
            runs.append(numbers_of(member) | (validated(member.history) if untested else {}))
        measured.append(runs)
    return measured


def _values_of(group: RunGroup, runs: Sequence[dict[str, MetricValue]], metrics: Iterable[str]) -> dict[str, Value]:
    """Mean and deviation over the runs of a group, of each metric that has a finite number in one of them."""
    seeds = _seeds(group)
    values = {}
    for key in metrics:
        finite = {}
        for seed, numbers in zip(seeds, runs, strict=True):
            number = numbers[key].value if key in numbers else None
            if number is not None and math.isfinite(number):
                finite[seed] = number
        if finite:
            values[key] = value_of(finite)
    return values


def _by(group: RunGroup) -> str:
    """The score behind the numbers of unknown sets; several where runs of a configuration do not agree."""
    records = [member.record for member in group.members if member.record and member.record.separation]
    return " or ".join(dict.fromkeys(readable(record.headline_score or "") for record in records))


def _seeds(group: RunGroup) -> list[Any]:
    """A key for each run: its seed, or where that is not known, its folder."""
    return [str(member.folder) if member.seed is None else member.seed for member in group.members]
