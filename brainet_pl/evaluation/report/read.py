"""Read the folder of a run into typed values; `schema` says what a record is."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from brainet_pl._utils.checks import UsageError
from brainet_pl._utils.inside import check_size, find_inside, read_inside
from brainet_pl.evaluation.schema import FORMAT, Record, parse_record, shortened

if TYPE_CHECKING:  # a page of many runs is made without torch
    from brainet_pl.structure import GGT

KNOWN_FILES = ("record.json", "metrics.csv", "config.yaml")

History = dict[str, tuple[list[float], list[float]]]


class Run(NamedTuple):
    """What the folder of a run holds; without a record it was only fitted."""

    folder: Path
    record: Record | None
    history: History
    config: str
    ggt: GGT | None


def read_run(folder: str | Path) -> Run:
    """Read a run's folder, or say why it is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"expected the folder of a run, found none at {folder}: check the path")
    if not any(find_inside(folder, name) for name in KNOWN_FILES):
        deeper = sorted(path.parent for name in KNOWN_FILES for path in folder.glob(f"*/{name}"))
        hint = f"did you mean {deeper[-1]}?" if deeper else "run `brainet fit` or `brainet test` first"
        listed = ", ".join(KNOWN_FILES)
        raise UsageError(
            f"expected the folder of a run, with at least one of {listed}, got {folder} without any: {hint}"
        )
    return Run(
        folder=folder,
        record=read_record(folder),
        history=read_history(folder),
        config=read_inside(folder, "config.yaml", errors="replace") or "",
        ggt=_read_structure(folder),
    )


def read_history(folder: Path) -> History:
    """metrics.csv → metric → (steps, values), empty cells left out; without the file, nothing."""
    found: History = {}
    path = find_inside(folder, "metrics.csv")
    if path is not None:
        check_size(path)
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
    names = ("structure.json", "checkpoints/structure.json")
    path = next(filter(None, (find_inside(folder, name) for name in names)), None)
    if path is None:
        return None
    from brainet_pl.structure import GGT

    try:
        check_size(path)
        return GGT.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected a learned structure in {path}, got {error!r}: fit the model again") from error


def read_record(folder: Path) -> Record | None:
    """record.json, checked; None if there is no such file, and one clear error if it is not what it should be."""
    path = folder / "record.json"
    try:
        text = read_inside(folder, path.name)
        if text is None:
            return None
        content = json.loads(text)  # which takes NaN and half characters, unlike msgspec
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {path}, got something else ({error}): test the model again") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object in {path}, got {type(content).__name__}: test the model again")
    if type(content.get("format")) is not int or content["format"] != FORMAT:
        got = shortened(json.dumps(content["format"])) if "format" in content else "none"
        raise ValueError(f"expected format {FORMAT} in {path}, got {got}: test the model again with this version")
    try:
        return parse_record(content)
    except ValueError as error:
        raise ValueError(f"{error}, in {path}: test the model again") from error
