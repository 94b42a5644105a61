"""Checkpoints to resume from: the last state, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from brainet_pl._utils import atomic, lightning_private
from brainet_pl._utils.framework import (
    ModelCheckpoint,
    SIGTERMException,
    TorchCheckpointIO,
    TrainerFn,
    pl,
    rank_zero_warn,
)
from brainet_pl._utils.tensor_file import check_file
from brainet_pl.storage.sharded import is_sharded_folder, read_whole


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and moves it into place.

    Lightning writes to the folder for temporary files; where that is another file system, moving is copying, and a
    process killed meanwhile leaves half a checkpoint. A `BRAINet` puts this in the place of Lightning's default.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Called by the strategy; what is not a local file is written as Lightning does."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic.atomic_write(path) as temporary, temporary.open("wb") as file:
            torch.save(checkpoint, file)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by the strategy; a local file is checked before memory is taken for what it says it holds.

        The folder of a fit that was sharded is read as the file that one process would have written.
        """
        if is_sharded_folder(path):
            return read_whole(path)
        if Path(path).is_file():
            check_file(path)
        return super().load_checkpoint(path, *args, **kwargs)


class LastCheckpoint(ModelCheckpoint):
    """Keeps the state after the last training epoch in `last.ckpt`, whatever the metrics say.

    `ModelCheckpoint(monitor=…, save_last=True)` writes `last.ckpt` only when it saves a best one. Use this beside a
    `ModelCheckpoint(monitor=…)`; it always runs after that one, so that the last state remembers the best.

    SIGTERM, which a cluster sends before it takes a machine away, also keeps the steps of an epoch so far. After any
    other exception the file stays as it is: it comes from inside a step, which has no state to resume from exactly.

    Args:
        dirpath: folder of the file; null is the folder `checkpoints` of the run.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(dirpath, filename="last", enable_version_counter=False, save_on_train_epoch_end=True)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the folder, clear it of what a killed run left, and go to the end of the callbacks."""
        super().setup(trainer, pl_module, stage)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [c for c in callbacks if c is not self] + [self]  # type: ignore[attr-defined]
        if stage == "fit" and trainer.is_global_zero and self.dirpath is not None:
            atomic.remove_leftovers(Path(self.dirpath))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save on SIGTERM, which Lightning raises between two batches; alone, because others may be gone already.

        Ctrl-C comes inside a step: of a fit that it ends before the first checkpoint, nothing is left, which is said.
        """
        epochs: Any = trainer.fit_loop.epoch_progress.current
        stopped = isinstance(exception, SIGTERMException) and epochs.processed < epochs.started
        if stopped and trainer.world_size == 1:
            lightning_private.save_now(self, trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if isinstance(exception, KeyboardInterrupt) and fitting and not self.best_model_path and not trainer.ckpt_path:
            rank_zero_warn(
                "the fit was interrupted before its first epoch had ended, so that there is no checkpoint to resume "
                "from: begin it again; SIGTERM (kill) in the place of Ctrl-C saves between two batches"
            )
