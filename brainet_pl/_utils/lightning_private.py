"""Every private attribute of Lightning that the package uses, each behind one named function.

Lightning has no public way to do these things. `tests/_utils/test_lightning_private.py` holds each function against the
installed Lightning, so an upgrade that renames an attribute fails there, by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from brainet_pl._utils.framework import ModelCheckpoint, pl

# -- loops ------------------------------------------------------------------------------------------------------------


def data_given(loop: Any) -> Any:
    """What `fit`, `validate` or `test` was called with: a datamodule, loaders, or None before the call.

    Not `trainer.datamodule`, which an earlier call may have left.
    """
    return loop._data_source.instance


def loader_source(loop: Any) -> Any:
    """What a loop takes its loaders from: an object with `dataloader`, `instance` and `name`."""
    return loop._data_source


def set_loader_source(loop: Any, source: Any) -> None:
    """Have a loop take its loaders from another source."""
    loop._data_source = source


def train_loaders(trainer: pl.Trainer) -> list[Any] | None:
    """The training loaders of a fit; None before they are made."""
    combined = trainer.fit_loop._combined_loader
    return None if combined is None else combined.flattened


def restart_training_data(trainer: pl.Trainer) -> Iterator[Any]:
    """Make the iterator over the training data of an epoch anew, and return it."""
    return iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]


def logged_step(trainer: pl.Trainer) -> int:
    """The step at which Lightning logs: that of the last training, or what `set_logged_step` says."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def set_logged_step(trainer: pl.Trainer, step: int) -> None:
    """Have Lightning log what follows at this step."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


# -- Trainer, model and callbacks -------------------------------------------------------------------------------------


def finds_learning_rate(trainer: pl.Trainer) -> bool:
    """Whether this is a trial of `Tuner.lr_find`, which raises the rate until the loss blows up, and undoes it all."""
    return any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks)  # type: ignore[attr-defined]


def set_root_folder(trainer: pl.Trainer, folder: str) -> None:
    """Set where files go that no logger has a folder for."""
    trainer._default_root_dir = folder  # type: ignore[attr-defined]


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer of a model; None where there is none, of which `module.trainer` makes an error."""
    return module._trainer


def compiler_context(module: pl.LightningModule) -> dict[str, Any] | None:
    """What `torch.compile` left on a model that Lightning compiled; None for others."""
    return module._compiler_ctx


def set_hparams(module: pl.LightningModule, settings: dict[str, Any]) -> None:
    """Set the hyper-parameters of a model as they are; `save_hyperparameters` would store class paths of the CLI."""
    module._set_hparams(settings)
    module._hparams_initial = copy.deepcopy(module._hparams)  # type: ignore[assignment]


def average_model(callback: pl.Callback) -> Any:
    """The copy of the model that a callback which averages weights keeps; None for other callbacks."""
    average = getattr(callback, "_average_model", None)
    return getattr(average, "module", average)


def keep_integers(trainer: pl.Trainer) -> None:
    """Have callbacks that average weights copy whole numbers: 0.9 · 63 + 0.1 · 63, cut off, is 62."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None)
        for name, keep in (("avg_fn", _keep_one), ("multi_avg_fn", _keep_several)):
            mean = getattr(average, name, None)
            if mean is not None and not getattr(mean, "keeps_integers", False):
                setattr(average, name, keep(mean))


def _keep_one(mean: Any) -> Any:
    def kept(averaged: Tensor, current: Tensor, count: Any) -> Tensor:
        found: Tensor = mean(averaged, current, count) if averaged.is_floating_point() else current
        return found

    kept.keeps_integers = True  # type: ignore[attr-defined]
    return kept


def _keep_several(mean: Any) -> Any:
    def kept(averaged: list[Tensor], current: list[Tensor], count: Any) -> None:
        if averaged[0].is_floating_point():  # they come by their type
            mean(averaged, current, count)
            return
        for one, other in zip(averaged, current, strict=True):
            one.copy_(other)

    kept.keeps_integers = True  # type: ignore[attr-defined]
    return kept


def save_now(callback: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Let a checkpoint callback save at once, unless it has saved this step."""
    if not callback._should_skip_saving_checkpoint(trainer):
        callback._save_topk_checkpoint(trainer, callback._monitor_candidates(trainer))


# -- loggers ----------------------------------------------------------------------------------------------------------


def experiment_of(logger: Any) -> Any:
    """What a logger writes with; None before its first use. `logger.experiment` would begin a run."""
    return getattr(logger, "_experiment", None)


def set_experiment(logger: Any, writer: Any) -> None:
    """Have a logger write with this."""
    logger._experiment = writer


def version_of(logger: Any) -> int | str | None:
    """The version that a local logger was given; None where it has none yet. `logger.version` would choose one."""
    version: int | str | None = logger._version
    return version


def set_version(logger: Any, version: int | str | None) -> None:
    """Give a local logger its version."""
    logger._version = version


def next_version(logger: Any) -> int:
    """The version that a local logger would choose."""
    return int(logger._get_next_version())


def set_folder(logger: Any, root: str, name: str, version: int | str) -> None:
    """Have a local logger write to `root/name/version`."""
    logger._name, logger._version = name, version
    for attribute in ("_root_dir", "_save_dir"):  # TensorBoard's has the first, that of CSV both
        if hasattr(logger, attribute):
            setattr(logger, attribute, root)


def wandb_arguments(logger: Any) -> dict[str, Any]:
    """The arguments with which a W&B logger will call `wandb.init`; changes count until its run begins."""
    arguments: dict[str, Any] = logger._wandb_init
    return arguments


def set_wandb_run(logger: Any, run: str | None) -> None:
    """Have a W&B logger continue the run of this id."""
    logger._id = logger._wandb_init["id"] = run


def set_wandb_folder(logger: Any, folder: str) -> None:
    """Have a W&B logger keep its files in this folder."""
    logger._save_dir = logger._wandb_init["dir"] = folder


def logs_models(logger: Any) -> bool:
    """Whether a W&B logger uploads checkpoints by itself."""
    return bool(logger._log_model)
