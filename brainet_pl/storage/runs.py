"""The folder of a run: new for every fit, and used again by a resumed fit and by tests of its checkpoints."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from brainet_pl._utils import atomic, inside, lightning_private
from brainet_pl._utils.framework import (
    ExperimentWriter,
    is_csv,
    is_tensorboard,
    is_wandb,
    pl,
    rank_zero_info,
)
from brainet_pl._utils.inside import read_inside, write_inside
from brainet_pl.storage.format import Checkpoint
from brainet_pl.storage.sharded import is_checkpoint

LAST = "last"  # as a path of a checkpoint: the newest run's
VERSION = "BRAINET_VERSION"  # in the environment of further processes of a run: the folder that the first has claimed
TESTED = ("test/", "ood/", "shift/", "cost/")  # metrics that a fit does not log
CHECKPOINTS = "checkpoints"  # Lightning's folder for them, in that of the run
WRITTEN = ("metrics.csv", "hparams.yaml", "config.yaml", "events.out.tfevents.*")  # what loggers leave beside it

# What Lightning writes, and folders that are filled.
FILLED = (*WRITTEN, "config_*.yaml", CHECKPOINTS, "figures", "tables")
SETTINGS = ("config.yaml", "hparams.yaml")  # what is written of a run before anything is done
LAST_FIT = ".last_fit.json"  # in the folder of all runs: which of them a fit entered last

_CLAIMED: set[Path] = set()  # folders that this process has made


def describe(trainer: pl.Trainer) -> dict[str, Any]:
    """The entry RUN of a checkpoint: the id of W&B's run, if there is one."""
    ids = [logger.version for logger in trainer.loggers if is_wandb(logger)]
    return {"wandb": str(ids[0]) if ids and ids[0] else None}


def find(trainer: pl.Trainer, checkpoint: str | None) -> str | None:
    """The file that `--ckpt_path` names; "last" is that of the newest fit in the logger's folder, None if it has none.

    A fit that was killed before its first checkpoint is the newest all the same: an older run's would be another's.
    """
    if checkpoint != LAST or is_checkpoint(LAST):
        return checkpoint
    newest = next(filter(None, (_newest(Path(logger.root_dir)) for logger in _local(trainer))), None)
    file = None if newest is None else newest / CHECKPOINTS / "last.ckpt"
    if file is None or not is_checkpoint(file):
        rank_zero_info(f"no checkpoint yet in {newest or 'the folder of the logger'}: beginning from the start")
        return None
    return str(file)


def _newest(root: Path) -> Path | None:
    """The folder that a fit entered last, by what fits noted and by the numbers of the folders: clocks may be wrong."""
    numbers = _numbers_in(root)
    if not numbers:
        return None
    highest = max(numbers)
    try:
        noted = json.loads(read_inside(root, LAST_FIT) or "{}")
        resumed = noted["run"] if noted["highest"] == highest else highest  # a newer one was not noted
    except (ValueError, TypeError, KeyError, RecursionError):
        resumed = highest
    return root / f"version_{resumed if resumed in numbers else highest}"


def _note_fit(logger: Any) -> None:
    """Note that a fit enters a folder, and the highest number of a folder at that moment."""
    root, number = Path(logger.root_dir), _number(Path(logger.log_dir))
    if number is not None:
        noted = {"run": number, "highest": max([number, *_numbers_in(root)])}
        with contextlib.suppress(OSError), write_inside(root, LAST_FIT) as temporary:
            temporary.write_text(json.dumps(noted), encoding="utf-8")


def _numbers_in(root: Path) -> list[int]:
    """The numbers of the folders of fits."""
    numbers = [_number(path.parent) for path in root.glob(f"version_*/{CHECKPOINTS}")]
    return [number for number in numbers if number is not None]


def folder_of(checkpoint: Checkpoint) -> Path | None:
    """The folder of the run that a checkpoint lies in; None for a file that was copied to another place.

    A run's folder holds `checkpoints` and the files of a logger beside it, or has the id of its W&B run as its name.
    """
    place = checkpoint.path.resolve().parent
    run = place.parent
    if place.name != CHECKPOINTS:
        return None
    if any(True for pattern in WRITTEN for _ in run.glob(pattern)):
        return run
    return run if run.name == checkpoint.wandb_id else None


def enter(trainer: pl.Trainer, checkpoint: Checkpoint | None) -> None:
    """Give the loggers of a fit a folder: that of its checkpoint's run, or a new one.

    A resumed run keeps the rows of `metrics.csv` before its checkpoint and its W&B id; later rows are dropped, because
    their steps are trained again. A checkpoint that was copied to another place begins a new run.
    """
    run = None if checkpoint is None else checkpoint.path.resolve().parents[1]
    same = _assign_folders(trainer, run, fit=True)
    if trainer.is_global_zero:
        for logger in _local(trainer):
            _note_fit(logger)
    if checkpoint is None or run is None:
        return
    if same or run.name == checkpoint.wandb_id:
        _continue_wandb(trainer, checkpoint)
    if same:
        _rewind(trainer, run, checkpoint.step)


