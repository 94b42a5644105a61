"""Decide what the page of a run shows, in which order and in which words; the template only marks it up.

Every function here takes typed values and returns plain text, never HTML.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from brainet_pl._utils.inside import find_inside
from brainet_pl.evaluation.chart import Matrix, readable
from brainet_pl.evaluation.report.plot import Drawing, chart_of_history, drawing_of, styles_of
from brainet_pl.evaluation.report.read import Run
from brainet_pl.evaluation.report.rules import RULES
from brainet_pl.evaluation.report.verdict import CALIBRATED, Line, verdict_of
from brainet_pl.evaluation.schema import CellValue, MetricValue, Record, RecordTable, Thumbnail
from brainet_pl.metrics.catalogue import facts_of

if TYPE_CHECKING:
    from brainet_pl.structure import GGT

# Which numbers are headlines, in this order.
CARDS = ("cls/Acc", "reg/RMSE", "reg/NLL", "cls/NLL", "cal/ECE", "cal/QCE", "cal/coverage95", "sc/AURC")
UNIT_NOTES = {"share": "", "nats": "nats", "": "", "target": "in units of the target"}
ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}
TRAINING = ("train/loss", "cls/NLL", "reg/NLL", "cls/Acc", "reg/RMSE", "cal/ECE", "cal/QCE", "train/lr")  # curves
CAPTIONS: dict[str, dict[str, str]] = {  # of pictures, by their group, then by the last part of their name
    "structure": {
        "tree": "The learned tree: each row splits sets of features by tests of the next order.",
        "network": "One sub-network: inputs at the bottom, each dense layer above what it reads.",
    },
}
UNLISTED = {  # figures drawn outside a test, which no record lists: file → name, group
    "structure_tree.png": ("structure/tree", "structure"),
    "structure_network.png": ("structure/network", "structure"),
}
LONG = 60  # letters of a cell, above which it has several lines
UNKNOWN, DOUBTFUL, CLASSES = "test/most_unknown", "test/most_uncertain", "test/classes"
MOST_COLUMNS = 10  # of single samples, that fit on a desktop
MOST_ROWS = 40  # of a table that is not folded away
COLUMNS = 3  # of charts, on a wide screen
NONE = "–"


class Card(NamedTuple):
    """A headline: a name, its number, and what to know about it."""

    name: str
    value: str
    note: str


class Picture(NamedTuple):
    """A PNG as a data URI, its size in pixels, and what it shows."""

    source: str
    width: int
    height: int
    alt: str


class Figure(NamedTuple):
    """A picture with a caption; a wide one is too fine for a phone's width and is moved there under the finger."""

    picture: Picture
    caption: str
    wide: bool


class Figures(NamedTuple):
    """A block of the page with figures in columns."""

    figures: list[Figure]
    kind: str = "figures"


class Charts(NamedTuple):
    """Drawn charts side by side; those of an unknown set are seen when it is chosen."""

    charts: list[Drawing]
    set: str = ""
    kind: str = "charts"


class Switch(NamedTuple):
    """A choice of unknown sets: what is chosen, their names, and how they are called."""

    label: str
    names: list[str]
    titles: list[str]
    kind: str = "switch"


class Shaded(NamedTuple):
    """A number of a matrix, and its share of its row."""

    text: str
    share: float


class Grid(NamedTuple):
    """A block of the page with a matrix of counts."""

    caption: str
    names: list[str]
    rows: list[list[Shaded]]
    kind: str = "matrix"


class Cell(NamedTuple):
    """A cell of a table: a text, which may be long, or a picture; the best of its kind, or a wrong answer."""

    text: str
    picture: Picture | None = None
    best: bool = False
    wrong: bool = False
    long: bool = False


