"""Read the folder of a run into typed values; every number is checked once, here."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from brainet_pl.evaluation.chart import KINDS, UNITS, Axis, Chart, Matrix, Panel, Series

if TYPE_CHECKING:  # a page of many runs is made without torch
    from brainet_pl.structure import GGT

FORMAT = 3  # of record.json; format 2 had pictures in place of charts, format 1 was dashboard.json with its CSV files
ROLES = ("known", "near", "far")
MEASURED = ("share", "nats", "", "target")
BETTER = ("higher", "lower", None)
GROUPS = ("test", "shift", "ood", "structure")
KNOWN_FILES = ("record.json", "metrics.csv", "config.yaml")

History = dict[str, tuple[list[float], list[float]]]


class Cost(NamedTuple):
    """What a part of the model costs: parameters, operations for one sample, seconds for a batch."""

    part: str
    parameters: int
    flops: float
    seconds: float


class Model(NamedTuple):
    """What the test says about the model. None stands for what a model does not have, such as passes."""

    head: str
    task: str | None
    head_parameters: int | None
    parameters: int | None
    passes: int | None
    temperature: float | None
    costs: list[Cost] = []  # noqa: RUF012  never changed
    batch: int | None = None  # samples of the batch that was timed


class DataSet(NamedTuple):
    """A set of samples that was tested, what it is to the model (known, near or far), and how many look unknown."""

    name: str
    samples: int
    role: str
    unknown: int | None = None


class Metric(NamedTuple):
    """A number of the test: its value, how it is called, its unit, and which direction is better (None: neither)."""

    key: str
    value: float | None
    title: str
    unit: str
    better: str | None


class Measure(NamedTuple):
    """A measure of separation, a column of its table, and which direction is better (None: a count)."""

    name: str
    better: str | None


class Separation(NamedTuple):
    """How well one score tells one set from the test set: the value of each measure, None where there is none."""

    set: str
    score: str
    values: dict[str, float | None]


class Drawn(NamedTuple):
    """A figure of the test: a file in the run's folder `figures`, what it shows in words, and where it belongs."""

    name: str
    file: str
    alt: str
    group: str


class Thumbnail(NamedTuple):
    """A cell that is a picture: a file in the run's folder `tables`."""

    file: str


CellValue = str | bool | float | None | Thumbnail


class Listed(NamedTuple):
    """A table of the test; each row has one cell for each column."""

    name: str
    caption: str
    columns: list[str]
    rows: list[list[CellValue]]


class Record(NamedTuple):
    """The content of record.json: everything that a test found."""

    created: str
    model: Model
    headline_score: str | None
    sets: list[DataSet]
    metrics: list[Metric]
    separation: list[Separation]
    measures: list[Measure]
    figures: list[Drawn]
    tables: list[Listed]
    charts: list[Chart]
    confusion: Matrix | None
    seed: int | None
    settings: dict[str, Any]
    level: float | None = None


class Run(NamedTuple):
    """What the folder of a run holds; without a record it was only fitted."""

    folder: Path
    record: Record | None
    history: History
    config: str
    ggt: GGT | None


# -- the folder -----------------------------------------------------------------------------------------------------


