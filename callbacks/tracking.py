"""How a run appears in Weights & Biases: its name, group, tags and job, and its checkpoints as versions of a model."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any, NamedTuple

from brainet_pl._utils import lightning_private
from brainet_pl._utils.framework import Callback, ModelCheckpoint, is_wandb, pl, rank_zero_info
from brainet_pl.callbacks.logging import log_files, log_use
from brainet_pl.distributed.samples import on_rank_zero
from brainet_pl.storage.format import RUN, wandb_id


class Tracking(Callback):
    """Hands the best and the last checkpoint of a fit to loggers that keep files, with the metrics of the fit.

    In W&B they are versions of the artifact `model-<run>` with the aliases `best` and `last`. A test or a prediction in
    another W&B run notes the checkpoint as what it is made from, so that W&B draws the way from structure to model to
    results. A `WandbLogger(log_model=…)` hands checkpoints over itself, and is left to it. A `BRAINet` brings this
    callback itself; to set it, or to keep models away (`most_megabytes=0`), give one.

    Args:
        most_megabytes: The size up to which a checkpoint is handed to loggers.
    """

    def __init__(self, most_megabytes: float = 200.0) -> None:
        self.most_megabytes = most_megabytes
        self._origin: str | None = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the W&B run that wrote it."""
        self._origin = wandb_id(checkpoint.get(RUN))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the checkpoint of another run that a fit starts from, or results come from."""
        origin, given = self._origin, trainer.ckpt_path
        if origin is None or given is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return

        def note() -> None:  # only the first process needs to have the file
            path = Path(given)
            if path.is_file() and path.stat().st_size / 1e6 <= self.most_megabytes:
                log_use(trainer, origin, path, {"structure": _tree(pl_module)})

        on_rank_zero(trainer, note)

    on_test_start = on_predict_start = on_fit_start

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All checkpoints are written by now."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            on_rank_zero(trainer, lambda: self._keep(trainer, pl_module))

    def _keep(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if any(is_wandb(logger) and lightning_private.logs_models(logger) for logger in trainer.loggers):
            return
        for one in chosen(trainer):
            size = one.path.stat().st_size / 1e6
            if size <= self.most_megabytes:
                facts = one.metrics | {"structure": _tree(module)}
                log_files(trainer, "model", [one.path], facts, aliases=["latest", *one.aliases])
            elif self.most_megabytes:
                rank_zero_info(
                    f"not handed to loggers: {one.path} has {size:,.0f} MB, and most_megabytes of Tracking is "
                    f"{self.most_megabytes:g}"
                )


def _tree(module: pl.LightningModule) -> str | None:
    ggt = getattr(module, "ggt", None)
    return None if ggt is None else str(ggt.fingerprint)


class Chosen(NamedTuple):
    """A checkpoint that is kept: "best", "last" or both, its file, and metrics of its epoch as far as known."""

    aliases: list[str]
    path: Path
    metrics: dict[str, Any]


def chosen(trainer: pl.Trainer) -> list[Chosen]:
    """The best and the last checkpoint of a fit, where there are files of them; one where their content is one."""
    best: Chosen | None = None
    last: Chosen | None = None
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        best, last = _best_of(callback) or best, _last_of(callback, trainer) or last
    kept = [one for one in (best, last) if one is not None and one.path.is_file()]
    if len(kept) == 2 and filecmp.cmp(kept[0].path, kept[1].path, shallow=False):
        return [kept[1]._replace(aliases=["best", "last"])]
    return kept


def _best_of(callback: ModelCheckpoint) -> Chosen | None:
    """The best checkpoint by the metric that a callback monitors."""
    if callback.monitor is None or not callback.best_model_path:
        return None
    score = callback.best_model_score
    known = {} if score is None else {callback.monitor: float(score)}  # others are those of the last epoch
    return Chosen(["best"], Path(callback.best_model_path), known)


def _last_of(callback: ModelCheckpoint, trainer: pl.Trainer) -> Chosen | None:
    """The last checkpoint of a callback; of one that monitors nothing, its best is its last."""
    path = callback.last_model_path if callback.monitor is not None else callback.best_model_path
    if not path:
        return None
    now = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Chosen(["last"], Path(path), now)
