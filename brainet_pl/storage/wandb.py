"""How a run is called in Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

from brainet_pl._utils import lightning_private
from brainet_pl._utils.framework import is_wandb, pl

SEED = "PL_GLOBAL_SEED"  # of seed_everything


def set_wandb_run_metadata(trainer: pl.Trainer, head: str, task: str) -> None:
    """Set name, group, tags and job of a W&B run before it begins, where the run is new and the user set none.

    The group is the data, so that runs on the same data stand together; the name is data, head and seed; the tags are
    head and task; the job type is what the Trainer does.
    """
    source: Any = getattr(trainer, "datamodule", None)
    data = str(getattr(source, "name", None) or ("data" if source is None else type(source).__name__)).lower()
    seed = os.environ.get(SEED, "")
    job = None if trainer.state.fn is None else str(trainer.state.fn.value)
    name = "-".join(filter(None, (data, head, seed)))
    defaults = {"name": name, "group": data, "tags": [head, task], "job_type": job}
    for logger in trainer.loggers:
        if not is_wandb(logger):
            continue
        arguments = lightning_private.wandb_arguments(logger)
        if arguments.get("anonymous", "") is None:
            del arguments["anonymous"]  # Lightning's default, of which W&B warns
        if lightning_private.experiment_of(logger) is None and logger.version is None:
            arguments.update({key: value for key, value in defaults.items() if arguments.get(key) is None})
