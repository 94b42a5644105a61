"""FSDP2 in two processes: weights and metrics of DDP, and checkpoints that go from one to the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import brainet_pl

SCRIPT = Path(__file__).with_name("sharded.py")


def run(folder, *words):
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *words], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def found(folder, name):
    state = torch.load(folder / f"{name}.pt", weights_only=True)
    return state, json.loads((folder / f"{name}.json").read_text())


def same(folder, one, other, metrics=1e-5):
    """Weights, what was learned from validation data, and metrics; sums of training metrics are of one process."""
    (a, numbers), (b, others) = found(folder, one), found(folder, other)
    assert list(a) == list(b)
    for key, value in a.items():
        if not key.startswith("train_metrics"):
            assert torch.allclose(value.double(), b[key].double(), atol=1e-5, rtol=1e-5), key
    assert numbers == pytest.approx(others, abs=metrics, nan_ok=True)


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name in ("ddp", "file", "folder"):
        run(folder, name, "fit")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_fit_and_a_test_equal_those_of_ddp(name, fits):
    same(fits, "ddp-fit", f"{name}-fit")
    same(fits, "ddp-test", f"{name}-test")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source"), [("file", "file"), ("folder", "folder"), ("file", "folder"), ("ddp", "file")]
)
def test_a_checkpoint_is_tested_with_its_own_tree(name, source, fits):
    run(fits, name, "test", source)
    same(fits, f"{source}-test", f"{name}-from-{source}-test")


@pytest.mark.slow
def test_a_fit_goes_on_sharded_and_unsharded(fits):
    for name, source in (("ddp", "ddp"), ("file", "file"), ("folder", "folder"), ("file", "ddp")):
        run(fits, name, "resume", source)
        same(fits, "ddp-from-ddp-resumed", f"{name}-from-{source}-resumed")


@pytest.mark.slow
def test_a_checkpoint_that_is_told_too_late_is_an_error_with_the_way(fits):
    run(fits, "file", "late", "file")
    assert "trainer.ckpt_path = path" in (fits / "late.txt").read_text()
