"""Results that a run which was cut goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "results"
Cell = dict[str, float]


class Store:
    """Finished cells in a JSON file, with the settings they were made with; other settings start anew.

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
