"""Files and folders that are whole or not there, whatever moment a process is killed at.

A writer fills a temporary file or folder beside the place, which then takes the place in one step. It holds a lock on
the temporary one, which the system lets go of when the process ends, in any way; so what nobody holds was left by a
killed process, and the next writer of the same place deletes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
_LOCKABLE_SECONDS = 2.0  # after which a temporary file has a lock, if its writer lives
_ORPHANED_SECONDS = 3600.0  # without a write, after which one counts as left where the file system has no locks
_CURRENT_FOLDER, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


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
    if durable:  # the others are many small pictures of one folder
        remove_leftovers(path.parent, path.name)
    temporary = _temporary(path)
    with _named_errors(temporary, path):
        temporary.touch()
        with _locked(temporary), _deleted(temporary):
            yield temporary
            if durable:
                _sync(temporary)
            os.replace(temporary, path)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], names: Collection[str]) -> Iterator[Path]:
    """A temporary folder beside `path` to fill, which takes its place at the end, together with all files in it.

    Where a folder is there already, both change places in one step, and the former one is deleted. A system that can't
    do so (any but Linux) moves the former one aside for a moment.

    Args:
        path: The folder.
        names: Of the files that it holds. What holds others is somebody's own, and refused.
    """
    path = Path(path)
    _refuse_others(path, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    temporary = _temporary(path)
    with _named_errors(temporary, path):
        temporary.mkdir()
        with _locked(temporary), _deleted(temporary):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    _sync(file)
            if path.exists():
                _exchange(temporary, path)
            else:
                os.rename(temporary, path)


def remove_leftovers(
    folder: str | os.PathLike[str], name: str | None = None, seconds: float = _LOCKABLE_SECONDS
) -> None:
    """Delete what killed processes left in a folder.

    Args:
        folder: Where they wrote.
        name: The file or folder that they wrote; None is any.
        seconds: Without a write, after which what nobody holds was left; more where writers hold no lock.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            match = _LEFTOVER.fullmatch(entry.name)
            if match and name in (None, match[1]) and not entry.is_symlink() and _is_left(Path(entry.path), seconds):
                _delete(Path(entry.path))


def _refuse_others(path: Path, names: Collection[str]) -> None:
    """Refuse a file, and a folder with files that would be lost with it."""
    others = [path] if path.exists() and not path.is_dir() else sorted(path.glob("*"))
    others = [one for one in others if one == path or one.name not in names]
    if others:
        raise ValueError(
            f"expected a new folder, or one of {', '.join(sorted(names))} alone, got {others[0]}, which would be lost: "
            "name another, or move it away"
        )


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def _is_left(temporary: Path, seconds: float) -> bool:
    """Whether no living process writes to it."""
    try:
        age = time.time() - temporary.lstat().st_mtime
        if age < seconds or fcntl is None:
            return age >= _ORPHANED_SECONDS
        handle = os.open(temporary, os.O_RDONLY)
    except OSError:  # another process was faster
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError) and age >= _ORPHANED_SECONDS
    else:
        return True
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(temporary: Path) -> Iterator[None]:
    """Hold the lock that says that somebody writes here; some file systems have none."""
    if fcntl is None:
        yield
        return
    handle = os.open(temporary, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _deleted(temporary: Path) -> Iterator[None]:
    """Delete at the end what is there of it."""
    try:
        yield
    finally:
        _delete(temporary)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # another process was faster, or the folder can only be read
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _sync(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def _exchange(made: Path, place: Path) -> None:
    """Give each of two folders the name of the other."""
    system = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    swap = getattr(system, "renameat2", None)
    if swap and swap(_CURRENT_FOLDER, os.fsencode(made), _CURRENT_FOLDER, os.fsencode(place), _EXCHANGE) == 0:
        return
    aside = _temporary(place)
    os.rename(place, aside)
    os.rename(made, place)
    os.rename(aside, made)


@contextlib.contextmanager
def _named_errors(temporary: Path, path: Path) -> Iterator[None]:
    """An error of the disk names the place that was asked for."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        failed = _disk_error(error)
        if failed is None or failed.filename not in (None, str(temporary)):
            raise
        raise type(failed)(failed.errno, failed.strerror or str(failed), str(path)) from error


def _disk_error(error: BaseException | None) -> OSError | None:
    """The error of the file system behind an error: torch wraps it, and neither names the file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error if error is None or error.errno is not None else None
