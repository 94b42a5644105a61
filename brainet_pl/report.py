"""`brainet report RUN_DIR`: one self-contained HTML page of a run, from the files in its folder.

The page has no scripts and asks for nothing from a network, which its content security policy also forbids. Pictures
are data URIs. Everything that comes from a file is escaped.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from brainet_pl.figures import readable, training_curves
from brainet_pl.structure import GGT

Values = dict[str, float]
CARDS = {  # key → name, whether it is a share, what is good
    "cls/Acc": ("Accuracy", True, "higher is better"),
    "reg/RMSE": ("RMSE", False, "lower is better"),
    "reg/NLL": ("NLL", False, "nats, lower is better"),
    "cls/NLL": ("NLL", False, "nats, lower is better"),
    "cal/ECE": ("Calibration error", True, "ECE, lower is better"),
    "sc/AURC": ("Risk–coverage area", True, "AURC, lower is better"),
}
CAPTIONS = {
    "test_reliability": "Is the confidence right? On the dotted line it is; below it the model is too sure. Vertical "
    "lines are 95 % intervals; the bars count samples.",
    "test_risk_coverage": "What refusing to answer buys: the error rate when only the most certain share is answered.",
    "test_passes": "What another pass buys: metrics of the mean of the first passes, in the order they were drawn.",
    "histograms": "Each score on the test set (filled) and on the unknown set (hatched). Values beyond an axis are in "
    "its end bins.",
    "curves": "Unknown inputs are the positive class. Dotted: a score that knows nothing.",
    "structure_tree": "The learned tree: each row splits sets of features by tests of the next order.",
    "structure_network": "One sub-network: inputs at the bottom, each dense layer above what it reads.",
    "training": "While fitting.",
}
LOWER = ("FPR95", "DetErr")
STYLE = """
:root { color-scheme: light dark; --page: #f6f7f8; --panel: #ffffff; --ink: #1b2027; --soft: #545e69; --line: #d9dee4;
  --accent: #00588a; --bad: #a33b00; --shade: #eef1f4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #111316; --panel: #1c1c1c; --ink: #e9ebee; --soft: #a9b2bc; --line: #363b41; --accent: #7cc4ee;
    --bad: #ff9b66; --shade: #272a2e; }
  figure img { filter: invert(0.89) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header, footer { max-width: 72rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 2rem; }
h1 { font-size: clamp(1.5rem, 5vw, 2.1rem); line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 0.25rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 0.25rem; }
p { margin: 0.35rem 0 0.75rem; max-width: 46rem; }
.soft, figcaption, .card small, caption { color: var(--soft); }
a { color: var(--accent); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; list-style: none; padding: 0; margin: 0.75rem 0 0; }
nav a { display: inline-block; padding: 0.3rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 9.5rem), 1fr)); gap: 0.75rem;
  margin: 1.25rem 0 0; padding: 0; }
