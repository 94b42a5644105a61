"""`brainet compare RUN [RUN …]`: one page and one table of several runs, from the files in their folders.

Runs whose settings differ in nothing but the seed are one configuration. A number of a configuration is the mean over
its runs; two configurations are compared by the difference of their means, seed by seed where they share seeds, and by
the standard error of that difference. `runs` finds and groups runs, `numbers` compares them, `tables` and `page` show
what came of it. Nothing here needs torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from brainet_pl._utils.atomic import atomic_write
from brainet_pl._utils.checks import UsageError
from brainet_pl.evaluation.compare.numbers import Comparison, compare
from brainet_pl.evaluation.compare.page import page_of
from brainet_pl.evaluation.compare.runs import find_runs, read_member
from brainet_pl.evaluation.compare.tables import as_csv, as_latex, as_markdown
from brainet_pl.evaluation.report import render_page


def write_comparison(
    runs: Iterable[str], out: str | Path = "comparison.html", against: str | None = None
) -> Comparison:
    """Compare runs and write the page, and beside it the table as `.csv`, `.md` and `.tex`.

    Args:
        runs: folders of runs, folders of such folders, checkpoints, or patterns of these.
        out: the page to write.
        against: the configuration that others are compared with; None is the first.
    """
    folders = find_runs(runs)
    if not folders:
        raise UsageError("expected at least one run to compare, got none: give folders of runs")
    found = compare([read_member(folder) for folder in folders], against)
    path = Path(out)
    written = {".csv": as_csv(found), ".md": as_markdown(found), ".tex": as_latex(found)}
    for file, text in [(path, render_page(page_of(found))), *((path.with_suffix(s), t) for s, t in written.items())]:
        with atomic_write(file) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")
    return found


def main(args: Sequence[str]) -> None:
    """`brainet compare RUN [RUN …] [--out FILE] [--against NAME]`."""
    parser = argparse.ArgumentParser(
        "brainet compare",
        description="Write one page and one table that compare runs; seeds of a configuration are one.",
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, folders of such folders, checkpoints, or patterns")
    parser.add_argument("--out", default="comparison.html", help="the page; .csv, .md and .tex are written beside it")
    parser.add_argument("--against", help="the configuration that others are compared with; the first if not given")
    words = parser.parse_args(args)
    print(as_markdown(write_comparison(words.runs, words.out, words.against)), end="")
    print(f"\ncomparison: {words.out}, and beside it .csv, .md and .tex")
