"""From the record of a test to what people look at: pictures with their descriptions, tables, and one JSON file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import to_builtins
from torchmetrics import MetricCollection

from brainet_pl._utils.csv import write_rows
from brainet_pl.evaluation.chart import Chart, Matrix
from brainet_pl.evaluation.charts import ClassNumbers
from brainet_pl.evaluation.record import Measured, TestRecord
from brainet_pl.evaluation.schema import FORMAT
from brainet_pl.metrics.catalogue import SEPARATION
from brainet_pl.metrics.measures import Measure
from brainet_pl.metrics.shift import means
from brainet_pl.structure import GGT

TREE = "structure/tree"  # the picture of the learned tree
ROWS_AT_A_TIME = 10_000  # of scores.csv: Python's numbers take ten times the memory of the record's


class LoggedTable(NamedTuple):
    """A table of numbers, texts and pictures: uint8 arrays (H, W) or (H, W, 3)."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def ranking_score(names: Sequence[str], wanted: str | None) -> str:
    """The one of these scores that orders test samples by doubt: the wanted one, else the entropy, or the first."""
    if wanted is not None and wanted not in names:
        raise ValueError(f"expected score to be one of {', '.join(names)}, got {wanted!r}: change Evaluation's")
    return wanted or ("entropy" if "entropy" in names else names[0])


def headline_score(record: TestRecord, wanted: str | None) -> str:
    """The score that stands for the model on unknown sets: the wanted one, else the verdict's, else what ranks."""
    names = list(record.known.scores)
    by_verdict = record.verdict_score if record.verdict_score in names else None
    return ranking_score(names, wanted or by_verdict)


def class_table(numbers: Sequence[ClassNumbers]) -> LoggedTable:
    """What is known of each class, as a table."""
    return LoggedTable(
        "Each class: how many of its samples are found (recall), how many that are called so are (precision), and the "
        "mean confidence of what is called so, which should equal the precision",
        ["class", "samples", "recall", "precision", "F1", "confidence", "overconfidence"],
        [list(row) for row in numbers],
    )


def score_table(record: TestRecord, most: int) -> LoggedTable:
    """A row for each sample, as in `scores.csv` with answers, of at most so many samples, spread evenly over all."""
    scores, answers = list(record.known.scores), list(record.known.answers)
    total = sum(len(part) for part in record.sets.values())
    rows: list[list[Any]] = []
    for part in record.sets.values():
        chosen = _spread_evenly(len(part), most, total)
        columns: list[list[Any]] = [part.numbers[chosen].tolist()]
        for kept, names in ((part.answers, answers), (part.scores, scores)):
            for name in names:
                columns.append(kept[name][chosen].tolist() if name in kept else [None] * len(chosen))
        rows += [[part.name, *row] for row in zip(*columns, strict=True)]
    named = ["probability" if name == "confidence" and name in scores else name for name in answers]
    return LoggedTable("Scores of single samples", ["set", "sample", *named, *scores], rows)


