"""How a run appears in Weights & Biases: its name, group, tags and job, and its checkpoints as versions of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from brainet_pl.callbacks.logging import log_files
from brainet_pl.framework import Callback, ModelCheckpoint, is_wandb, pl, rank_zero_info
from brainet_pl.ranks import on_rank_zero

SEED = "PL_GLOBAL_SEED"  # of seed_everything


def introduce(trainer: pl.Trainer, head: str, task: str) -> None:
    """Tell W&B what a run is, before it begins: what the user did not say, and only of a run that is new.

    The group is the data, so that runs on the same data stand together; the name is data, head and seed; the tags are
    head and task; the job type is what the Trainer does.
    """
    source: Any = getattr(trainer, "datamodule", None)
    data = str(getattr(source, "name", None) or ("data" if source is None else type(source).__name__)).lower()
    seed = os.environ.get(SEED, "")
    job = None if trainer.state.fn is None else str(trainer.state.fn.value)
    said = {"name": "-".join(filter(None, (data, head, seed))), "group": data, "tags": [head, task], "job_type": job}
    for logger in trainer.loggers:
        if is_wandb(logger) and logger._experiment is None and logger.version is None:
            for key, value in said.items():
                if logger._wandb_init.get(key) is None:
                    logger._wandb_init[key] = value


class Tracking(Callback):
    """Hands the best and the last checkpoint of a fit to loggers that keep files, with the metrics of the fit.

    In W&B they are versions of the artifact `model-<run>` with the aliases `best` and `last`; one version has both if
    the last epoch was the best. A `WandbLogger(log_model=…)` does so itself, and is left to it. A `BRAINet` brings this
    callback itself; to set it, or to keep models away (`most_megabytes=0`), give one.

    Args:
        most_megabytes: a larger checkpoint stays where it is.
    """

    def __init__(self, most_megabytes: float = 200.0) -> None:
        self.most_megabytes = most_megabytes

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All checkpoints are written by now."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            on_rank_zero(trainer, lambda: self._keep(trainer, pl_module))

    def _keep(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        boards = [logger for logger in trainer.loggers if is_wandb(logger)]
        if any(getattr(logger, "_log_model", False) for logger in boards):
            return
        facts: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        ggt = getattr(module, "ggt", None)
        facts |= {"structure": None if ggt is None else ggt.fingerprint}
        name = f"model-{boards[0].version}" if boards else "model"
        for path, aliases in chosen(trainer.checkpoint_callbacks).items():
            size = Path(path).stat().st_size / 1e6
            if size <= self.most_megabytes:
                log_files(trainer, "model", [Path(path)], facts, name, ["latest", *aliases])
            elif self.most_megabytes:
                rank_zero_info(
                    f"not handed to loggers: {path} has {size:,.0f} MB, and most_megabytes of Tracking is "
                    f"{self.most_megabytes:g}"
                )


def chosen(callbacks: Any) -> dict[str, list[str]]:
    """The files of the best and the last checkpoint, with these words as their aliases; one file where they are one."""
    best, last = None, None
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            if callback.monitor is not None and callback.best_model_path:
                best = (callback.best_model_path, callback._last_global_step_saved)
            path = callback.last_model_path if callback.monitor is not None else callback.best_model_path
            if path:
                last = (path, callback._last_global_step_saved)
    if best is not None and last is not None and best[1] == last[1] and Path(best[0]).is_file():
        return {best[0]: ["best", "last"]}
    found = [(best, "best"), (last, "last")]
    return {part[0]: [alias] for part, alias in found if part is not None and Path(part[0]).is_file()}