def read_run(folder: str | Path) -> Run:
    """Read a run's folder, or say why it is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the folder of a run, found none at {folder}: check the path")
    if (folder / "dashboard.json").is_file() and not (folder / "record.json").is_file():
        raise ValueError(
            f"expected record.json in {folder}, got dashboard.json, made by version 0.1; test the model again"
        )
    if not any((folder / name).is_file() for name in KNOWN_FILES):
        deeper = sorted(path.parent for name in KNOWN_FILES for path in folder.glob(f"*/{name}"))
        hint = f"did you mean {deeper[-1]}?" if deeper else "run `brainet fit` or `brainet test` first"
        listed = ", ".join(KNOWN_FILES)
        raise FileNotFoundError(
            f"expected the folder of a run, with at least one of {listed}, got {folder} without any: {hint}"
        )
    config = folder / "config.yaml"
    return Run(
        folder=folder,
        record=read_record(folder / "record.json"),
        history=read_history(folder / "metrics.csv"),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        ggt=_read_structure(folder),
    )


def read_history(path: Path) -> History:
    """metrics.csv → metric → (steps, values), empty cells left out; without the file, nothing."""
    found: History = {}
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if text and name not in (None, "step", "epoch"):
                        steps, values = found.setdefault(name, ([], []))
                        steps.append(_csv_number(path, "step", row.get("step") or "0"))
                        values.append(_csv_number(path, name, text))
    return found


def _csv_number(path: Path, column: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"expected a number in the column {column!r} of {path}, got {text!r}: fit or test the model again"
        ) from None


def _read_structure(folder: Path) -> GGT | None:
    paths = [path for path in (folder / "structure.json", folder / "checkpoints" / "structure.json") if path.is_file()]
    if not paths:
        return None
    from brainet_pl.structure import GGT

    try:
        return GGT.from_json(paths[0].read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected a learned structure in {paths[0]}, got {error!r}: fit the model again") from error


def inside(folder: Path, file: str) -> Path | None:
    """The file of that relative name, if there is one and it does not lie outside the folder."""
    try:
        path = (folder / file).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except (OSError, ValueError):  # a name that no file can have: too long, or with a zero byte
        return None


# -- the record -----------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A value somewhere in a JSON document, with the way to it; asked for as a type, it is that or an error."""

    value: Any
    where: str

    def wrong(self, expected: str) -> NoReturn:
        """Say what was expected here, and what came."""
        raise ValueError(f"expected {expected} as {self.where}, got {_short(json.dumps(self.value))}")

    def child(self, key: str) -> Node:
        """The value under a key that must be there."""
        if not isinstance(self.value, dict):
            self.wrong("an object")
        where = f"{self.where}.{key}" if self.where else key
        if key not in self.value:
            raise ValueError(f"expected the key {where}, got only {_short(', '.join(self.value)) or 'an empty object'}")
        return Node(self.value[key], where)

    def children(self) -> list[Node]:
        """Gives the values of a list, each with its place."""
        if not isinstance(self.value, list):
            self.wrong("a list")
        return [Node(value, f"{self.where}[{i}]") for i, value in enumerate(self.value)]

    def text(self) -> str:
        """Gives the value, which must be a text."""
        if not isinstance(self.value, str):
            self.wrong("a text")
        return self.value

    def text_or_none(self) -> str | None:
        """Gives the value, which must be a text or null."""
        return None if self.value is None else self.text()

    def number_or_none(self) -> float | None:
        """A number, or null. Whole numbers stay whole."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or _too_long(self.value):
            self.wrong("a number or null")
        return self.value

    def whole(self) -> int:
        """A whole number of at least 0."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < 0 or _too_long(self.value):
            self.wrong("a count")
        return self.value

    def whole_or_none(self) -> int | None:
        """A whole number of at least 0, or null."""
        return None if self.value is None else self.whole()

    def numbers(self) -> list[float]:
        """Gives the value, which must be a list of finite numbers."""
        if not isinstance(self.value, list) or not all(
            isinstance(v, int | float) and not isinstance(v, bool) and not _too_long(v) and math.isfinite(v)
            for v in self.value
        ):
            self.wrong("a list of finite numbers")
        return [float(v) for v in self.value]

    def mapping(self) -> dict[str, Any]:
        """An object, whatever is in it."""
        if not isinstance(self.value, dict):
            self.wrong("an object")
        return self.value

    def one_of(self, choices: tuple[str | bool | None, ...]) -> Any:
        """One of a few texts, or null where that is one of them."""
        if not any(self.value is choice or (self.value == choice and type(choice) is str) for choice in choices):
            self.wrong(f"one of {', '.join(json.dumps(choice) for choice in choices)}")
        return self.value


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _too_long(value: float) -> bool:
    """Whether a whole number, which JSON does not limit, is too long to become a float."""
    return isinstance(value, int) and abs(value) >= 10**300


