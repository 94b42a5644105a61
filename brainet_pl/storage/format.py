"""The checkpoint file of a BRAINet: its entries, its format number, its digests, and which files are accepted.

A file of torch is not checked when it is read: one flipped bit in the bytes of a weight loads like any other weight. So
a checkpoint carries a digest of each of its parts, and a damaged file is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brainet_pl._utils.checks import all_plain
from brainet_pl._utils.digest import fingerprint
from brainet_pl._utils.framework import pl, rank_zero_warn
from brainet_pl._utils.inside import leads_out
from brainet_pl._utils.stored import parse
from brainet_pl._utils.tensor_file import Oversized, check_content, check_sizes, read_tensors
from brainet_pl.storage.container import StoredBackbone, StoredModel, check_kind
from brainet_pl.storage.sharded import META, FolderWeights, is_sharded_folder

KIND = "BRAINet"
STORED = "brainet"  # the entry with everything that rebuilds the head
DIGEST = "digest"  # the digests, inside that entry
CONFIG = "brainet_config"  # the settings of the command line
RUN = "brainet_run"  # the run that wrote the file
RANDOM = "brainet_random"  # states of random generators
HPARAMS = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY  # the arguments of the model
STATES = ("state_dict", STORED, "optimizer_states")  # checked when a model is restored
SETTINGS = (HPARAMS, CONFIG)  # checked when the file is read: Lightning changes them before it restores a model

_WANDB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it becomes part of file names and addresses


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file says of its settings and its run; weights are left to Lightning, which loads them.

    Attributes:
        path: The file.
        hparams: The arguments of the model, as primitives.
        config: The settings of the command line; empty for a model that was trained in Python.
        run: What the file says of the run that wrote it.
        step: The number of training steps before the file was written.
        backbone: What the head reads.
    """

    path: Path
    hparams: Mapping[str, Any]
    config: Mapping[str, Any]
    run: Any
    step: int
    backbone: StoredBackbone

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read and check a file: tensors and primitives, never code."""
        if "://" in str(path):
            raise ValueError(f"expected a file, got the address {path}: download it first, then give the file")
        file = Path(path) / META if is_sharded_folder(path) else Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"expected a checkpoint at {path}, found no such file: check the path")
        content = _read_content(path, file)
        _check_digests(content, _stored_entry(content), SETTINGS)
        if file == Path(path):
            check_sizes([content.get(HPARAMS), content.get(CONFIG)], content.get("state_dict"))
        config, step = content.get(CONFIG) or {}, content.get("global_step", 0)
        if not isinstance(config, Mapping) or type(step) is not int:
            raise ValueError(
                f"expected settings and the number of training steps in {path}, got a {type(config).__name__} and a "
                f"{type(step).__name__}: the file was changed; take another copy"
            )
        stored = _parse(content[STORED])
        return cls(Path(path), content.get(HPARAMS) or {}, config, content.get(RUN), step, stored.backbone)

    @property
    def wandb_id(self) -> str | None:
        """The id of the W&B run that wrote the file."""
        return wandb_id(self.run)


def _read_content(path: str | os.PathLike[str], file: Path) -> Any:
    """The content of the file of a checkpoint; of a damaged one, any error may come."""
    try:
        return read_tensors(file)
    except Exception as error:
        why = f" ({error})" if isinstance(error, Oversized) else ""
        raise ValueError(
            f"expected a checkpoint with tensors and primitives in {path}, got {type(error).__name__} when reading "
            f"it{why}: the file is damaged or no checkpoint of BRAINet; take another copy"
        ) from error


def wandb_id(run: Any) -> str | None:
    """The W&B id in the entry RUN of a checkpoint; anything that could be more than an id is ignored with a warning."""
    found = run.get("wandb") if isinstance(run, Mapping) else None
    if found is None or (isinstance(found, str) and _WANDB_ID.fullmatch(found)):
        return found
    rank_zero_warn(
        "expected the checkpoint to name W&B's run by letters, digits, - and _, got something else: W&B begins a run "
        "of its own"
    )
    return None


def unpack(content: dict[str, Any]) -> StoredModel:
    """Check a checkpoint that was loaded, and give the entry that rebuilds the head."""
    parts = ("state_dict", "optimizer_states") if isinstance(content.get("state_dict"), FolderWeights) else ()
    check_content({key: part for key, part in content.items() if key not in parts})  # a folder's were when it was read
    _check_digests(content, _stored_entry(content), STATES)  # of the file as it was written
    check_sizes([content.get(HPARAMS), content[STORED]], content.get("state_dict"))
    return _parse(content[STORED])


def add_digests(content: dict[str, Any]) -> None:
    """Write the digest of every part into a checkpoint that is about to be saved."""
    shared = [key for key in STATES if _is_shared(content.get(key))]  # of which a process has its share alone
    content[STORED][DIGEST] = _digests(content, [key for key in STATES + SETTINGS if key not in shared])


def _is_shared(part: Any) -> bool:
    """Whether a part of a checkpoint holds tensors that several processes share, or is empty but in the first."""
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if hasattr(value, "to_local"):
            return True
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        waiting += () if all_plain(inside) else inside
    return False


# -- checks -----------------------------------------------------------------------------------------------------------


def _stored_entry(content: Any) -> Mapping[str, Any]:
    """The entry that rebuilds the head, or an error that says whose checkpoint this is."""
    stored = content.get(STORED) if isinstance(content, Mapping) else None
    if not isinstance(stored, Mapping):
        raise ValueError("expected a checkpoint of BRAINet, got one without its structure: load it with its own class")
    check_kind(stored, KIND, "a checkpoint")
    settings = content.get(HPARAMS) or {}
    if not isinstance(settings, Mapping) or "_instantiator" in settings:  # Lightning would import and call it
        raise ValueError(
            "expected the settings of a BRAINet in the checkpoint, got a function that makes the model: a checkpoint "
            "is data and runs no code; take a file that BRAINet wrote"
        )
    return stored


def _digests(content: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """A SHA-256 of each of these parts that is there: names, types, shapes and bytes."""
    parts = {key: content[key] for key in keys if key in content}
    if isinstance(parts.get(STORED), Mapping):  # a digest can't cover itself
        parts[STORED] = {key: value for key, value in parts[STORED].items() if key != DIGEST}
    return {key: fingerprint(part) for key, part in parts.items()}


def _check_digests(content: Mapping[str, Any], stored: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse a checkpoint whose parts are not those that were saved; a file without digests is not checked."""
    written = stored.get(DIGEST)
    if written is None:
        return
    wanted = {key: written[key] for key in keys if key in written} if isinstance(written, Mapping) else {"?": ""}
    found = _digests(content, wanted)
    damaged = [key for key, value in wanted.items() if found.get(key) != value]
    if damaged:
        raise ValueError(
            f"expected the checkpoint as it was saved, got another {', '.join(damaged)}: the file is damaged, take "
            "another copy; if you changed it yourself, delete checkpoint['brainet']['digest'] before saving it"
        )


