"""The page of a test of a swapped model: the record, charts and page of Lightning's tests, without a Trainer."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchmetrics import MetricCollection

from brainet_pl._utils.parts import primitive
from brainet_pl.backbones.batches import move
from brainet_pl.evaluation import charts, summary
from brainet_pl.evaluation.chart import readable
from brainet_pl.evaluation.record import Role, TestRecord, group_means
from brainet_pl.evaluation.report import write_report
from brainet_pl.features.extraction import inputs_and_target, inputs_of, unshuffled
from brainet_pl.lightning import steps
from brainet_pl.lightning.steps import EvaluatedBatch
from brainet_pl.metrics.sets import TEST
from brainet_pl.swap.data import input_batches, labelled_batches
from brainet_pl.swap.model import SwappedModel

COMPARED = {"swapped": "head", "linear": "linear", "network": "own"}  # names of a `Comparison`, and of logged metrics


@torch.no_grad()
def report_swapped(
    model: SwappedModel, path: str | Path, test: Any, unknown: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Test a model and write the page of the test; gives its metrics by name.

    Args:
        model: a fitted model.
        path: the file to write, such as page.html.
        test: inputs and labels that it has never met.
        unknown: name → inputs unlike the training data, to see whether they are noticed.
    """
    model.eval()
    loaders = {TEST: labelled_batches(test, TEST)}
    loaders |= {name: input_batches(data, None) for name, data in (unknown or {}).items()}
    roles: dict[str, Role] = {name: "known" if name == TEST else "far" for name in loaders}
    record, metrics = TestRecord(roles, model.scores.units), steps.test_metrics(model.task)
    for name, loader in loaders.items():
        first = 0
        for batch in unshuffled(loader):
            seen = _evaluate(model, batch, first, metrics if name == TEST else {})
            first += len(seen.numbers)
            record.add(name, seen.numbers, steps.sample_batch(model, seen, with_shifts=False))
    record = record.gather()
    values = {key: float(value) for part in metrics.values() for key, value in _computed(part).items()}
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(path).resolve()
        content = _content(model, record, metrics, values)
        Path(scratch, "record.json").write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        write_report(scratch, path, title=readable(page.stem), history=_comparison_as_history(model))
    return values


def _comparison_as_history(model: SwappedModel) -> dict[str, tuple[list[float], list[float]]]:
    """What the fit found beside other layers, under the keys that a Trainer's fit logs it with."""
    history: dict[str, tuple[list[float], list[float]]] = {}
    if model.comparison is not None:
        for name, key in COMPARED.items():
            if name in model.comparison.nll:
                history[f"versus/{key}/NLL"] = [0.0], [model.comparison.nll[name]]
            if name in model.comparison.gains:
                history[f"versus/{key}/Error"] = [0.0], [model.comparison.gains[name][1]]
    return history


def _computed(metrics: MetricCollection) -> Mapping[str, Any]:
    updated = all(metric.update_called for metric in metrics.values())
    return metrics.compute() if updated else {}


def _evaluate(model: SwappedModel, batch: Any, first: int, metrics: Mapping[str, MetricCollection]) -> EvaluatedBatch:
    """Run a batch; that of the known set has metrics, and so labels."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x, target = inputs_and_target(batch, model.columns) if metrics else (inputs_of(batch, model.columns), None)
    passes = model.passes(move(x, device))
    scores, numbers = model.all_scores(passes), torch.arange(first, first + len(passes.predicted))
    if target is None:
        return EvaluatedBatch(numbers, passes, scores, None)
    target = model.task.check(torch.as_tensor(target).to(device))
    return steps.measure(model, passes, scores, numbers, target, metrics)


def _content(
    model: SwappedModel, record: TestRecord, metrics: Mapping[str, MetricCollection], values: Mapping[str, float]
) -> dict[str, Any]:
    """The record of the test as `write_report` reads it."""
    found = record.separations()
    found |= group_means(found, list(record.unknown))
    score, ranking = summary.headline_score(record, None), summary.ranking_score(list(record.known.scores), None)
    label = None if model.calibration is None else model.calibration.label()
    classes = charts.class_numbers(record.known)
    facts: dict[str, Any] = {
        "head": type(model.head).__name__ if model.settings is None else type(model.settings).__name__,
        "task": type(model.task).__name__,
        "head_parameters": model.head.num_params,
        "parameters": sum(p.numel() for p in model.parameters()),
        "temperature": None,
        "calibration": None if model.calibration is None else type(model.calibration).__name__,
        "calibrated": model.calibrates,
        "promise": model.risk.sentence(),
    }
    if model.expected is not None:
        share = None if math.isnan(model.expected_noticed) else model.expected_noticed
        facts |= {"expected": str(model.expected), "expected_share": share}
    return summary.to_json(
        record,
        model=facts | model.head.facts(),
        score=score,
        ranking=ranking,
        metrics=summary.metric_entries(list(metrics.values()), values),
        rows=summary.separation_rows(found),
        charts=charts.charts_of(record, found, label, ranking, score),
        matrix=charts.confusion(record.known),
        ggt=model.ggt,
        tables={"test/classes": summary.class_table(classes)} if classes else {},
        files={},
        settings=primitive({"head": model.settings, "layers": model.backbone.evidence}),
    )
