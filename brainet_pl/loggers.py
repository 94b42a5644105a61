"""Loggers told apart by what they are, whichever package they come from: `pytorch_lightning`, `lightning` or another.

`lightning.pytorch` and `pytorch_lightning` have two sets of the same classes, so `isinstance` would know only one of
them. A class is known here by its name and that of its bases.
"""

from __future__ import annotations

from typing import Any


def is_a(thing: Any, name: str) -> bool:
    """Whether the class of a thing, or one of its bases, has this name."""
    return any(cls.__name__ == name for cls in type(thing).__mro__)


def is_wandb(logger: Any) -> bool:
    """Whether a logger sends to Weights & Biases."""
    return is_a(logger, "WandbLogger")


def is_csv(logger: Any) -> bool:
    """Whether a logger writes `metrics.csv`."""
    return is_a(logger, "CSVLogger")


def is_local(logger: Any) -> bool:
    """Whether a logger writes into a folder `<save_dir>/<name>/<version>` of its run."""
    return is_csv(logger) or is_a(logger, "TensorBoardLogger")
