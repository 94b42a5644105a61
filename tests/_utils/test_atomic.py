"""Files and folders that are whole or not there: a writer is killed at any moment, and the next one cleans up."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from brainet_pl._utils import atomic
from brainet_pl._utils.atomic import atomic_folder, atomic_write, remove_leftovers

WRITERS = """
import sys, time
from pathlib import Path
from brainet_pl._utils.atomic import atomic_folder, atomic_write

kind, place = sys.argv[1], Path(sys.argv[2])
print("ready", flush=True)
while True:
    number = time.time_ns()
    if kind == "file":
        with atomic_write(place) as temporary:
            with temporary.open("w") as file:
                for part in range(40):
                    file.write(f"{number}\\n")
                    file.flush()
    else:
        with atomic_folder(place, [f"{part}.txt" for part in range(8)]) as temporary:
            for part in range(8):
                (temporary / f"{part}.txt").write_text(str(number))
"""

FILES = ("a", "a.json", *(f"{part}.txt" for part in range(8)))  # that a folder of these tests may hold


def content(kind, place):
    """The numbers of the parts of what stands there: of a whole one, all the same."""
    if kind == "file":
        return place.read_text().split()
    return [(place / f"{part}.txt").read_text() for part in range(8)]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_writer_leaves_the_former_one_whole(kind, tmp_path):
    place, rng = tmp_path / "made", np.random.default_rng(0)
    seen = set()
    for _ in range(12):
        writer = subprocess.Popen([sys.executable, "-c", WRITERS, kind, str(place)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(float(rng.uniform(0.05, 0.3)))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        if place.exists():
            parts = content(kind, place)
            assert len(parts) == (40 if kind == "file" else 8)
            assert len(set(parts)) == 1
            seen.add(parts[0])
    assert len(seen) > 1  # it was killed at different moments
    for left in tmp_path.glob(".made.*.tmp"):
        os.utime(left, (0, 0))  # a writer of long ago
    with atomic_folder(place, FILES) if kind == "folder" else atomic_write(place) as temporary:
        if kind == "file":
            temporary.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_folder_changes_places_with_the_former_one_in_one_step(tmp_path):
    """A reader that looks all the time never finds a moment without the folder."""
    place = tmp_path / "made"
    place.mkdir()
    for part in range(8):
        (place / f"{part}.txt").write_text("0")
    writer = subprocess.Popen([sys.executable, "-c", WRITERS, "folder", str(place)], stdout=subprocess.PIPE)
    writer.stdout.readline()
    looks, folders, end = [], set(), time.monotonic() + 20
    try:
        while len(folders) < 5 and time.monotonic() < end:
            looks += [place.is_dir() for _ in range(1000)]
            folders.add(place.stat().st_ino)
    finally:
        writer.kill()
        writer.wait()
    assert all(looks)
    assert len(folders) > 1


def test_systems_that_cannot_exchange_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *args, **kwargs: None)
    for number in range(2):
        with atomic_folder(tmp_path / "made", FILES) as temporary:
            (temporary / "a.json").write_text(json.dumps(number))
    assert json.loads((tmp_path / "made" / "a.json").read_text()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_somebody_writes_stays(tmp_path):
    left, others = tmp_path / f".a.{'1' * 32}.tmp", tmp_path / ".mine.tmp"
    for path in (left, others, tmp_path / "c.json"):
        path.touch()
        os.utime(path, (0, 0))
    with atomic_write(tmp_path / "b") as temporary:
        temporary.write_text("b")
        os.utime(temporary, (0, 0))
        remove_leftovers(tmp_path)
        assert temporary.exists()  # this process holds it
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", "b", "c.json"]
    left.touch()
    remove_leftovers(tmp_path)
    assert left.exists()  # so young that its writer may not hold it yet


def test_a_folder_that_is_not_filled_leaves_the_former_one(tmp_path):
    with atomic_folder(tmp_path / "made", FILES) as temporary:
        (temporary / "a").write_text("1")

    def fail():
        with atomic_folder(tmp_path / "made", FILES) as temporary:
            (temporary / "a").write_text("2")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (tmp_path / "made" / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_somebodys_own_is_not_replaced(kind, tmp_path):
    """A folder takes the place of one with the same files: never of a file, nor of a folder with others."""
    mine = tmp_path / "made" if kind == "file" else tmp_path / "made" / "notes.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("dear")
    with (
        pytest.raises(ValueError, match=r"expected a new folder, .* which would be lost"),
        atomic_folder(tmp_path / "made", FILES),
    ):
        pytest.fail("it begins to write")
    assert mine.read_text() == "dear"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_link_to_a_folder_is_replaced_and_nothing_is_left(tmp_path):
    for place in (tmp_path / "far", tmp_path / "made"):
        with atomic_folder(place, FILES) as temporary:
            (temporary / "a").write_text(place.name)
        if place.name == "far":
            (tmp_path / "made").symlink_to(place)
    assert (tmp_path / "far" / "a").read_text() == "far"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "made"]
    assert not (tmp_path / "made").is_symlink()
