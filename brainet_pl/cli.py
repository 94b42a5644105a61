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

import yaml

import brainet_pl.datamodules  # noqa: F401  makes `--data Digits` a known name
from brainet_pl import configs, runs
from brainet_pl.callbacks import PredictionFile, StructureLearning
from brainet_pl.evaluation import report
from brainet_pl.framework import LightningArgumentParser, LightningCLI, SaveConfigCallback, is_wandb, pl, translated
from brainet_pl.module import CONFIG, HPARAMS, BRAINet, read_checkpoint
from brainet_pl.trust import given_by, vet

DESCRIPTION = (
    "Calibrated heads whose wiring is learned from the data. Beside the subcommands below there is "
    "`brainet report RUN_DIR [--out FILE]`, which writes one self-contained HTML page of a run. All take --debug, "
    "which shows the whole traceback of an error. With --ckpt_path, settings come out of the checkpoint; its classes "
    "that are not of brainet_pl have to be named again, or need --trust_checkpoint for a file whose maker you know."
)
SUBCOMMANDS = ("fit", "validate", "test", "predict")
TRUST, DEBUG = "--trust_checkpoint", "--debug"
KEYWORDS = ("best", "last", "hpc", "null", "None", "")  # of Lightning, in place of a checkpoint's file
SWEEP = "sweep"  # for `wandb sweep`: settings to try, not a configuration that runs


class UsageError(FileNotFoundError):
    """The command names something that is not there."""


class SaveConfig(SaveConfigCallback):
    """Writes the configuration: to the run's folder, to W&B once, and into every checkpoint, for `brainet test`."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Rank zero only, called by the base class."""
        for logger in trainer.loggers:
            if is_wandb(logger):
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

    def before_instantiate_classes(self) -> None:
        """A checkpoint named in a configuration file is held to the same rules; and what is loaded holds no code."""
        chosen = self.config[self.subcommand]
        check_ckpt_path(str(chosen.get("ckpt_path")))
        if chosen.get("weights_only") is False:
            raise UsageError("expected weights_only to be true, got false: a checkpoint holds no code, and runs none")
        chosen["weights_only"] = True
        if self.subcommand == "predict" and chosen.get("return_predictions") is None:
            chosen["return_predictions"] = False  # PredictionFile writes them as they come; memory need not hold all

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
        raise UsageError(f"expected a file or one of the shipped configurations ({listed}), got {name!r}")
    return path


def stored_config(checkpoint: str | Path) -> dict[str, Any]:
    """The settings that a checkpoint carries; of one saved in Python, the model's alone."""
    content = read_checkpoint(checkpoint)
    config: dict[str, Any] = content.get(CONFIG) or {"model": dict(content.get(HPARAMS, {}))}
    return config


def check_ckpt_path(path: str) -> None:
    """Refuse an address, which Lightning would load together with the code in it, and a file that is not there."""
    if "://" in path:
        raise UsageError(f"expected ckpt_path to be a file, got the address {path}: download it, then give the file")
    if path not in KEYWORDS and not Path(path).is_file():
        raise UsageError(
            f"expected ckpt_path to be a checkpoint file, best, last or hpc, got {path!r}, and there is no such file: "
            "check the path"
        )


def _complete(words: list[str], folder: str) -> list[str]:
    """Shipped configurations by name, and before everything else the configuration that a checkpoint carries."""
    trusted = TRUST in words
    words = [word for word in words if word != TRUST]
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    words = [word if before == "--ckpt_path" else translated(word) for before, word in pairwise(["", *words])]
    for i, word in enumerate(words[:-1]):
        if word in ("--config", "-c"):
            words[i + 1] = _in_namespace(words[i + 1], Path(folder) / f"{i}.yaml")
    command = next((i for i, word in enumerate(words) if word in SUBCOMMANDS), None)
    checkpoints = [b for a, b in pairwise(words) if a == "--ckpt_path"]
    if command is None or not checkpoints:
        return words
    check_ckpt_path(checkpoints[-1])
    if Path(checkpoints[-1]).is_file():
        config = stored_config(checkpoints[-1])
        if words[command] != "fit":  # resuming takes up all of the Trainer's settings, a test only what watches it
            callbacks = (config.get("trainer") or {}).get("callbacks")
            config = {name: part for name, part in config.items() if name in ("model", "data")}
            if words[command] == "test" and callbacks:
                config["trainer"] = {"callbacks": callbacks}
        if not trusted:
            config = vet(config, given_by(words))
        path = Path(folder) / "checkpoint.yaml"
        path.write_text(translated(yaml.safe_dump(config)))
        words[command + 1 : command + 1] = ["--config", str(path)]
    return words


def _in_namespace(name: str, copy: Path) -> str:
    """The file of a configuration; where it names classes of the other namespace of Lightning, a copy in ours."""
    path = Path(name) if Path(name).is_file() else config_path(name)
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return str(path)  # jsonargparse will say what is wrong with it
    if translated(content) == content:
        return str(path)
    copy.write_text(translated(content), encoding="utf-8")
    return str(copy)


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
    """Entry point: an error becomes one line and the exit status 1, or 2 for a command that can't be meant.

    Nothing is returned: a console script's result would become its exit status.
    """
    words = [word for word in sys.argv[1:] if word != DEBUG]
    try:
        main(words)
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning ends a fit so, with the status of an error
            sys.exit(_interrupted())
        raise
    except Exception as error:
        if DEBUG in sys.argv:
            raise
        print(f"brainet: {one_line(error)} ({DEBUG} shows where)", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def one_line(error: Exception) -> str:
    """The message of an error without line breaks and other signs that steer a terminal; its kind, if not ours."""
    shown = " ".join("".join(sign if sign.isprintable() else " " for sign in str(error)).split())
    return shown if shown.startswith("expected") else f"{type(error).__name__}: {shown}".rstrip(": ")


def _interrupted() -> int:
    print("brainet: interrupted", file=sys.stderr)
    return 130  # as shells have it: 128 and the number of the signal


if __name__ == "__main__":
    console()
