"""`brainet fit|validate|test|predict`: LightningCLI with the structure callback and the settings of checkpoints.

A test, validation or prediction of a checkpoint continues the run that wrote it (`checkpoints/runs.py`).
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml

import brainet_pl.datamodules  # noqa: F401  makes `--data Digits` a known name
from brainet_pl._utils.bounded_yaml import TooManyValues, load_yaml
from brainet_pl._utils.checks import UsageError
from brainet_pl._utils.framework import (
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
    is_wandb,
    keep_quiet,
    pl,
    rank_zero_info,
    translated,
)
from brainet_pl._utils.inside import find_inside, read_inside, write_inside
from brainet_pl.callbacks import PredictionFile, StructureLearning
from brainet_pl.callbacks.logging import run_folder
from brainet_pl.cli.commands import ABOUT
from brainet_pl.cli.trust import ADVICE, Given, Untrusted, given_by, vet
from brainet_pl.cli.words import config_path, find_ckpt_path, short_error, split_words
from brainet_pl.datamodules.table import read_task
from brainet_pl.evaluation.report.read import read_history
from brainet_pl.evaluation.terminal import lines_of_fit
from brainet_pl.lightning.module import BRAINet
from brainet_pl.lightning.sharding import is_model_parallel
from brainet_pl.storage import runs
from brainet_pl.storage.format import CONFIG, Checkpoint
from brainet_pl.storage.sharded import is_checkpoint

SUBCOMMANDS = ("fit", "validate", "test", "predict")
TRUST = "--trust_checkpoint"
STORED_CONFIG = "checkpoint.yaml"  # the settings of a checkpoint, on their way to the parser
CONFIG_FILE = "config.yaml"  # the settings of a run, in its folder


class SaveConfig(SaveConfigCallback):
    """Writes the configuration: to the run's folder, to W&B once, and the model's part into every checkpoint.

    In W&B they have the names of the command line, `model.lr`. A test that continues a run leaves them and
    `config.yaml` to the fit: its own are `test.model.lr` and `config_test.yaml`.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Choose the name of the file; only the first process writes one."""
        folder = trainer.log_dir
        if stage != "fit" and folder is not None and find_inside(folder, CONFIG_FILE):
            self.config_filename = f"config_{getattr(stage, 'value', stage)}.yaml"
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Rank zero only, called by the base class."""
        settings = self.config.as_dict()
        _, continues, stage = Path(self.config_filename).stem.partition("_")
        for logger in trainer.loggers:
            if is_wandb(logger):
                logger.experiment.config.update({stage: settings} if continues else settings, allow_val_change=True)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the settings of model and structure; those of data and Trainer are in the run's `config.yaml`."""
        checkpoint[CONFIG] = copy.deepcopy(self._settings)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `config.yaml` beside the checkpoints too, where only W&B logs: Lightning puts them elsewhere then."""
        checkpoints = Path(getattr(trainer.checkpoint_callback, "dirpath", None) or "")
        run = checkpoints.parent
        if trainer.is_global_zero and checkpoints.name == runs.CHECKPOINTS and not (run / CONFIG_FILE).exists():
            with write_inside(run, CONFIG_FILE) as temporary:
                self.parser.save(self.config, temporary, skip_none=False, multifile=self.multifile, overwrite=True)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The settings as primitives; once, because dumping them takes longer than a short epoch."""
        dumped = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        config = {name: dumped.get(name) for name in ("model", "structure")}
        backbone = config["model"].get("backbone")
        if isinstance(backbone, dict):
            backbone["weights"] = None  # the checkpoint holds them: their file must not be asked for again
        return config


class Parser(LightningArgumentParser):
    """The parser of settings, whose errors are a line or two without the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what was expected, what came, and the nearest names."""
        if not self.exit_on_error:  # of a class in the settings: the outer parser says it
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option for action in parser._actions for option in action.option_strings]
        raise UsageError(short_error(message, options)) from ex


