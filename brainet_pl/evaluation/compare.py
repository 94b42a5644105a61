"""`brainet compare RUN [RUN …]`: one page and one table of several runs, from the files in their folders.

Runs whose settings differ in nothing but the seed are one configuration. A number of a configuration is the mean over
its runs; two configurations are compared by the difference of their means, seed by seed where they share seeds, and by
the standard error of that difference. Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import glob
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from brainet_pl._utils.csv import write_rows
from brainet_pl.evaluation.chart import Axis, Chart, Panel, Series, readable
from brainet_pl.evaluation.report import render_page
from brainet_pl.evaluation.report.plot import chart_of_history, drawing_of
from brainet_pl.evaluation.report.read import KNOWN_FILES, History, Metric, Record, read_history, read_record
from brainet_pl.evaluation.report.verdict import Line
from brainet_pl.evaluation.report.view import (
    ARROWS,
    TRAINING,
    Block,
    Cell,
    Charts,
    Page,
    Section,
    Table,
    millions,
    number,
    share,
)

# Settings that say where and how a run was made, not what was tried.
IGNORED = ("seed_everything", "trainer.logger", "trainer.callbacks", "trainer.default_root_dir", "config", "ckpt_path",
           "trainer.enable_", "weights_only", "test", "structure.progress", "structure.cache", "predictions",
           "trainer.accelerator", "trainer.devices")  # fmt: skip
FIRST = ("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE", "sc/AURC", "reg/RMSE", "reg/NLL", "cal/QCE", "cal/coverage95")
TITLES = {"cls/Acc": "Accuracy", "cls/NLL": "NLL", "cls/Brier": "Brier score", "cal/ECE": "ECE", "sc/AURC": "AURC",
          "reg/RMSE": "RMSE", "reg/NLL": "NLL", "cal/QCE": "Interval error",
          "cal/coverage95": "Inside 95 %"}  # fmt: skip
BETTER = {"cls/Acc": "higher", "cal/coverage95": None}  # of runs without a record; others are better if lower
SHARES = ("cls/Acc", "cal/ECE", "sc/AURC", "cal/QCE", "cal/coverage95")
MARKS = {True: "▲", False: "▼"}


class Member(NamedTuple):
    """One run: its folder, what its test found (None if it was only fitted), its history, settings and seed."""

    folder: Path
    record: Record | None
    history: History
    settings: dict[str, Any]
    seed: int | None


class Group(NamedTuple):
    """Runs of one configuration, by what tells it from the others."""

    name: str
    members: list[Member]


class Value(NamedTuple):
    """A number of a configuration: mean and standard deviation over its runs (None of one run), by seed or place."""

    mean: float
    deviation: float | None
    values: dict[Any, float]


class Difference(NamedTuple):
    """How a configuration differs from another: mean difference, its standard error (None of one run), if by seed.

    Attributes:
        value: mean of this one minus that of the other.
        error: standard error of that difference.
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
    """Configurations and their numbers; the first is what the others are compared with."""

    groups: list[Group]
    metrics: list[Metric]
    values: list[dict[str, Value]]
    differences: list[dict[str, Difference]]
    settings: dict[str, list[str]]


# -- runs -------------------------------------------------------------------------------------------------------------


def find_runs(words: Iterable[str]) -> list[Path]:
    """Folders of runs: as given, those of checkpoints, and what patterns match; a folder of runs is all runs in it."""
    found: dict[Path, None] = {}
    for word in words:
        paths = sorted(glob.glob(word)) if any(sign in word for sign in "*?[") else [word]
        if not paths:
            raise FileNotFoundError(f"expected runs that match {word!r}, found none: check the pattern")
        for path in map(Path, paths):
            folders = _folders(path)
            if not folders and len(paths) == 1:
                raise FileNotFoundError(
                    f"expected the folder of a run, a folder of runs or a checkpoint, got {path} without "
                    f"{', '.join(KNOWN_FILES)}: check the path"
                )
            found |= dict.fromkeys(folders)
    return list(found)


def _folders(path: Path) -> list[Path]:
    if path.is_file():
        path = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    if any((path / name).is_file() for name in KNOWN_FILES):
        return [path]
    inside = {file.parent for name in KNOWN_FILES for file in path.glob(f"*/{name}")}
    return sorted(inside, key=lambda folder: (len(folder.name), folder.name))


