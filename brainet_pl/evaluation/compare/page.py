"""The page of a comparison: what it shows, in which order and in which words."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from brainet_pl.evaluation.chart import Axis, Chart, Panel, Series, readable
from brainet_pl.evaluation.compare.numbers import LEAST_SEEDS, Comparison, chance, difference
from brainet_pl.evaluation.compare.runs import Member
from brainet_pl.evaluation.compare.tables import rows_of, spread_of, text_of, verdict
from brainet_pl.evaluation.report.plot import chart_of_history, drawing_of
from brainet_pl.evaluation.report.verdict import Line
from brainet_pl.evaluation.report.view import (
    ARROWS,
    PARTS,
    TRAINING,
    Block,
    Cell,
    Charts,
    Page,
    PageTable,
    Section,
    millions,
    time_of_test,
)
from brainet_pl.evaluation.schema import MetricValue, PartCost, Record

CHANCE_AUROC = 0.5
FEW_PAIRS = 6  # runs below which two standard errors are exceeded by chance clearly more often than in 5 %


def page_of(found: Comparison) -> Page:
    """Puts together the page of a comparison."""
    first = found.groups[0].name
    styles = {group.name: i for i, group in enumerate(found.groups)}  # one colour for one configuration
    training = [drawing_of(chart, styles) for chart in _overlaid(found, _training_curves)]
    sections = [
        Section("table", "Heads and metrics", [_table(found)]),
        Section("differences", f"Differences from {first}", _differences(found)),
        Section("charts", "Curves", _overlays(found, styles)),
        Section("settings", "Settings that differ", _settings(found)),
        Section("costs", "What a prediction costs", _costs(found)),
        Section("training", "Training", [Charts(training)] if training else []),
        Section("runs", "Runs", [_runs(found)]),
    ]
    total = sum(len(group.members) for group in found.groups)
    return Page(
        title="Comparison of runs",
        subtitle=f"{total} runs of {len(found.groups)} configurations",
        verdict=[*_doubts(found), *_verdict(found)],
        legend=None,
        cards=[],
        sections=[section for section in sections if section.blocks],
        footer="Made by brainet compare from record.json, metrics.csv and config.yaml of the runs. Point at a chart to "
        "read its values; its keys show and hide lines.",
        maker="brainet compare",
    )


def _note(found: Comparison) -> str:
    """How the table is to be read."""
    note = (
        f"Mean ± standard deviation over the runs of a configuration, one for each seed. ✓ and ✗: better or worse than "
        f"{found.groups[0].name} by more than two standard errors of the difference, taken seed by seed where seeds "
        f"are shared; ?: fewer than {LEAST_SEEDS} runs can't tell."
    )
    runs = []
    for row in found.differences[1:]:
        runs += [gap.runs for gap in row.values() if gap.error is not None]
    fewest = min(runs, default=0)
    if 1 < fewest < FEW_PAIRS:
        note += f" With {fewest} runs that happens by chance in {100 * chance(fewest):.0f} % of the comparisons."
    return f"{note}{_about_scores(found)} Bold: the best mean."


def _table(found: Comparison) -> PageTable:
    columns, texts = rows_of(found)
    rows = []
    for i, line in enumerate(texts):
        row = [Cell(line[0]), Cell(line[1])]
        for j, metric in enumerate(found.metrics):
            row.append(Cell(line[j + 2], best=_is_best(found, metric, i)))
        rows.append(row)
    return PageTable(_note(found), columns, rows)


def _is_best(found: Comparison, metric: MetricValue, i: int) -> bool:
    means = [row[metric.key].mean for row in found.values if metric.key in row]
    if metric.better is None or len(means) < 2 or metric.key not in found.values[i]:
        return False
    return found.values[i][metric.key].mean == (max(means) if metric.better == "higher" else min(means))


def _differences(found: Comparison) -> list[Block]:
    if len(found.groups) < 2:
        return []
    columns = ["configuration", *(metric.title + ARROWS[metric.better] for metric in found.metrics)]
    rows = []
    for group, gaps in list(zip(found.groups, found.differences, strict=True))[1:]:
        row = [Cell(group.name)]
        for metric in found.metrics:
            gap = gaps.get(metric.key)
            if gap is None:
                row.append(Cell("–"))
                continue
            sign = "+" if gap.value >= 0 else "−"
            error = "" if gap.error is None else f" ±\u00a0{spread_of(metric, gap.error)}"
            text = f"{sign}{text_of(metric, abs(gap.value))}{error}\u00a0{verdict(metric, gap)}".strip()
            row.append(Cell(text, best=gap.clear))
        rows.append(row)
    caption = "Difference of the means ± its standard error. Bold: more than two standard errors."
    return [PageTable(caption, columns, rows)]


def _verdict(found: Comparison) -> list[Line]:
    """For each of a few metrics, who is best and whether that is clear; no praise, for the best of them may be bad."""
    lines = []
    for metric in found.metrics[:6]:
        order = [i for i, row in enumerate(found.values) if metric.key in row]
        if metric.better is None or len(order) < 2:
            continue
        order.sort(key=lambda i: found.values[i][metric.key].mean, reverse=metric.better == "higher")
        best, second = order[:2]
        gap = difference(found.values[best][metric.key], found.values[second][metric.key])
        named = (
            f"{metric.title}: {found.groups[best].name} is best, {text_of(metric, found.values[best][metric.key].mean)}"
        )
        if metric.key.endswith("AUROC") and found.values[best][metric.key].mean <= CHANCE_AUROC:
            lines.append(Line(f"{named}: no better than chance, which is 50\u00a0%; none of them tells these inputs."))
            continue
        other = found.groups[second].name
        if gap.clear:
            lines.append(Line(f"{named}, clearly ahead of {other}."))
        elif gap.error is None:
            lines.append(Line(f"{named}, ahead of {other}; too few runs to tell whether that is chance."))
        else:
            lines.append(Line(f"{named}; {other} is within two standard errors."))
    return lines


def _doubts(found: Comparison) -> list[Line]:
    """What a reader must know before the numbers: too few runs, runs that do not count, runs without a test."""
    lines = []
    few = [f"{group.name}: {len(group.members)}" for group in found.groups if len(group.members) < LEAST_SEEDS]
    if few:
        lines.append(Line(f"Too few runs for an interval, fewer than {LEAST_SEEDS} seeds ({'; '.join(few)}): numbers "
                          "without ± may differ by chance alone.", "fair"))  # fmt: skip
    earlier, untested, count = [], [], 0
    for group in found.groups:
        count += len(group.members)
        earlier += [f"{member.folder} (seed {member.seed})" for member in group.earlier]
        untested += [str(member.folder) for member in group.members if member.record is None]
    if earlier:
        lines.append(
            Line(f"Not counted, because a later run has the same configuration and seed: {', '.join(earlier)}.")
        )
    if untested and len(untested) < count:
        text = f"Not tested: {', '.join(untested)}. Numbers of tests are those of the other runs; numbers of "
        lines.append(Line(f"{text}validation stand beside them, in columns of their own.", "fair"))
    return lines


def _about_scores(found: Comparison) -> str:
    """By which score unknown sets are judged; nothing where there are none."""
    names: dict[str, list[str]] = {}  # score → the configurations that go by it
    is_verdict = True
    for group, score in zip(found.groups, found.by, strict=True):
        if score:
            names.setdefault(score, []).append(group.name)
        for member in group.members:
            if member.record and member.record.separation:
                is_verdict &= member.record.headline_score == member.record.verdict_score
    if not names:
        return ""
    listed = next(iter(names))
    if len(names) > 1:
        listed = "; ".join(f"{score} ({', '.join(groups)})" for score, groups in names.items())
    return f" Unknown sets are judged by {listed}{', the score behind the verdict' if is_verdict else ''}."


def _costs(found: Comparison) -> list[Block]:
    """Parameters, operations and time of each configuration, of its first run with numbers; times as their means."""
    columns = ["configuration", "parameters of the head", "MFLOP, backbone", "MFLOP, head", "MFLOP, one pass"]
    columns += ["ms, backbone", "ms, head", "ms, one pass"]
    rows = []
    for group in found.groups:
        measured = [costs for costs in map(_costs_of, group.members) if costs]
        if measured:
            rows.append([Cell(group.name), *_cells_of_costs(measured)])
    if not rows:
        return []
    for j in reversed(range(2, len(columns))):  # a part that no run has
        if all(row[j].text == "–" for row in rows):
            del columns[j]
            for row in rows:
                del row[j]
    note = "Operations for one sample; time for a batch, the mean over runs, where the test ran."
    return [PageTable(note, columns, rows)]


def _costs_of(member: Member) -> dict[str, PartCost]:
    """What each part of a run's model costs; nothing where that was not measured."""
    if not member.record or not member.record.model.costs:
        return {}
    return member.record.model.costs.parts()