def _rewind(trainer: pl.Trainer, run: Path, step: int) -> None:
    """Drop the rows of a run's folder that a fit from this step logs again."""
    if trainer.is_global_zero:
        atomic.remove_leftovers(run, "metrics.csv")  # which a killed fit was writing
    for logger in trainer.loggers:
        writer = lightning_private.experiment_of(logger)
        if isinstance(writer, Rows):
            writer.rewind(step)


def keep_rows(trainer: pl.Trainer) -> None:
    """Keep the rows of `metrics.csv` where a logger of the user's writes to a folder in use; Lightning deletes them.

    To be called before a logger is first used. Only later is it known whether a fit goes on: see `rewind_rows`.
    """
    for logger in trainer.loggers if trainer.is_global_zero else ():
        unused = is_csv(logger) and lightning_private.experiment_of(logger) is None
        if unused and lightning_private.version_of(logger) is not None:
            rows = Rows(str(logger.log_dir))
            rows.waits = True
            lightning_private.set_experiment(logger, rows)


def rewind_rows(trainer: pl.Trainer, step: int | None) -> None:
    """Drop of the rows that `keep_rows` kept those that a fit from this step logs again; all for a fit from nothing."""
    for logger in trainer.loggers:
        rows = lightning_private.experiment_of(logger)
        if isinstance(rows, Rows) and rows.waits:
            rows.waits = False
            if step is None:
                rows.drop_earlier()
            else:
                rows.rewind(step)


def continue_run(trainer: pl.Trainer, checkpoint: str | os.PathLike[str] | Checkpoint) -> Path | None:
    """Let what a Trainer does next be a part of the run that wrote a checkpoint: call it before `trainer.test`.

        trainer = pl.Trainer(callbacks=[Evaluation()])
        continue_run(trainer, file)
        trainer.test(model, datamodule=data, ckpt_path=file)

    Loggers write into the folder of that run, rows of `metrics.csv` stay, W&B continues its run, files of a test lie
    beside the checkpoints, and numbers are logged at the step of the checkpoint. Loggers that were given a version keep
    it. `brainet test --ckpt_path FILE` does this by itself.

    Returns:
        The folder of the run; None, and nothing is changed, if the checkpoint lies in none because it was copied.
    """
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.read(checkpoint)
    run = folder_of(checkpoint)
    if run is None:
        rank_zero_info(f"{checkpoint.path} does not lie in the folder of a run: what follows is a run of its own")
        return None
    busy = [type(logger).__name__ for logger in trainer.loggers if lightning_private.experiment_of(logger) is not None]
    if busy:
        raise RuntimeError(
            f"expected a Trainer that has not logged yet, got one whose {', '.join(busy)} has begun a run: call "
            "continue_run before anything else, with a Trainer of its own"
        )
    for logger in trainer.loggers:
        _move(logger, run)
    return join(trainer, checkpoint)


def join(trainer: pl.Trainer, checkpoint: Checkpoint) -> Path | None:
    """`continue_run` for loggers that stay where the user put them: the run's folder, if one of them writes there.

    A logger that writes elsewhere gets a new folder.
    """
    run = folder_of(checkpoint)
    same = _assign_folders(trainer, run, fit=False)
    if run is None or (_local(trainer) and not same):
        return None
    _continue_wandb(trainer, checkpoint)
    if not same:
        inside.refuse_links(run, FILLED)
        lightning_private.set_root_folder(trainer, str(run))
    lightning_private.set_logged_step(trainer, checkpoint.step)
    return run


def begin(trainer: pl.Trainer) -> None:
    """Give the loggers of a test a new folder."""
    _assign_folders(trainer, None, fit=False)


def _assign_folders(trainer: pl.Trainer, run: Path | None, fit: bool) -> bool:
    """Give every local logger its folder; whether that of `run` is among them."""
    same = False
    for logger in _local(trainer):
        if lightning_private.version_of(logger) is None:
            here = run is not None and _number(run) is not None and Path(logger.root_dir).resolve() == run.parent
            lightning_private.set_version(logger, _number(run) if here else _claim(trainer, logger, fit))
        if run is not None and Path(logger.log_dir).resolve() == run:
            same = True
            inside.refuse_links(run, FILLED)
        if is_csv(logger) and trainer.is_global_zero:
            lightning_private.set_experiment(logger, Rows(logger.log_dir))
    return same


def _move(logger: Any, run: Path) -> None:
    """Let a logger without a version write to the folder `run`, and W&B keep its files where that run has them."""
    root = _near(run.parents[1])
    if (is_csv(logger) or is_tensorboard(logger)) and lightning_private.version_of(logger) is None:
        number = _number(run)
        lightning_private.set_folder(logger, root, run.parent.name, run.name if number is None else number)
    elif is_wandb(logger) and logger.version is None:
        lightning_private.set_wandb_folder(logger, root)


