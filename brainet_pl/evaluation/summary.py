"""From the record of a test to what people look at: pictures with their descriptions, tables, and one JSON file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
from msgspec import to_builtins
from torchmetrics import MetricCollection

from brainet_pl.evaluation.chart import Chart, Matrix
from brainet_pl.evaluation.charts import ClassNumbers
from brainet_pl.evaluation.record import Measured, TestRecord
from brainet_pl.evaluation.schema import FORMAT
from brainet_pl.metrics.catalogue import SEPARATION
from brainet_pl.metrics.measures import Measure
from brainet_pl.structure import GGT

TREE = "structure/tree"  # the picture of the learned tree


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
        few: Iterable[int] = range(len(part))
        if total > most:
            n = max(1, most * len(part) // total)
            few = sorted({i * len(part) // n for i in range(n)})
        columns = [part.numbers.tolist()]
        for kept, names in ((part.answers, answers), (part.scores, scores)):
            for name in names:
                columns.append(kept[name].tolist() if name in kept else [None] * len(part))
        rows += [[part.name, *(column[i] for column in columns)] for i in few]
    named = ["probability" if name == "confidence" and name in scores else name for name in answers]
    return LoggedTable("Scores of single samples", ["set", "sample", *named, *scores], rows)


def separation_rows(found: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """A row for each set and score: their names, the measures, and both counts as whole numbers."""
    return [
        {"set": name, "score": score} | {m: int(v) if m.startswith("n_") else v for m, v in measures.items()}
        for name, scores in found.items()
        for score, measures in scores.items()
    ]


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
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cells(name: str, table: LoggedTable, files: Mapping[str, str]) -> list[list[Any]]:
    def cell(value: Any, i: int, j: int) -> Any:
        if isinstance(value, np.ndarray):
            return {"picture": files[f"{name}/{i}/{j}"]}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [[cell(value, i, j) for j, value in enumerate(row)] for i, row in enumerate(table.rows)]
