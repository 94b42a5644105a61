"""The schema of record.json: everything that a test found, as typed values, and what is wrong with a damaged one.

`msgspec` decodes strictly: a text is never taken for a number, and a number never for true or false. Fields that the
schema does not know are ignored. Nothing here needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from msgspec import Struct, ValidationError, convert
from msgspec.structs import fields

from brainet_pl.evaluation.chart import Chart, ChartGroup, Count, Finite, Matrix
from brainet_pl.metrics.catalogue import SEPARATION, Better, MeasureUnit

FORMAT = 3  # of record.json


class PartCost(Struct, frozen=True):
    """What a part of the model costs: parameters, operations for one sample, seconds for a batch."""

    parameters: Count
    flops: Finite
    seconds: Finite


class ModelCosts(Struct, frozen=True):
    """What a prediction costs: the size of the batch that was timed, and each part that was measured."""

    samples: Count
    backbone: PartCost | None
    head: PartCost | None
    one_pass: PartCost | None

    def parts(self) -> dict[str, PartCost]:
        """The parts that were measured, in the order of a prediction."""
        listed = {"backbone": self.backbone, "head": self.head, "one_pass": self.one_pass}
        return {name: cost for name, cost in listed.items() if cost is not None}


class Model(Struct, frozen=True):
    """What the test says about the model. None stands for what a model does not have, such as passes.

    `calibration` names the calibrator, and `calibrated` says whether it has learned from validation data. `expected` is
    the sentence on what the verdict should notice, and `expected_share` its number. `promise` is the sentence on the
    share of inputs that may be answered.
    """

    head: str
    task: str | None
    head_parameters: Count | None
    parameters: Count | None
    passes: Count | None
    temperature: float | None
    costs: ModelCosts | None = None
    calibration: str | None = None
    calibrated: bool = True
    expected: str | None = None
    expected_share: float | None = None
    promise: str | None = None


class DataSet(Struct, frozen=True):
    """A set of samples that was tested, what it is to the model (known, near or far), and how many look unknown."""

    name: str
    samples: Count
    role: Literal["known", "near", "far"]
    unknown: Count | None = None


class MetricValue(Struct, frozen=True):
    """A number of the test: its value, title, unit, and which direction is better (None: neither)."""

    key: str
    value: float | None
    title: str
    unit: MeasureUnit
    better: Better


class SeparationMeasure(Struct, frozen=True):
    """A measure of separation, a column of its table, and which direction is better (None: a count)."""

    name: str
    better: Better


class Separation(Struct, frozen=True):
    """How well one score tells one set from the test set; a measure is None where it has no value."""

    set: str
    score: str
    AUROC: float | None = None
    AUPR_out: float | None = None
    AUPR_in: float | None = None
    FPR95: float | None = None
    DetErr: float | None = None
    AUROC_full: float | None = None
    SCOD: float | None = None
    n_id: float | None = None
    n_ood: float | None = None

    def value(self, measure: str) -> float | None:
        """The value of a measure; None where there is none of this name."""
        value: float | None = getattr(self, measure) if measure in SEPARATION else None
        return value


class ShiftedMeasures(Struct, frozen=True):
    """What was measured after one shift of the test set ("clean" of severity 0 is none), before and after calibration.

    A measure is None where it has no value, and `final` where nothing is calibrated.
    """

    corruption: str
    severity: Count
    samples: Count
    predicted: dict[str, float | None]
    final: dict[str, float | None] | None = None


class FigureFile(Struct, frozen=True):
    """A figure of the test: a file in the run's folder `figures`, what it shows in words, and where it belongs."""

    name: str
    file: str
    alt: str
    group: ChartGroup


class Thumbnail(Struct, frozen=True):
    """A cell that is a picture: a file in the run's folder `tables`."""

    picture: str


CellValue = str | bool | float | None | Thumbnail


class RecordTable(Struct, frozen=True):
    """A table of the test; each row has one cell for each column."""

    name: str
    caption: str
    columns: list[str]
    rows: list[list[CellValue]]

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"{len(self.columns)} cells @ rows[{i}]")


