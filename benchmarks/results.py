"""Measure again what the pages show: all benchmarks, the short ones first, each with a budget; `make results`.

    python benchmarks/results.py                             # what is stale, and how long each takes at the most
    python benchmarks/results.py --data DIR --hours 5        # measures it; call it again to go on

Every command that stands below a table of a page is known (`pages.py`). A file of docs/results is stale where cells
were measured with another structure algorithm or layout of heads than today's, or with none that was noted. Stale cells
are measured in a folder beside, so that a page never shows half of a table; a file takes its place when its command has
come to its end. What was measured there with today's code is kept, so that a run which was cut goes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.pages import read_results
from common.store import RESULTS, ROOT, numbers_of_code, write_whole
from pages import DATA, TABLES

WORK = ROOT / "build" / "results"
SHORT, MIDDLE, LONG = 10, 30, 60  # minutes of two cores that a command may take at a time
BUDGETS = {  # what is neither short nor long, by the name of the script
    "battery": LONG, "defaults": LONG, "table1": LONG, "table2": LONG, "swap": LONG, "honest": LONG,
    "unknown_classes": LONG,
    "unknown": MIDDLE, "structure": MIDDLE, "mnist": MIDDLE, "drift": MIDDLE, "fading": MIDDLE, "attacks": MIDDLE,
    "tempered": MIDDLE, "decisions": MIDDLE, "strongest": MIDDLE, "costs": MIDDLE,
}  # fmt: skip
IN_PLACE = ("structure", "reliability")  # scripts that write docs/results themselves, a section at a time


class Task(NamedTuple):
    """A command, and what it measures.

    Attributes:
        command: as it stands below tables.
        file: of docs/results.
        of: beginnings of the names of its cells.
        minutes: its budget.
        stale: how many of its cells are.
        cells: how many it has.
    """

    command: str
    file: str
    of: tuple[str, ...]
    minutes: int
    stale: int
    cells: int


def is_today(stamp: str, today: dict[str, str]) -> bool:
    """Whether a cell was measured with today's structures and heads.

    >>> is_today("0.3.0 / 6 / 2 / abc", {"version": "0.4.0", "algorithm": "6", "layout": "2"})
    True
    """
    _, algorithm, layout, _ = stamp.split(" / ")
    return (algorithm, layout) == (today["algorithm"], today["layout"])


def stale_cells(file: str, folder: Path, begins: tuple[str, ...], today: dict[str, str]) -> tuple[int, int]:
    """How many cells whose names begin so are stale, of how many; a file without stamps is one stale cell."""
    stamps = [stamp for name, stamp in read_results(file, folder).measured.items() if name.startswith(begins)]
    if not stamps:
        return 1, 1
    return sum(not is_today(stamp, today) for stamp in stamps), len(stamps)


def tasks(folder: Path = RESULTS) -> list[Task]:
    """All commands below tables, once each, the short ones first."""
    begins: dict[tuple[str, str], tuple[str, ...]] = {}
    for table in TABLES.values():
        of = (table.of,) if isinstance(table.of, str) else table.of
        key = (table.command, table.file)
        begins[key] = begins.get(key, ()) + of
    today, found = numbers_of_code(), []
    for (command, file), of in begins.items():
        name = Path(command.split()[1]).stem
        found.append(Task(command, file, of, BUDGETS.get(name, SHORT), *stale_cells(file, folder, of, today)))
    return sorted(found, key=lambda task: (task.minutes, task.command))


def prepare(task: Task, folder: Path, results: Path = RESULTS) -> None:
    """Put a file into the folder where it is measured, without the stale cells of a task, unless an earlier run has."""
    place = folder / task.file
    if place.is_file():
        return
    content, today = json.loads((results / task.file).read_text(encoding="utf-8")), numbers_of_code()
    stamps = content.get("measured")
    if isinstance(stamps, dict) and "cells" in content:  # of a `Store`: other files are written anew as a whole
        for name, stamp in list(stamps.items()):
            if name.startswith(task.of) and not is_today(stamp, today):
                del content["cells"][name], stamps[name]
        write_whole(place, json.dumps(content, indent=1, sort_keys=True) + "\n")


def words_of(task: Task, data: Path, out: Path) -> list[str]:
    """The words of a command, with this Python, the folder of data and the place of results."""
    words = shlex.split(task.command.replace(DATA, f"--data {shlex.quote(str(data))}"))
    return [sys.executable, *words[1:], *([] if writes_itself(task) else ["--out", str(out)])]


def writes_itself(task: Task) -> bool:
    """Whether a command has no other place for its results than docs/results."""
    return Path(task.command.split()[1]).stem in IN_PLACE


def measure(todo: Sequence[Task], data: Path, hours: float, work: Path = WORK) -> Iterator[str]:
    """Run commands until the time is over; gives a line for each."""
    end = time.monotonic() + 3600 * hours
    for task in todo:
        seconds = min(60 * task.minutes, end - time.monotonic())
        if seconds <= 0:
            yield f"not begun: {task.command}"
            continue
        if not writes_itself(task):
            prepare(task, work)
        begin = time.monotonic()
        try:
            code = subprocess.run(words_of(task, data, work), cwd=ROOT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = None
        minutes = (time.monotonic() - begin) / 60
        if code == 0:
            if not writes_itself(task):
                shutil.move(work / task.file, RESULTS / task.file)
            yield f"measured in {minutes:.0f} min: {task.command}"
        elif code is None:
            yield f"not at its end after {minutes:.0f} min, call again: {task.command}"
        else:
            yield f"failed with status {code}: {task.command}"


def main(argv: Sequence[str] | None = None) -> int:
    """Say what is stale, or measure it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the data sets; without it nothing is measured")
    parser.add_argument("--hours", type=float, default=5.0, help="for all commands together; 5")
    parser.add_argument("--only", default="", help="a part of the commands that are meant")
    parser.add_argument("--all", action="store_true", help="what is not stale too")
    args = parser.parse_args(argv)
    known = [task for task in tasks() if args.only in task.command]
    todo = [task for task in known if task.stale or args.all]
    for task in todo:
        print(f"{task.minutes:3d} min  {task.stale:5,d} of {task.cells:5,d} stale  {task.command}")
    total = sum(task.minutes for task in todo) / 60
    print(f"{len(todo)} of {len(known)} commands, at most {total:.1f} h")
    if args.data is None:
        return 0
    done = []
    for line in measure(todo, args.data, args.hours):
        print(line, flush=True)
        done.append(line)
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "pages.py")], check=False)
    return int(not all(line.startswith("measured") for line in done))


if __name__ == "__main__":
    sys.exit(main())
