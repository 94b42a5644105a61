"""From the record of a test to what people look at: figures with their descriptions, tables, and one JSON file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from torchmetrics import MetricCollection

from brainet_pl.evaluation import figures
from brainet_pl.evaluation.curves import SEPARATION, risk_coverage, separation
from brainet_pl.evaluation.metrics import Measure
from brainet_pl.evaluation.passes import pass_metrics
from brainet_pl.evaluation.record import MOST_TRACED, Measured, TestRecord
from brainet_pl.structure import GGT
from brainet_pl.structure.draw import draw_ggt

FORMAT = 2  # of the JSON form


class Picture(NamedTuple):
    """A figure, what it shows in words, and the part of a report that it belongs to: test, shift, ood or structure."""

    figure: Figure
    alt: str
    group: str


class TableData(NamedTuple):
    """A table of numbers, texts and pictures: uint8 arrays (H, W) or (H, W, 3)."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def headline(names: Sequence[str], wanted: str | None) -> str:
    """The one of these scores that ranks samples: the wanted one, else the entropy, or the first there is."""
    if wanted is not None and wanted not in names:
        raise ValueError(f"expected score to be one of {', '.join(names)}, got {wanted!r}: change Evaluation's")
    return wanted or ("entropy" if "entropy" in names else names[0])


def pictures(
    record: TestRecord, found: Mapping[str, Measured], label: str | None, ggt: GGT | None, temperature: float | None
) -> dict[str, Picture]:
    """All figures that the record has the numbers for, by name; `label` says what calibration did."""
    drawn = _test_pictures(record, label)
    for part in record.unknown:
        known, measured = record.known.rankable(), found.get(part.name, {})
        inside = {score: known[score] for score in measured}
        if not inside:
            continue
        name, outside = part.name, part.rankable()
        listed = ", ".join(f"{figures.readable(s)} {m['AUROC']:.3f}" for s, m in measured.items())
        drawn[f"ood/{name}/histograms"] = Picture(
            figures.score_histograms(inside, outside, name, measured, record.units),
            f"Histograms of {len(inside)} scores on the test set and on {figures.readable(name)}",
            "ood",
        )
        drawn[f"ood/{name}/curves"] = Picture(
            figures.ood_curves(inside, outside, name, measured),
            f"ROC and precision-recall curves on {figures.readable(name)}; AUROC: {listed}",
            "ood",
        )
    if ggt is not None:
        alt = f"Tree of {ggt.num_variables} variables, depth {ggt.depth}; colour is the probability of being used"
        drawn["structure/tree"] = Picture(draw_ggt(ggt, 1.0 if temperature is None else temperature), alt, "structure")
    return drawn


def _test_pictures(record: TestRecord, label: str | None) -> dict[str, Picture]:
    """Figures of the known set, of a task with right and wrong answers; of another, none."""
    known = record.known
    if "wrong" not in known.answers or "confidence" not in known.answers:
        return {}
    wrong, confidence = known.answers["wrong"], known.answers["confidence"]
    shown = {"as predicted": (confidence, 1.0 - wrong)}
    if label is not None and "calibrated" in known.answers:
        shown = {"before scaling": (confidence, 1.0 - wrong), label: (known.answers["calibrated"], 1.0 - wrong)}
    ece = {name: figures.calibration_bins(*pair).ece for name, pair in shown.items()}
    told = "; ".join(f"{name}, expected calibration error {100 * value:.2f} %" for name, value in ece.items())
    alt = f"Reliability diagram of {len(wrong):,} test samples: {told}"
    drawn = {"test/reliability": Picture(figures.reliability(shown), alt, "test")}
    scores = known.rankable()
    if scores:
        areas = {name: float(risk_coverage(values, wrong).mean()) for name, values in scores.items()}
        best = min(areas, key=lambda name: areas[name])
        drawn["test/risk_coverage"] = Picture(
            figures.risk_coverage_curves(scores, wrong),
            f"Error rate against coverage for {len(areas)} scores: {100 * float(wrong.mean()):.2f} % when all are "
            f"answered; the smallest area, {100 * areas[best]:.2f} %, is that of {figures.readable(best)}",
            "test",
        )
    if known.sums is not None and len(record.steps) > 1:
        curves = pass_metrics(known.sums)
        few = any(len(part) > MOST_TRACED for part in record.sets.values() if part.running)
        told = f"AUROC of {MOST_TRACED:,} samples of each set at the most" if few else ""
        drawn["test/passes"] = Picture(
            figures.pass_curves(record.steps, curves, _running_aurocs(record), len(wrong), told),
            f"Metrics of the mean of the first t passes, t from 1 to {record.steps[-1]}: negative log-likelihood from "
            f"{curves['NLL'][0]:.3f} to {curves['NLL'][-1]:.3f}, error from {100 * curves['error'][0]:.2f} % to "
            f"{100 * curves['error'][-1]:.2f} %{'; ' if told else ''}{told}",
            "test",
        )
    return drawn


def _running_aurocs(record: TestRecord) -> dict[str, dict[str, list[float]]]:
    """Score → set → AUROC of the mean of the first t passes, for each t."""
    sets = {part.name: part.running for part in record.unknown if part.running}
    found: dict[str, dict[str, list[float]]] = {}
    for score, inside in record.known.running.items():
        if inside.isnan().any() or any(score not in part or part[score].isnan().any() for part in sets.values()):
            continue
        found[score] = {
            name: [separation(a, b)["AUROC"] for a, b in zip(inside, part[score], strict=True)]
            for name, part in sets.items()
        }
    return found if sets else {}


def separation_rows(found: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """A row for each set and score: their names, the measures, and both counts as whole numbers."""
    return [
        {"set": name, "score": score} | {m: int(v) if m.startswith("n_") else v for m, v in measures.items()}
        for name, scores in found.items()
        for score, measures in scores.items()
    ]


def separation_table(rows: Sequence[Mapping[str, Any]]) -> TableData:
    """Set × score × measure, as a table for loggers."""
    columns = ["set", "score", *SEPARATION]
    caption = "How well each score tells each set from the test set; unknown inputs are the positive class"
    return TableData(caption, columns, [[row[name] for name in columns] for row in rows])


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
    metrics: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    drawn: Mapping[str, Picture],
    tables: Mapping[str, TableData],
    files: Mapping[str, str],
) -> dict[str, Any]:
    """The record as primitives, numbers as numbers, in the form that `brainet report` reads.

    `files` holds the file name of each figure and the path of each picture in a table, by the name of the figure and by
    "<table>/<row>/<column>".
    """
    return {
        "format": FORMAT,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": dict(model) | {"passes": record.passes},
        "headline_score": score,
        "sets": [{"name": part.name, "samples": len(part), "role": part.role} for part in record.sets.values()],
        "metrics": metrics,
        "separation": rows,
        "shifts": [_finite(part._asdict()) for part in record.shifts()],
        "separation_measures": [{"name": name, "better": better} for name, better in SEPARATION.items()],
        "figures": [{"name": n, "file": files[n], "alt": p.alt, "group": p.group} for n, p in drawn.items()],
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


def _cells(name: str, table: TableData, files: Mapping[str, str]) -> list[list[Any]]:
    def cell(value: Any, i: int, j: int) -> Any:
        if isinstance(value, np.ndarray):
            return {"picture": files[f"{name}/{i}/{j}"]}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [[cell(value, i, j) for j, value in enumerate(row)] for i, row in enumerate(table.rows)]
