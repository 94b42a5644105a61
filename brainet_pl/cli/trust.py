"""Which settings of a checkpoint the command line accepts: those of known classes that run and write nothing else.

The command line gives the settings of a checkpoint and of its run's `config.yaml` to jsonargparse, which imports and
calls whatever a class path names. These files are data, perhaps from a stranger, so their settings are read here first
and written anew: classes are those of the package or of a short table, by their full path; everything else has to be a
number, or a text where a text can do no harm. Nothing is imported while checking. What the user's own command line or
`--config` files name is the user's to decide; `--trust_checkpoint` trusts the checkpoint and its run's `config.yaml`.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from brainet_pl._utils import checks
from brainet_pl._utils.bounded_yaml import load_yaml
from brainet_pl._utils.framework import OLD, pl, translated
from brainet_pl._utils.parts import arguments, part_classes
from brainet_pl.backbones.loading import Backbone, check_stored_backbone
from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.callbacks import FeatureCache, StructureLearning
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.measures import Measure
from brainet_pl.network import HeadSettings
from brainet_pl.scores import Score
from brainet_pl.structure import IndependenceTest
from brainet_pl.tasks import Task

MOST_VALUES, MOST_LEVELS = 10_000, 30  # of a configuration; the largest shipped one has about 200 values on 6 levels
MOST = {"num_workers": 256, "devices": 16, "num_nodes": 64}  # processes and machines that a file may ask for
ADVICE = (
    "a checkpoint is data; give it yourself on the command line or in a --config file, or add --trust_checkpoint if "
    "you know who made the file"
)

WORDS = (("model.scores", "all"), ("model.calibration", "auto"))  # that stand in the place of a class
# Where a class is meant, and the base of the package's own classes that may stand there.
SLOTS: dict[str, type | None] = {
    "model.head": HeadSettings,
    "model.task": Task,
    "model.scores": Score,
    "model.calibration": Calibrator,
    "model.conformal": Conformal,
    "model.metrics": Measure,
    "model.optimizer": None,
    "model.lr_scheduler": None,
    "data": pl.LightningDataModule,
    "trainer.callbacks": pl.Callback,
    "trainer.logger": None,
}
_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_SCHEDULERS = ("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR")
# Classes of others that may stand there too, Lightning's by either of its namespaces, each with its arguments that may
# be texts; all take plain settings only.
OTHERS: dict[str, dict[str, str]] = {
    "model.optimizer": {f"torch.optim.{name}": "" for name in _OPTIMIZERS},
    "model.lr_scheduler": {
        **{f"torch.optim.lr_scheduler.{name}": "" for name in _SCHEDULERS},
        "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts": "",
        "torch.optim.lr_scheduler.OneCycleLR": "anneal_strategy",
        "torch.optim.lr_scheduler.ReduceLROnPlateau": "mode threshold_mode",
        "pytorch_lightning.cli.ReduceLROnPlateau": "monitor mode threshold_mode",
    },
    "trainer.callbacks": {
        "pytorch_lightning.callbacks.ModelCheckpoint": "dirpath filename monitor mode save_last train_time_interval",
        "pytorch_lightning.callbacks.EarlyStopping": "monitor mode",
        "pytorch_lightning.callbacks.LearningRateMonitor": "logging_interval",
        "pytorch_lightning.callbacks.DeviceStatsMonitor": "",
        "pytorch_lightning.callbacks.ModelSummary": "",
        "pytorch_lightning.callbacks.RichModelSummary": "",
        "pytorch_lightning.callbacks.TQDMProgressBar": "",
        "pytorch_lightning.callbacks.RichProgressBar": "theme",
        "pytorch_lightning.callbacks.Timer": "duration interval",
    },
    "trainer.logger": {
        "pytorch_lightning.loggers.CSVLogger": "save_dir name version prefix",
        "pytorch_lightning.loggers.TensorBoardLogger": "save_dir name version prefix sub_dir",
        # Neither entity nor settings: they say to whom, and to which server, a run is sent.
        "pytorch_lightning.loggers.WandbLogger": "save_dir dir name version id project log_model prefix "
        "checkpoint_name add_file_policy group job_type notes tags mode resume",
    },
}
# Arguments that become a part of the path of a file that is written.
PATHS = {"save_dir", "dir", "name", "version", "id", "project", "sub_dir", "dirpath", "filename", "default_root_dir"}
PATHS |= {"cache", "root"}
WRITES = {(StructureLearning, "cache"), (FeatureCache, "folder")}  # arguments of ours that name a folder for files
FUNCTIONS = {("Evaluation", "unknown"), ("Evaluation", "logits")}  # arguments that may be functions: of no file
IN_PYTHON = ("SwapHead",)  # classes for a user's own code, most of whose arguments are parts and functions
FILES = {"score_file", "file"}  # those of the callbacks that write a file into the run's folder
_FIELD = re.compile(r"\{[\w/@.-]+(:[\d.]*[dfeg]?)?\}")  # "{epoch:02d}" in a file name; no other formats
_WORDS = re.compile(r"[\w:, +-]*")  # what the Trainer's own texts look like: "auto", "bf16-mixed", "00:12:00:00"


class Untrusted(ValueError):
    """The settings of a checkpoint, or of its run, name something that they may not."""


class Given(NamedTuple):
    """What the user's own words name: all texts in them and in their configuration files, and what they set."""

    texts: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()


