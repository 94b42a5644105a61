"""Which Lightning: `pytorch_lightning` or `lightning.pytorch`, two copies of one library that do not mix.

Everything else in the package imports Lightning's classes from here. The choice is made when the package is imported:
what the environment variable BRAINET_LIGHTNING says, else the one that was imported before, else the one that is
installed, else `pytorch_lightning`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeGuard

from brainet_pl._utils.warn import warn

SETTING = "BRAINET_LIGHTNING"
OLD, NEW = "pytorch_lightning", "lightning.pytorch"


def choose(forced: str | None, loaded: Collection[str], installed: Callable[[str], bool]) -> str:
    """Chooses the namespace of Lightning to use.

    Args:
        forced: The namespace that the user asks for: "pytorch_lightning", "lightning", or None.
        loaded: The names of all imported modules.
        installed: Whether a package is installed, by its name.
    """
    if forced:
        names = {OLD: OLD, "lightning": NEW, NEW: NEW}
        if forced not in names:
            raise ValueError(
                f"expected {SETTING} to be {OLD} or lightning, got {forced!r}: set one of them, or neither"
            )
        return names[forced]
    if (OLD in loaded) != (NEW in loaded):
        return OLD if OLD in loaded else NEW
    return NEW if installed("lightning") and not installed(OLD) else OLD


def _installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a mere folder of that name has none


NAMESPACE = choose(os.environ.get(SETTING), sys.modules, _installed)
OTHER = OLD if NAMESPACE == NEW else NEW

if TYPE_CHECKING or NAMESPACE == OLD:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import Callback, ModelCheckpoint
    from pytorch_lightning.cli import (
        LightningArgumentParser,
        LightningCLI,
        LRSchedulerCallable,
        OptimizerCallable,
        SaveConfigCallback,
    )
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
    from pytorch_lightning.loggers.csv_logs import ExperimentWriter
    from pytorch_lightning.plugins import TorchCheckpointIO
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_only
    from pytorch_lightning.utilities.combined_loader import CombinedLoader
    from pytorch_lightning.utilities.exceptions import SIGTERMException
else:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.cli import (
        LightningArgumentParser,
        LightningCLI,
        LRSchedulerCallable,
        OptimizerCallable,
        SaveConfigCallback,
    )
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter
    from lightning.pytorch.plugins import TorchCheckpointIO
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = [
    "NAMESPACE",
    "OTHER",
    "CSVLogger",
    "Callback",
    "CombinedLoader",
    "ExperimentWriter",
    "LRSchedulerCallable",
    "LightningArgumentParser",
    "LightningCLI",
    "ModelCheckpoint",
    "OptimizerCallable",
    "SIGTERMException",
    "SaveConfigCallback",
    "TensorBoardLogger",
    "TorchCheckpointIO",
    "TrainerFn",
    "WandbLogger",
    "is_averaging",
    "is_csv",
    "is_tensorboard",
    "is_wandb",
    "keep_quiet",
    "pl",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "refuse_mix",
    "translated",
    "watch_mixes",
]


# -- names ------------------------------------------------------------------------------------------------------------


def translated(text: str, namespace: str = NAMESPACE) -> str:
    """The same with every path of a class of Lightning in one namespace.

    >>> translated("class_path: lightning.pytorch.callbacks.EarlyStopping", "pytorch_lightning")
    'class_path: pytorch_lightning.callbacks.EarlyStopping'
    """
    return re.sub(r"(?<![\w.])(pytorch_lightning|lightning\.pytorch)\.(?=\w)", f"{namespace}.", text)


# -- loggers: a Trainer takes those of either namespace ----------------------------------------------------------------


def is_csv(logger: object) -> TypeGuard[CSVLogger]:
    """Whether a logger writes `metrics.csv`."""
    return _named(logger, "CSVLogger")


def is_tensorboard(logger: object) -> TypeGuard[TensorBoardLogger]:
    """Whether a logger is one of TensorBoard's."""
    return _named(logger, "TensorBoardLogger")


def is_wandb(logger: object) -> TypeGuard[WandbLogger]:
    """Whether a logger is that of Weights & Biases."""
    return _named(logger, "WandbLogger")


def is_averaging(callback: object) -> bool:
    """Whether a callback keeps a mean of weights, and so a copy of the model."""
    return _named(callback, "StochasticWeightAveraging") or _named(callback, "WeightAveraging")


def _named(thing: object, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(thing).__mro__)


# -- mixes ------------------------------------------------------------------------------------------------------------


def namespace_of(thing: object) -> str | None:
    """The namespace whose classes a thing is made of; None where it is not Lightning's."""
    thing = getattr(thing, "_orig_mod", thing)  # of torch.compile
    modules = [f"{cls.__module__}." for cls in type(thing).__mro__]
    return next((name for name in (OLD, NEW) if any(module.startswith(f"{name}.") for module in modules)), None)


def refuse_mix(thing: object, namespace: str = NAMESPACE) -> None:
    """Raise where a Trainer of one namespace is given a thing of the other."""
    theirs = namespace_of(thing)
    if theirs is None or theirs == namespace:
        return
    thing = getattr(thing, "_orig_mod", thing)
    ours = type(thing).__module__.split(".")[0] == "brainet_pl"
    advice = (
        f"brainet_pl took {theirs}: import {namespace} before brainet_pl, or set {SETTING}={namespace.split('.')[0]} "
        f"in the environment, or take the Trainer of {theirs}"
        if ours
        else f"import both from {NAMESPACE}, as brainet_pl does"
    )
    raise TypeError(
        f"expected Lightning's classes to come from one package, got a Trainer of {namespace} and a "
        f"{type(thing).__qualname__} of {theirs}: {advice}"
    )


def watch_mixes() -> None:
    """Have Lightning explain a mix of namespaces, where it mostly says "Expected a parent".

    Its own check looks at the module of a class alone, and so misses every class that a user or this package derives.
    It is replaced by one that looks at the base classes too. Called whenever something is made that a Trainer takes,
    because the other namespace may be imported at any time.
    """
    for namespace in (OLD, NEW):
        for name in ("model_helpers", "compile"):
            module: Any = sys.modules.get(f"{namespace}.utilities.{name}")
            before = getattr(module, "_check_mixed_imports", None)
            if before is not None and before.__module__ != __name__:
                module._check_mixed_imports = _check_for(namespace)


def _check_for(namespace: str) -> Callable[[object], None]:
    def check(instance: object) -> None:
        refuse_mix(instance, namespace)

    return check


# -- warnings ---------------------------------------------------------------------------------------------------------


@rank_zero_only
def rank_zero_warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, in the first process alone."""
    warn(message, category)


# -- noise ------------------------------------------------------------------------------------------------------------


class _NoTips(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Drop advertisements for other products."""
        return "Tip: For seamless" not in record.getMessage()


def keep_quiet() -> None:
    """Hide tips, and warnings about calls of Lightning or of the package that a user of `brainet` can't change."""
    logger = logging.getLogger(f"{NAMESPACE}.utilities.rank_zero")
    if not any(isinstance(one, _NoTips) for one in logger.filters):
        logger.addFilter(_NoTips())
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    # A prediction takes no callbacks of the fit along, and a new run of a checkpoint has a new folder.
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks used to create")
    warnings.filterwarnings("ignore", message="The dirpath has changed from")
    warnings.filterwarnings("ignore", message=r".isinstance\(treespec, LeafSpec\). is deprecated")
