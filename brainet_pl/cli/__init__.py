"""The command `brainet`: `commands` is light, everything else is imported when it is asked for.

Imports every room; no room imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from brainet_pl._utils.checks import UsageError
from brainet_pl.cli.commands import console, main, one_line
from brainet_pl.cli.words import config_path, shipped

if TYPE_CHECKING:
    from brainet_pl.cli.lightning_cli import (
        BrainetCLI,
        SaveConfig,
        lightning,
        stored_config,
        without_wandb,
    )

__all__ = [
    "BrainetCLI",
    "SaveConfig",
    "UsageError",
    "config_path",
    "console",
    "lightning",
    "main",
    "one_line",
    "shipped",
    "stored_config",
    "without_wandb",
]


def __getattr__(name: str) -> Any:
    """What Lightning's commands are made of, from its own file, when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("brainet_pl.cli.lightning_cli"), name)
