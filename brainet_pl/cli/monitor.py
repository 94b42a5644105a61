"""`brainet monitor`: an alarm when the inputs behind a file of predictions are no longer like the held-out data."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils.atomic import atomic_write
from brainet_pl._utils.checks import UsageError
from brainet_pl.cli.words import best_of_run
from brainet_pl.evaluation.figures import draw
from brainet_pl.monitoring.chart import drift_chart, summary
from brainet_pl.monitoring.drift import KNOWN_P, DriftMonitor, DriftState
from brainet_pl.monitoring.signals import READ, half_for_the_first, signals_of

Floats = NDArray[np.float64]
Rows = Sequence[Sequence[str]]
BATCH = 1024  # rows that are read at a time
POLL = 0.5  # seconds between looks at a file that is followed
EXIT_ALARM = 3
LISTED = 5  # inputs that are named after an alarm
NAMES = ("file", "id", "row", "sample")  # columns that name an input
BUFFER = "predictor.scores.reference.of_"  # scores of validation data among the weights of a checkpoint


def main(args: Sequence[str]) -> None:
    """`brainet monitor predictions.csv --reference FILE|N`; the exit status is 3 where there is an alarm."""
    parser = argparse.ArgumentParser(
        "brainet monitor",
        description="Watch predictions, in the order of their rows, for a change of the inputs, without labels. While "
        "inputs are like the held-out data, the probability of ever raising an alarm is at most alpha. The exit status "
        f"is {EXIT_ALARM} after an alarm.",
    )
    parser.add_argument("predictions", help="what `brainet predict` wrote, or any CSV file with such columns")
    parser.add_argument(
        "--reference",
        required=True,
        help="predictions of held-out data (.csv), the checkpoint that predicted (.ckpt) or its run, or the number of "
        "validation samples behind known_p",
    )
    parser.add_argument("--columns", help="columns to watch, with commas; by default score, doubt and answer")
    parser.add_argument("--alpha", type=float, default=0.05, help="the probability of a false alarm; 0.05")
    parser.add_argument("--horizon", type=int, help="inputs in which a change is expected; without end by default")
    parser.add_argument("--out", default="drift.png", help="the picture; drift.png")
    parser.add_argument("--follow", action="store_true", help="go on as rows are added, until an alarm or Ctrl-C")
    parser.add_argument("--timeout", type=float, help="seconds without a new row after which --follow ends")
    words = parser.parse_args(args)
    path = Path(words.predictions)
    if not path.is_file():
        raise UsageError(f"expected a file of predictions, got {path}, and there is none: check the path")
    columns = None if words.columns is None else [name.strip() for name in words.columns.split(",")]
    watched = read_reference(words.reference, columns)
    weights = half_for_the_first(watched.held)
    monitor = DriftMonitor(watched.held, alpha=words.alpha, horizon=words.horizon, weights=weights)
    if watch(path, watched, monitor, words.out, words.follow, words.timeout).alarm:
        sys.exit(EXIT_ALARM)


# -- what is watched --------------------------------------------------------------------------------------------------


class Watched(NamedTuple):
    """What is known of held-out data, and how rows of predictions are compared with it."""

    held: Mapping[str, Floats | int]  # signal → its values, or their number
    columns: Sequence[str]  # that are read
    signals: Callable[[Mapping[str, Floats]], Mapping[str, Floats]]  # columns → signals


def read_reference(reference: str, columns: Sequence[str] | None = None) -> Watched:
    """What `--reference` and `--columns` say."""
    if reference.isdigit():
        return Watched({KNOWN_P: int(reference)}, [KNOWN_P], dict)
    path = best_of_run(Path(reference)) or Path(reference)
    if not path.is_file():
        raise UsageError(
            "expected --reference to be a CSV file, a checkpoint, a run or a number of validation samples, got "
            f"{reference!r}, and there is no such file: check the path"
        )
    return _from_predictions(path, columns) if path.suffix == ".csv" else _from_checkpoint(path, columns)


def _from_predictions(path: Path, columns: Sequence[str] | None) -> Watched:
    """Predictions of held-out data."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    if columns is not None:
        return Watched(numbers(header, rows, columns), columns, dict)
    names = [name for name in READ if name in header]
    return Watched(signals_of(numbers(header, rows, names)), names, signals_of)


