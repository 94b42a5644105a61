"""Every key that a run logs is in the table of docs/reference/metrics.md, and so are those of W&B's workspace."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = "(train|val|test|test/scaled)"


@pytest.fixture(scope="module")
def known():
    """A pattern of all keys of the table."""
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8").split("## Columns")[0]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    keys = [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]
    patterns = []
    for key in keys:
        places = re.sub(r"<\\w+>|<\w+>", "[^/]+", re.escape(key).replace("\\<", "<").replace("\\>", ">"))
        patterns.append(re.sub("^…", STAGES, places))
    assert len(patterns) > 50
    return re.compile("|".join(patterns))


def test_every_key_that_a_run_logs_is_explained(run, known):
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        logged = set(next(csv.reader(file))) - {"epoch", "step"}
    assert len(logged) > 60
    assert sorted(key for key in logged if not known.fullmatch(key)) == []
    assert not known.fullmatch("test/cls/Accuracy")


def test_panels_of_the_workspace_show_keys_of_the_table(known):
    path = ROOT / "examples" / "wandb_workspace.py"
    spec = importlib.util.spec_from_file_location("wandb_workspace", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    keys = [key for panels in example.SECTIONS.values() for of_panel in panels.values() for key in of_panel]
    assert len(keys) == len(set(keys)) > 15
    assert [key for key in keys if not known.fullmatch(key)] == []
