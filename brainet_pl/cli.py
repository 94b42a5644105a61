"""`brainet fit|validate|test|predict`: LightningCLI with the structure callback and the shipped configs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import WandbLogger

import brainet_pl.datamodules  # noqa: F401  makes `--data Digits` a known name
from brainet_pl import configs
from brainet_pl.callbacks import StructureLearning
from brainet_pl.module import BRAINet


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml into the run's folder, and the whole resolved configuration to W&B once."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Rank zero only, called by the base class."""
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.config.update({"cli": self.config.as_dict()}, allow_val_change=True)


class BrainetCLI(LightningCLI):
    """Adds `--structure.*`, the settings of the structure callback."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Called by LightningCLI."""
        parser.add_lightning_class_args(StructureLearning, "structure")


def config_path(name: str) -> Path:
    """The file of a shipped configuration: "digits" or "digits.yaml"."""
    folder = Path(str(configs.__path__[0]))
    path = folder / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise FileNotFoundError(f"expected a file or one of the shipped configurations ({known}), got {name!r}")
    return path


def main(args: Sequence[str] | None = None) -> BrainetCLI:
    """The console script; `--config NAME` also takes the name of a shipped configuration."""
    import sys

    words = list(sys.argv[1:] if args is None else args)
    for i, word in enumerate(words[:-1]):
        if word in ("--config", "-c") and not Path(words[i + 1]).exists():
            words[i + 1] = str(config_path(words[i + 1]))
    os.environ.setdefault("WANDB_SILENT", "true")
    return BrainetCLI(
        BRAINet,
        pl.LightningDataModule,
        subclass_mode_data=True,
        save_config_callback=SaveConfig,
        save_config_kwargs={"save_to_log_dir": True, "overwrite": True},
        auto_configure_optimizers=False,
        seed_everything_default=0,
        trainer_defaults={"default_root_dir": "runs"},
        parser_kwargs={"prog": "brainet", "description": "Calibrated heads whose wiring is learned from the data."},
        args=words,
    )


def console() -> None:
    """Entry point without a return value: a console script's result becomes its exit status."""
    main()


if __name__ == "__main__":
    console()
