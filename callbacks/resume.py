"""A resumed fit gives what an uninterrupted one gives: checkpoints keep the random states."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from brainet_pl._utils import lightning_private
from brainet_pl._utils.framework import Callback, TorchCheckpointIO, TrainerFn, is_csv, pl, rank_zero_warn
from brainet_pl._utils.rng import States, collect, put_back
from brainet_pl.callbacks.checkpoints import WholeCheckpointIO
from brainet_pl.distributed.samples import all_gather
from brainet_pl.storage import runs
from brainet_pl.storage.format import RANDOM, RUN

SEED = "PL_GLOBAL_SEED"  # of seed_everything; Lightning seeds the samplers of several processes with it


class ExactResume(Callback):
    """Makes `fit(ckpt_path=…)` continue as if it had never stopped. A `BRAINet` brings this callback itself.

    A checkpoint holds the states of the random generators of Python, NumPy and torch at its own moment and at the start
    of its epoch. Lightning makes the iterator over an epoch's data after `on_train_epoch_start`, and that draws the
    seeds of the sampler and of worker processes; but in a resumed fit Lightning makes the first one long before. So:

    - after a checkpoint from the end of an epoch, its states are put back and the iterator is made again;
    - after one from the middle of an epoch, the iterator is made from the states at the epoch's start, the batches that
      were trained on are read and dropped, the states of the checkpoint are put back, and the epoch continues.

    Weights and metrics are then the same to the bit on a CPU. Not covered: random numbers in workers that outlive an
    epoch (`persistent_workers`), and `reload_dataloaders_every_n_epochs`.
    """

    def __init__(self) -> None:
        self._epoch_start: States = {}
        self._stored: tuple[States, States] | None = None  # at the checkpoint, and at the start of its epoch
        self._step: int | None = None  # of the checkpoint that a fit goes on from
        self._inside = False  # whether the checkpoint was written before the end of an epoch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget an earlier fit, and have checkpoints written whole unless the user chose how to write them."""
        self._stored = self._step = None
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeCheckpointIO()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the states of all processes and which run this is; what was logged is written, lest a kill lose it."""
        checkpoint[RUN] = runs.describe(trainer)
        states = {"now": all_gather(collect()), "epoch_start": all_gather(self._epoch_start)}
        checkpoint[RANDOM] = states | {"seed": os.environ.get(SEED)}
        for logger in trainer.loggers:
            if is_csv(logger):
                logger.save()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what a fit has to put back."""
        self._step = int(checkpoint.get("global_step", 0))
        stored = checkpoint.get(RANDOM)
        if trainer.state.fn != TrainerFn.FITTING or stored is None:
            return
        if len(stored["now"]) != trainer.world_size:
            rank_zero_warn(
                f"expected a checkpoint of {trainer.world_size} processes, got one of {len(stored['now'])}: the "
                "resumed fit draws other random numbers than an uninterrupted one"
            )
            return
        if stored["seed"] is not None:
            os.environ[SEED] = stored["seed"]
        self._stored = stored["now"][trainer.global_rank], stored["epoch_start"][trainer.global_rank]
        self._inside = _inside(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first epoch's iterator is made from these: the sanity check in between leaves no trace in them.

        By now it is known whether the fit goes on from a checkpoint, and so which rows of `metrics.csv` stay.
        """
        runs.rewind_rows(trainer, self._step)
        self._epoch_start = collect()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the states back; in the middle of an epoch, its data too."""
        if self._stored is None:
            return
        loop: Any = trainer.fit_loop
        loaders = lightning_private.train_loaders(trainer) or []
        if any(getattr(loader, "persistent_workers", False) for loader in loaders):
            rank_zero_warn(
                "expected workers that live for an epoch, got persistent_workers=True in the training loader: if they "
                "draw random numbers, for augmentation, a resumed fit can't repeat those; set it to False"
            )
        now, epoch_start = self._stored
        inside = _inside(vars(loop.epoch_progress.current))
        if self._inside and not inside:
            rank_zero_warn(
                "expected a checkpoint from the end of an epoch or from between its batches, got one from its last "
                "batch: Lightning leaves out the validation that came next, so the resumed fit differs from an "
                "uninterrupted one; use last.ckpt of LastCheckpoint"
            )
        if inside and not _stateful(loaders):
            put_back(epoch_start)
            self._epoch_start = epoch_start
            _skip_trained_batches(trainer, loaders)
            self._stored = None  # on_train_epoch_start won't come for this epoch
        put_back(now)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the states from which the epoch's iterator is made; after a resume, make it here."""
        if self._stored is not None or trainer.current_epoch > 0:
            self._epoch_start = collect()
        if self._stored is not None:
            self._stored = None
            lightning_does = trainer.current_epoch > 0 and not getattr(trainer.fit_loop, "is_resuming", False)
            if not lightning_does and not _stateful(lightning_private.train_loaders(trainer) or []):
                lightning_private.restart_training_data(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A checkpoint from the end leaves nothing to train, but a test may follow."""
        if self._stored is not None:
            put_back(self._stored[0])
            self._stored = None


def _skip_trained_batches(trainer: pl.Trainer, loaders: Sequence[Any]) -> None:
    """Make the iterator over the epoch's data again, and drop the batches of it that were trained on."""
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
    loop: Any = trainer.fit_loop
    for loader in loaders:
        for name in ("sampler", "batch_sampler"):
            sampler: Any = getattr(loader, name, None)
            if hasattr(sampler, "set_epoch"):  # of several processes: it shuffles by the number of the epoch
                sampler.set_epoch(loop.epoch_progress.current.processed)
    fetcher: Any = lightning_private.restart_training_data(trainer)
    trained = loop.epoch_loop.batch_progress.current.processed
    for _ in range(trained):
        next(fetcher)
    fetcher.fetched -= trained  # Lightning adds them itself


def _inside(epochs: Mapping[str, int]) -> bool:
    """Whether an epoch has begun and not ended, by Lightning's counts."""
    return epochs["processed"] < epochs["started"]


def _stateful(loaders: Any) -> bool:
    """Whether loaders resume by themselves, as those of torchdata do."""
    return any(hasattr(loader, "load_state_dict") for loader in loaders)