class PageTable(NamedTuple):
    """Rows of cells; the first `texts` columns are left-aligned, the first heads its row."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    texts: int = 1
    kind: str = "table"


class Text(NamedTuple):
    """A block of the page with a text to fold away."""

    title: str
    text: str
    unfolded: bool
    kind: str = "text"


Block = Figures | Charts | Switch | Grid | PageTable | Text


class Section(NamedTuple):
    """A part of the page under a heading; without blocks it is left out."""

    key: str
    title: str
    blocks: list[Block]


class Page(NamedTuple):
    """Everything that the template shows."""

    title: str
    subtitle: str
    verdict: list[Line]
    legend: PageTable | None
    cards: list[Card]
    sections: list[Section]
    footer: str
    maker: str


def page_of(run: Run) -> Page:
    """Puts together the page of a run from its record and its history."""
    record = run.record
    sections = [] if record is None else _sections_of_test(run, record)
    sections += _sections_of_fit(run)
    sections.sort(key=lambda section: ORDER.index(section.key))
    return Page(
        title=" / ".join(run.folder.resolve().parts[-2:]),
        subtitle=subtitle(record, target_of(run.config)),
        verdict=verdict_of(record, run.history) if record else [],
        legend=legend() if record else None,
        cards=[*_metric_cards(run), *_separation_cards(record)],
        sections=[section for section in sections if section.blocks],
        footer="Made by brainet report from the files of the run. Shares are of samples; scores are higher for less "
        "certain inputs. Point at a chart to read its values; its keys show and hide lines.",
        maker="brainet report",
    )


ORDER = (
    "test", "shift", "unknown", "strangest", "classes", "doubtful", "training", "costs", "structure", "others",
    "tables", "metrics", "configuration",
)  # fmt: skip


def _sections_of_test(run: Run, record: Record) -> list[Section]:
    """What a page shows of a test."""
    styles = _styles(run)
    tables = {table.name: table for table in record.tables}
    strangest, doubtful, classes = (tables.pop(name, None) for name in (UNKNOWN, DOUBTFUL, CLASSES))
    matrix = [grid_of(record.confusion)] if record.confusion else []
    return [
        Section("test", "Calibration and certainty", _charts(record, "test", styles)),
        Section("shift", "After a shift of the inputs", _charts(record, "shift", styles)),
        Section("unknown", "Inputs unlike the training data", [*_unknown(record, styles), *_separation(record)]),
        Section("classes", "Classes", [*matrix, *_tables(run.folder, [classes])]),
        Section("strangest", "Most unknown inputs", _tables(run.folder, [strangest])),
        Section("doubtful", "Most uncertain samples", _tables(run.folder, [few_columns(record, doubtful)])),
        Section("costs", "What a prediction costs", _costs(record)),
        Section("tables", "Other tables", _tables(run.folder, list(tables.values()))),
    ]


def _sections_of_fit(run: Run) -> list[Section]:
    """What a page shows of a fit, tested or not."""
    pictures, training = figures_of(run), chart_of_history(run.history, TRAINING)
    temperature = run.record.model.temperature if run.record else None
    return [
        Section("training", "Training", [Charts([drawing_of(training, _styles(run))])] if training else []),
        Section("structure", "Structure", [*_grid(pictures["structure"]), *_structure(run.ggt, temperature)]),
        Section("others", "Other figures", _grid(pictures["others"])),
        Section("metrics", "All metrics", _all_metrics(run)),
        Section("configuration", "Configuration", [Text("config.yaml", run.config, False)] if run.config else []),
    ]


def _styles(run: Run) -> dict[str, int]:
    """The colours of all curves of a page."""
    training = chart_of_history(run.history, TRAINING)
    return styles_of([*(run.record.charts if run.record else ()), *([training] if training else ())])


# -- numbers and pictures -------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Four decimals, or four digits of very small and large values; counts with thousands separators."""
    if value is None:
        return NONE
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"
    return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.4g}"


def share(value: float) -> str:
    """Writes a share of 1 as a percentage."""
    return f"{100 * value:.2f}\u00a0%"


def picture(data: bytes, alt: str) -> Picture:
    """The bytes of a PNG → a picture that needs no file."""
    if data[:8] != b"\x89PNG\r\n\x1a\n" or len(data) < 24:
        raise ValueError(f"expected a PNG for {alt!r}, got another format: make the figures again")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    return Picture("data:image/png;base64," + base64.b64encode(data).decode("ascii"), width, height, alt)


# -- the head of the page -------------------------------------------------------------------------------------------


def target_of(config: str) -> str | None:
    """The column that a regression predicts, by the run's config.yaml; None where it names none.

    >>> target_of("data:\\n  init_args:\\n    target: price")
    'price'
    """
    _, _, data = f"\n{config}".partition("\ndata:\n")
    target = re.search(r"^    target: (.+)$", re.split(r"\n(?=\S)", data)[0], re.M)
    return target[1].strip("'\"") if target and target[1] != "null" else None