def _from_checkpoint(path: Path, columns: Sequence[str] | None) -> Watched:
    """Scores of the validation data, as a checkpoint has them."""
    from brainet_pl._utils.tensor_file import read_tensors
    from brainet_pl.storage.format import Checkpoint

    Checkpoint.read(path)  # refuses what is none
    known: dict[str, Floats] = {}
    for key, values in read_tensors(path)["state_dict"].items():
        if key.startswith(BUFFER):
            known[key.removeprefix(BUFFER)] = values.numpy().astype(np.float64)
    if not known:
        raise ValueError(f"expected scores of validation data in {path}, got none: fit with validation data")
    if columns is None:
        held = signals_of(known)
        return Watched(held, list(held), dict)
    missing = [name for name in columns if name not in known]
    if missing:
        raise ValueError(f"expected columns among {', '.join(known)}, got {', '.join(columns)}: choose some")
    return Watched({name: known[name] for name in columns}, list(columns), dict)


def numbers(header: Sequence[str], rows: Rows, names: Sequence[str], first: int = 1) -> dict[str, Floats]:
    """Columns (B,) of rows, which are numbered from `first` on in errors."""
    missing = [name for name in names if name not in header]
    if missing:
        raise ValueError(
            f"expected the columns {', '.join(names)}, got none called {', '.join(missing)}: choose some of "
            f"{', '.join(header)} with --columns"
        )
    columns = {}
    for name in names:
        place, column = header.index(name), np.empty(len(rows))
        for i, row in enumerate(rows):
            try:
                column[i] = float(row[place])
            except (ValueError, IndexError) as error:
                got = row[place] if place < len(row) else "no such cell"
                raise ValueError(
                    f"expected a number in column {name} of row {first + i}, got {got!r}: correct the file"
                ) from error
        columns[name] = column
    return columns


# -- watching ---------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """What was read so far: the evidence and the p-values of each batch, and how its inputs are called."""

    paths: list[Floats]
    p_values: list[Mapping[str, Floats]]
    names: list[str]


def watch(
    path: Path, watched: Watched, monitor: DriftMonitor, out: str | Path, follow: bool, timeout: float | None
) -> DriftState:
    """Show a monitor the rows of a file, print what it says and draw it."""
    seen = _Seen([], [], [])
    state = monitor.update({name: [] for name in watched.held})
    with path.open(newline="", encoding="utf-8") as file:
        batches = read_rows(file, follow, timeout)
        header = next(batches, [[]])[0]
        named = next((name for name in NAMES if name in header), None)
        for rows in batches:
            columns = numbers(header, rows, watched.columns, state.inputs + 1)
            first = state.inputs + 1
            state = monitor.update(watched.signals(columns))
            seen.paths.append(state.path)
            seen.p_values.append(state.p_values)
            if named is None:
                seen.names.extend(map(str, range(first, first + len(rows))))
            else:
                seen.names.extend(row[header.index(named)] for row in rows)
            if follow:
                print(summary(state, monitor.alpha), flush=True)
                if state.alarm:
                    break
    if not seen.paths:
        raise ValueError(f"expected rows of predictions in {path}, got none: give a file with some")
    if not follow:
        print(summary(state, monitor.alpha))
    p_values = {name: np.concatenate([batch[name] for batch in seen.p_values]) for name in watched.held}
    _print_alarm(state, p_values, seen.names, named or "row")
    with atomic_write(Path(out)) as temporary:
        chart = drift_chart(state, np.concatenate(seen.paths), p_values, monitor.alpha)
        draw(chart).savefig(temporary, format="png", dpi=144)
    print(f"picture: {out}")
    return state


def _print_alarm(state: DriftState, p_values: Mapping[str, Floats], names: Sequence[str], called: str) -> None:
    """After an alarm, which signals it came from and which inputs were strangest."""
    if state.alarm_at is None or state.changed_at is None:
        return
    print("evidence by signal: " + ", ".join(f"{name} {value:.3g}" for name, value in state.signals.items()))
    first = state.changed_at - 1
    strangest = first + np.argsort(p_values[state.leading][first : state.alarm_at])[:LISTED]
    print(f"strangest inputs before the alarm, by {called}: {', '.join(names[i] for i in strangest)}")


def read_rows(file: IO[str], follow: bool, timeout: float | None) -> Iterator[list[list[str]]]:
    """The header of a CSV file as a batch of its own, then its rows in batches; of a growing file as they come."""
    size, pending, quiet = 1, "", 0.0
    batch: list[list[str]] = []
    while True:
        text = file.readline()
        pending += text
        if _is_row(pending, ended=not text and not follow):
            batch.append(next(csv.reader([pending])))
            pending = ""
        if batch and (len(batch) == size or not text):
            yield batch
            size, batch = BATCH, []
        if text:
            quiet = 0.0
        elif not follow or (timeout is not None and quiet >= timeout):
            return
        else:
            time.sleep(POLL)
            quiet += POLL


def _is_row(text: str, ended: bool) -> bool:
    """Whether a text is a whole row: an odd number of quotes means a line break within a cell."""
    return bool(text) and (text.endswith("\n") or ended) and text.count('"') % 2 == 0
