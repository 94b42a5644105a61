"""Files that are whole or not there, whatever moment a process is killed at."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], durable: bool = True) -> Iterator[Path]:
    """A temporary file beside `path` to write to, which takes its place at the end. Missing folders are made.

    It lies in the same folder and so on the same file system, where a move can't leave half a file. A link at `path` is
    replaced, and what it led to stays as it is.

    Args:
        path: The file.
        durable: Whether the content is on the disk before it has the name, should the power fail.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        failed = _disk_error(error)
        if failed is None or failed.filename not in (None, str(temporary)):
            raise
        raise type(failed)(failed.errno, failed.strerror or str(failed), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _disk_error(error: BaseException | None) -> OSError | None:
    """The error of the file system behind an error: torch wraps it, and neither names the file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error if error is None or error.errno is not None else None


def remove_leftovers(folder: str | os.PathLike[str], seconds: float = 0.0) -> None:
    """Delete what killed processes left of `atomic_write` in a folder: temporary files at least so many seconds old."""
    for orphan in Path(folder).glob(".*.tmp"):
        with contextlib.suppress(OSError):  # another process was faster, or the folder can only be read
            old = time.time() - orphan.lstat().st_mtime >= seconds
            if old and _LEFTOVER.fullmatch(orphan.name) and not orphan.is_symlink():
                orphan.unlink()