def given_by(words: Sequence[str]) -> Given:
    """Read the words of a command line, `--key=value` already split, and the YAML and JSON files among them."""
    texts: set[str] = set()
    keys: set[str] = {word[2:] for word in words if word.startswith("--")}
    for before, word in pairwise(["", *words]):
        if before == "--ckpt_path":
            continue  # the name of the file says nothing about what is in it
        content: Any = word
        try:
            file = Path(word)
            is_file = file.suffix in (".yaml", ".yml", ".json") and file.is_file()
            content = yaml.safe_load(file.read_text(encoding="utf-8") if is_file else word)
        except (OSError, ValueError, yaml.YAMLError):
            is_file = False  # jsonargparse will say what is wrong with it
        texts |= {word, *_texts(content)}
        if is_file:
            keys |= set(_keys(content))
    return Given(frozenset(texts), frozenset(keys))


def vet(config: Mapping[str, Any], given: Given | None = None) -> dict[str, Any]:
    """The settings of a checkpoint as jsonargparse may have them, or `Untrusted`.

    Args:
        config: the parts model, data, structure and trainer, or some of them.
        given: what the user names in the same call. Something refused that the user sets anyway is left out.
    """
    return _Vetting(given or Given()).parts(config)


class _Vetting:
    def __init__(self, given: Given) -> None:
        self.given, self.values, self.level = given, 0, 0

    def parts(self, config: Any) -> dict[str, Any]:
        settings = {
            "model": [argument.name for argument in arguments(BRAINet)],
            "structure": [argument.name for argument in arguments(StructureLearning)],
            "trainer": [argument.name for argument in arguments(pl.Trainer)],
        }
        vetted: dict[str, Any] = {}
        for group, content in self.entries("", config, ["data", *settings]):
            if group not in settings or content is None:
                vetted |= self.kept(group, group, content)
                continue
            vetted[group] = {}
            for name, value in self.entries(group, content, settings[group]):
                vetted[group] |= self.kept(f"{group}.{name}", name, value)
        return vetted

    def kept(self, key: str, name: str, value: Any) -> dict[str, Any]:
        """A setting under its name; nothing where it is refused and the user sets it."""
        try:
            return {name: self.setting(key, name, value)}
        except Untrusted:
            if key not in self.given.keys:
                raise
            return {}

    def setting(self, key: str, name: str, value: Any) -> Any:
        if key in SLOTS:
            return value if (key, value) in WORDS else self.slot(key, value)
        if key == "model.backbone":
            return self.backbone(value)
        if key in ("model.columns", "model.verdict"):  # names of columns and scores
            return self.plain(key, "", value)
        if key.startswith("structure."):
            return self.own(StructureLearning, key, name, value)
        word = isinstance(value, str) and _WORDS.fullmatch(value)
        data = name in ("default_root_dir", "max_time", "val_check_interval")  # a time may be {"minutes": 5}
        return self.plain(key, name, value) if _harmless(value) or word or data else self.refuse(key, value)

    # -- classes ------------------------------------------------------------------------------------------------------

    def slot(self, key: str, value: Any) -> Any:
        """A class, or a list of classes, as dictionaries of full paths and vetted arguments."""
        if _harmless(value):
            return value
        if isinstance(value, list | tuple):
            return [self.chosen(key, f"{key}[{i}]", item) for i, item in enumerate(value)]
        return self.chosen(key, key, value)

    def chosen(self, slot: str, key: str, value: Any) -> dict[str, Any]:
        """One class of a slot, by its full path, with its vetted arguments."""
        spec = {"class_path": value} if isinstance(value, str) else value
        if not isinstance(spec, Mapping) or not isinstance(spec.get("class_path"), str):
            self.refuse(key, spec)
        path = translated(_full(slot, spec["class_path"]))
        cls, texts = _own(SLOTS.get(slot), path), OTHERS.get(slot, {}).get(translated(path, OLD))
        vetted: dict[str, Any] = {"class_path": path if cls is None else f"{cls.__module__}.{cls.__qualname__}"}
        vet_argument: Callable[[str, str, Any], Any]
        if cls is not None:
            vet_argument = partial(self.own, cls)
        elif texts is not None:
            vet_argument = partial(self.others, texts.split())
        elif path in self.given.texts:
            vet_argument = self.users
        else:
            self.refuse(key, path)
        for group, content in self.entries(key, spec, ["class_path", "init_args", "dict_kwargs"]):
            if group == "class_path" or content is None:
                continue
            kept = {}
            for name, argument in self.entries(f"{key}.{group}", content):
                kept[name] = vet_argument(f"{key}.{name}", name, argument)
            if cls is not None and kept.get("download"):  # the data set is written below its root
                self.plain(f"{key}.root", "root", kept.get("root"))
            vetted[group] = kept
        return vetted

    def own(self, cls: type, key: str, name: str, value: Any) -> Any:
        """An argument of a class of the package: all of them take data, save for the independence test."""
        if name not in {argument.name for argument in arguments(cls)}:
            return self.others([], key, name, value)  # what a base class takes may be a function by name
        if (cls.__name__, name) in FUNCTIONS and value is not None:
            self.refuse(key, value)
        if cls is StructureLearning and name == "test" and isinstance(value, str):
            return self.independence_test(key, value)
        if issubclass(cls, pl.Callback) and name in FILES and cls is not StructureLearning:
            return self.file_name(key, value)
        return self.plain(key, "cache" if (cls, name) in WRITES else "", value)

    def independence_test(self, key: str, value: str) -> str:
        """A test by its short name, or the path of one of the package's own or one that the user names."""
        test = _own(IndependenceTest, value)
        if test is not None:
            return f"{test.__module__}.{test.__qualname__}"
        return value if value.isidentifier() or value in self.given.texts else self.refuse(key, value)

    def others(self, texts: Iterable[str], key: str, name: str, value: Any) -> Any:
        """An argument of a class of the table: a number, or what the table lists."""
        if _harmless(value) or (isinstance(value, str | list | dict) and not value):
            return value
        return self.plain(key, name, value) if name in texts else self.refuse(key, value)

    def users(self, key: str, name: str, value: Any) -> Any:
        """An argument of a class that the user names: data, and of classes and functions only what the user names."""
        with self:
            if isinstance(value, Mapping) and "class_path" in value:
                return self.chosen("", key, value)
            if isinstance(value, Mapping):
                return {inner: self.users(f"{key}.{inner}", name, item) for inner, item in self.entries(key, value)}
            if isinstance(value, list | tuple):
                return [self.users(f"{key}[{i}]", name, item) for i, item in enumerate(value)]
            if isinstance(value, str) and value not in self.given.texts and _becomes_code(value):
                self.refuse(key, value)
            return self.plain(key, "", value)

    def backbone(self, value: Any) -> Any:
        """A backbone by its name, without the file of its weights: the checkpoint holds them."""
        if value is None:
            return None
        spec = {"model": value} if isinstance(value, str) else value
        known = [field.name for field in fields(Backbone)]
        settings: dict[str, Any] = {}
        for name, item in self.entries("model.backbone", spec, known):
            settings[name] = self.plain(f"model.backbone.{name}", "", item)
        settings["weights"] = None
        if settings.get("model") not in self.given.texts:
            try:
                check_stored_backbone(settings, imported=False)
            except ValueError:
                self.refuse("model.backbone", settings.get("model"))
        return settings

    # -- data ---------------------------------------------------------------------------------------------------------

    def plain(self, key: str, name: str, value: Any) -> Any:
        """Numbers and texts, in lists and dictionaries; a text that becomes a path stays below the current folder."""
        with self:
            if isinstance(value, str):
                if name in PATHS and value not in self.given.texts and _outside(value, name == "filename"):
                    self.refuse(key, value)
                return value
            if _harmless(value):
                return value
            if isinstance(value, list | tuple):
                return [self.plain(f"{key}[{i}]", name, item) for i, item in enumerate(value)]
            return {k: self.plain(f"{key}.{k}", name, item) for k, item in self.entries(key, value)}

    def file_name(self, key: str, value: Any) -> Any:
        try:
            checks.file_name(key, value)
        except ValueError:
            self.refuse(key, value)
        return value

    def entries(self, key: str, value: Any, known: Sequence[str] | None = None) -> Iterator[tuple[Any, Any]]:
        """The entries of a dictionary, whose keys must be among the known ones; unknown ones without a value go."""
        if not isinstance(value, Mapping):
            self.refuse(key, value)
        for name, item in value.items():
            if known is None:
                allowed = isinstance(name, int | str) and name != "class_path" and not str(name).startswith("__")
            else:
                allowed = name in known
            if allowed:
                if _count(item) > MOST.get(name, math.inf):
                    self.refuse(f"{key}.{name}".lstrip("."), item)
                yield name, item
            elif item is not None:
                self.refuse(f"{key}.{name}".lstrip("."), item)

    def __enter__(self) -> None:
        """One value more, and one level deeper: a small file can hold endless lists in lists."""
        self.values, self.level = self.values + 1, self.level + 1
        if self.values > MOST_VALUES or self.level > MOST_LEVELS:
            self.refuse("its settings", f"more than {MOST_VALUES:,} values or {MOST_LEVELS} levels")

    def __exit__(self, *_: object) -> None:
        self.level -= 1

    def refuse(self, key: str, value: Any) -> NoReturn:
        named = value.get("class_path") if isinstance(value, Mapping) else value
        # Not the text of any other value: that of a list in itself has no end.
        number = _harmless(named) and isinstance(named, int | float)
        shown = repr(named[:200]) if isinstance(named, str) else repr(named) if number else f"a {type(value).__name__}"
        raise Untrusted(
            "expected known classes and plain settings in the checkpoint and its run's configuration, got "
            f"{shown} as {key}: {ADVICE}"
        )