class BrainetCLI(LightningCLI):
    """Adds `--structure.*`, the settings of the structure callback, and `--predictions.*`.

    Args:
        loggers_given: Whether the user chose loggers, which then stay where they write.
        checkpoint: The checkpoint on the command line, already read.
        **kwargs: The arguments of LightningCLI.
    """

    def __init__(
        self, *args: Any, loggers_given: bool = False, checkpoint: Checkpoint | None = None, **kwargs: Any
    ) -> None:
        self.loggers_given, self.checkpoint = loggers_given, checkpoint
        super().__init__(*args, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the settings of this package; LightningCLI calls it."""
        parser.add_lightning_class_args(StructureLearning, "structure")
        parser.add_lightning_class_args(PredictionFile, "predictions")
        # So that `--model.head.num_params 8000` needs no class.
        parser.set_defaults({"model.head": {"class_path": "brainet_pl.network.Tree"}})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add what only some subcommands take."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            parser.add_argument(
                "--test", action="store_true", help="Test the best checkpoint afterwards, in the same run."
            )
        else:
            parser.add_argument(
                "--new_run",
                action="store_true",
                help="Begin a new folder and W&B run instead of continuing those that wrote the checkpoint.",
            )
        if subcommand == "test":
            parser.set_defaults(verbose=False)  # a line for each of a hundred numbers; files and loggers have them
        return parser

    def before_instantiate_classes(self) -> None:
        """Hold a checkpoint that a configuration file names to the same rules, and see that no code is loaded."""
        chosen = self.config[self.subcommand]
        chosen["trainer"]["logger"] = without_wandb(chosen["trainer"].get("logger"))
        find_ckpt_path(str(chosen.get("ckpt_path")))
        if chosen.get("weights_only") is False:
            raise UsageError("expected weights_only to be true, got false: a checkpoint holds no code, and runs none")
        chosen["weights_only"] = True
        infer_task(chosen)
        if self.subcommand == "predict" and chosen.get("return_predictions") is None:
            chosen["return_predictions"] = False  # PredictionFile writes them as they come; memory need not hold all

    def instantiate_classes(self) -> None:
        """Make all parts; a value that one of them refuses is an error of the command, nothing was begun yet."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            # jsonargparse wraps it in many lines, or in an error that it is the cause of.
            texts, said = [str(error)], error.__cause__
            while said is not None:
                texts, said = [*texts, str(said)], said.__cause__
            ours = next(filter(None, (re.search(r"(?:^|\n[ -]*)(expected .+)", text) for text in texts)), None)
            if ours is None:
                raise
            raise UsageError(ours[1]) from error

    def before_fit(self) -> None:
        """Find the checkpoint to resume from, and enter its run's folder or a new one."""
        checkpoint = self._find_checkpoint()
        if checkpoint is not None and isinstance(self.model, BRAINet):
            self.model.restore_layers(checkpoint.backbone)
        runs.enter(self.trainer, checkpoint)

    def after_fit(self) -> None:
        """Say what came of the fit; with `--test`, test what it chose on validation data, with the same loggers."""
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "") or None
        test = bool(self.config[self.subcommand].get("test"))
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._say_fit(best, test)
        if test:
            rank_zero_info(f"testing {best or 'the model as it is: there is no checkpoint'}")
            self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best, verbose=False, weights_only=True)

    def _say_fit(self, best: str | None, test: bool) -> None:
        """What came of the fit, in a few lines of the first process."""
        if not self.trainer.is_global_zero:
            return
        folder, chosen = run_folder(self.trainer), self.trainer.checkpoint_callback
        lines = lines_of_fit(
            read_history(folder),
            {key: float(value) for key, value in self.trainer.callback_metrics.items()},
            monitor=getattr(chosen, "monitor", None),
            higher=getattr(chosen, "mode", "min") == "max",
            folder=str(folder),
            checkpoint=best,
            tested=test,
            trust=None if best is None or test or not _needs_trust(best) else TRUST,
        )
        rank_zero_info("\n".join(lines))

    def _find_checkpoint(self) -> Checkpoint | None:
        settings = self.config_init[self.subcommand]
        settings["ckpt_path"] = path = runs.find(self.trainer, settings["ckpt_path"])
        if path is not None and is_model_parallel(self.trainer):  # a call with it would tell of it after `setup`
            self.trainer.ckpt_path, settings["ckpt_path"] = path, None
        if path is None or (self.checkpoint is not None and self.checkpoint.path == Path(path)):
            return None if path is None else self.checkpoint
        return Checkpoint.read(path)

    def _continue_run(self) -> None:
        """Find the checkpoint, and continue the run that wrote it unless the user wants a new one."""
        checkpoint = self._find_checkpoint()
        if checkpoint is None or self.config[self.subcommand].get("new_run"):
            runs.begin(self.trainer)
        elif self.loggers_given:
            runs.join(self.trainer, checkpoint)
        elif runs.continue_run(self.trainer, checkpoint) is None:
            runs.begin(self.trainer)

    before_validate = before_test = before_predict = _continue_run

    def _run_subcommand(self, subcommand: str) -> None:
        """Run it; of one that fails before anything was logged, no empty folder is left."""
        try:
            super()._run_subcommand(subcommand)
        except BaseException:
            runs.remove_empty(self.trainer)
            raise

    def _parse_ckpt_path(self) -> None:
        """Do nothing: `_complete` puts a checkpoint's settings before those of the command line, never over them."""


