"""Figures, tables and files to any logger: W&B, TensorBoard, or files beside the CSV; nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave

from brainet_pl.callbacks.rows import write_rows
from brainet_pl.framework import is_csv, is_tensorboard, is_wandb, pl, rank_zero_only, rank_zero_warn


def run_folder(trainer: pl.Trainer) -> Path:
    """Where files of a run go: beside its metrics or, without a logger that has a folder, the Trainer's root."""
    for logger in trainer.loggers:
        if is_csv(logger) or is_tensorboard(logger):
            return Path(logger.log_dir)
    return Path(trainer.default_root_dir)


def file_name(name: str) -> str:
    """ood/held_out/curves → ood_held_out_curves."""
    return name.replace("/", "_")


@rank_zero_only
def log_figure(trainer: pl.Trainer, name: str, figure: Figure) -> None:
    """Send a figure to every logger and save it as `figures/<name>.png` in the run's folder."""
    path = run_folder(trainer) / "figures" / f"{file_name(name)}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    for logger in trainer.loggers:
        if is_wandb(logger):
            logger.log_image(name, [str(path)], step=trainer.global_step)
        elif is_tensorboard(logger):
            experiment: Any = logger.experiment
            experiment.add_figure(name, figure, trainer.global_step)
        elif not is_csv(logger):
            rank_zero_warn(f"{type(logger).__name__} takes no figures here: {name} is in {path}")


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
    path = run_folder(trainer) / "tables" / f"{file_name(name)}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.with_suffix("").glob("*.png"):
        old.unlink()
    plain = [[_saved(cell, path, f"{i}_{j}") for j, cell in enumerate(row)] for i, row in enumerate(rows)]
    with path.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [list(columns), *plain])
    for logger in trainer.loggers:
        if is_wandb(logger):
            import wandb

            data = [[wandb.Image(_rgb(cell)) if isinstance(cell, np.ndarray) else cell for cell in row] for row in rows]
            logger.log_table(name, columns=list(columns), data=data, step=trainer.global_step)
        elif is_tensorboard(logger):
            experiment: Any = logger.experiment
            experiment.add_text(name, _markdown(columns, plain), trainer.global_step)
            for j, column in enumerate(columns):
                pictures = [row[j] for row in rows if isinstance(row[j], np.ndarray)]
                if pictures and len({p.shape for p in pictures}) == 1:
                    grid = np.stack([_rgb(p) for p in pictures])
                    experiment.add_images(f"{name}/{column}", grid, trainer.global_step, dataformats="NHWC")
        elif not is_csv(logger):
            rank_zero_warn(f"{type(logger).__name__} takes no tables here: {name} is in {path}")
    shown = ((i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if isinstance(cell, np.ndarray))
    return {f"{name}/{i}/{j}": str(plain[i][j]) for i, j in shown}


@rank_zero_only
def log_artifact(trainer: pl.Trainer, kind: str, path: Path, facts: Mapping[str, Any]) -> None:
    """Hand a file to W&B as a versioned artifact of that kind; equal content stays one version. Others keep the file.

    An offline run keeps the artifact until `wandb sync`; a disabled one has no place for it.
    """
    for logger in trainer.loggers:
        if is_wandb(logger) and not getattr(logger.experiment, "disabled", False):
            import wandb

            artifact = wandb.Artifact(kind, type=kind, metadata=dict(facts))
            artifact.add_file(str(path), name=path.name)
            logger.experiment.log_artifact(artifact)


@rank_zero_only
def define_summaries(trainer: pl.Trainer, best: Mapping[str, str]) -> None:
    """Tell W&B which value of a metric sums up a run: name → "min" or "max"; without it, the last counts."""
    for logger in trainer.loggers:
        if is_wandb(logger):
            for name, which in best.items():
                logger.experiment.define_metric(name, summary=which, step_metric="trainer/global_step")


def _saved(cell: Any, table: Path, name: str) -> Any:
    """The cell as CSV holds it; a picture is written to its file."""
    if not isinstance(cell, np.ndarray):
        return "" if cell is None else cell
    path = table.with_suffix("") / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    imsave(path, _rgb(cell))
    return path.relative_to(table.parent).as_posix()


def _rgb(picture: Any) -> Any:
    """uint8 (H, W) or (H, W, 3) → (H, W, 3)."""
    return np.repeat(picture[..., None], 3, axis=-1) if picture.ndim == 2 else picture


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for cells in lines)