def subtitle(record: Record | None, target: str | None = None) -> str:
    """One line about the model, the sets and the time of the test."""
    if record is None:
        return "not tested yet, there is no record.json: numbers are the last ones in metrics.csv"
    model = record.model
    parts = [f"{model.head} head, {model.task}" if model.task else model.head]
    if target:
        parts[0] += f" of {target}"
    if model.head_parameters:
        parts.append(f"{model.head_parameters:,} parameters in the head")
    if model.passes and model.passes > 1:
        parts.append(f"mean of {model.passes:,} passes")
    for part in record.sets:
        name = "test set" if part.name == "test" else readable(part.name)
        parts.append(f"{name}: n\u00a0=\u00a0{part.samples:,}")
    if record.created:
        parts.append(f"tested {time_of_test(record)}")
    return "\u00a0· ".join(parts)  # a line never begins with the dot


def legend() -> PageTable:
    """When a sentence is green, amber or red: `RULES` as a table."""
    rows = [[Cell(text, long=True) for text in rule] for rule in RULES.values()]
    return PageTable("Sentences that no rule judges are grey.", ["what", "green", "amber", "red"], rows, texts=4)


def time_of_test(record: Record) -> str:
    """When the record was made, for people."""
    return record.created.replace("T", " ").replace("+00:00", " UTC")


def metrics_of(run: Run) -> dict[str, MetricValue]:
    """Every number by its key: as the record has it, or where that has none the last one in the history."""
    metrics = {}
    for key, (_, values) in run.history.items():
        facts = facts_of(key)
        metrics[key] = MetricValue(key, values[-1], facts.title, facts.unit, facts.better)
    for metric in run.record.metrics if run.record else ():
        metrics[metric.key] = metric
    return metrics


def _metric_cards(run: Run) -> list[Card]:
    """Headlines of the predictions that a user gets: after calibration, where there is one."""
    metrics = metrics_of(run)
    stage = "test/" if any(key.startswith("test/") for key in metrics) else "val/"
    cards = []
    for key in CARDS:
        before, after = metrics.get(stage + key), metrics.get(CALIBRATED + key) if stage == "test/" else None
        if after is not None and after.value is not None:
            cards.append(metric_card(after, None if before is None else before.value))
        elif before is not None:
            cards.append(metric_card(before))
    return [card for card in cards if card]


def metric_card(metric: MetricValue, before: float | None = None) -> Card | None:
    """The card of a number, with the same number before calibration where it was another; None if it has no value."""
    if metric.value is None:
        return None
    show = share if metric.unit == "share" else number
    direction = f"{metric.better} is better" if metric.better else ""
    note, shown = ", ".join(filter(None, (UNIT_NOTES[metric.unit], direction))), show(metric.value)
    changed = "" if before is None or show(before) == shown else f"calibrated; {show(before)} before"
    return Card(metric.title, shown, "; ".join(filter(None, (note, changed))))


def _separation_cards(record: Record | None) -> list[Card]:
    """The AUROC of each unknown set by the score that stands for the model."""
    if record is None:
        return []
    better = {measure.name: measure.better for measure in record.separation_measures}
    by = ", the score behind the verdict" if record.headline_score == record.verdict_score else ""
    note = f"AUROC by {readable(record.headline_score or '')}{by}"
    note += f", {better['AUROC']} is better" if better.get("AUROC") else ""
    aurocs, cards = record.headline_aurocs(), []
    for part in record.unknown_sets():
        auroc = aurocs.get(part.name)
        if auroc is not None:
            cards.append(Card(f"Unknown: {readable(part.name)}", share(auroc), note))
    return cards


# -- the sections ---------------------------------------------------------------------------------------------------


def figures_of(run: Run) -> dict[str, list[Figure]]:
    """Pictures by group, in the order of the record; those in the folder that it does not list come last.

    Pictures of charts are left out: the page draws these itself.
    """
    groups: dict[str, list[Figure]] = {"structure": [], "others": []}
    for file, name, alt, group in _listed_figures(run):
        path = find_inside(run.folder, f"figures/{file}")
        if path:
            shown, place = readable(name.replace("/", " ")), group if group in groups else "others"
            caption = CAPTIONS.get(place, {}).get(name.rpartition("/")[2], shown)
            image = picture(path.read_bytes(), alt or f"Figure: {shown}")
            groups[place].append(Figure(image, caption, wide=place == "structure"))
    return groups


def _listed_figures(run: Run) -> list[tuple[str, str, str, str]]:
    """File, name, description and group of each picture that is no chart."""
    listed: list[tuple[str, str, str, str]] = []
    charted = {"test_confusion.png"}
    if run.record:
        listed = [(part.file, part.name, part.alt, part.group) for part in run.record.figures]
        charted |= {f"{chart.name.replace('/', '_')}.png" for chart in run.record.charts}
    known = {file for file, *_ in listed} | charted
    for path in sorted((run.folder / "figures").glob("*.png")):
        if path.name not in known:
            name, group = UNLISTED.get(path.name, (path.stem, "others"))
            listed.append((path.name, name, "", group))
    return listed


