"""What is stale is known, measured beside, and replaced when it is whole."""

import json
import shutil

import pytest


@pytest.fixture(scope="module")
def results(load):
    return load("results")


def stored(folder, file, cells, stamps):
    content = {"settings": {}, "cells": cells, "measured": stamps}
    (folder / file).write_text(json.dumps(content))


@pytest.fixture
def today(results):
    now = results.numbers_of_code()
    return f"0.1.0 / {now['algorithm']} / {now['layout']} / abc"


def test_every_command_of_the_pages_is_known_with_a_budget(results):
    known = results.tasks()
    assert len(known) == len({(task.command, task.file) for task in known}) > 25
    assert [task.minutes for task in known] == sorted(task.minutes for task in known)
    scripts = {task.command.split()[1].rpartition("/")[2].removesuffix(".py") for task in known}
    assert set(results.BUDGETS) <= scripts


def test_stale_cells_of_a_task_alone_are_measured_again(results, today, tmp_path):
    old = "0.1.0 / 1 / 1 / abc"
    cells, stamps = {"a/1": 1, "a/2": 2, "b/1": 3}, {"a/1": old, "a/2": today, "b/1": old}
    stored(tmp_path, "x.json", cells, stamps)
    assert results.stale_cells("x.json", tmp_path, ("a/",), results.numbers_of_code()) == (1, 2)
    assert results.stale_cells("x.json", tmp_path, ("",), results.numbers_of_code()) == (2, 3)
    task = results.Task("python x.py", "x.json", ("a/",), 1, 1, 2)
    work = tmp_path / "work"
    results.prepare(task, work, tmp_path)
    assert json.loads((work / "x.json").read_text())["cells"] == {"a/2": 2, "b/1": 3}
    stored(work, "x.json", {"a/1": 9}, {"a/1": today})  # what a run that was cut has left
    results.prepare(task, work, tmp_path)
    assert json.loads((work / "x.json").read_text())["cells"] == {"a/1": 9}


def test_a_file_is_replaced_when_its_command_has_ended(results, today, tmp_path, monkeypatch):
    shown, work = tmp_path / "shown", tmp_path / "work"
    shown.mkdir()
    monkeypatch.setattr(results, "RESULTS", shown)
    content = json.dumps({"cells": {"a": 2}, "measured": {"a": today}})
    write = f"import sys; open(sys.argv[-1] + '/x.json', 'w').write({content!r})"
    for code, line in ((write, "measured in"), (f"{write}; sys.exit(3)", "failed with status 3")):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        stored(shown, "x.json", {"a": 1}, {"a": "0.1.0 / 1 / 1 / abc"})
        monkeypatch.setattr(results, "words_of", lambda task, data, out, code=code: [
            results.sys.executable, "-c", code, "--out", str(out),
        ])  # fmt: skip
        monkeypatch.setattr(results, "prepare", lambda task, folder: None)
        (said,) = results.measure([results.Task("python x.py", "x.json", ("",), 1, 1, 1)], tmp_path, 1.0, work)
        assert said.startswith(line)
        assert json.loads((shown / "x.json").read_text())["cells"] == {"a": 2 if line == "measured in" else 1}
    (said,) = results.measure([results.Task("python x.py", "x.json", ("",), 1, 1, 1)], tmp_path, 0.0, work)
    assert said.startswith("not begun")
