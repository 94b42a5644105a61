"""Results that a run which was cut goes on from."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
Cell = dict[str, float]
NUMBERS = {  # of a stamp: where the code says them, so that nothing has to be imported
    "version": ("brainet_pl/__init__.py", r'^__version__ = "(.+)"'),
    "algorithm": ("brainet_pl/structure/cache.py", r"^ALGORITHM = (\d+)"),
    "layout": ("brainet_pl/network/plan.py", r"^LAYOUT = (\d+)"),
}


def numbers_of_code() -> dict[str, str]:
    """Version of the library, algorithm of its structures, layout of its heads: what results depend on."""
    found = {}
    for name, (file, pattern) in NUMBERS.items():
        match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.M)
        assert match, f"{file} has no line {pattern}"
        found[name] = match[1]
    return found


CODE = ["brainet_pl", "callbacks", "datamodules", "benchmarks/*.py"]  # what results depend on, and no results


@cache
def stamp() -> str:
    """What a new result is measured with: "version / algorithm / layout / commit", a + if the code differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else "?"

    changed = git("status", "--porcelain", "--", *CODE)
    return " / ".join([*numbers_of_code().values(), git("rev-parse", "--short=7", "HEAD") + "+" * bool(changed)])


class Store:
    """Finished cells in a JSON file, with what each was measured with; other settings start anew.

    Args:
        path: the file.
        settings: what the cells depend on, as JSON can hold it.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"settings": settings, "cells": {}}
        if path.is_file():
            found = json.loads(path.read_text())
            if found.get("settings") == json.loads(json.dumps(settings)):
                self.content = found
            else:
                print(f"{path} was made with other settings: starting anew")

    def cell(self, key: str, make: Callable[[], Any]) -> Any:
        """The stored cell, or a new one."""
        if key not in self.content["cells"]:
            self.content["cells"][key] = make()
            self.content.setdefault("measured", {})[key] = stamp()
            self.save()
        return self.content["cells"][key]

    def save(self) -> None:
        """Write the file, whole or not at all."""
        write_whole(self.path, json.dumps(self.content, indent=1, sort_keys=True) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that a run which is cut leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