def _parse(stored: Mapping[str, Any]) -> StoredModel:
    return parse(StoredModel, stored, f"the entry {STORED!r} of the checkpoint")


def check_callback_states(states: Any, trainer: pl.Trainer) -> None:
    """Refuse states of callbacks that name files elsewhere: Lightning deletes older checkpoints by the names it reads.

    It deletes what lies below its folder by the letter of the path, `folder/../../x` included, and anything that has an
    address.
    """
    folders = tuple(f"{getattr(callback, 'dirpath', None)}/" for callback in trainer.checkpoint_callbacks)
    for state in states.values() if isinstance(states, Mapping) else ():
        for name in _files_of(state):
            if _is_elsewhere(name, folders):
                raise ValueError(
                    f"expected checkpoints in the folder of the run in the states of callbacks, got {name!r}: the file "
                    "is not what Lightning writes; take another copy"
                )


def _files_of(state: Any) -> list[str]:
    """The files that the state of a callback names."""
    if not isinstance(state, Mapping):
        return []
    best = state.get("best_k_models")
    named = list(best) if isinstance(best, Mapping) else []
    named += [value for key, value in state.items() if str(key).endswith("path")]
    return [name for name in named if isinstance(name, str)]


def _is_elsewhere(name: str, folders: tuple[str, ...]) -> bool:
    """Whether a file could lie outside of these folders: by `..`, by a link, or at an address."""
    if ".." in Path(name).parts:
        return True
    if any(name.startswith(folder) and leads_out(folder, Path(name)) for folder in folders):
        return True
    return ("://" in name or "::" in name) and not name.startswith(folders)
