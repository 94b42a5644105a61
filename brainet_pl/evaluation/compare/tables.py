"""A comparison as a table: for the page, as CSV, in Markdown and in LaTeX."""

from __future__ import annotations

import io
import re
from typing import Any

from brainet_pl._utils.csv import write_rows
from brainet_pl.evaluation.compare.numbers import Comparison, Difference, Value
from brainet_pl.evaluation.report.view import ARROWS, number, share
from brainet_pl.evaluation.schema import MetricValue

LATEX = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "✓": r"$\checkmark$", "✗": r"$\times$", "≠": r"$\neq$", "–": "--", "↑": r"$\uparrow$",
    "↓": r"$\downarrow$", "\u00a0": "~",
}  # fmt: skip
MARKS = {True: "✓", False: "✗"}  # not arrows: those at the heads of columns say which way is better


def text_of(metric: MetricValue, value: float) -> str:
    """A value in the unit of its metric."""
    return share(value).replace(" ", "\u00a0") if metric.unit == "share" else number(float(value))


def spread_of(metric: MetricValue, value: float) -> str:
    """A deviation or a standard error, with as many decimals as the number before it."""
    return text_of(metric, value) if metric.unit == "share" or value >= 1 else f"{value:.4f}"


def cell(metric: MetricValue, value: Value) -> str:
    """Writes a number of a configuration as mean ± deviation."""
    spread = "" if value.deviation is None else f" ±\u00a0{spread_of(metric, value.deviation)}"
    return f"{text_of(metric, value.mean)}{spread}"


def verdict(metric: MetricValue, difference: Difference) -> str:
    """✓ clearly better, ✗ clearly worse, ≠ clearly other, "" not clear; "?" where there are too few runs to tell."""
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
    """Writes the table of a comparison in Markdown; names are texts, without markup, links or HTML."""
    columns, rows = rows_of(found)
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    shown = [line if i == 1 else map(markdown_text, line) for i, line in enumerate(lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in shown) + "\n"


def as_latex(found: Comparison) -> str:
    """The table for LaTeX with booktabs."""
    columns, rows = rows_of(found)
    body = [" & ".join(map(latex_text, line)) + r" \\" for line in rows]
    head = " & ".join(map(latex_text, columns)) + r" \\"
    layout = "l" + "r" * (len(columns) - 1)
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def markdown_text(text: str) -> str:
    """A text that Markdown shows as it is, on one line.

    >>> markdown_text("a|num_params <i>")
    'a\\\\|num_params &lt;i&gt;'
    """
    shown = "".join(sign if sign.isprintable() or sign == "\u00a0" else " " for sign in text)
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", shown)


def latex_text(text: str) -> str:
    """A text that LaTeX sets as it is: no sign of it is a command.

    >>> latex_text(r"50 % \\input{x}")
    '50 \\\\% \\\\textbackslash{}input\\\\{x\\\\}'
    """
    return "".join(LATEX.get(sign, sign if sign.isprintable() else " ") for sign in text)