def _count(value: Any) -> float:
    """How many a setting asks for: a number, as text too, or a list of them."""
    if isinstance(value, list | tuple):
        return len(value)
    text = value.strip() if isinstance(value, str) else ""
    return float(text) if text.isdecimal() else value if isinstance(value, int | float) else 0


def _own(base: type | None, path: str) -> type | None:
    """The package's own class of that name and kind: "Tree", "brainet_pl.network.Tree" or its full path."""
    folder, _, name = path.rpartition(".")
    if base is None or (folder and folder.split(".")[0] != "brainet_pl"):
        return None
    cls: type | None = part_classes(base).get(name)  # the package's own are known by their short name
    inside = cls is not None and cls.__module__ != "brainet_pl.cli.lightning_cli" and cls.__name__ not in IN_PYTHON
    return cls if inside else None


def _full(slot: str, path: str) -> str:
    """The path of the table's only class of that short name, or what was given."""
    found = [known for known in OTHERS.get(slot, {}) if known.endswith(f".{path}")] if path.isidentifier() else []
    return found[0] if len(found) == 1 else path


def _harmless(value: Any) -> bool:
    """Whether a value can be no class, function, path or address: nothing, a number, or a list of numbers."""
    if isinstance(value, list | tuple):
        return all(type(item) in (bool, int, float) and abs(item) < 2**63 for item in value)
    return value is None or (type(value) in (bool, int, float) and not abs(value) >= 2**63)


def _outside(text: str, is_file: bool) -> bool:
    """Whether a path leads, or could be expanded to lead, out of the current folder, or is no local path at all."""
    text = _FIELD.sub("0", text) if is_file else text
    return text.startswith(("/", "\\", "~")) or ".." in re.split(r"[/\\]", text) or bool(re.search(r"[:$\0{}]", text))


def _becomes_code(text: str) -> bool:
    """Whether jsonargparse could make more of a text than a text: a list, a dictionary or an object of a module."""
    try:
        if isinstance(load_yaml(text), list | dict):
            return True
    except ValueError:
        pass
    names = text.split(".")
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        return False
    try:
        return importlib.util.find_spec(names[0]) is not None  # which imports nothing
    except (ImportError, ValueError):
        return True


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _keys(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield f"{key}{name}"
            yield from _keys(item, f"{key}{name}.")
