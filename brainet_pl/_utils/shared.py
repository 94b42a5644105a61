"""Folders that others may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from brainet_pl._utils.warn import warn

_WARNED: set[str] = set()


def warn_if_shared(folder: str | os.PathLike[str], holds: str) -> None:
    """Warn, once for each folder, where every user of the machine may write to it or another user owns it.

    Args:
        folder: The folder; one that is not there yet will be the user's own.
        holds: What is taken from it, to say so.
    """
    try:
        found = Path(folder).stat()
    except OSError:
        return
    user = os.getuid() if hasattr(os, "getuid") else found.st_uid
    open_to_all, others = bool(found.st_mode & stat.S_IWOTH), found.st_uid not in (user, 0)
    if (open_to_all or others) and str(folder) not in _WARNED:
        _WARNED.add(str(folder))
        who = "every user of this machine may write" if open_to_all else "another user owns, and may write"
        warn(
            f"{holds} are taken from {folder}, to which {who}: who writes there decides what a fit uses; give a folder "
            "of your own, or take away the right (chmod o-w)"
        )