def _cells_of_costs(measured: Sequence[dict[str, PartCost]]) -> list[Cell]:
    """The cells of one configuration, from the costs of its runs; "–" where not all have a number."""
    first = measured[0]
    parameters = f"{first['head'].parameters:,}" if "head" in first else "–"
    operations, times = [], []
    for part in PARTS:
        if all(part in costs for costs in measured):
            seconds = statistics.fmean(costs[part].seconds for costs in measured)
            operations.append(millions(first[part].flops))
            times.append(f"{1000 * seconds:,.3g}")
        else:
            operations.append("–")
            times.append("–")
    return [Cell(text) for text in (parameters, *operations, *times)]


def _overlaid(found: Comparison, curves: Callable[[Member], Iterable[tuple[Chart, Series]]]) -> list[Chart]:
    """One chart for all runs of each that `curves` gives for a run, empty, with the line of that run."""
    charts: dict[str, Chart] = {}
    for group in found.groups:
        for i, member in enumerate(group.members):
            for empty, line in curves(member):
                chart = charts.setdefault(empty.name, empty)
                chart.panels[0].series.append(replace(line, name=group.label(i), group=group.name))
    return list(charts.values())


def _overlays(found: Comparison, styles: Mapping[str, int]) -> list[Block]:
    """Charts that runs have in common, one line for each run, of the headline's or the only curve of each."""
    drawings = [drawing_of(_same_axes(chart), styles) for chart in _overlaid(found, _test_curves)]
    several = [drawing for drawing in drawings if sum(key.kind != "guide" for key in drawing.keys) > 1]
    return [Charts(several)] if several else []


