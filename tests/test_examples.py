"""Every example runs as it stands, in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
QUICK = ("structure_alone", "unknown_inputs")
NEEDS = {"hugging_face": "transformers"}  # of an extra


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if p.stem in QUICK else pytest.mark.slow, id=p.stem) for p in EXAMPLES]
)
def test_examples_run(path, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    chosen = {name: value for name, value in os.environ.items() if name != "BRAINET_LIGHTNING"}  # their imports choose
    environment = chosen | {"WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_there_are_examples_and_each_says_how_to_run_it():
    assert len(EXAMPLES) >= 5
    for path in EXAMPLES:
        assert f"python examples/{path.name}" in path.read_text()
