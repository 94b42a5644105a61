"""Learned trees on disk: a key that names features and settings, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from brainet_pl._utils import atomic
from brainet_pl._utils.inside import check_size
from brainet_pl._utils.warn import warn
from brainet_pl.structure.canonical import canonical_order
from brainet_pl.structure.constraints import Background
from brainet_pl.structure.data import PreparedData, as_table
from brainet_pl.structure.ggt import GGT
from brainet_pl.structure.score import find_score
from brainet_pl.structure.settings import StructureSettings, choose_test

ENTRY = "cache"  # the key of a tree and its digest, beside the tree
ALGORITHM = 6  # raise it whenever the same features and settings give another tree: old files are then not found


def cache_key(features: Any, settings: StructureSettings, knowledge: Background | None = None) -> str:
    """16 hexadecimal digits that name the tree of `features` (N, d) learned with `settings`.

    Args:
        features: array or tensor as `learn_structure` takes it, or what was prepared of it. The order of its rows does
            not matter to a tree and not to the key; the order of columns does, because a stored tree is numbered by it.
        settings: of the structure.
        knowledge: that it is learned with.
    """
    complete = vars(settings) | {"s": settings.samples}
    values = features if isinstance(features, PreparedData) else as_table(features)
    test = choose_test(complete.pop("test"), values)
    score = complete.pop("score")
    scoring = find_score(test.default_score if score is None else score, test.kind)
    if isinstance(values, PreparedData):
        digest, columns, categories = values.digest, values.columns, values.categories
    else:
        _, columns, digest = canonical_order(values)
        categories = values.dtype.kind in "iub"
    content = {
        "algorithm": ALGORITHM,
        "data": digest,
        "columns": columns.tolist(),
        # The digest sees numbers only, but whole numbers are categories if they are stored as integers.
        "categories": categories,
        "test": [test.__module__, test.__qualname__, test.version],
        "score": [scoring.__module__, scoring.__qualname__, scoring.version],
        "settings": complete,
    }
    if knowledge is not None:
        content["knowledge"] = knowledge.to_dict()
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def load(path: str | os.PathLike[str], num_variables: int | None = None) -> GGT | None:
    """The tree in a file that `store` wrote under this name, or None if there is no such file.

    A file that is no whole tree, was written under another name, or was changed is renamed to `….bad` with a warning,
    and None says that there is nothing to use.

    Args:
        path: The file; its name without `.json` is the key of the tree.
        num_variables: The number of variables that the tree must have; None takes any.
    """
    path = Path(path)
    if not path.is_file():
        return None
    try:
        check_size(path)
        return _read_entry(path.read_text(encoding="utf-8"), path.stem, num_variables)
    except (ValueError, RecursionError) as error:  # also what is not text
        aside = path.with_name(f"{path.name}.bad")
        with contextlib.suppress(OSError):  # another run was faster, or the folder can only be read
            os.replace(path, aside)
        warn(f"set {path} aside as {aside.name} and go on without it: {error}")
        return None


def _read_entry(text: str, key: str, num_variables: int | None) -> GGT:
    ggt = GGT.from_json(text)
    written = json.loads(text).get(ENTRY)
    if written != _entry(key, ggt):
        raise ValueError(
            f"expected the tree that was learned for {key}, as it was written, got another: it is learned again"
        )
    if num_variables is not None and ggt.num_variables != num_variables:
        raise ValueError(f"expected a tree of {num_variables} variables, got one of {ggt.num_variables}")
    return ggt


def store(path: str | os.PathLike[str], ggt: GGT) -> None:
    """Write a tree, with its key and a digest, whole or not at all: another run may be reading the file.

    Missing folders are made. The file is JSON that `GGT.from_json` reads too.
    """
    content = ggt.to_dict() | {ENTRY: _entry(Path(path).stem, ggt)}
    with atomic.atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, separators=(",", ":"), allow_nan=False), encoding="utf-8")


def _entry(key: str, ggt: GGT) -> dict[str, str]:
    """What binds a tree to its key: the key, and a digest of both."""
    return {"key": key, "sha256": hashlib.sha256(f"{key} {ggt.to_json()}".encode()).hexdigest()}
