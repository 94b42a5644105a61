"""FSDP2 in two processes: weights and metrics of DDP, and checkpoints that go from one to the other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import brainet_pl
from brainet_pl import Backbone, BRAINet

SCRIPT = Path(__file__).with_name("sharded.py")


def start(*words, **given):
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=env, capture_output=True, text=True, timeout=600, **given
    )


def run(folder, *words):
    done = start(SCRIPT, folder, *words)
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
    ("name", "source"),
    [("file", "file"), ("folder", "folder"), ("file", "folder"), ("ddp", "file"), ("ddp", "folder")],
)
def test_a_checkpoint_is_tested_with_its_own_tree(name, source, fits):
    run(fits, name, "test", source)
    same(fits, f"{source}-test", f"{name}-from-{source}-test")


@pytest.fixture(scope="module")
def resumed(fits):
    run(fits, "ddp", "resume", "ddp")
    return fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source"), [("file", "file"), ("folder", "folder"), ("file", "ddp"), ("ddp", "file"), ("ddp", "folder")]
)
def test_a_fit_goes_on_sharded_and_unsharded(name, source, resumed):
    run(resumed, name, "resume", source)
    same(resumed, "ddp-from-ddp-resumed", f"{name}-from-{source}-resumed")


def network():
    first, more, last = nn.Linear(64, 24), nn.Linear(24, 24), nn.Linear(24, 8)
    body = nn.Sequential(first, nn.BatchNorm1d(24), nn.ReLU(), more, nn.ReLU(), last)
    return Backbone(body, freeze=False, layers=None)


@pytest.mark.slow
def test_a_folder_is_read_without_processes(fits):
    one, other = (BRAINet.load_from_checkpoint(fits / n / "last.ckpt", backbone=network()) for n in ("file", "folder"))
    x = torch.rand(20, 64)
    assert torch.allclose(one.eval()(x), other.eval()(x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_process_ends_the_other_with_the_cause(rank, tmp_path):
    done = start(SCRIPT, tmp_path, "file", "killed", rank)  # it returns when both have closed their outputs
    assert done.returncode != 0
    assert re.search("Connection (reset|closed) by peer|terminated with code -9", done.stderr), done.stderr[-2000:]


@pytest.mark.slow
def test_the_command_line_hands_the_checkpoint_over_in_time(tmp_path):
    given = [
        "--config=digits", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=CSVLogger",
        "--trainer.logger.save_dir=runs", "--trainer.strategy=ModelParallelStrategy",
        "--trainer.strategy.data_parallel_size=2", "--trainer.strategy.tensor_parallel_size=1",
        "--trainer.strategy.process_group_backend=gloo",
    ]  # fmt: skip

    def call(*words):
        done = start("-m", "brainet_pl.cli", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]

    call("fit", *given, "--trainer.max_epochs=1")
    (folder,) = tmp_path.glob("runs/**/last.ckpt")
    assert (folder / "meta.pt").is_file()
    call("fit", *given, "--trainer.max_epochs=2", f"--ckpt_path={folder}", "--seed_everything=7")
    assert torch.load(folder / "meta.pt", weights_only=True)["epoch"] == 1
    call("test", *given[1:], f"--ckpt_path={folder}")
    assert "test/cls/NLL" in (folder.parents[1] / "metrics.csv").read_text()


@pytest.mark.slow
def test_a_module_of_ones_own_is_sharded_by_its_own_configure_model(tmp_path):
    for name in ("ddp", "folder"):
        run(tmp_path, name, "own_fit")
        run(tmp_path, name, "own_resume", name)
        run(tmp_path, name, "own_test", name)
    run(tmp_path, "file", "own_resume", "ddp")
    run(tmp_path, "folder", "large_fit")
    run(tmp_path, "folder", "large_resume", "folder")
    same(tmp_path, "own-ddp-fit", "own-folder-fit")
    same(tmp_path, "own-ddp-from-ddp-resumed", "large-folder-from-folder-resumed")
    same(tmp_path, "own-ddp-from-ddp-resumed", "own-folder-from-folder-resumed")
    same(tmp_path, "own-ddp-from-ddp-resumed", "own-file-from-ddp-resumed")
    same(tmp_path, "own-ddp-from-ddp-test", "own-folder-from-folder-test")


@pytest.mark.slow
def test_a_checkpoint_that_is_told_too_late_is_an_error_with_the_way(fits):
    run(fits, "file", "late", "file")
    assert "trainer.ckpt_path = path" in (fits / "late.txt").read_text()