def _near(folder: Path) -> str:
    """A folder as a fit names it: relative below the current one, else absolute."""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _continue_wandb(trainer: pl.Trainer, checkpoint: Checkpoint) -> None:
    """Let W&B continue the run that a checkpoint names."""
    run = checkpoint.wandb_id
    for logger in trainer.loggers:
        if is_wandb(logger) and logger.version is None:
            lightning_private.set_wandb_run(logger, run)


def _local(trainer: pl.Trainer) -> list[Any]:
    return [logger for logger in trainer.loggers if is_csv(logger) or is_tensorboard(logger)]


def _number(folder: Path | None) -> int | None:
    """3 of `version_3`."""
    digits = "" if folder is None else folder.name.removeprefix("version_")
    return int(digits) if digits.isdigit() else None


def _claim(trainer: pl.Trainer, logger: Any, fit: bool) -> int | None:
    """The next free number, taken by making its folder: two runs can't both make one."""
    if not trainer.is_global_zero:
        known = os.environ.get(VERSION)
        return None if known is None else int(known)
    beside = [lightning_private.version_of(other) for other in _local(trainer) if other.root_dir == logger.root_dir]
    taken = next((number for number in beside if isinstance(number, int)), None)  # loggers of a run share its folder
    if taken is not None:
        return taken
    for number in itertools.count(lightning_private.next_version(logger)):
        folder = Path(logger.root_dir) / f"version_{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            if fit:
                (folder / CHECKPOINTS).mkdir()  # its mark, for `find`
            os.environ[VERSION] = str(number)
            _CLAIMED.add(folder)
            return number
    return None


def remove_empty(trainer: pl.Trainer) -> None:
    """Remove the folder that this process has claimed for a run, if it holds nothing but settings.

    An offline run of W&B that was begun and has no number goes with it; one on a server is marked as failed by W&B.
    """
    if not trainer.is_global_zero:
        return
    for folder in {Path(logger.log_dir) for logger in _local(trainer)} & _CLAIMED:
        files = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
        if all(file.parent == folder and file.name in SETTINGS for file in files):
            shutil.rmtree(folder, ignore_errors=True)
            _remove_offline(trainer)


def _remove_offline(trainer: pl.Trainer) -> None:
    for logger in filter(is_wandb, trainer.loggers):
        run = lightning_private.experiment_of(logger)
        place = Path(str(getattr(run, "dir", ""))).parent  # …/wandb/offline-run-DATE-ID/files
        if run is not None and place.name.startswith("offline-run-") and run.step == 0:
            run.finish(exit_code=1)
            shutil.rmtree(place, ignore_errors=True)
            _remove_dead_links(place.parent)


def _remove_dead_links(folder: Path) -> None:
    """Remove links of W&B (`latest-run`, `debug.log`) that point to a removed run, and the folder if that was all."""
    for path in folder.glob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other runs are there
        folder.rmdir()


class Rows(ExperimentWriter):
    """Lightning's writer of `metrics.csv`, but rows that are there stay, and a kill can't cost them."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self.waits = False  # for `rewind_rows`
        self._earlier = 0  # rows of other processes
        self._tested_steps: set[int] = set()  # at which this process has logged a test
        if Path(self.metrics_file_path).is_file():
            with open(self.metrics_file_path, newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])
            self._earlier = len(self._read())

    def _check_log_dir_exists(self) -> None:
        """Lightning deletes what is there."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._write(self._read(), fieldnames)

    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        """Log; the first numbers of a test drop those of an earlier process at the same step, a killed one maybe."""
        tests = any(name.startswith(TESTED) for name in metrics_dict)
        if tests and step is not None and step not in self._tested_steps:
            self._tested_steps.add(step)
            self.save()
            if self.metrics_keys:
                kept = [row for row in self._read() if int(row["step"]) != step or not _tested(row)]
                self._write(kept, self.metrics_keys)
        super().log_metrics(metrics_dict, step)

    def drop_earlier(self) -> None:
        """Drop what was logged by other processes."""
        rows = self._read()[self._earlier :] if self._earlier else []
        if rows:
            self._write(rows, self.metrics_keys)
        elif self._earlier:
            os.remove(self.metrics_file_path)
            self.metrics_keys = []

    def rewind(self, step: int) -> None:
        """Drop what was logged of the steps from `step` on, and a row cut short by a kill; rows of tests stay."""
        if self.metrics_keys:
            self._write((row for row in self._read() if int(row["step"]) < step or _tested(row)), self.metrics_keys)

    def _read(self) -> list[dict[str, str]]:
        """Rows that are whole: the last one may have been cut anywhere."""
        with open(self.metrics_file_path, newline="") as file:
            lines = file.readlines()
        cut = bool(lines) and not lines[-1].endswith("\n")
        return [row for row in csv.DictReader(lines[:-1] if cut else lines) if row.get("step")]

    def _write(self, rows: Iterable[dict[str, str]], columns: list[str]) -> None:
        with atomic.atomic_write(self.metrics_file_path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


def _tested(row: dict[str, str]) -> bool:
    return any(value and name.startswith(TESTED) for name, value in row.items())
