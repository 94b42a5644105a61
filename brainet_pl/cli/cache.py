"""`brainet cache`: list or delete the features that `FeatureCache` keeps on disk."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from brainet_pl.features import store as feature_store
from brainet_pl.features.store import Stored, shown_size

FOLDER = "runs/features"  # of `FeatureCache` under the command line's root


def main(args: Sequence[str]) -> None:
    """List the features in a folder, or clear them."""
    parser = argparse.ArgumentParser(prog="brainet cache", description="Features that FeatureCache keeps on disk.")
    parser.add_argument("action", nargs="?", default="list", choices=("list", "clear"), help="clear deletes them")
    parser.add_argument("--folder", default=FOLDER, help=f"where they are; {FOLDER} by default")
    parser.add_argument("--unused", type=float, default=0.0, metavar="DAYS", help="only those unused for so many days")
    chosen = parser.parse_args(list(args))
    if not Path(chosen.folder).is_dir():
        print(f"no features in {chosen.folder}: there is no such folder")
        return
    if chosen.action == "clear":
        gone = feature_store.clear(chosen.folder, chosen.unused)
        freed = shown_size(sum(one.bytes for one in gone))
        print(f"deleted {counted(gone)} from {chosen.folder}, {freed}")
        return
    found = [one for one in feature_store.list_stored(chosen.folder) if time.time() - one.used >= chosen.unused * 86400]
    print(f"{counted(found)} in {chosen.folder}, {shown_size(sum(one.bytes for one in found))}")
    for one in found:
        print(line(one))


def counted(found: Sequence[Stored]) -> str:
    """How many tables of features there are."""
    return "1 table" if len(found) == 1 else f"{len(found)} tables"


def line(one: Stored) -> str:
    """One table in a line: its size, what is in it, when it was used, where it is."""
    kind = {".tmp": "unfinished", ".bad": "damaged or outdated"}.get(one.folder.suffix, "unreadable")
    what = kind if one.samples is None else f"{one.samples:,} samples × {one.features:,} features"
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
    return f"{shown_size(one.bytes):>10}  {what:<36}  used {used}  {one.folder}"