class Record(Struct, frozen=True):
    """The content of record.json: everything that a test found.

    `headline_score` is the score that stands for the model on unknown sets: the verdict's, where there is a verdict.
    `ranking_score` orders test samples by doubt; `verdict_samples` counts the validation samples behind the verdict.
    """

    format: Literal[3]
    separation_measures: list[SeparationMeasure]
    created: str
    model: Model
    headline_score: str | None
    sets: list[DataSet]
    metrics: list[MetricValue]
    separation: list[Separation]
    figures: list[FigureFile]
    tables: list[RecordTable]
    charts: list[Chart]
    confusion: Matrix | None
    seed: Count | None
    settings: dict[str, Any]
    level: float | None = None
    verdict_score: str | None = None
    verdict_samples: Count | None = None
    ranking_score: str | None = None
    shifts: list[ShiftedMeasures] = []

    def known_set(self) -> DataSet | None:
        """The known test set."""
        return next((part for part in self.sets if part.role == "known"), None)

    def unknown_sets(self) -> list[DataSet]:
        """All other sets, in their order."""
        return [part for part in self.sets if part.role != "known"]

    def values(self) -> dict[str, float]:
        """Key → value of every metric that has one."""
        return {metric.key: metric.value for metric in self.metrics if metric.value is not None}

    def headline_aurocs(self) -> dict[str, float | None]:
        """Unknown set → AUROC by the score that stands for the model."""
        return {row.set: row.AUROC for row in self.separation if row.score == self.headline_score}


# -- decoding ---------------------------------------------------------------------------------------------------------

WORDS = {
    "str": "a text",
    "str | null": "a text",
    "int": "a count",
    "int | null": "a count",
    "float": "a finite number",
    "float | null": "a number or null",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "Number out of range": "a number",
}


def parse_record(content: Mapping[str, Any]) -> Record:
    """The object in record.json → a record; an error says which value is not what it should be."""
    try:
        charts = content.get("charts")
        for i, chart in enumerate(charts) if isinstance(charts, list) else ():
            _require_all(Chart, chart, f".charts[{i}]")
        return convert(content, Record)
    except ValidationError as error:
        raise ValueError(_explained(str(error), content)) from error


def _require_all(kind: type[Struct], given: Any, where: str) -> None:
    """A chart in a file has all of its fields; only the code that makes one may leave some at their defaults."""
    for field in fields(kind) if isinstance(given, dict) else ():
        if field.name not in given:
            raise ValidationError(f"Object missing required field `{field.name}` - at `${where}`")
        structs = [one for one in _alternatives(field.type) if isinstance(one, type) and issubclass(one, Struct)]
        if not structs:
            continue
        inner, value = structs[0], given[field.name]
        if not isinstance(value, list):
            _require_all(inner, value, f"{where}.{field.name}")
            continue
        for i, item in enumerate(value):
            _require_all(inner, item, f"{where}.{field.name}[{i}]")


def _explained(message: str, content: Any) -> str:
    """A message of msgspec, or "<what> @ <where>" of a check above, as "expected <what> as <where>, got <value>"."""
    message, _, where = message.rpartition(" - at `$") if " - at `$" in message else (message, "", "")
    where = where.strip("`.")
    if message.startswith("Invalid enum value"):  # which quotes what came: nothing in it is a place
        expected = f"one of {', '.join(map(json.dumps, _choices(where)))}"
    else:
        what, _, inner = message.partition(" @ ")
        where = ".".join(filter(None, (where, inner)))
        quoted = re.match(r"Expected `([^`]*)`", what)
        expected = quoted.group(1) if quoted else what
    value = content
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", where):
        value = value.get(name) if name else value[int(index)]
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        key = ".".join(filter(None, (where, missing.group(1))))
        return f"expected the key {key}, got only {shortened(', '.join(value)) or 'an empty object'}"
    return f"expected {WORDS.get(expected, expected)} as {where}, got {shortened(json.dumps(value))}"


def _choices(where: str) -> list[Any]:
    """The values that a field of the record may have."""
    kind: Any = Record
    alternatives: list[Any] = []
    for name in re.findall(r"[a-zA-Z_]\w*", where):
        alternatives = _alternatives(get_type_hints(kind)[name])
        kind = next((one for one in alternatives if isinstance(one, type)), kind)
    return alternatives


def _alternatives(kind: Any) -> list[Any]:
    """list[X], X | None and Literal → what is inside them."""
    parts = get_args(kind)
    if not parts:
        return [None if kind is NoneType else kind]
    alternatives: list[Any] = []
    for part in parts:
        alternatives += _alternatives(part)
    return alternatives


def shortened(text: str, most: int = 80) -> str:
    """The text, or its beginning and dots."""
    return text if len(text) <= most else text[: most - 3] + "..."
