"""Find runs, read them, and put those of equal settings together."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brainet_pl._utils.bounded_yaml import load_yaml
from brainet_pl._utils.checks import UsageError
from brainet_pl._utils.inside import read_inside
from brainet_pl.evaluation.report.read import KNOWN_FILES, History, read_history, read_record
from brainet_pl.evaluation.schema import Record

# Settings that say where and how a run was made, not what was tried.
IGNORED = ("seed_everything", "trainer.logger", "trainer.callbacks", "trainer.default_root_dir", "config", "ckpt_path",
           "trainer.enable_", "weights_only", "test", "structure.progress", "structure.cache", "predictions",
           "trainer.accelerator", "trainer.devices")  # fmt: skip
MOST_NAMED = 4  # settings in the name of a configuration


class Member(NamedTuple):
    """One run: its folder, what its test found (None if it was only fitted), its history, settings and seed."""

    folder: Path
    record: Record | None
    history: History
    settings: dict[str, Any]
    seed: int | None


class RunGroup(NamedTuple):
    """Runs of one configuration, by what tells it from the others.

    Attributes:
        name: of the configuration.
        members: one run for each seed, the latest, and every run whose seed is not known.
        earlier: runs that do not count, because a later one has the same seed.
    """

    name: str
    members: list[Member]
    earlier: Sequence[Member] = ()

    def label(self, i: int) -> str:
        """The name of its i-th run: that of the configuration and, where there are several, the seed."""
        if len(self.members) == 1:
            return self.name
        seed = self.members[i].seed
        return f"{self.name}, {f'run {i + 1}' if seed is None else f'seed {seed}'}"


def find_runs(words: Iterable[str]) -> list[Path]:
    """Folders of runs: as given, those of checkpoints, and what patterns match; a folder of runs is all runs in it."""
    folders: list[Path] = []
    for word in words:
        paths = sorted(glob.glob(word)) if any(sign in word for sign in "*?[") else [word]
        if not paths:
            raise UsageError(f"expected runs that match {word!r}, found none: check the pattern")
        for path in map(Path, paths):
            inside = _folders(path)
            if not inside and len(paths) == 1:
                raise UsageError(
                    f"expected the folder of a run, a folder of runs or a checkpoint, got {path} without "
                    f"{', '.join(KNOWN_FILES)}: check the path"
                )
            folders += inside
    return list(dict.fromkeys(folders))


def _folders(path: Path) -> list[Path]:
    if path.is_file():
        path = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    if any((path / name).is_file() for name in KNOWN_FILES):
        return [path]
    inside = {file.parent for name in KNOWN_FILES for file in path.glob(f"*/{name}")}
    return sorted(inside, key=lambda folder: (len(folder.name), folder.name))


def read_member(folder: Path) -> Member:
    """Read what a comparison needs of a run."""
    record = read_record(folder)
    settings: dict[str, Any] = {}
    config = read_inside(folder, "config.yaml", errors="replace")
    if config is not None:
        try:
            content = load_yaml(config)
        except ValueError as error:
            raise ValueError(f"{error}, in {folder / 'config.yaml'}: fit the model again") from error
        settings = flat(content if isinstance(content, dict) else {})
    elif record is not None:
        settings = flat({"model": record.settings})
    seed = settings.get("seed_everything")
    if not isinstance(seed, int) or isinstance(seed, bool):
        seed = record.seed if record is not None else None
    return Member(folder, record, read_history(folder), settings, seed)


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested settings → name.name → value; a class and its arguments are one level."""
    if isinstance(value, dict) and "class_path" in value and set(value) <= {"class_path", "init_args", "dict_kwargs"}:
        named = {key: str(value["class_path"]).rpartition(".")[2]}
        return named | flat(value.get("init_args") or {}, key) | flat(value.get("dict_kwargs") or {}, key)
    inner = _inside(value, key)
    if inner is None:
        return {key: value}
    settings: dict[str, Any] = {}
    for name, part in inner.items():
        settings |= flat(part, name)
    return settings


def _inside(value: Any, key: str) -> dict[str, Any] | None:
    """The parts of nested settings by their full names; None of a value that has none."""
    if isinstance(value, dict):
        return {f"{key}.{name}" if key else str(name): part for name, part in value.items()}
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return {f"{key}[{i}]": part for i, part in enumerate(value)}
    return None


def differing(members: Sequence[Member]) -> dict[str, list[str]]:
    """Setting → its value in each run, for those that are not the same in all."""
    every: dict[str, Any] = {}  # all settings, in their order
    for member in members:
        every |= member.settings
    differ = {}
    for key in every:
        if not key.startswith(IGNORED):
            values = [_shown(member.settings[key]) if key in member.settings else "–" for member in members]
            if len(set(map(_as_later, values))) > 1:
                differ[key] = values
    return differ


def _as_later(value: str) -> str:
    """A setting that a later version added is null in its runs and absent in earlier ones."""
    return "null" if value == "–" else value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def group_runs(members: Sequence[Member]) -> list[RunGroup]:
    """Runs of equal settings together, in the order of their first ones; named by their heads and what else differs."""
    settings = differing(members)
    kept: dict[tuple[str, ...], list[Member]] = {}
    for i, member in enumerate(members):
        key = tuple(_as_later(values[i]) for values in settings.values())
        kept.setdefault(key, []).append(member)
    groups = [once_per_seed(part) for part in kept.values()]
    names = names_of_groups([group[0][0] for group in groups])
    return [RunGroup(name, latest, earlier) for name, (latest, earlier) in zip(names, groups, strict=True)]


def once_per_seed(members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
    """Runs of one configuration → one of each seed and the rest; a run whose seed is not known counts by itself.

    Of several with one seed it is the latest that was tested, or the latest where none was.
    """
    latest: dict[Any, Member] = {}
    for member in members:
        key = str(member.folder) if member.seed is None else member.seed
        latest[key] = max(latest[key], member, key=_age) if key in latest else member
    counted = list(latest.values())
    chosen = set(map(id, counted))
    return counted, [member for member in members if id(member) not in chosen]


def _age(member: Member) -> tuple[bool, str, float, int, str]:
    """What tells the later of two runs: tested ones first, by the time of the test, of the files, of the name."""
    files = [member.folder / name for name in KNOWN_FILES[1:]]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    made = member.record.created if member.record else ""
    return bool(member.record), made, max(times, default=0.0), len(member.folder.name), member.folder.name


def names_of_groups(members: Sequence[Member]) -> list[str]:
    """A name for each configuration, from one run of it: its head and, where heads are the same, what differs."""
    heads = [_head(member) for member in members]
    names = []
    for i, head in enumerate(heads):
        same = [j for j, other in enumerate(heads) if other == head]
        differs = differing([members[j] for j in same])
        own = [f"{_short(key, differs)} {values[same.index(i)]}" for key, values in differs.items()]
        more = [f"and {len(own) - MOST_NAMED} more"] if len(own) > MOST_NAMED else []
        names.append(", ".join([head, *own[:MOST_NAMED], *more]))
    return [f"{name} ({members[i].folder.name})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _short(key: str, keys: Iterable[str]) -> str:
    """The last part of a setting's name, or all of it where another setting ends so too."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in keys) > 1 else last


def _head(member: Member) -> str:
    if member.record:
        return member.record.model.head
    return str(member.settings.get("model.head", member.folder.name) or "Tree")  # null is a Tree
