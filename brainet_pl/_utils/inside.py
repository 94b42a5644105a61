"""The files of a folder that somebody else may have made: read and written inside that folder, never through a link
that leads out of it.

A folder that is unpacked from an archive can hold a link in the place of any file: a page that is written to
`report.html` would overwrite whatever the link names, and a `config.yaml` could show a private key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from brainet_pl._utils.atomic import atomic_write
from brainet_pl._utils.warn import warn

MOST_BYTES = 2**28  # of a file that is read at once; the record of a test has a few megabytes


def find_inside(folder: str | os.PathLike[str], name: str) -> Path | None:
    """The regular file of that relative name; None, with a warning for a link, if there is none inside the folder."""
    path = Path(folder) / name
    try:
        if not path.is_file():
            return None
        if leads_out(folder, path):
            warn(f"ignored {path}: it is a link out of its folder, to {path.resolve()}")
            return None
    except (OSError, ValueError):  # a name that no file can have: too long, or with a zero byte
        return None
    return path


def read_inside(folder: str | os.PathLike[str], name: str, errors: str = "strict") -> str | None:
    """The text of that file, or None if there is none inside the folder."""
    path = find_inside(folder, name)
    if path is None:
        return None
    check_size(path)
    return path.read_text(encoding="utf-8", errors=errors)


def check_size(path: Path, most: int = MOST_BYTES) -> None:
    """Refuse a file that is too large to be read at once."""
    if path.stat().st_size > most:
        raise ValueError(
            f"expected at most {most:,} bytes in {path}, got {path.stat().st_size:,}: it is not what brainet_pl "
            "writes; take another copy"
        )


def place_inside(folder: str | os.PathLike[str], name: str) -> Path:
    """The path of a file to write; refused where a folder on the way to it is a link that leads out."""
    path = Path(folder) / name
    if leads_out(folder, path.parent):
        raise ValueError(
            f"expected {path.parent} inside {folder}, got a link to {path.parent.resolve()}: delete the link, so that "
            "nothing is written elsewhere"
        )
    return path


@contextlib.contextmanager
def write_inside(folder: str | os.PathLike[str], name: str, durable: bool = True) -> Iterator[Path]:
    """A temporary file that takes the place of `name` in a folder at the end; a link there is replaced, not followed.

    Args:
        folder: The folder that the file must lie in; it may itself be reached by a link.
        name: The relative name of the file. Missing folders are made.
        durable: As in `atomic_write`.
    """
    with atomic_write(place_inside(folder, name), durable) as temporary:
        yield temporary


def refuse_links(folder: Path, patterns: Iterable[str]) -> None:
    """Refuse a folder in which one of the names that another library writes to is a link that leads out."""
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_symlink() and leads_out(folder, path):
            raise ValueError(
                f"expected the files of a run in {folder}, got {path.name}, a link to {path.resolve()}: delete the "
                "link, or copy the file there, so that nothing is written elsewhere"
            )


def leads_out(folder: str | os.PathLike[str], path: Path) -> bool:
    """Whether a path below a folder is, by its links and its `..`, one outside of it."""
    return not path.resolve().is_relative_to(Path(folder).resolve())
