"""The notebooks run from top to bottom in an empty folder, and what is stored in them came from such a run."""

import importlib.util
import os
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def kinds(cell):
    """What a code cell gives, in order; texts that are printed piece by piece count once."""
    found = [output.output_type for output in cell.outputs]
    return [kind for i, kind in enumerate(found) if i == 0 or kind != found[i - 1]]


def codes(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_one_for_each_door():
    names = {path.stem for path in NOTEBOOKS}
    assert {"honest_predictions", "table", "terminal"} <= names  # a model, a CSV file, a terminal
    assert {"rare_classes", "risk_coverage"} <= names


@pytest.mark.slow
@every
def test_they_run(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored, fresh = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    for cell in codes(fresh):
        cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, after in zip(codes(stored), codes(fresh), strict=True):
        assert kinds(before) == kinds(after)
        assert all(output.get("name") != "stderr" for output in after.outputs), after.outputs


@every
def test_what_is_stored_came_from_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in codes(notebook)] == list(range(1, len(codes(notebook)) + 1))
    stored = str(notebook)
    assert "stderr" not in stored
    assert "site-packages" not in stored
    assert os.path.expanduser("~") + "/" not in stored
    assert path.stat().st_size < 300_000


@every
def test_the_site_shows_all_of_it(path):
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "_hooks.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text, pictures = hook.pages(path)
    notebook = nbformat.read(path, as_version=4)
    version, algorithm, layout, _ = notebook.metadata.measured.split(" / ")
    assert f"measured with {version}" in text
    former = f"{version} / {int(algorithm) - 1} / {layout} / abc"
    assert "**before today's structures**" in hook.run_with(former)  # results of other structures say so by themselves
    assert len(pictures) >= 2
    for cell in notebook.cells:
        assert cell.source in text
        for output in cell.get("outputs", []):
            assert output.output_type != "stream" or output.text.strip() in text
            assert output.output_type != "execute_result"  # a table of pandas, say: the page would not have it
    for name, content in pictures.items():
        assert f"({name})" in text
        assert content.startswith(b"\x89PNG")
