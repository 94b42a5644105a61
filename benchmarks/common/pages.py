"""Tables of README and docs that are made from docs/results: marks in a page, and what stands between them.

A page has `<!-- table: NAME -->` and `<!-- end of table -->`; between them stands what a function of
`benchmarks/pages.py` makes of the results, and under it which command measured it, with which version. Numbers of
sentences are checked, not written: a `Quoted` says which number of which file a sentence of a page repeats.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from common.store import RESULTS, ROOT, numbers_of_code

MARK = re.compile(r"<!-- table: ([\w -]+) -->\n.*?<!-- end of table -->", re.S)
NO_FILE = "*No results file: "  # begins the line above a table that can't be checked
BY_HAND = f"{NO_FILE}written down from a run by hand.*"


class Results(NamedTuple):
    """A file of docs/results.

    Attributes:
        cells: what was measured, by name.
        measured: name → "version / algorithm / layout / commit".
    """

    cells: Mapping[str, Any]
    measured: Mapping[str, str]


class Table(NamedTuple):
    """What a mark stands for.

    Attributes:
        file: of docs/results.
        command: that measures it.
        make: results → Markdown.
        of: beginning, or beginnings, of the names of the cells that are in it, where a file has more.
    """

    file: str
    command: str
    make: Callable[[Mapping[str, Any]], str]
    of: str | tuple[str, ...] = ""


class Quoted(NamedTuple):
    """A number in a sentence: the words around it, with {} in its place, and where it comes from."""

    page: str
    sentence: str
    file: str
    number: Callable[[Mapping[str, Any]], float | str]
    form: str = "{}"


def read_results(file: str, folder: Path = RESULTS) -> Results:
    """A file of results, whatever wrote it: cells of a `Store`, sections, rows, or lines of JSON."""
    text = (folder / file).read_text(encoding="utf-8")
    if file.endswith(".jsonl"):
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return Results({"rows": rows}, {str(i): row["measured"] for i, row in enumerate(rows) if "measured" in row})
    content = json.loads(text)
    cells = content.get("cells", {k: v for k, v in content.items() if k != "measured"})
    by = content.get(
        "measured", {k: v["measured"] for k, v in cells.items() if isinstance(v, dict) and "measured" in v}
    )
    return Results(cells, {"": by} if isinstance(by, str) else by)


def measured_with(stamps: Iterable[str], today: Mapping[str, str]) -> str:
    """What results were measured with, and whether the code has changed since in what they depend on.

    >>> today = {"version": "0.3.0", "algorithm": "6", "layout": "2"}
    >>> measured_with(["0.3.0 / 6 / 2 / abc"], today)
    'measured with 0.3.0 (abc)'
    >>> measured_with(["0.2.0 / 5 / 2 / abc"], today)
    "measured with 0.2.0 (abc), **before today's structures**"
    >>> measured_with(["0.2.0 / 5 / 2 / abc", "0.3.0 / 6 / 2 / def"], today)
    "measured with 0.2.0 (abc), 0.3.0 (def), **partly before today's structures**"
    """
    found = sorted(set(stamps))
    if not found:
        return "**measured with a version that was not noted**"
    versions: dict[str, list[str]] = {}
    now = 0
    for one in found:
        version, algorithm, layout, commit = one.split(" / ")
        versions.setdefault(version, []).append(commit)
        now += (algorithm, layout) == (today["algorithm"], today["layout"])
    said = ", ".join(f"{version} ({', '.join(commits)})" for version, commits in versions.items())
    former = "" if now == len(found) else f", **{'partly ' if now else ''}before today's structures**"
    return f"measured with {said}{former}"


def rendered(table: Table, page: Path, folder: Path = RESULTS) -> str:
    """What stands between the marks of a page."""
    results = read_results(table.file, folder)
    stamps = [one for name, one in results.measured.items() if name.startswith(table.of)]
    said = measured_with(stamps, numbers_of_code())
    link = f"[{table.file}]({Path(os.path.relpath(RESULTS / table.file, page.parent)).as_posix()})"
    return f"{table.make(results.cells)}\n\n*`{table.command}` → {link}; {said}.*"


def filled(page: Path, tables: Mapping[str, Table], folder: Path = RESULTS) -> str:
    """The text of a page with the tables of today's results between its marks."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise ValueError(f"expected one of the tables of benchmarks/pages.py, got {name!r}: add it there")
        return f"<!-- table: {name} -->\n\n{rendered(tables[name], page, folder)}\n\n<!-- end of table -->"

    return MARK.sub(fill, page.read_text(encoding="utf-8"))


def pages() -> list[Path]:
    """README and all pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sentence_of(quoted: Quoted, folder: Path = RESULTS) -> str:
    """A sentence with the number that the results say."""
    value = quoted.number(read_results(quoted.file, folder).cells)
    return quoted.sentence.format(quoted.form.format(value).replace("%", " %"))


def stale(quoted: Quoted, folder: Path = RESULTS) -> str:
    """What is wrong with a number of a sentence; empty if the page says what the results say."""
    said = sentence_of(quoted, folder)
    text = " ".join((ROOT / quoted.page).read_text(encoding="utf-8").split())
    return "" if said in text else f"{quoted.page}: expected {said!r}, by {quoted.file}"


def loose_tables(text: str, checked: Iterable[str] = ()) -> list[str]:
    """First lines of tables full of numbers that neither come from results nor say that they do not.

    Numbers of `checked` sentences, see `sentence_of`, come from results.
    """
    for sentence in checked:
        text = text.replace(sentence, "")
    found, said = [], False
    for block in re.split(r"\n\s*\n", MARK.sub("", text)):
        if block.lstrip().startswith("|"):
            decimals = re.findall(r"(?<![\w`/=-])-?\d*\.\d+(?![\w`])", block)
            if len(decimals) >= 8 and not said:
                found.append(block.splitlines()[0])
            said = False
        elif NO_FILE in block:
            said = True
    return found


@cache
def benchmark(name: str) -> Any:
    """A script of benchmarks/, for what it knows of its own results."""
    import importlib

    return importlib.import_module(name)