def _charts(record: Record, group: str, styles: Mapping[str, int]) -> list[Block]:
    drawn = [drawing_of(chart, styles) for chart in record.charts if chart.group == group]
    return [Charts(fill_rows(drawn))] if drawn else []


def fill_rows(drawn: Sequence[Drawing]) -> list[Drawing]:
    """A chart of one panel that would be alone in its row has its words beside it, and so the whole row.

    Rows have `COLUMNS` columns; charts come in their order.
    """
    filled, free = list(drawn), 0
    for place, drawing in enumerate(drawn):
        begins_row = drawing.span > free
        free = (COLUMNS if begins_row else free) - drawing.span
        is_last = place + 1 == len(drawn) or drawn[place + 1].span > free
        if drawing.span == 1 and begins_row and is_last:
            filled[place] = drawing._replace(alone=True)
    return filled


def _unknown(record: Record, styles: Mapping[str, int]) -> list[Block]:
    """The charts of each unknown set, with a switch between sets where there are several."""
    sets: dict[str, list[Drawing]] = {}
    for chart in record.charts:
        if chart.group == "ood":
            sets.setdefault(chart.name.split("/")[1], []).append(drawing_of(chart, styles))
    if len(sets) < 2:
        return [Charts(drawn) for drawn in sets.values()]
    titles = [readable(name) for name in sets]
    return [Switch("Unknown set", list(sets), titles), *(Charts(drawn, name) for name, drawn in sets.items())]


def grid_of(matrix: Matrix) -> Grid:
    """A confusion matrix, each cell with its share of its row."""
    rows = []
    for counts in matrix.counts:
        total = max(1, sum(counts))
        rows.append([Shaded(f"{count:,}" if count else "", round(count / total, 3)) for count in counts])
    caption = (
        "Which classes are taken for which: rows are true, columns are predicted; the shade is the share of a row."
    )
    return Grid(caption, matrix.names, rows)


def _grid(figures: list[Figure]) -> list[Block]:
    return [Figures(figures)] if figures else []


def best_values(record: Record) -> dict[tuple[str, str], float]:
    """Finds the best value of any score by (set, measure); counts have no best, and what is no number never is one."""
    best: dict[tuple[str, str], float] = {}
    for measure in record.separation_measures:
        if measure.better:
            pick = min if measure.better == "lower" else max
            for row in record.separation:
                value, key = row.value(measure.name), (row.set, measure.name)
                if value is not None and not math.isnan(value):
                    best[key] = pick(best.get(key, value), value)
    return best


def _separation(record: Record) -> list[Block]:
    if not record.separation:
        return []
    best = best_values(record)
    measures = [measure for measure in record.separation_measures if measure.better is not None]
    columns = ["set", "score", *(measure.name + ARROWS[measure.better] for measure in measures)]
    sizes, rows = {}, []
    for row in record.separation:
        cells = [Cell(readable(row.set)), Cell(readable(row.score))]
        for measure in measures:
            value = row.value(measure.name)
            is_best = value is not None and value == best.get((row.set, measure.name))
            cells.append(Cell("" if value is None else f"{value:.3f}", best=is_best))
        rows.append(cells)
        if row.n_ood is not None:
            sizes[row.set] = f"{readable(row.set)} {row.n_ood:,.0f}"
    caption = "How well each score tells each set from the test set; unknown inputs are the positive class. "
    caption += f"Samples: {', '.join(sizes.values())}. " * bool(sizes)
    caption += "↑ higher is better, ↓ lower. Bold: the best of a set"
    return [PageTable(caption, list(map(readable, columns)), rows, texts=2)]


def _tables(folder: Path, tables: Sequence[RecordTable | None]) -> list[Block]:
    """Tables as the test wrote them; where both are there, a prediction unlike its label is marked."""
    shown: list[Block] = []
    for table in tables:
        if table is not None and table.rows:
            answered = {"predicted", "label"} <= set(table.columns)
            caption = f"{table.caption}. ✗ marks a wrong prediction." if answered else f"{table.caption}."
            rows = [_row(folder, table.columns, row) for row in table.rows]
            texts = len(table.columns) if any(cell.long for row in rows for cell in row) else 1
            shown.append(PageTable(caption, list(map(readable, table.columns)), rows, texts))
    return shown