def infer_task(settings: Any) -> None:
    """Where the data is a CSV file and the model has no task: the one that belongs to the column to be predicted."""
    data, model = settings.get("data"), settings.get("model")
    if not data or model.get("task") is not None or model.get("num_classes") is not None:
        return
    if str(data.get("class_path")).rpartition(".")[2] != "Table":
        return
    task, classes = read_task(data["init_args"])
    kind, given = ("Classification", {"num_classes": classes}) if classes else ("Regression", {})
    model["task"] = {"class_path": f"brainet_pl.tasks.{kind}", "init_args": given}
    data["init_args"]["task"] = task
    for callback in settings.get("trainer", {}).get("callbacks") or ():
        _monitor_group(callback.get("init_args") or {}, "cls" if classes else "reg")


def _monitor_group(settings: Any, group: str) -> None:
    """Let a callback that monitors a metric of the other kind of task monitor that of this one."""
    if str(settings.get("monitor")).startswith(("val/cls/", "val/reg/")):
        settings["monitor"] = f"val/{group}/{settings['monitor'].split('/', 2)[2]}"


def without_wandb(loggers: Any) -> Any:
    """The loggers of a configuration, without W&B's where W&B is not installed or WANDB_MODE is "disabled"."""
    disabled = os.environ.get("WANDB_MODE") == "disabled"  # Lightning would log offline, as the configuration says
    if not isinstance(loggers, list) or (importlib.util.find_spec("wandb") is not None and not disabled):
        return loggers
    kept = [logger for logger in loggers if not str(logger.get("class_path")).endswith(".WandbLogger")]
    if len(kept) < len(loggers) and not disabled:
        rank_zero_info("W&B is not installed, so this run is not logged there: pip install wandb for its dashboard")
    return kept


def stored_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings with which a checkpoint was trained: its own, and data and Trainer of its run's `config.yaml`.

    A checkpoint that was saved in Python holds those of the model alone.
    """
    config, run = checkpoint.config, runs.folder_of(checkpoint)
    if not config:
        return {"model": dict(checkpoint.hparams)}
    try:
        text = None if run is None else read_inside(run, CONFIG_FILE)
        if run is None or text is None:
            return dict(config)
        of_run = load_yaml(text)
    except TooManyValues as error:
        raise Untrusted(
            "expected known classes and plain settings in the checkpoint and its run's configuration, got too many in "
            f"{CONFIG_FILE} ({error}): {ADVICE}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"expected the configuration of a run in {run}/{CONFIG_FILE}, got {type(error).__name__} when reading it: "
            "take another copy, or give the settings yourself and the checkpoint from another folder"
        ) from error
    parts = {name: of_run.get(name) for name in ("data", "trainer")} if isinstance(of_run, Mapping) else {}
    return dict(config) | {name: part for name, part in parts.items() if name not in config}


def _complete(words: list[str], folder: str) -> tuple[list[str], Checkpoint | None]:
    """The command line with files for shipped configurations, and with its checkpoint's settings before all others.

    Returns:
        The words of the command line, and the checkpoint that they name.
    """
    trusted = TRUST in words
    words = split_words(word for word in words if word != TRUST)
    words = [word if before == "--ckpt_path" else translated(word) for before, word in pairwise(["", *words])]
    for i, word in enumerate(words[:-1]):
        if word in ("--config", "-c"):
            words[i + 1] = _in_namespace(words[i + 1], Path(folder) / f"{i}.yaml")
    place = next((i for i, word in enumerate(words) if word in SUBCOMMANDS), None)
    path = next((word for before, word in reversed([*pairwise(words)]) if before == "--ckpt_path"), None)
    if place is None or path is None:
        return words, None
    path = find_ckpt_path(path, last=words[place] == "fit")
    words = [path if before == "--ckpt_path" else word for before, word in pairwise(["", *words])]
    if not is_checkpoint(path):
        return words, None
    checkpoint = Checkpoint.read(path)
    config = _settings_of(checkpoint, words[place], given_by(words), trusted)
    file = Path(folder) / STORED_CONFIG
    file.write_text(translated(yaml.safe_dump(config)))
    return [*words[: place + 1], "--config", str(file), *words[place + 1 :]], checkpoint


def _needs_trust(path: str) -> bool:
    """Whether a later command refuses the settings of a checkpoint, such as a network of the user's own."""
    try:
        _settings_of(Checkpoint.read(path), "test", Given(), trusted=False)
    except Untrusted:
        return True
    except UsageError:  # a checkpoint outside the folder of a run: its data has to be named anyway
        return False
    return False


