"""Charts, figures, tables and files to any logger, and always as files of the run; nothing is dropped in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave

from brainet_pl._utils.csv import write_rows
from brainet_pl._utils.framework import is_csv, is_tensorboard, is_wandb, pl, rank_zero_info, rank_zero_only
from brainet_pl._utils.inside import place_inside, write_inside
from brainet_pl._utils.lightning_private import logged_step
from brainet_pl.callbacks.sinks import SavedFigure, SavedTable, Sink, rgb, sink_of
from brainet_pl.evaluation import figures
from brainet_pl.evaluation.chart import Chart, Matrix
from brainet_pl.evaluation.summary import LoggedTable

_NOTED: WeakSet[Any] = WeakSet()  # loggers of which it was said that they don't take everything


def run_folder(trainer: pl.Trainer) -> Path:
    """Where files of a run go: beside its metrics, or where Lightning puts the checkpoints of its logger's run.

    Without a logger that has runs it is the Trainer's root.
    """
    root = Path(trainer.default_root_dir)
    for logger in trainer.loggers:
        if is_csv(logger) or is_tensorboard(logger):
            return Path(logger.log_dir)
    for logger in trainer.loggers:  # of services, such as W&B: two runs must not write into one folder
        version = logger.version
        if isinstance(version, str) and version and root.name != version:  # else a run that goes on in its folder
            return Path(logger.save_dir or root) / str(logger.name) / version
    return root


def file_name(name: str) -> str:
    """ood/held_out/curves → ood_held_out_curves."""
    return name.replace("/", "_")


@rank_zero_only
def log_figure(trainer: pl.Trainer, name: str, figure: Figure) -> None:
    """Send a figure to every logger and save it as `figures/<name>.png` in the run's folder."""
    drawn = _saved_figure(trainer, name, figure)
    _send(trainer, "pictures", drawn.path.parent, lambda sink: sink.picture(drawn))


@rank_zero_only
def log_chart(trainer: pl.Trainer, chart: Chart) -> None:
    """Send a chart to every logger, as data where it draws charts itself, and save its picture in `figures`."""
    drawn = _saved_figure(trainer, chart.name, figures.draw(chart))
    _send(trainer, "pictures", drawn.path.parent, lambda sink: sink.chart(chart, drawn))


@rank_zero_only
def log_matrix(trainer: pl.Trainer, name: str, matrix: Matrix) -> None:
    """Send a confusion matrix to every logger, and save its picture in `figures`."""
    log_figure(trainer, name, figures.draw_matrix(matrix))