def few_columns(record: Record, table: RecordTable | None) -> RecordTable | None:
    """The table without scores that would not fit beside each other: those that rank and judge samples stay."""
    if table is None or len(table.columns) <= MOST_COLUMNS:
        return table
    wanted = [record.ranking_score, record.verdict_score, record.headline_score, "mutual_information"]
    scores = {row.score for row in record.separation} | {"std"}
    kept = [name for name in table.columns if name not in scores or name in wanted][:MOST_COLUMNS]
    places = [table.columns.index(name) for name in kept]
    rows = [[row[place] for place in places] for row in table.rows]
    caption = f"{table.caption}; all scores are in scores.csv"
    return structs.replace(table, caption=caption, columns=kept, rows=rows)


def _row(folder: Path, columns: list[str], row: list[CellValue]) -> list[Cell]:
    named = dict(zip(columns, row, strict=True))
    wrong = named.get("label") not in (None, named.get("predicted"))
    alt = f"input of sample {_plain(named['sample'])}" if "sample" in named else "input of this row"
    cells = []
    for column, value in zip(columns, row, strict=True):
        if isinstance(value, Thumbnail):
            path = find_inside(folder, f"tables/{value.picture}")
            cells.append(Cell("", picture=picture(path.read_bytes(), alt) if path else None))
        else:
            is_sentence = isinstance(value, str) and len(value) > LONG
            cells.append(Cell(_plain(value), wrong=wrong and column == "predicted", long=is_sentence))
    return cells


def _plain(value: CellValue) -> str:
    """A cell in words; numbers in the common format."""
    if value is None or isinstance(value, Thumbnail):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else number(value)


PARTS = {"backbone": "backbone", "head": "head, all passes", "one_pass": "head, one pass"}


def _costs(record: Record) -> list[Block]:
    costs = record.model.costs
    if costs is None or not costs.parts():
        return []
    rows = []
    for part, cost in costs.parts().items():
        texts = (PARTS[part], f"{cost.parameters:,}", millions(cost.flops), f"{1000 * cost.seconds:,.3g}")
        rows.append([Cell(text) for text in texts])
    passes = record.model.passes or 1
    note = f"Operations are those of matrix products and convolutions; {passes:,} pass{'es' * (passes > 1)}. "
    note += f"Time is the median of a few runs of a batch of {costs.samples:,} where the test ran."
    return [PageTable(note, ["part", "parameters", "MFLOP a sample", "ms a batch"], rows)]


def millions(flops: float) -> str:
    """Operations in millions, with three digits."""
    value = flops / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _structure(ggt: GGT | None, temperature: float | None) -> list[Block]:
    if ggt is None:
        return []
    facts = {
        "variables": number(ggt.num_variables),
        "training rows": number(ggt.num_rows),
        "sub-networks": _count(ggt.num_subnetworks),
        "unique structures": _count(ggt.num_unique_structures),
        "depth": str(ggt.depth),
        "temperature of the posterior": f"{ggt.auto_temperature if temperature is None else temperature:.4g}",
        "sub-networks that count (perplexity)": f"{ggt.perplexity(temperature):.4g}",
        "fingerprint": ggt.fingerprint,
    }
    table = PageTable("The learned structure", ["property", "value"], [[Cell(k), Cell(v)] for k, v in facts.items()])
    return [table, *_sets(ggt), Text("The top of the tree", ggt.summary(temperature), True)]


def _sets(ggt: GGT) -> list[Block]:
    """Which features belong together: the lowest sets of the likeliest sub-network, where features have names."""
    if ggt.names is None:
        return []
    rows = []
    for leaf in ggt.leaves(ggt.map())[:MOST_ROWS]:
        listed = ", ".join(ggt.names[v] for v in leaf.variables)
        rows.append([Cell(number(len(leaf.variables))), Cell(listed, long=True)])
    caption = "Which features belong together: the sets that the first layers of the likeliest sub-network read"
    return [PageTable(caption, ["count", "features"], rows, texts=2)]


def _count(count: int) -> str:
    return f"{count:,}" if count < 10**7 else f"about 10^{len(str(count)) - 1}"


def _all_metrics(run: Run) -> list[Block]:
    """The last value of every metric; those of the test as the record has them."""
    has_table = run.record is not None and bool(run.record.separation)  # of what the loggers have under a key each
    rows = []
    for key, metric in sorted(metrics_of(run).items()):
        if not (has_table and key.startswith("ood/")):
            rows.append([Cell(key), Cell(number(metric.value))])
    return [PageTable("The last value of every metric", ["metric", "value"], rows)] if rows else []
