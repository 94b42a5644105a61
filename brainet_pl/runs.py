"""The folder of a run on the command line: one process's alone, and gone on with by a fit that is resumed."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from brainet_pl import files
from brainet_pl.framework import (
    CSVLogger,
    ExperimentWriter,
    TensorBoardLogger,
    is_csv,
    is_tensorboard,
    is_wandb,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from brainet_pl.module import read_checkpoint

LAST = "last"  # as a path of a checkpoint: the newest run's
RUN = "brainet_run"  # the checkpoint's entry: what tells its run from others
VERSION = "BRAINET_VERSION"  # in the environment of further processes of a run: the folder that the first has claimed
WANDB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it becomes part of file names and addresses
TESTED = ("test/", "ood/")  # metrics that a fit does not log

Logger = CSVLogger | TensorBoardLogger


def describe(trainer: pl.Trainer) -> dict[str, Any]:
    """What a checkpoint keeps of its run, as primitives: the id of W&B's run, if there is one."""
    ids = [logger.version for logger in trainer.loggers if is_wandb(logger)]
    return {"wandb": str(ids[0]) if ids and ids[0] else None}


def find(trainer: pl.Trainer, checkpoint: str | None) -> str | None:
    """The file that `--ckpt_path` names; "last" is that of the newest fit in the logger's folder, None if it has none.

    A fit that was killed before its first checkpoint is the newest all the same: an older run's would be another's.
    """
    if checkpoint != LAST or Path(LAST).is_file():
        return checkpoint
    folders = [folder for logger in _local(trainer) for folder in Path(logger.root_dir).glob("version_*/checkpoints")]
    newest = max((folder / "last.ckpt" if (folder / "last.ckpt").is_file() else folder for folder in folders),
                 key=lambda path: path.stat().st_mtime, default=None)  # fmt: skip
    if newest is None or not newest.is_file():
        rank_zero_info(f"no checkpoint yet in {newest or 'the folder of the logger'}: beginning from the start")
        return None
    return str(newest)


def enter(trainer: pl.Trainer, checkpoint: str | None) -> None:
    """Give the loggers of a fit a folder: that of its checkpoint if this lies in a run, or one that nobody else has.

    The run of a checkpoint is gone on with: rows of `metrics.csv` before it stay, later ones are trained again and so
    dropped, and W&B is told the same id. A checkpoint that was copied to another place begins a new run.
    """
    run = None if checkpoint is None else Path(checkpoint).resolve().parents[1]
    same = False
    for logger in _local(trainer):
        if logger._version is None:
            here = run is not None and _number(run) is not None and Path(logger.root_dir).resolve() == run.parent
            logger._version = _number(run) if here and run is not None else _claim(trainer, logger)
        same |= run is not None and Path(logger.log_dir).resolve() == run
        if is_csv(logger) and trainer.is_global_zero:
            logger._experiment = Rows(logger.log_dir)
    if checkpoint is None or run is None:
        return
    content = read_checkpoint(checkpoint)
    wandb = _wandb_id(content)
    for any_logger in trainer.loggers:
        if is_wandb(any_logger) and any_logger.version is None and (same or run.name == wandb):
            any_logger._id = any_logger._wandb_init["id"] = wandb
        if same and is_csv(any_logger) and isinstance(any_logger._experiment, Rows):
            any_logger._experiment.rewind(int(content["global_step"]))


def _wandb_id(content: dict[str, Any]) -> str | None:
    """The id of W&B's run that a checkpoint names; one that could be more than an id is left alone, with a warning."""
    run = content.get(RUN)
    found = run.get("wandb") if isinstance(run, dict) else None
    if found is None or (isinstance(found, str) and WANDB_ID.fullmatch(found)):
        return found
    rank_zero_warn(
        "expected the checkpoint to name W&B's run by letters, digits, - and _, got something else: this fit gets a "
        "run of its own there"
    )
    return None


def _local(trainer: pl.Trainer) -> list[Logger]:
    return [logger for logger in trainer.loggers if (is_csv(logger) or is_tensorboard(logger))]


def _number(folder: Path | None) -> int | None:
    """3 of `version_3`."""
    digits = "" if folder is None else folder.name.removeprefix("version_")
    return int(digits) if digits.isdigit() else None


def _claim(trainer: pl.Trainer, logger: Logger) -> int | None:
    """The next free number, taken by making its folder: two runs can't both make one."""
    if not trainer.is_global_zero:
        known = os.environ.get(VERSION)
        return None if known is None else int(known)
    beside = [other._version for other in _local(trainer) if other.root_dir == logger.root_dir]
    taken = next((number for number in beside if isinstance(number, int)), None)  # loggers of a run share its folder
    if taken is not None:
        return taken
    for number in itertools.count(logger._get_next_version()):
        folder = Path(logger.root_dir) / f"version_{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            (folder / "checkpoints").mkdir()  # the mark of a fit, for `find`
            os.environ[VERSION] = str(number)
            return number
    return None


class Rows(ExperimentWriter):
    """Lightning's writer of `metrics.csv`, but rows that are there stay, and a kill can't cost them."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        if Path(self.metrics_file_path).is_file():
            with open(self.metrics_file_path, newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def _check_log_dir_exists(self) -> None:
        """Lightning deletes what is there."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._write(self._read(), fieldnames)

    def rewind(self, step: int) -> None:
        """Drop what was logged of the steps from `step` on, and a row cut short by a kill; rows of tests stay."""
        if self.metrics_keys:
            self._write((row for row in self._read() if int(row["step"]) < step or _tested(row)), self.metrics_keys)

    def _read(self) -> list[dict[str, str]]:
        """Rows that are whole: the last one may have been cut anywhere."""
        with open(self.metrics_file_path, newline="") as file:
            lines = file.readlines()
        cut = bool(lines) and not lines[-1].endswith("\n")
        return [row for row in csv.DictReader(lines[:-1] if cut else lines) if row["step"]]

    def _write(self, rows: Iterable[dict[str, str]], columns: list[str]) -> None:
        with files.whole(self.metrics_file_path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


def _tested(row: dict[str, str]) -> bool:
    return any(value and name.startswith(TESTED) for name, value in row.items())