@rank_zero_only
def log_table(trainer: pl.Trainer, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, str]:
    """Send a table to every logger and save it as `tables/<name>.csv` in the run's folder.

    A cell is text, a number, None, or a picture: uint8 (H, W) or (H, W, 3). Pictures are saved as PNG in
    `tables/<name>/`, and their cell in the CSV file is that path, relative to the file's folder. Those paths are also
    what is returned, under `<name>/<row>/<column>`.
    """
    wrong = [i for i, row in enumerate(rows) if len(row) != len(columns)]
    if wrong:
        raise ValueError(
            f"expected {len(columns)} cells in every row of {name} ({', '.join(columns)}), got "
            f"{len(rows[wrong[0]])} in row {wrong[0]}: give a cell for each column, None where there is no value"
        )
    folder, file_stem = run_folder(trainer), file_name(name)
    path = place_inside(folder, f"tables/{file_stem}.csv")
    pictures = place_inside(folder, f"tables/{file_stem}/0_0.png").parent
    for old in pictures.glob("*.png"):
        if re.fullmatch(r"\d+_\d+\.png", old.name):  # of an earlier test; any other is not ours
            old.unlink()
    plain = [[_saved(cell, folder, f"{file_stem}/{i}_{j}.png") for j, cell in enumerate(row)]
             for i, row in enumerate(rows)]  # fmt: skip
    with (
        write_inside(folder, f"tables/{file_stem}.csv") as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        write_rows(file, [list(columns), *plain])
    table = SavedTable(name, list(columns), rows, plain, path, logged_step(trainer))
    _send(trainer, "tables", path.parent, lambda sink: sink.table(table))
    shown = ((i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if isinstance(cell, np.ndarray))
    return {f"{name}/{i}/{j}": str(plain[i][j]) for i, j in shown}


@rank_zero_only
def log_files(
    trainer: pl.Trainer,
    kind: str,
    paths: Sequence[Path],
    facts: Mapping[str, Any],
    name: str = "",
    aliases: Sequence[str] = (),
    used: bool = False,
) -> None:
    """Hand files to every logger that keeps files, as W&B's versioned artifacts; they stay in the run's folder too.

    Args:
        trainer: with the loggers.
        kind: what they are: "structure", "model", "predictions", "evaluation".
        paths: the files.
        facts: what is known about them, as primitives.
        name: of the artifact; "" is `<kind>-<run>`.
        aliases: of this version, such as "best".
        used: whether the rest of the run is made from them, as a model is from its structure.
    """
    for sink in map(sink_of, trainer.loggers):
        if not (used and sink.uses(kind, name, paths, facts)):
            sink.files(kind, name, paths, facts, list(aliases))


@rank_zero_only
def log_use(trainer: pl.Trainer, run: str, path: Path, facts: Mapping[str, Any]) -> None:
    """Note in W&B that what follows is made by the model that another of its runs has logged, from its checkpoint."""
    for sink in map(sink_of, trainer.loggers):
        if is_wandb(sink.logger) and sink.logger.experiment.id != run:  # in one's own run it is there as an output
            sink.uses("model", f"model-{run}", [path], facts)


@rank_zero_only
def log_config(trainer: pl.Trainer, facts: Mapping[str, Any]) -> None:
    """Note what was found out about a run beside its settings, such as counts, in W&B's configuration of it."""
    for logger in trainer.loggers:
        if is_wandb(logger):
            logger.experiment.config.update(dict(facts), allow_val_change=True)


@rank_zero_only
def log_numbers(trainer: pl.Trainer, numbers: Mapping[str, float]) -> None:
    """Numbers that a run has once to every logger; in W&B they are in the summary, and no panel is made of them."""
    define_summaries(trainer, dict.fromkeys(numbers, "last"), hidden=True)
    for logger in trainer.loggers:
        logger.log_metrics(dict(numbers), step=logged_step(trainer))


@rank_zero_only
def log_scores(trainer: pl.Trainer, make: Callable[[], LoggedTable]) -> None:
    """Send the table of single samples to W&B, where it can be filtered; others have `scores.csv`."""
    boards: list[Any] = [logger for logger in trainer.loggers if is_wandb(logger)]
    if boards:
        table = make()
        for board in boards:
            board.log_table("test/scores", columns=list(table.columns), data=table.rows, step=logged_step(trainer))


@rank_zero_only
def define_summaries(trainer: pl.Trainer, best: Mapping[str, str], hidden: bool = False) -> None:
    """Tell W&B which value of a metric sums up a run.

    Args:
        trainer: with the loggers.
        best: name → "min", "max", "last" or "none"; without it, the last counts.
        hidden: whether no panel is made of them by itself: a number that is logged once is no curve.
    """
    for logger in trainer.loggers:
        if is_wandb(logger):
            for name, which in best.items():
                logger.experiment.define_metric(
                    name, summary=which, step_metric="trainer/global_step", hidden=hidden or None
                )


def _send(trainer: pl.Trainer, what: str, folder: Path, log: Callable[[Sink], None]) -> None:
    """Log to every logger that takes such a thing; say once of each other one where the files are."""
    for sink in map(sink_of, trainer.loggers):
        if what in sink.takes:
            log(sink)
        elif not sink.quiet and sink.logger not in _NOTED:
            _NOTED.add(sink.logger)
            rank_zero_info(f"{type(sink.logger).__name__} takes no {what}: they are in {folder}")


def _saved_figure(trainer: pl.Trainer, name: str, figure: Figure) -> SavedFigure:
    folder, file = run_folder(trainer), f"figures/{file_name(name)}.png"
    with write_inside(folder, file, durable=False) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    return SavedFigure(name, figure, folder / file, logged_step(trainer))


def _saved(cell: Any, folder: Path, name: str) -> Any:
    """The cell as CSV holds it; a picture is written to its file in the run's folder `tables`."""
    if not isinstance(cell, np.ndarray):
        return "" if cell is None else cell
    with write_inside(folder, f"tables/{name}", durable=False) as temporary:
        imsave(temporary, rgb(cell), format="png")
    return name
