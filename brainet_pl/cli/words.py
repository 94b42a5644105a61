"""The words of a command line: what is wrong with them, said in a line or two with the nearest names, and short help.

Before torch and Lightning are loaded, names of configurations and checkpoints are checked, and that a command has data.
Classes and their settings are the parser's to check; `short_error` says in a line what it says in a hundred.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from brainet_pl import configs
from brainet_pl._utils.checks import UsageError

HEADS = (
    "Bayes", "Ensemble", "Laplace", "Linear", "MCDropout", "MLP", "Tree", "TreeDropout", "TreeEnsemble"
)  # fmt: skip
KEYWORDS = ("best", "last", "hpc", "null", "None", "")  # of Lightning, in place of a checkpoint's file
SHARDED = "meta.pt"  # in a folder that is the checkpoint of a sharded fit
SWEEP = "sweep"  # for `wandb sweep`: settings to try, not a configuration that runs
HELP = ("-h", "--help")
ALL = "all"
NEEDS_NO_DATA = ("--print_config", "--help", "-h", "--config", "-c", "--ckpt_path")
USUAL = {
    "--config NAME": "a shipped configuration or a file; several add up, later words win",
    "--data …": "the data: a class of brainet_pl.datamodules or your own, package.Class; --data.NAME sets its settings",
    "--model.head NAME": f"{', '.join(HEADS)}, or your own class",
    "--model.backbone NAME": "torchvision/NAME, timm/NAME, or package.module:Class (or a function) of your own",
    "--model.scores NAME": "scores that tell unknown inputs",
    "--model.calibration NAME": "what is learned from validation data",
    "--structure.…": "how the structure is learned",
    "--trainer.max_epochs N": "and any other setting of Lightning's Trainer",
    "--seed_everything N": "seed of all random numbers",
    "--ckpt_path FILE": "a checkpoint: to resume from in a fit, else to evaluate with its own settings",
}


# -- before torch is loaded -------------------------------------------------------------------------------------------


def split_words(words: Iterable[str]) -> list[str]:
    """`--name=value` as two words."""
    return [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]


def check_words(words: Sequence[str]) -> None:
    """Refuse a command of Lightning's whose names do not exist, or that has no data."""
    command, parts = words[0], split_words(words)
    for name, value in pairwise(parts):
        if name in ("--config", "-c") and not Path(value).is_file():
            config_path(value)
        elif name == "--ckpt_path":
            find_ckpt_path(value, last=command == "fit")
    if not command.startswith("-") and not any(w in NEEDS_NO_DATA or w.startswith("--data") for w in parts):
        raise UsageError(no_data(command))


def no_data(command: str) -> str:
    """What to do about a command without data."""
    start = "--config digits" if command == "fit" else "--ckpt_path FILE"
    return (
        f"expected data, got none: try `brainet {command} {start}`; shipped configurations are {', '.join(shipped())}, "
        "and --config FILE or --data=CLASS names your own"
    )


def no_module(setting: str, value: str, module: str) -> str:
    """What to say of a class whose module is not there."""
    return (
        f"expected {setting} to be a class that can be imported, got {value!r}: there is no module {module!r} in "
        f"{Path.cwd()} or among the installed packages"
    )


def _no_such_setting(part: str, cls: str, name: str, known: Sequence[str]) -> str:
    return f"expected a setting of {cls} ({', '.join(known)}) for {part}, got {name!r}{nearest(name, known)}"


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
        raise UsageError(
            f"expected a file or one of the shipped configurations ({listed}), got {name!r}{nearest(name, known)}"
        )
    return path


def best_of_run(folder: Path) -> Path | None:
    """The best checkpoint in the folder of a run, its last one where no other was kept; None where it has none."""
    found = sorted((folder / "checkpoints").glob("*.ckpt"))
    best = [path for path in found if path.stem != "last"] or found
    if len(best) > 1:
        listed = ", ".join(map(str, best))
        raise UsageError(f"expected one checkpoint beside last.ckpt in {folder}, got {listed}: name one of them")
    return best[0] if best else None


def find_ckpt_path(path: str, last: bool = False) -> str:
    """A checkpoint's file; of the folder of a run its best one, or the last one to go on from.

    An address is refused, for Lightning would load it together with the code in it, and a path with no checkpoint.
    """
    if "://" in path:
        raise UsageError(f"expected ckpt_path to be a file, got the address {path}: download it, then give the file")
    if path in KEYWORDS or Path(path).is_file() or (Path(path) / SHARDED).is_file():
        return path
    state = Path(path) / "checkpoints" / "last.ckpt"
    of_run = state if last and state.is_file() else best_of_run(Path(path))
    if of_run is None:
        raise UsageError(
            f"expected ckpt_path to be a checkpoint file, best, last or hpc, got {path!r}, and there is no such file, "
            "no folder of a sharded fit and no run with checkpoints: check the path"
        )
    return str(of_run)