.card, figure, .scroll, details { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 0.8rem 1rem; }
.card dt { color: var(--soft); font-size: 0.9rem; }
.card dd { margin: 0; }
.card b { display: block; font-size: 1.75rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card small { display: block; font-size: 0.8rem; line-height: 1.35; }
.grid { columns: 2 26rem; column-gap: 1rem; margin-top: 0.75rem; }
figure { margin: 0 0 1rem; padding: 0.75rem; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; max-width: 40rem; margin: 0 auto; border-radius: 4px; }
figure.wide { column-span: all; }
figure.wide img { max-width: 56rem; min-width: 36rem; }
.pan { overflow-x: auto; }
figcaption { font-size: 0.875rem; margin-top: 0.6rem; }
.scroll { overflow-x: auto; margin-top: 0.75rem; }
.scroll:focus-visible, .pan:focus-visible, a:focus-visible, summary:focus-visible {
  outline: 3px solid var(--accent); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: 0.875rem; }
caption span { display: block; position: sticky; left: 0; padding: 0.75rem 1rem 0.5rem; width: 100%;
  max-width: calc(100vw - 2.2rem); }
th, td { padding: 0.38rem 0.75rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
th { font-weight: 600; }
thead th { background: var(--shade); vertical-align: bottom; white-space: normal; }
.facts { max-width: 40rem; }
.facts th, .facts td { white-space: normal; overflow-wrap: anywhere; }
th[scope=row], .text { text-align: left; }
th[scope=row] { position: sticky; left: 0; background: var(--panel); }
tbody tr:hover td, tbody tr:hover th { background: var(--shade); }
td strong { color: var(--accent); }
td img { display: block; width: 3rem; height: 3rem; object-fit: contain; image-rendering: pixelated; border-radius: 4px;
  margin-left: auto; }
.wrong { color: var(--bad); font-weight: 600; }
pre { margin: 0; padding: 1rem; overflow-x: auto; font: 0.8rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas,
  monospace; }
details { margin-top: 0.75rem; max-width: 56rem; }
summary { cursor: pointer; padding: 0.75rem 1rem; font-weight: 600; }
details > .scroll { border: 0; margin: 0; }
footer { padding-top: 2.5rem; padding-bottom: 2.5rem; font-size: 0.85rem; }
@media print { details > * { display: block; } nav { display: none; } body { background: #fff; } }
"""


class Run(NamedTuple):
    """What the folder of a run holds; each part may be empty."""

    folder: Path
    dashboard: dict[str, Any]
    history: dict[str, tuple[list[float], list[float]]]
    config: str
    ggt: GGT | None
    pictures: dict[str, Path]

    @property
    def metrics(self) -> Values:
        """The last value of every metric; those of the test as the dashboard wrote them."""
        last = {name: values[-1] for name, (_, values) in self.history.items()}
        tested = {name: value for name, value in self.dashboard.get("metrics", {}).items() if value is not None}
        return last | tested


def read_run(folder: str | Path) -> Run:
    """Read a run's folder, or say why it is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the folder of a run, found none at {folder}: check the path")
    known = ("dashboard.json", "metrics.csv", "config.yaml")
    if not any((folder / name).is_file() for name in known):
        inside = sorted(p.parent for name in known for p in folder.glob(f"*/{name}"))
        hint = f"did you mean {inside[-1]}?" if inside else "run `brainet fit` or `brainet test` first"
        raise FileNotFoundError(
            f"expected the folder of a run, with at least one of {', '.join(known)}, got {folder} without any: {hint}"
        )
    trees = [path for path in (folder / "structure.json", folder / "checkpoints" / "structure.json") if path.is_file()]
    config = folder / "config.yaml"
    return Run(
        folder=folder,
        dashboard=_read_json(folder / "dashboard.json"),
        history=_read_history(folder / "metrics.csv"),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        ggt=GGT.from_json(trees[0].read_text()) if trees else None,
        pictures={path.stem: path for path in sorted((folder / "figures").glob("*.png"))},
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got something else ({error}): test the model again") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object in {path}, got {type(content).__name__}: test the model again")
    return content


def _read_history(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """metrics.csv → metric → (steps, values), empty cells left out."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if text and name not in (None, "step", "epoch"):
                        steps, values = found.setdefault(name, ([], []))
                        steps.append(float(row.get("step") or 0))
                        values.append(float(text))
    return found


# -- pieces of the page ---------------------------------------------------------------------------------------------


def _uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def _image(data: bytes, alt: str) -> str:
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"expected a PNG for {alt!r}, got another format: make the figures again")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    return f'<img src="{_uri(data)}" width="{width}" height="{height}" alt="{escape(alt, quote=True)}">'


def _figure(data: bytes, alt: str, caption: str, wide: bool = False) -> str:
    picture, kind = _image(data, alt), ""
    if wide:  # too fine for a phone's width: there it keeps a readable size, and is moved under the finger
        label = escape(alt, quote=True)
        picture = f'<div class="pan" tabindex="0" role="region" aria-label="{label}">{picture}</div>'
        kind = ' class="wide"'
    return f"<figure{kind}>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _number(value: Any) -> str:
    """Four decimals, or four digits of very small and large values; counts with thousands separators."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"
    return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.4g}"


def _cell(text: str) -> str:
    """A cell of a CSV file as text; numbers in the common format."""
    try:
        return escape(_number(float(text)))
    except (ValueError, OverflowError):
        return escape(text)


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """Cells are HTML already; the first `text` columns are left-aligned, the first heads its row."""
    head = "".join(
        f'<th scope="col"{" class=text" if j < text else ""}>{escape(readable(name))}</th>'
        for j, name in enumerate(columns)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if not j else f"<td{' class=text' if j < text else ''}>{cell}</td>"
            for j, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    label = escape(caption, quote=True)
    kind = "scroll facts" if len(columns) == 2 else "scroll"
    return (
        f'<div class="{kind}" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


class Section(NamedTuple):
    """A part of the page; without html it is left out."""

    key: str
    title: str
    html: str

    def render(self) -> str:
        """The part with its heading."""
        head = f'<h2 id="{self.key}-title">{escape(self.title)}</h2>'
        return f'<section id="{self.key}" aria-labelledby="{self.key}-title">{head}{self.html}</section>'


# -- parts of the page ----------------------------------------------------------------------------------------------


def _headline(run: Run) -> str:
    metrics = run.metrics
    stage = "test" if any(name.startswith("test/") for name in metrics) else "val"
    counts = run.dashboard.get("counts", {})
    cards = []
    for key, (name, share, note) in CARDS.items():
        value = metrics.get(f"{stage}/{key}")
        if value is not None:
            shown = f"{100 * value:.2f} %" if share else _number(float(value))
            scaled = metrics.get(f"{stage}/scaled/{key}")
            after = f"; {100 * scaled:.2f} % after scaling" if share and scaled is not None and "cal" in key else ""
            cards.append((name, shown, note + after))
    score = run.dashboard.get("headline_score")
    for name in counts:
        value = metrics.get(f"ood/{name}/{score}/AUROC")
        if value is not None:
            note = f"AUROC by {readable(str(score))}, higher is better"
            cards.append((f"Unknown: {readable(name)}", f"{100 * value:.2f} %", note))
    items = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd><b>{escape(value)}</b><small>{escape(note)}</small></dd></div>'
        for name, value, note in cards
    )
    return f'<dl class="cards">{items}</dl>' if items else ""


def _subtitle(run: Run) -> str:
    model, counts = run.dashboard.get("model", {}), run.dashboard.get("counts", {})
    parts = []
    if model:
        parts.append(f"{model.get('head')} head, {model.get('task')}")
        if model.get("head_parameters"):
            parts.append(f"{model['head_parameters']:,} parameters in the head")
        if (model.get("passes") or 1) > 1:
            parts.append(f"{model['passes']} passes")
    parts += [
        f"{'test set' if name == 'test' else readable(name)}: n\u00a0=\u00a0{count:,}" for name, count in counts.items()
    ]
    if run.dashboard.get("created"):
        parts.append(f"tested {run.dashboard['created'].replace('T', ' ').replace('+00:00', ' UTC')}")
    if not run.dashboard:
        parts.append("not tested with the Dashboard callback yet: numbers are those of fitting and validation")
    return "\u00a0· ".join(parts)  # a line never begins with the dot


def _pictures(run: Run, prefix: str) -> str:
    """All figures whose file begins with the prefix, in the order of the dashboard."""
    listed = {Path(str(f.get("file"))).stem: str(f.get("alt", "")) for f in run.dashboard.get("figures", [])}
    names = [n for n in [*listed, *(n for n in run.pictures if n not in listed)] if n in run.pictures]
    shown = []
    for name in names:
        if name.startswith(prefix):
            caption = next((text for key, text in CAPTIONS.items() if name == key or name.endswith(f"_{key}")), "")
            data = run.pictures[name].read_bytes()
            alt = listed.get(name) or f"Figure: {readable(name)}"
            shown.append(_figure(data, alt, caption or readable(name), wide=name.startswith("structure")))
    return f'<div class="grid">{"".join(shown)}</div>' if shown else ""


def _csv_table(run: Run, name: str) -> tuple[str, list[dict[str, str]]]:
    """The caption and rows of a table that the dashboard wrote; no rows where it is not there."""
    entry = next((t for t in run.dashboard.get("tables", []) if t.get("name") == name), None)
    path = run.folder / "tables" / Path(str(entry.get("file"))).name if entry else None
    if entry is None or path is None or not path.is_file():
        return "", []
    with path.open(newline="") as file:
        return str(entry.get("caption", name)), list(csv.DictReader(file))


def _ood_table(run: Run) -> str:
    caption, rows = _csv_table(run, "ood/table")
    if not rows:
        return ""
    columns = list(rows[0])
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        for name in columns[2:]:
            if row[name] and not name.startswith("n_"):
                pick = min if name in LOWER else max
                key = (row["set"], name)
                best[key] = pick(best.get(key, float(row[name])), float(row[name]))

    def show(row: dict[str, str], name: str) -> str:
        if name in ("set", "score"):
            return escape(readable(row[name]))
        if not row[name] or name.startswith("n_"):
            return _cell(row[name])
        value = f"{float(row[name]):.3f}"
        return f"<strong>{value}</strong>" if float(row[name]) == best[row["set"], name] else value

    heads = [f"{name} ↓" if name in LOWER else f"{name} ↑" if name in columns[2:7] else name for name in columns]
    cells = [[show(row, name) for name in columns] for row in rows]
    return _table(f"{caption}. Bold: the best of a set", heads, cells, text=2)


def _doubtful_table(run: Run) -> str:
    caption, rows = _csv_table(run, "test/most_uncertain")
    if not rows:
        return ""

    def show(row: dict[str, str], name: str) -> str:
        if name == "picture":
            path = (run.folder / "tables" / row[name]).resolve()
            inside = path.is_relative_to((run.folder / "tables").resolve()) and path.is_file()
            return _image(path.read_bytes(), f"input of sample {row['sample']}") if row[name] and inside else ""
        if name == "predicted" and row.get("label") not in (None, row[name]):
            return f'<span class="wrong">{_cell(row[name])} ✗</span>'
        return _cell(row[name])

    note = " ✗ marks a wrong prediction." if "label" in rows[0] else ""
    return _table(f"{caption}.{note}", list(rows[0]), ([show(row, name) for name in row] for row in rows))


def _training(run: Run) -> str:
    wanted = ("train/loss", "val/cls/NLL", "val/cls/Acc", "val/cal/ECE", "val/reg/RMSE", "val/reg/NLL")
    series = {name: run.history[name] for name in wanted if len(run.history.get(name, ([], []))[1]) > 1}
    if not series:
        return ""
    first = ", ".join(f"{name} from {y[0]:.4g} to {y[-1]:.4g}" for name, (_, y) in series.items())
    figure = _figure(_png(training_curves(series)), f"Training curves: {first}", CAPTIONS["training"])
    return f'<div class="grid">{figure}</div>'


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def _structure(run: Run) -> str:
    if run.ggt is None:
        return ""
    temperature = run.dashboard.get("model", {}).get("temperature")
    ggt = run.ggt
    facts = {
        "variables": _number(ggt.num_variables),
        "training rows": _number(ggt.num_rows),
        "sub-networks": _count(ggt.num_subnetworks),
        "unique structures": _count(ggt.num_unique_structures),
        "depth": str(ggt.depth),
        "temperature": f"{ggt.auto_temperature if temperature is None else temperature:.4g}",
        "perplexity of the posterior": f"{ggt.perplexity(temperature):.4g}",
        "fingerprint": ggt.fingerprint,
    }
    table = _table("The learned structure", ["property", "value"], ([k, escape(v)] for k, v in facts.items()))
    text = f'<pre tabindex="0">{escape(ggt.summary(temperature))}</pre>'
    return f"{table}<details open><summary>The top of the tree</summary>{text}</details>"


def _count(count: int) -> str:
    return f"{count:,}" if count < 10**7 else f"about 10^{len(str(count)) - 1}"


def _metrics_table(run: Run) -> str:
    rows = {k: v for k, v in sorted(run.metrics.items()) if not k.startswith("ood/")}
    if not rows:
        return ""
    cells = ([escape(name), _number(value)] for name, value in rows.items())
    return _table("The last value of every metric", ["metric", "value"], cells)


def render(run: Run) -> str:
    """The page."""
    name = " / ".join(run.folder.resolve().parts[-2:])
    listed = ("test_", "ood_", "structure_")
    others = "".join(_pictures(run, stem) for stem in run.pictures if not stem.startswith(listed))
    config = (
        f'<details><summary>config.yaml</summary><pre tabindex="0">{escape(run.config)}</pre></details>'
        if run.config
        else ""
    )
    every = [
        Section("test", "Calibration and certainty", _pictures(run, "test_")),
        Section("unknown", "Inputs unlike the training data", _ood_table(run) + _pictures(run, "ood_")),
        Section("doubtful", "Most uncertain samples", _doubtful_table(run)),
        Section("structure", "Structure", _pictures(run, "structure_") + _structure(run)),
        Section("training", "Training", _training(run)),
        Section("others", "Other figures", others),
        Section("metrics", "All metrics", _metrics_table(run)),
        Section("configuration", "Configuration", config),
    ]
    sections = [part for part in every if part.html]
    links = "".join(f'<li><a href="#{part.key}">{escape(part.title)}</a></li>' for part in sections)
    body = "".join(part.render() for part in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="generator" content="brainet report">
<title>{escape(name)} – brainet report</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header><h1>{escape(name)}</h1><p class="soft">{escape(_subtitle(run))}</p>
{_headline(run)}
<nav aria-label="Sections"><ul>{links}</ul></nav></header>
<main>{body}</main>
<footer class="soft">Made by <code>brainet report</code> from the files of the run. Shares are of samples; scores are
higher for less certain inputs.</footer>
</body>
</html>
"""


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run to `out`, by default `report.html` in its folder; returns the file."""
    run = read_run(folder)
    path = run.folder / "report.html" if out is None else Path(out)
    if path.is_dir():
        raise IsADirectoryError(f"expected a file to write to, got the folder {path}: give --out FILE")
    page = render(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def main(args: Sequence[str]) -> None:
    """`brainet report RUN_DIR [--out FILE]`."""
    parser = argparse.ArgumentParser("brainet report", description="Write one self-contained HTML page of a run.")
    parser.add_argument("run_dir", help="the folder of a run: the one with metrics.csv or dashboard.json")
    parser.add_argument("--out", help="the file to write; report.html in the run's folder if not given")
    words = parser.parse_args(args)
    try:
        print(f"report: {write_report(words.run_dir, words.out)}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