def _settings_of(checkpoint: Checkpoint, command: str, given: Given, trusted: bool) -> dict[str, Any]:
    """The settings of a checkpoint that a command needs, as the parser may have them."""
    config = stored_config(checkpoint)
    if config.get("data") is None and not given.keys & {"data", "data.class_path", "help"}:
        raise UsageError(
            f"expected data for {checkpoint.path}, got none: the file does not lie in the folder of a run whose "
            f"{CONFIG_FILE} names them; give them, as --data=Digits or in a --config file"
        )
    if command != "fit":
        given = _allow_run_folder(given, checkpoint)
        config = _evaluation_settings(config, command, given, trusted)
    return config if trusted else vet(config, given)


def _evaluation_settings(config: dict[str, Any], command: str, given: Given, trusted: bool) -> dict[str, Any]:
    """The settings of a fit that its evaluation needs: model, data, loggers that may be used, callbacks of a test."""
    trainer = config.get("trainer") or {}
    kept = {"callbacks": trainer.get("callbacks")} if command == "test" else {}
    if not loggers_given(given):
        try:
            logger = {"trainer": {"logger": trainer.get("logger")}}
            kept |= logger["trainer"] if trusted else vet(logger, given)["trainer"]
        except Untrusted as error:
            rank_zero_info(f"not logged where the fit was: {error}")
    config = {name: part for name, part in config.items() if name in ("model", "data")}
    return config | {"trainer": {name: part for name, part in kept.items() if part}}


def _allow_run_folder(given: Given, checkpoint: Checkpoint) -> Given:
    """What the user names, and the folder of the checkpoint's run: loggers may write there again."""
    run = runs.folder_of(checkpoint)
    places = () if run is None else (str(run.parents[1]), os.path.relpath(run.parents[1]))
    return given._replace(texts=given.texts.union(places))


def loggers_given(given: Given) -> bool:
    """Whether the user's own words choose loggers."""
    return "trainer.logger" in given.keys  # a setting of one, such as trainer.logger.init_args.name, is of a stored one


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
    keep_quiet()
    words = ["--predictions.explain=true" if word == "--explain" else word for word in words]
    if os.getcwd() not in (os.path.abspath(place) for place in sys.path):
        sys.path.append(os.getcwd())  # last: nothing there takes the place of an installed package
    with tempfile.TemporaryDirectory() as folder:
        complete, checkpoint = _complete(list(words), folder)
        own = [word for word in complete if word != str(Path(folder) / STORED_CONFIG)]
        return BrainetCLI(
            BRAINet,
            pl.LightningDataModule,
            loggers_given=loggers_given(given_by(own)),
            checkpoint=checkpoint,
            subclass_mode_data=True,
            parser_class=Parser,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": True, "overwrite": True},
            auto_configure_optimizers=False,
            seed_everything_default=0,
            # A bar in a log file is hundreds of fragments of lines.
            trainer_defaults={"default_root_dir": "runs", "enable_progress_bar": sys.stdout.isatty()},
            parser_kwargs={"prog": "brainet", "description": ABOUT},
            args=complete,
        )