def _spread_evenly(count: int, most: int, total: int) -> list[int]:
    """Places of the samples that a set of so many has in a table of at most `most` of `total` samples."""
    if total <= most:
        return list(range(count))
    shown = max(1, most * count // total)
    return sorted({i * count // shown for i in range(shown)})


def logged_numbers(record: TestRecord, separations: Mapping[str, Measured]) -> dict[str, float]:
    """What is logged beside the metrics of the model: separations, shares that look unknown, means over shifts."""
    logged: dict[str, float] = {}
    for name, scores in separations.items():
        for score, measures in scores.items():
            for measure, value in measures.items():
                if SEPARATION[measure] is not None:
                    logged[f"ood/{name}/{score}/{measure}"] = float(value)
        if scores:  # the number of samples is that of the set, once
            counts = next(iter(scores.values()))
            logged[f"ood/{name}/n_id"], logged[f"ood/{name}/n_ood"] = float(counts["n_id"]), float(counts["n_ood"])
    for part in record.sets.values():
        unknown = record.look_unknown(part)
        if unknown is not None:
            logged[f"verdict/{part.name}/Unknown"] = unknown / len(part)
    return logged | _means_over_shifts(record)


def _means_over_shifts(record: TestRecord) -> dict[str, float]:
    """The mean of every measure over all shifts, as predicted and calibrated."""
    logged = {}
    for which, measures in means(record.shifts()).items():
        prefix = "shift/scaled/mean" if which == "final" else "shift/mean"
        for measure, value in measures.items():
            logged[f"{prefix}/{measure}"] = value
    return logged


def best_of_separations(separations: Mapping[str, Measured], headline: str) -> dict[str, str]:
    """Key → which value sums up a run: of the headline score the best one, of others none.

    Each would be a panel with one point: dashboards have them in a table, and those of the headline in the summary.
    """
    best = {}
    for name, scores in separations.items():
        for score in scores:
            for measure, better in SEPARATION.items():
                if better is not None:
                    which = "max" if better == "higher" else "min"
                    best[f"ood/{name}/{score}/{measure}"] = which if score == headline else "none"
    return best


def write_scores(path: Path, record: TestRecord) -> None:
    """One row a sample: its set, its number in the set, its scores; a cell is empty where a set lacks a score."""
    names = list(record.known.scores)
    with path.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [["set", "sample", *names]])
        for part in record.sets.values():
            for start in range(0, len(part), ROWS_AT_A_TIME):
                rows = slice(start, start + ROWS_AT_A_TIME)
                columns = [[part.name] * len(part.numbers[rows]), part.numbers[rows].tolist()]
                for name in names:
                    columns.append(part.scores[name][rows].tolist() if name in part.scores else [""] * len(columns[0]))
                write_rows(file, zip(*columns, strict=True))


def separation_rows(separations: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """A row for each set and score: their names, the measures, and both counts as whole numbers."""
    rows = []
    for name, scores in separations.items():
        for score, measures in scores.items():
            row: dict[str, Any] = {"set": name, "score": score}
            for measure, value in measures.items():
                row[measure] = int(value) if measure.startswith("n_") else value
            rows.append(row)
    return rows


def separation_measures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The measures that some row has: without shifts there is no `AUROC_full`, without classes no `SCOD`."""
    return [name for name in SEPARATION if not rows or any(name in row for row in rows)]


def separation_table(rows: Sequence[Mapping[str, Any]]) -> LoggedTable:
    """Set × score × measure, as a table for loggers."""
    columns = ["set", "score", *separation_measures(rows)]
    caption = "How well each score tells each set from the test set; unknown inputs are the positive class"
    return LoggedTable(caption, columns, [[row.get(name) for name in columns] for row in rows])


def metric_entries(collections: Sequence[MetricCollection | None], values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every measure of a test with its value, title, unit and direction."""
    entries = []
    for collection in collections:
        for key, measure in collection.items() if collection is not None else ():
            if key in values and isinstance(measure, Measure):
                value = float(values[key])
                title = measure.title or key.rpartition("/")[2]
                known = {"key": key, "value": value if math.isfinite(value) else None, "title": title}
                entries.append(known | {"unit": measure.unit, "better": measure.better})
    return entries


def to_json(
    record: TestRecord,
    *,
    model: Mapping[str, Any],
    score: str | None,
    ranking: str | None,
    metrics: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    charts: Sequence[Chart],
    matrix: Matrix | None,
    ggt: GGT | None,
    tables: Mapping[str, LoggedTable],
    files: Mapping[str, str],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The record as primitives, numbers as numbers, in the form that `brainet report` and `brainet compare` read.

    `files` holds the file name of the picture of the tree `ggt`, as `TREE`, and the path of each picture in a table, as
    "<table>/<row>/<column>". `settings` are those of the model, for a run without a configuration file.
    """
    seed, figures = os.environ.get("PL_GLOBAL_SEED", ""), []  # what `seed_everything` was given
    if ggt is not None and TREE in files:
        alt = f"Tree of {ggt.num_variables} variables, depth {ggt.depth}; colour is the probability of being used"
        figures = [{"name": TREE, "file": files[TREE], "alt": alt, "group": "structure"}]
    return {
        "format": FORMAT,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": dict(model) | {"passes": record.passes},
        "seed": int(seed) if seed.isdigit() else None,
        "settings": dict(settings),
        "headline_score": score,
        "ranking_score": ranking,
        "level": record.level,
        "verdict_score": record.verdict_score,
        "verdict_samples": record.verdict_samples,
        "sets": [
            {"name": part.name, "samples": len(part), "role": part.role, "unknown": record.look_unknown(part)}
            for part in record.sets.values()
        ],
        "metrics": metrics,
        "separation": rows,
        "shifts": [_finite(part._asdict()) for part in record.shifts()],
        "separation_measures": [{"name": name, "better": SEPARATION[name]} for name in separation_measures(rows)],
        "charts": to_builtins(charts),
        "confusion": to_builtins(matrix),
        "figures": figures,
        "tables": [
            {"name": name, "caption": table.caption, "columns": list(table.columns), "rows": _cells(name, table, files)}
            for name, table in tables.items()
        ],
    }


def _finite(value: Any) -> Any:
    """The same with null in the place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cells(name: str, table: LoggedTable, files: Mapping[str, str]) -> list[list[Any]]:
    """The rows of a table for JSON, with the files of its pictures."""
    rows = []
    for i, row in enumerate(table.rows):
        cells: list[Any] = []
        for j, value in enumerate(row):
            is_picture = isinstance(value, np.ndarray)
            cells.append({"picture": files[f"{name}/{i}/{j}"]} if is_picture else _finite(value))
        rows.append(cells)
    return rows
