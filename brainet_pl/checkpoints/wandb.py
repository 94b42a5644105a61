"""How a run is called in Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

from brainet_pl._utils.framework import is_wandb, pl

SEED = "PL_GLOBAL_SEED"  # of seed_everything


def set_wandb_run_metadata(trainer: pl.Trainer, head: str, task: str) -> None:
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
        if is_wandb(logger) and logger._wandb_init.get("anonymous", "") is None:
            del logger._wandb_init["anonymous"]  # Lightning's default, of which W&B warns
        if is_wandb(logger) and logger._experiment is None and logger.version is None:
            for key, value in said.items():
                if logger._wandb_init.get(key) is None:
                    logger._wandb_init[key] = value
