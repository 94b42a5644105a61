"""Figures to any logger: W&B, TensorBoard, or a folder of PNGs beside the CSV; nothing is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from matplotlib.figure import Figure
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn


def figure_folder(trainer: pl.Trainer) -> Path:
    """Where PNGs go: beside the run's metrics or, without a logger, under the Trainer's root."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            return Path(logger.log_dir) / "figures"
    return Path(trainer.default_root_dir) / "figures"


@rank_zero_only
def log_figure(trainer: pl.Trainer, name: str, figure: Figure) -> Path:
    """Send a figure to every logger and save it as PNG; returns the file."""
    path = figure_folder(trainer) / f"{name.replace('/', '_')}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)])
        elif isinstance(logger, TensorBoardLogger):
            experiment: Any = logger.experiment
            experiment.add_figure(name, figure, trainer.global_step)
        elif not isinstance(logger, CSVLogger):
            rank_zero_warn(f"{type(logger).__name__} takes no figures here: {name} is in {path}")
    return path