def nearest(name: str, known: Iterable[str], before: str = "") -> str:
    """`: did you mean "digits"?`, or nothing where no name is near; what all begin with is not compared.

    >>> nearest("digitz", ["mnist", "digits"]), nearest("zzz", ["mnist"])
    (": did you mean 'digits'?", '')
    """
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), lower, n=2)
    return f": did you mean {' or '.join(repr(before + lower[one]) for one in found)}?" if found else ""


def short_help(command: str, summary: str) -> str:
    """Help on one screen: how to start, shipped configurations, settings that are often changed."""
    start = "--config digits --test" if command == "fit" else "--ckpt_path runs/…/checkpoints/last.ckpt"
    described = {name: path.open(encoding="utf-8").readline().lstrip("# ").strip() for name, path in shipped().items()}
    extra = {"--test": "test the best checkpoint afterwards"} if command == "fit" else {"--new_run": "begin a new run"}
    return "\n".join(
        [
            f"usage: brainet {command} [--config NAME] [--SETTING VALUE …]",
            "",
            f"{summary[:1].upper()}{summary[1:]}.",
            "",
            "start with:",
            f"  brainet {command} {start}",
            "",
            "shipped configurations:",
            *_columns(described),
            "",
            "settings:",
            *_columns(USUAL | extra),
            "",
            f"`brainet {command} --help {ALL}` lists every setting, --model.head.help Tree those of a class.",
        ]
    )


def _columns(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"  {name:<{width}}  {text}" for name, text in rows.items()]


# -- what the parser of settings says, in a line ----------------------------------------------------------------------


def short_error(message: str, options: Iterable[str]) -> str:
    """A message of jsonargparse, of up to a hundred lines, as: expected, got, nearest names.

    Args:
        message: What it says.
        options: The settings that the command has: `--trainer.max_epochs`.
    """
    key = next(iter(re.findall(r'[Kk]ey "([^"]+)"', message)), "")
    given = next(iter(re.findall(r"Given value: (.+)", message)), "")
    wrong = re.search(r"Option '([\w.]+)' is not accepted", message)
    of = re.search(r"class_path '([\w.]+)'", message)
    if wrong and of:
        return _no_such_setting(key, of[1].rpartition(".")[2], wrong[1], _arguments(of[1]))
    if "required: " in message and message.endswith("data"):
        return no_data("fit")
    if "Expected a <class 'list'>" in message:
        return f"expected {key} to be a list, got {given}: --{key}+={given} adds one to it"
    unknown = re.search(r"[Uu]nrecognized arguments: (--?[\w.]+)", message)
    if unknown:
        names = [name.removeprefix("--") for name in options if name.startswith("--")]
        return f"expected a setting that there is, got {unknown[1]!r}{nearest(unknown[1].lstrip('-'), names, '--')}"
    missing = re.search(r"No module named '([\w.]+)'", message)
    if missing:
        return no_module(key or "a class", given or missing[1], missing[1])
    return _no_such_class(message, key) or _leaves(message, key, given)


def _no_such_class(message: str, key: str) -> str | None:
    """What to say of a name without a dot that is none of the classes that would do; None of other messages."""
    bare = re.search(r"Expected a dot import path string: (\w+)", message)
    names = _subclasses(message) or (_scores() if key == "model.scores" else [])
    if bare is None or not names:
        return None
    return (
        f"expected {key} to be one of {', '.join(names)}, or package.Class of your own, got {bare[1]!r}"
        f"{nearest(bare[1], names)}"
    )


def _leaves(message: str, key: str, given: str) -> str:
    """The innermost lines of a message, without those that say how it came to them."""
    noise = (
        "Parser key|Expected a path but|Given value|Subtypes|Errors?:|Does not validate|Problem with given|.*NoneType|"
        "Cannot take a Union"
    )
    lines = [line.strip(" -") for line in message.splitlines()]
    said = [line for line in dict.fromkeys(lines) if line and not re.match(noise, line)]
    types = [re.fullmatch(r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal\[(.+)\])", line) for line in said]
    if types and all(types):
        keys = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
        return f"expected {keys} to be {' or '.join(found[1] or found[2] for found in types if found)}, got {given}"
    text = "; ".join(said[:3]) or " ".join(message.split())
    got = f", got {given}" if given else ""
    return f"expected {f'a value that fits {key}' if key else 'settings that can be read'}{got}: {text}"


def _loaded(path: str) -> Any:
    """A class by its path, if its module is loaded; nothing is imported for an error."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _arguments(path: str) -> list[str]:
    cls = _loaded(path)
    return [] if cls is None else [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]


def _scores() -> list[str]:
    """The names of all scores: of a list that a score is added to, a message has no types."""
    from brainet_pl._utils.parts import part_classes
    from brainet_pl.scores import Score

    return sorted(part_classes(Score))


def _subclasses(message: str) -> list[str]:
    """The names of all classes that would do, of the types in a message."""
    from brainet_pl._utils.parts import part_classes

    types = [_loaded(path) for path in re.findall(r"<class '([\w.]+)'>", message) if "NoneType" not in path]
    found = [name for cls in types if isinstance(cls, type) for name in part_classes(cls)]
    return sorted({name for name in found if "." not in name})
