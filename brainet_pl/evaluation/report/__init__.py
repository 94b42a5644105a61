"""`brainet report RUN_DIR`: one self-contained HTML page of a run, from the files in its folder.

`read` turns the folder into typed values, `view` decides what is shown and in which words, `plot` where the lines of a
chart stand, and the template `page.html.j2` says how it is marked up. The page asks for nothing from a network, which
its content security policy also forbids; the one script that it runs is `charts.js`, named there by its digest, and a
page without scripts shows the same charts. Pictures are data URIs. Everything that comes from a file is escaped.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from brainet_pl._utils.atomic import atomic_write
from brainet_pl._utils.inside import write_inside
from brainet_pl.evaluation.report import plot
from brainet_pl.evaluation.report.read import History, Run, read_run
from brainet_pl.evaluation.report.view import Page, page_of

__all__ = ["main", "read_run", "render", "render_page", "write_report"]

HERE = Path(__file__).parent
FRAME = {
    "width": f"{plot.WIDTH:g}",
    "height": plot.HEIGHT,
    "left": plot.LEFT,
    "right": plot.WIDTH - plot.RIGHT,
    "top": plot.TOP,
    "bottom": plot.HEIGHT - plot.BOTTOM,
}


def render(run: Run) -> str:
    """The HTML text of a run's page."""
    return render_page(page_of(run))


@cache
def _template() -> Template:
    """The compiled template, once a process: compiling takes as long as writing a page."""
    templates = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,  # always: the usual choice by file name would miss `.j2`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.j2")


def render_page(page: Page) -> str:
    """The HTML text of a page."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "charts.js"))
    digest = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template().render(page=page, frame=FRAME, style=style, script=script, digest=digest)


def write_report(
    folder: str | Path, out: str | Path | None = None, title: str | None = None, history: History | None = None
) -> Path:
    """Write the page of a run.

    Args:
        folder: The folder of the run, with `record.json`, `metrics.csv` or `config.yaml` in it.
        out: The file to write; None is `report.html` in the run's folder. Missing parent folders are made.
        title: What stands on top; None is the name of the folder and of that around it.
        history: Curves of a fit that wrote no `metrics.csv`.

    Returns:
        The file that was written.
    """
    run = read_run(folder)
    path = run.folder / "report.html" if out is None else Path(out)
    if path.is_dir():
        raise IsADirectoryError(f"expected a file to write to, got the folder {path}: give --out FILE")
    if history is not None:
        run = run._replace(history=history)
    page = page_of(run)
    text = render_page(page if title is None else page._replace(title=title))
    with write_inside(run.folder, "report.html") if out is None else atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")  # JSON can hold half a character, UTF-8 cannot
    return path


def main(args: Sequence[str]) -> None:
    """`brainet report RUN_DIR [--out FILE]`."""
    parser = argparse.ArgumentParser("brainet report", description="Write one self-contained HTML page of a run.")
    parser.add_argument("run_dir", help="the folder of a run: the one with metrics.csv or record.json")
    parser.add_argument("--out", help="the file to write; report.html in the run's folder if not given")
    words = parser.parse_args(args)
    print(f"report: {write_report(words.run_dir, words.out)}")