def read_record(path: Path) -> Record | None:
    """record.json, checked; None if there is no such file, and one clear error if it is not what it should be."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {path}, got something else ({error}): test the model again") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object in {path}, got {type(content).__name__}: test the model again")
    if type(content.get("format")) is not int or content["format"] != FORMAT:
        got = _short(json.dumps(content["format"])) if "format" in content else "none"
        raise ValueError(f"expected format {FORMAT} in {path}, got {got}: test the model again with this version")
    try:
        return parse_record(content)
    except ValueError as error:
        raise ValueError(f"{error}, in {path}: test the model again") from error


def parse_record(content: dict[str, Any]) -> Record:
    """The object in record.json → a record; an error says which value is not what it should be."""
    root = Node(content, "")
    measures = [
        Measure(part.child("name").text(), part.child("better").one_of(BETTER))
        for part in root.child("separation_measures").children()
    ]
    return Record(
        created=root.child("created").text(),
        model=_model(root.child("model")),
        headline_score=root.child("headline_score").text_or_none(),
        sets=[_set(part) for part in root.child("sets").children()],
        metrics=[_metric(part) for part in root.child("metrics").children()],
        separation=[_separation(part, measures) for part in root.child("separation").children()],
        measures=measures,
        figures=[_drawn(part) for part in root.child("figures").children()],
        tables=[_listed(part) for part in root.child("tables").children()],
        charts=[_chart(part) for part in root.child("charts").children()],
        confusion=_matrix(root.child("confusion")),
        seed=root.child("seed").whole_or_none(),
        settings=root.child("settings").mapping(),
        level=root.child("level").number_or_none() if "level" in content else None,
    )


def _set(node: Node) -> DataSet:
    unknown = node.child("unknown").whole_or_none() if "unknown" in node.mapping() else None
    return DataSet(node.child("name").text(), node.child("samples").whole(), node.child("role").one_of(ROLES), unknown)


def _model(node: Node) -> Model:
    costs = node.child("costs") if "costs" in node.mapping() else None
    return Model(
        head=node.child("head").text(),
        task=node.child("task").text_or_none(),
        head_parameters=node.child("head_parameters").whole_or_none(),
        parameters=node.child("parameters").whole_or_none(),
        passes=node.child("passes").whole_or_none(),
        temperature=node.child("temperature").number_or_none(),
        costs=[] if costs is None else _costs(costs),
        batch=None if costs is None else costs.child("samples").whole(),
    )


def _costs(node: Node) -> list[Cost]:
    """The parts that were measured, in the order of a prediction."""
    found = []
    for part in ("backbone", "head", "one_pass"):
        cost = node.child(part)
        if cost.value is not None:
            flops, seconds = (
                Node([cost.child(k).value], cost.child(k).where).numbers()[0] for k in ("flops", "seconds")
            )
            found.append(Cost(part, cost.child("parameters").whole(), flops, seconds))
    return found


def _metric(node: Node) -> Metric:
    return Metric(
        key=node.child("key").text(),
        value=node.child("value").number_or_none(),
        title=node.child("title").text(),
        unit=node.child("unit").one_of(MEASURED),
        better=node.child("better").one_of(BETTER),
    )


def _separation(node: Node, measures: list[Measure]) -> Separation:
    """A row; a measure that it does not have, as the mean over sets has no count, is None."""
    return Separation(
        set=node.child("set").text(),
        score=node.child("score").text(),
        values={m.name: node.child(m.name).number_or_none() if m.name in node.value else None for m in measures},
    )


def _drawn(node: Node) -> Drawn:
    name, file, alt = (node.child(key).text() for key in ("name", "file", "alt"))
    return Drawn(name, file, alt, node.child("group").one_of(GROUPS))


def _listed(node: Node) -> Listed:
    columns = [column.text() for column in node.child("columns").children()]
    rows = node.child("rows").children()
    for row in rows:
        if len(row.children()) != len(columns):
            row.wrong(f"{len(columns)} cells")
    return Listed(
        name=node.child("name").text(),
        caption=node.child("caption").text(),
        columns=columns,
        rows=[[_cell(cell) for cell in row.children()] for row in rows],
    )


def _chart(node: Node) -> Chart:
    name, caption, alt = (node.child(key).text() for key in ("name", "caption", "alt"))
    panels = [_panel(panel) for panel in node.child("panels").children()]
    if not panels:
        node.child("panels").wrong("at least one panel")
    choose = node.child("choose").one_of((True, False))
    return Chart(name, node.child("group").one_of(GROUPS), caption, alt, panels, choose)


def _panel(node: Node) -> Panel:
    return Panel(
        node.child("key").text(),
        node.child("title").text(),
        _axis(node.child("x")),
        _axis(node.child("y")),
        [_series(series) for series in node.child("series").children()],
    )


def _axis(node: Node) -> Axis:
    low, high = (node.child(key).number_or_none() for key in ("low", "high"))
    log = node.child("log").one_of((True, False))
    if log and not (low is not None and low > 0):
        node.child("low").wrong("a number above 0 where the axis begins")
    if low is not None and high is not None and not low < high:
        node.child("high").wrong("a number above the lower end")
    return Axis(node.child("label").text(), node.child("unit").one_of(UNITS), low, high, log)


def _series(node: Node) -> Series:
    x, y = (node.child(key).numbers() for key in ("x", "y"))
    kind = node.child("kind").one_of(KINDS)
    low, high = (None if node.child(key).value is None else node.child(key).numbers() for key in ("low", "high"))
    if len(x) != len(y) + (kind == "bars"):
        node.child("x").wrong(f"{len(y) + (kind == 'bars')} numbers")
    for name, ends in (("low", low), ("high", high)):
        if ends is not None and len(ends) != len(y):
            node.child(name).wrong(f"{len(y)} numbers")
    return Series(
        node.child("name").text(),
        x,
        y,
        kind,
        node.child("note").text(),
        low,
        high,
        node.child("shown").one_of((True, False)),
        node.child("group").text(),
    )


def _matrix(node: Node) -> Matrix | None:
    if node.value is None:
        return None
    names = [name.text() for name in node.child("names").children()]
    rows = node.child("counts").children()
    if len(rows) != len(names) or any(len(row.children()) != len(names) for row in rows):
        node.child("counts").wrong(f"{len(names)} rows of {len(names)} counts")
    return Matrix(names, [[cell.whole() for cell in row.children()] for row in rows])


def _cell(node: Node) -> CellValue:
    if isinstance(node.value, dict):
        return Thumbnail(node.child("picture").text())
    if isinstance(node.value, str | bool):
        return node.value
    if isinstance(node.value, list):
        node.wrong('a text, a number, null or {"picture": FILE}')
    return node.number_or_none()