def read_member(folder: Path) -> Member:
    """Read what a comparison needs of a run."""
    record = read_record(folder / "record.json")
    settings: dict[str, Any] = {}
    config = folder / "config.yaml"
    if config.is_file():
        try:
            content = yaml.safe_load(config.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"expected YAML in {config}, got something else ({error}): fit the model again") from error
        settings = flat(content if isinstance(content, dict) else {})
    elif record is not None:
        settings = flat({"model": record.settings})
    seed = settings.get("seed_everything")
    if not isinstance(seed, int) or isinstance(seed, bool):
        seed = record.seed if record is not None else None
    return Member(folder, record, read_history(folder / "metrics.csv"), settings, seed)


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested settings → name.name → value; a class and its arguments are one level."""
    if isinstance(value, dict):
        if set(value) <= {"class_path", "init_args", "dict_kwargs"} and "class_path" in value:
            named = {key: str(value["class_path"]).rpartition(".")[2]}
            return named | flat(value.get("init_args") or {}, key) | flat(value.get("dict_kwargs") or {}, key)
        parts = (flat(part, f"{key}.{name}" if key else str(name)) for name, part in value.items())
        return {name: part for found in parts for name, part in found.items()}
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return {name: v for i, part in enumerate(value) for name, v in flat(part, f"{key}[{i}]").items()}
    return {key: value}


def differing(members: Sequence[Member]) -> dict[str, list[str]]:
    """Setting → its value in each run, for those that are not the same in all."""
    keys = dict.fromkeys(key for member in members for key in member.settings)
    found = {}
    for key in keys:
        if not key.startswith(IGNORED):
            values = [_shown(member.settings[key]) if key in member.settings else "–" for member in members]
            # A setting that a later version added is null in its runs and absent in earlier ones.
            if len({"null" if value == "–" else value for value in values}) > 1:
                found[key] = values
    return found


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def group_runs(members: Sequence[Member]) -> list[Group]:
    """Runs of equal settings together, in the order of their first ones; named by their heads and what else differs."""
    settings = differing(members)
    kept: dict[tuple[str, ...], list[Member]] = {}
    for i, member in enumerate(members):
        kept.setdefault(tuple(values[i] for values in settings.values()), []).append(member)
    heads = [_head(part[0]) for part in kept.values()]
    names = []
    for key, head in zip(kept, heads, strict=True):
        told = [f"{name.rpartition('.')[2]} {value}" for name, value in zip(settings, key, strict=True)
                if name != "model.head" and value != "–"]  # fmt: skip
        names.append(head if heads.count(head) == 1 else ", ".join([head, *told[:3]]))
    for i, name in enumerate(names):
        if names.count(name) > 1:
            names[i] = f"{name} ({list(kept.values())[i][0].folder.name})"
    return [Group(name, part) for name, part in zip(names, kept.values(), strict=True)]


def _head(member: Member) -> str:
    return member.record.model.head if member.record else str(member.settings.get("model.head", member.folder.name))


# -- numbers ----------------------------------------------------------------------------------------------------------


def numbers_of(member: Member) -> dict[str, Metric]:
    """The numbers of a run that are compared: of its test and of unknown sets, or of its best validation."""
    if member.record is None:
        return _validated(member.history)
    found = {}
    for metric in member.record.metrics:
        short = metric.key.partition("/")[2]
        if short in FIRST and metric.key.startswith("test/") and metric.value is not None:
            found[short] = metric._replace(key=short, title=TITLES[short])
        elif metric.key == "test/scaled/cal/ECE" and metric.value is not None:
            found["scaled/cal/ECE"] = metric._replace(key="scaled/cal/ECE", title="ECE, calibrated")
    for row in member.record.separation:
        if row.score == member.record.headline_score:
            for name, better in (("AUROC", "higher"), ("FPR95", "lower")):
                value = row.values.get(name)
                if value is not None:
                    key = f"ood/{row.set}/{name}"
                    found[key] = Metric(key, value, f"{name}, {readable(row.set)}", "share", better)
    order = {key: i for i, key in enumerate(FIRST)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def _validated(history: History) -> dict[str, Metric]:
    """Of a run without a test: validation at the epoch of the lowest NLL, or the last."""
    by = next((key for key in ("val/cls/NLL", "val/reg/NLL") if key in history), None)
    steps, values = history[by] if by else ([], [])
    best = steps[min(range(len(values)), key=lambda i: values[i])] if values else None
    found = {}
    for key in FIRST:
        there, numbers = history.get(f"val/{key}", ([], []))
        if numbers:
            at = there.index(best) if best in there else len(numbers) - 1
            unit = "share" if key in SHARES else ""
            found[key] = Metric(key, numbers[at], f"{TITLES[key]}, validation", unit, BETTER.get(key, "lower"))
    return found


def value_of(values: Mapping[Any, float]) -> Value:
    """Numbers of runs by their seeds → mean and deviation."""
    listed = list(values.values())
    deviation = statistics.stdev(listed) if len(listed) > 1 else None
    return Value(statistics.fmean(listed), deviation, dict(values))


def difference(one: Value, other: Value) -> Difference:
    """Mean of one minus mean of the other, with its standard error.

    Seed by seed where at least two seeds are shared: s / √n of the differences. Else as of independent runs,
    √(s₁²/n₁ + s₂²/n₂), where both have at least two.

    >>> difference(value_of({0: 1.0, 1: 2.0}), value_of({0: 0.5, 1: 1.0}))
    Difference(value=0.75, error=0.25, paired=True, runs=2)
    """
    shared = [seed for seed in one.values if seed in other.values and isinstance(seed, int)]
    if len(shared) > 1:
        gaps = [one.values[seed] - other.values[seed] for seed in shared]
        return Difference(statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)), True, len(gaps))
    n, m = len(one.values), len(other.values)
    error = None
    if one.deviation is not None and other.deviation is not None:
        error = math.sqrt(one.deviation**2 / n + other.deviation**2 / m)
    return Difference(one.mean - other.mean, error, False, min(n, m))


def chance(count: int) -> float:
    """How often a difference that is not there exceeds two standard errors, of so many paired runs (Student's t).

    >>> round(chance(2), 2), round(chance(5), 2)
    (0.3, 0.12)
    """
    free = count - 1
    scale = math.gamma((free + 1) / 2) / (math.sqrt(free * math.pi) * math.gamma(free / 2))
    steps = 2000
    x = [2 * i / steps for i in range(steps + 1)]
    y = [scale * (1 + v * v / free) ** (-(free + 1) / 2) for v in x]
    inside = (2 / steps) * (sum(y) - 0.5 * (y[0] + y[-1]))
    return float(1 - 2 * inside)


def compare(members: Sequence[Member], against: str | None = None) -> Comparison:
    """Group runs and compare every group with one: the first, or the one of that name."""
    groups = group_runs(members)
    if against is not None:
        names = [group.name for group in groups]
        if against not in names:
            raise ValueError(f"expected --against to be one of {', '.join(names)}, got {against!r}")
        groups.sort(key=lambda group: group.name != against)
    measured = [[numbers_of(member) for member in group.members] for group in groups]
    metrics = {key: metric for runs in measured for found in runs for key, metric in found.items()}
    values = []
    for group, runs in zip(groups, measured, strict=True):
        seeds = _seeds(group)
        row = {}
        for key in metrics:
            known = {seed: found[key].value for seed, found in zip(seeds, runs, strict=True) if key in found}
            finite = {seed: v for seed, v in known.items() if v is not None and math.isfinite(v)}
            if finite:
                row[key] = value_of(finite)
        values.append(row)
    differences = [
        {key: difference(row[key], values[0][key]) for key in metrics if key in row and key in values[0]}
        for row in values
    ]
    firsts = [group.members[0] for group in groups]
    return Comparison(groups, list(metrics.values()), values, differences, differing(firsts))


def _seeds(group: Group) -> list[Any]:
    """A key for each run: its seed, or where that is not known or taken, its folder."""
    keys: list[Any] = []
    for member in group.members:
        keys.append(member.seed if member.seed is not None and member.seed not in keys else str(member.folder))
    return keys


# -- what is shown ----------------------------------------------------------------------------------------------------


def _text(metric: Metric, value: float) -> str:
    return share(value).replace(" ", "\u00a0") if metric.unit == "share" else number(float(value))


def _spread(metric: Metric, value: float) -> str:
    """A deviation or a standard error, with as many decimals as the number before it."""
    return _text(metric, value) if metric.unit == "share" or value >= 1 else f"{value:.4f}"


def cell(metric: Metric, value: Value) -> str:
    """Writes a number of a configuration as mean ± deviation."""
    spread = "" if value.deviation is None else f" ±\u00a0{_spread(metric, value.deviation)}"
    return f"{_text(metric, value.mean)}{spread}"


def verdict(metric: Metric, difference: Difference) -> str:
    """▲ clearly better, ▼ clearly worse, ≠ clearly other, "" not clear; "?" where one run can't tell."""
    if difference.error is None:
        return "?" if difference.value else ""
    if not difference.clear:
        return ""
    return "≠" if metric.better is None else MARKS[(difference.value > 0) == (metric.better == "higher")]


def rows_of(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """The table as texts: a row for each configuration."""
    columns = ["configuration", "runs", *(metric.title + ARROWS[metric.better] for metric in found.metrics)]
    rows = []
    for i, group in enumerate(found.groups):
        texts = []
        for metric in found.metrics:
            value = found.values[i].get(metric.key)
            mark = verdict(metric, found.differences[i][metric.key]) if i and metric.key in found.differences[i] else ""
            texts.append("–" if value is None else f"{cell(metric, value)}\u00a0{mark}".strip())
        rows.append([group.name, str(len(group.members)), *texts])
    return columns, rows


def as_csv(found: Comparison) -> str:
    """A row for each configuration and metric, numbers as numbers."""
    rows: list[list[Any]] = [
        ["configuration", "metric", "runs", "mean", "deviation", "difference", "standard_error", "paired", "clear"]
    ]
    for group, row, gaps in zip(found.groups, found.values, found.differences, strict=True):
        for metric in found.metrics:
            if metric.key in row:
                value, gap = row[metric.key], gaps.get(metric.key)
                more = ["", "", "", ""] if gap is None else [gap.value, gap.error, gap.paired, gap.clear]
                rows.append([group.name, metric.key, len(value.values), value.mean, value.deviation, *more])
    file = io.StringIO()
    write_rows(file, rows)
    return file.getvalue()


def as_markdown(found: Comparison) -> str:
    """Writes the table of a comparison in Markdown."""
    columns, rows = rows_of(found)
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines) + "\n"


def as_latex(found: Comparison) -> str:
    """The table for LaTeX with booktabs."""
    columns, rows = rows_of(found)
    signs = {"±": r"$\pm$", "▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "≠": r"$\neq$", "–": "--",
             "↑": r"$\uparrow$", "↓": r"$\downarrow$", "\u00a0": "~"}  # fmt: skip

    def escaped(text: str) -> str:
        for sign in ("\\", "&", "%", "$", "#", "_", "{", "}"):
            text = text.replace(sign, r"\textbackslash{}" if sign == "\\" else f"\\{sign}")
        for sign, latex in signs.items():
            text = text.replace(sign, latex)
        return text

    body = [" & ".join(map(escaped, line)) + r" \\" for line in rows]
    head = " & ".join(map(escaped, columns)) + r" \\"
    layout = "l" + "r" * (len(columns) - 1)
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def page_of(found: Comparison) -> Page:
    """Puts together the page of a comparison."""
    first = found.groups[0].name
    count = min((gap.runs for row in found.differences[1:] for gap in row.values() if gap.error is not None), default=0)
    note = (
        f"Mean ± standard deviation over the runs of a configuration. ▲ and ▼: better or worse than {first} by more "
        "than two standard errors of the difference, taken seed by seed where seeds are shared; ?: one run can't tell."
    )
    if 1 < count < 6:
        note += f" With {count} runs that happens by chance in {100 * chance(count):.0f} % of the comparisons."
    sections = [
        Section("table", "Heads and metrics", [_table(found, note)]),
        Section("differences", f"Differences from {first}", _differences(found)),
        Section("charts", "Curves", _overlays(found)),
        Section("settings", "Settings that differ", _settings(found)),
        Section("costs", "What a prediction costs", _costs(found)),
        Section("training", "Training", _training(found)),
        Section("runs", "Runs", [_runs(found)]),
    ]
    total = sum(len(group.members) for group in found.groups)
    return Page(
        title="Comparison of runs",
        subtitle=f"{total} runs of {len(found.groups)} configurations",
        verdict=_verdict(found),
        cards=[],
        sections=[section for section in sections if section.blocks],
        footer="Made by brainet compare from record.json, metrics.csv and config.yaml of the runs. Point at a chart to "
        "read its values; its keys show and hide lines.",
        maker="brainet compare",
    )


def _table(found: Comparison, note: str) -> Table:
    columns, texts = rows_of(found)
    rows = []
    for i, line in enumerate(texts):
        row = [Cell(line[0]), Cell(line[1])]
        for j, metric in enumerate(found.metrics):
            row.append(Cell(line[j + 2], best=_is_best(found, metric, i)))
        rows.append(row)
    return Table(f"{note} Bold: the best mean.", columns, rows)


def _is_best(found: Comparison, metric: Metric, i: int) -> bool:
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
            error = "" if gap.error is None else f" ±\u00a0{_spread(metric, gap.error)}"
            text = f"{sign}{_text(metric, abs(gap.value))}{error}\u00a0{verdict(metric, gap)}".strip()
            row.append(Cell(text, best=gap.clear))
        rows.append(row)
    caption = "Difference of the means ± its standard error. Bold: more than two standard errors."
    return [Table(caption, columns, rows)]


def _verdict(found: Comparison) -> list[Line]:
    """For each of a few metrics, who is best and whether that is clear."""
    lines = []
    for metric in found.metrics[:6]:
        order = [i for i, row in enumerate(found.values) if metric.key in row]
        if metric.better is None or len(order) < 2:
            continue
        order.sort(key=lambda i: found.values[i][metric.key].mean, reverse=metric.better == "higher")
        best, second = order[:2]
        gap = difference(found.values[best][metric.key], found.values[second][metric.key])
        named = (
            f"{metric.title}: {found.groups[best].name} is best, {_text(metric, found.values[best][metric.key].mean)}"
        )
        other = found.groups[second].name
        if gap.clear:
            lines.append(Line(f"{named}, clearly ahead of {other}.", "good"))
        elif gap.error is None:
            lines.append(Line(f"{named}, ahead of {other}; one run each can't tell whether that is chance."))
        else:
            lines.append(Line(f"{named}; {other} is within two standard errors.", "fair"))
    return lines


def _costs(found: Comparison) -> list[Block]:
    """Parameters, operations and time of each configuration, of its first run with numbers; times as their means."""
    rows = []
    for group in found.groups:
        measured = [{cost.part: cost for cost in m.record.model.costs} for m in group.members if m.record]
        measured = [costs for costs in measured if costs]
        if not measured:
            continue
        parts = [part for part in ("backbone", "head", "one_pass") if all(part in costs for costs in measured)]
        seconds = {part: statistics.fmean(costs[part].seconds for costs in measured) for part in parts}
        first = measured[0]
        row = [Cell(group.name), Cell(f"{first['head'].parameters:,}" if "head" in first else "–")]
        row += [
            Cell(millions(first[part].flops) if part in parts else "–") for part in ("backbone", "head", "one_pass")
        ]
        row += [
            Cell(f"{1000 * seconds[part]:,.3g}" if part in parts else "–") for part in ("backbone", "head", "one_pass")
        ]
        rows.append(row)
    if not rows:
        return []
    columns = ["configuration", "parameters of the head", "MFLOP, backbone", "MFLOP, head", "MFLOP, one pass"]
    columns += ["ms, backbone", "ms, head", "ms, one pass"]
    used = [j for j in range(len(columns)) if j < 2 or any(row[j].text != "–" for row in rows)]
    note = "Operations for one sample; time for a batch, the mean over runs, where the test ran."
    return [Table(note, [columns[j] for j in used], [[row[j] for j in used] for row in rows])]


def _overlays(found: Comparison) -> list[Block]:
    """Charts that runs have in common, one line for each run, of the headline's or the only curve of each."""
    charts: dict[str, Chart] = {}
    for group in found.groups:
        for i, member in enumerate(group.members):
            for chart in member.record.charts if member.record else ():
                for panel in chart.panels:
                    key = f"{chart.name}/{panel.key}"
                    series = _headline(member, panel)
                    if chart.choose or series is None or panel.key == "counts":
                        continue
                    if key not in charts:
                        guides = [s for s in panel.series if s.kind == "guide" and s.name != "best possible"]
                        empty = Panel(panel.key, _title(chart, panel, series), panel.x, panel.y, guides)
                        charts[key] = Chart(key, "test", "", f"{_title(chart, panel, series)} of all runs", [empty])
                    name = group.name if len(group.members) == 1 else f"{group.name}, {_called(member, i)}"
                    note = series.note.replace("ECE ", "")
                    line = series._replace(name=name, note=note, shown=True, group=group.name, low=None, high=None)
                    charts[key].panels[0].series.append(line)
    drawn = [drawing_of(_same_axes(chart)) for chart in charts.values()]
    return [Charts([chart for chart in drawn if sum(k.kind != "guide" for k in chart.keys) > 1])] if drawn else []


def _title(chart: Chart, panel: Panel, series: Series) -> str:
    """The panel's title, which set it is of, and by which score."""
    title = panel.title.split(", n = ")[0]
    if chart.group == "ood":
        return f"{title}: {readable(chart.name.split('/')[1])}, by {series.name}"
    many = sum(s.kind == "line" for s in panel.series) > 1
    return f"{title}, by {series.name}" if many else title


def _called(member: Member, i: int) -> str:
    return f"seed {member.seed}" if member.seed is not None else f"run {i + 1}"


def _headline(member: Member, panel: Panel) -> Series | None:
    """The curve of a panel that stands for a run: that of its headline score, or the only one."""
    lines = [series for series in panel.series if series.kind == "line"]
    wanted = readable((member.record.headline_score if member.record else None) or "")
    chosen = [series for series in lines if series.name == wanted]
    return chosen[0] if chosen else lines[0] if len(lines) == 1 or (lines and panel.key == "reliability") else None


def _same_axes(chart: Chart) -> Chart:
    """Axes that hold the lines of all runs, where they are not shares from 0 to 1."""
    (panel,) = chart.panels
    wide = Axis(panel.y.label, panel.y.unit, 0.0 if panel.y.low == 0 else None, 1.0 if panel.y.high == 1 else None)
    return chart._replace(panels=[panel._replace(y=wide)])


def _settings(found: Comparison) -> list[Block]:
    if not found.settings:
        return []
    rows = [[Cell(key), *map(Cell, values)] for key, values in found.settings.items()]
    columns = ["setting", *(group.name for group in found.groups)]
    return [Table("Settings that are not the same in all configurations.", columns, rows)]


def _training(found: Comparison) -> list[Block]:
    """Validation curves, one line for each run."""
    charts: dict[str, Chart] = {}
    for group in found.groups:
        for i, member in enumerate(group.members):
            chart = chart_of_history(member.history, TRAINING)
            for panel in chart.panels if chart else ():
                line = next((s for s in panel.series if s.name == "validation"), panel.series[0])
                if panel.key == "Learning rate":
                    continue
                name = group.name if len(group.members) == 1 else f"{group.name}, {_called(member, i)}"
                title = f"{panel.title}, {line.name}" if line.name != "training" else panel.title
                made = charts.setdefault(
                    panel.key, Chart(panel.key, "training", "", title, [panel._replace(series=[])])
                )
                made.panels[0].series.append(line._replace(name=name, group=group.name))
    return [Charts([drawing_of(chart) for chart in charts.values()])] if charts else []


def _runs(found: Comparison) -> Table:
    rows = []
    for group in found.groups:
        for member in group.members:
            tested = (
                member.record.created.replace("T", " ").replace("+00:00", " UTC") if member.record else "not tested"
            )
            seed = "–" if member.seed is None else str(member.seed)
            rows.append([Cell(str(member.folder)), Cell(group.name), Cell(seed), Cell(tested)])
    return Table("All runs.", ["folder", "configuration", "seed", "tested"], rows, texts=4)


# -- the command ------------------------------------------------------------------------------------------------------


def write_comparison(
    runs: Iterable[str], out: str | Path = "comparison.html", against: str | None = None
) -> Comparison:
    """Compare runs and write the page, and beside it the table as `.csv`, `.md` and `.tex`.

    Args:
        runs: folders of runs, folders of such folders, checkpoints, or patterns of these.
        out: the page to write.
        against: the configuration that others are compared with; None is the first.
    """
    folders = find_runs(runs)
    if not folders:
        raise FileNotFoundError("expected at least one run to compare, got none: give folders of runs")
    found = compare([read_member(folder) for folder in folders], against)
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(page_of(found)), encoding="utf-8", errors="replace")
    for suffix, text in ((".csv", as_csv(found)), (".md", as_markdown(found)), (".tex", as_latex(found))):
        path.with_suffix(suffix).write_text(text, encoding="utf-8")
    return found


def main(args: Sequence[str]) -> None:
    """`brainet compare RUN [RUN …] [--out FILE] [--against NAME]`."""
    parser = argparse.ArgumentParser(
        "brainet compare",
        description="Write one page and one table that compare runs; seeds of a configuration are one.",
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, folders of such folders, checkpoints, or patterns")
    parser.add_argument("--out", default="comparison.html", help="the page; .csv, .md and .tex are written beside it")
    parser.add_argument("--against", help="the configuration that others are compared with; the first if not given")
    words = parser.parse_args(args)
    print(as_markdown(write_comparison(words.runs, words.out, words.against)), end="")
    print(f"\ncomparison: {words.out}, and beside it .csv, .md and .tex")
