"""Files that are whole or not there, whatever moment a process is killed at."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path` to write to, which takes its place at the end. Missing folders are made.

    It lies in the same folder and so on the same file system, where a move can't leave half a file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:  # on the disk before it has the name, should the power fail
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: str | os.PathLike[str], seconds: float = 0.0) -> None:
    """Delete what killed processes left of `atomic_write` in a folder: temporary files at least so many seconds old."""
    for orphan in Path(folder).glob(".*.tmp"):
        with contextlib.suppress(OSError):  # another process was faster, or the folder can only be read
            if time.time() - orphan.stat().st_mtime >= seconds:
                orphan.unlink()
