"""`brainet fit|validate|test|predict|report`: LightningCLI with the structure callback and the shipped configs."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import WandbLogger

import brainet_pl.datamodules  # noqa: F401  makes `--data Digits` a known name
from brainet_pl import configs, runs
from brainet_pl.callbacks import PredictionFile, StructureLearning
from brainet_pl.evaluation import report
from brainet_pl.module import BRAINet, read_checkpoint

DESCRIPTION = (
    "Calibrated heads whose wiring is learned from the data. Beside the subcommands below there is "
    "`brainet report RUN_DIR [--out FILE]`, which writes one self-contained HTML page of a run."
)
SWEEP = "sweep"  # for `wandb sweep`: settings to try, not a configuration that runs


CONFIG = "brainet_config"  # the checkpoint's entry with the settings of the command line


class SaveConfig(SaveConfigCallback):
    """Writes the configuration: to the run's folder, to W&B once, and into every checkpoint, for `brainet test`."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Rank zero only, called by the base class."""
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.config.update({"cli": self.config.as_dict()}, allow_val_change=True)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the settings of model, data, structure and Trainer, and which run this is."""
        checkpoint[CONFIG] = copy.deepcopy(self._settings)
        checkpoint[runs.RUN] = runs.describe(trainer)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The settings as primitives; once, because dumping them takes longer than a short epoch."""
        dumped = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        config = {name: dumped.get(name) for name in ("model", "data", "structure", "trainer")}
        backbone = config["model"].get("backbone")
        if isinstance(backbone, dict):
            backbone["weights"] = None  # the checkpoint holds them: their file must not be asked for again
        return config


class BrainetCLI(LightningCLI):
    """Adds `--structure.*`, the settings of the structure callback, and `--predictions.*`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Called by LightningCLI."""
        parser.add_lightning_class_args(StructureLearning, "structure")
        parser.add_lightning_class_args(PredictionFile, "predictions")
        # So that `--model.head.num_params 8000` needs no class.
        parser.set_defaults({"model.head": {"class_path": "brainet_pl.network.Tree"}})

    def before_fit(self) -> None:
        """Find the checkpoint to go on from, and enter its run's folder or a new one."""
        checkpoint = self._find_checkpoint()
        runs.enter(self.trainer, checkpoint)

    def _find_checkpoint(self) -> str | None:
        settings = self.config_init[self.subcommand]
        settings["ckpt_path"] = checkpoint = runs.find(self.trainer, settings["ckpt_path"])
        return checkpoint

    before_validate = before_test = before_predict = _find_checkpoint

    def _parse_ckpt_path(self) -> None:
        """Nothing: a checkpoint's settings come before the command line's (`_complete`), never over them."""


def shipped() -> dict[str, Path]:
    """The shipped configurations that run, by name."""
    files = sorted(Path(str(configs.__path__[0])).glob("*.yaml"))
    return {path.stem: path for path in files if path.stem != SWEEP}


def config_path(name: str) -> Path:
    """The file of a shipped configuration: "digits" or "digits.yaml"."""
    known = shipped()
    path = known.get(name.removesuffix(".yaml"))
    if path is None:
        listed = ", ".join(known)
        raise FileNotFoundError(f"expected a file or one of the shipped configurations ({listed}), got {name!r}")
    return path


def stored_config(checkpoint: str | Path) -> dict[str, Any]:
    """The settings that a checkpoint carries; of one saved in Python, the model's alone."""
    content = read_checkpoint(checkpoint)
    config: dict[str, Any] = content.get(CONFIG) or {"model": dict(content.get("hyper_parameters", {}))}
    return config


def _complete(words: list[str], folder: str) -> list[str]:
    """Shipped configurations by name, and before everything else the configuration that a checkpoint carries."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    for i, word in enumerate(words[:-1]):
        if word in ("--config", "-c") and not Path(words[i + 1]).is_file():
            words[i + 1] = str(config_path(words[i + 1]))
    checkpoint = next((b for a, b in pairwise(words) if a == "--ckpt_path"), None)
    if checkpoint and Path(checkpoint).is_file():
        config = stored_config(checkpoint)
        if words[0] != "fit":  # resuming takes up all of the Trainer's settings, a test only what watches it
            callbacks = (config.get("trainer") or {}).get("callbacks")
            config = {name: part for name, part in config.items() if name in ("model", "data")}
            if words[0] == "test" and callbacks:
                config["trainer"] = {"callbacks": callbacks}
        path = Path(folder) / "checkpoint.yaml"
        path.write_text(yaml.safe_dump(config))
        words[1:1] = ["--config", str(path)]
    return words


def lightning(words: Sequence[str]) -> BrainetCLI:
    """fit, validate, test and predict; `--config NAME` also takes the name of a shipped configuration."""
    os.environ.setdefault("WANDB_SILENT", "true")
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    with tempfile.TemporaryDirectory() as folder:
        return BrainetCLI(
            BRAINet,
            pl.LightningDataModule,
            subclass_mode_data=True,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": True, "overwrite": True},
            auto_configure_optimizers=False,
            seed_everything_default=0,
            trainer_defaults={"default_root_dir": "runs"},
            parser_kwargs={"prog": "brainet", "description": DESCRIPTION},
            args=_complete(list(words), folder),
        )


def main(args: Sequence[str] | None = None) -> BrainetCLI | None:
    """The console script: `report` reads the files of a run, everything else is Lightning's."""
    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["report"]:
        report.main(words[1:])
        return None
    return lightning(words)


def console() -> None:
    """Entry point without a return value: a console script's result becomes its exit status."""
    main()


if __name__ == "__main__":
    console()