def _test_curves(member: Member) -> Iterator[tuple[Chart, Series]]:
    for chart in member.record.charts if member.record else []:
        if chart.choose:
            continue
        for panel in chart.panels:
            series = _representative(member, chart, panel)
            if series is not None and panel.key != "counts":
                yield _empty_chart(chart, panel), Series(series.name, series.x, series.y, note=_key_note(panel, series))


def _empty_chart(chart: Chart, panel: Panel) -> Chart:
    """A chart for one panel of all runs, with nothing but its guides."""
    title = panel.title.split(", n = ")[0]
    if chart.group == "ood":
        title += f": {readable(chart.name.split('/')[1])}"
    guides = [series for series in panel.series if series.kind == "guide" and series.name != "best possible"]
    empty = Panel(panel.key, title, panel.x, panel.y, guides)
    return Chart(f"{chart.name}/{panel.key}", "test", "", f"{title} of all runs", [empty])


def _key_note(panel: Panel, series: Series) -> str:
    """What the key of a line says beside the name of its run."""
    if panel.key == "risk":
        return f"area {series.note}, by {series.name}"
    note = series.note.replace("ECE ", "")
    several = sum(other.kind == "line" for other in panel.series) > 1
    return f"{note} ({series.name})" if several else note


def _representative(member: Member, chart: Chart, panel: Panel) -> Series | None:
    """The curve of a panel that stands for a run: that of the score that it goes by there, or the only one."""
    lines = [series for series in panel.series if series.kind == "line"]
    wanted = readable(_score_of(member.record, chart) or "")
    for series in lines:
        if series.name == wanted:
            return series
    after_calibration = panel.key == "reliability"  # its last line, which is what a user gets
    return lines[-1] if lines and (len(lines) == 1 or after_calibration) else None


def _score_of(record: Record | None, chart: Chart) -> str | None:
    """The score by which a run goes in a chart."""
    if record is None:
        return None
    return (record.ranking_score if chart.group != "ood" else None) or record.headline_score


def _same_axes(chart: Chart) -> Chart:
    """Axes that hold the lines of all runs, where they are not shares from 0 to 1."""
    (panel,) = chart.panels
    wide = Axis(panel.y.label, panel.y.unit, 0.0 if panel.y.low == 0 else None, 1.0 if panel.y.high == 1 else None)
    return replace(chart, panels=[replace(panel, y=wide)])


def _settings(found: Comparison) -> list[Block]:
    if not found.settings:
        return []
    rows = [[Cell(key), *map(Cell, values)] for key, values in found.settings.items()]
    columns = ["setting", *(group.name for group in found.groups)]
    return [PageTable("Settings that are not the same in all configurations.", columns, rows)]


def _training_curves(member: Member) -> Iterator[tuple[Chart, Series]]:
    """Validation curves; training curves of what is not validated."""
    chart = chart_of_history(member.history, [key for key in TRAINING if key != "train/lr"])
    for panel in chart.panels if chart else ():
        line = next((s for s in panel.series if s.name == "validation"), panel.series[0])
        title = f"{panel.title}, {line.name}" if line.name != "training" else panel.title
        yield Chart(panel.key, "training", "", title, [replace(panel, series=[])]), line


def _runs(found: Comparison) -> PageTable:
    rows = []
    for group in found.groups:
        for member in group.members:
            tested = time_of_test(member.record) if member.record else "not tested"
            seed = "–" if member.seed is None else str(member.seed)
            rows.append([Cell(str(member.folder)), Cell(group.name), Cell(seed), Cell(tested)])
        for member in group.earlier:
            rows.append([Cell(str(member.folder)), Cell(group.name), Cell(str(member.seed)), Cell("not counted")])
    return PageTable("All runs.", ["folder", "configuration", "seed", "tested"], rows, texts=4)
