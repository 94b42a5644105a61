"""A run that cannot be lost: resumed fits repeat uninterrupted ones to the bit, and go on in their folder."""

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from brainet_pl._utils.framework import Callback, ModelCheckpoint, pl
from brainet_pl.callbacks import LastCheckpoint, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.datamodules.base import Samples
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import MCDropout, Tree

EPOCHS = 3


class NoisyDigits(Digits):
    """Digits with noise from every random generator that an augmentation may draw from, in three batches."""

    def setup(self, stage):
        super().setup(stage)
        data = self.train_set.dataset
        self.train_set.dataset = Samples(data.x, data.y, self.noisy)

    @staticmethod
    def noisy(x):
        return x + torch.rand(()) + float(np.random.rand()) + random.random()  # noqa: NPY002


def fit(folder, quiet_trainer, head, *callbacks, resume=None, data=None, seed=0, epochs=EPOCHS, **settings):
    pl.seed_everything(seed, verbose=False)
    model = BRAINet(8, head=head, lr=0.01)
    trainer = quiet_trainer(
        folder, StructureLearning(threshold=0.1, progress=False), *callbacks, epochs=epochs, **settings
    )
    trainer.fit(model, datamodule=data or NoisyDigits(batch_size=256), ckpt_path=resume)
    return trainer, model


def assert_same(one, other):
    """Weights, optimizer and validation metrics of two (trainer, model), to the bit, and what a test would draw."""
    for name, value in one[1].state_dict().items():
        assert torch.equal(value, other[1].state_dict()[name]), name
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (one[0], other[0])]
    for number, state in states[0].items():
        assert all(torch.equal(value, states[1][number][name]) for name, value in state.items())
    metrics = [{k: v.item() for k, v in trainer.callback_metrics.items()} for trainer in (one[0], other[0])]
    assert metrics[0] == metrics[1]


class Every(ModelCheckpoint):
    def __init__(self, folder, **settings):
        super().__init__(folder, filename="{epoch}-{step}", save_top_k=-1, **settings)


@pytest.mark.parametrize("head", [Tree(num_params=4000, dropout=0.2), MCDropout(num_params=4000)])
def test_resuming_after_an_epoch_repeats_the_uninterrupted_fit(tmp_path, quiet_trainer, head):
    whole = fit(tmp_path, quiet_trainer, head, Every(tmp_path))
    drawn = torch.rand(3)
    for epoch in (0, EPOCHS - 2, EPOCHS - 1):  # the last has nothing left to train
        (file,) = tmp_path.glob(f"epoch={epoch}-*.ckpt")
        torch.load(file, weights_only=True)
        resumed = fit(tmp_path, quiet_trainer, head, resume=file, seed=99)
        if epoch < EPOCHS - 1:
            assert_same(whole, resumed)
        assert torch.equal(torch.rand(3), drawn)  # as a test that follows would draw


def test_resuming_in_the_middle_of_an_epoch_goes_on_with_the_batches_that_are_left(tmp_path, quiet_trainer):
    head = Tree(num_params=4000)
    whole = fit(tmp_path, quiet_trainer, head, Every(tmp_path, every_n_train_steps=1))
    assert whole[0].num_training_batches == 3
    for step in (2, 4):
        (file,) = tmp_path.glob(f"*step={step}.ckpt")
        assert_same(whole, fit(tmp_path, quiet_trainer, head, resume=file, seed=99))
    (file,) = tmp_path.glob("*step=6.ckpt")
    with pytest.warns(UserWarning, match="got one from its last batch"):
        once = fit(tmp_path, quiet_trainer, head, resume=file, seed=99)
    assert_same(once, fit(tmp_path, quiet_trainer, head, resume=file, seed=98))


def test_workers_are_seeded_alike(tmp_path, quiet_trainer):
    head = Tree(num_params=4000)
    data = [NoisyDigits(batch_size=256, num_workers=2) for _ in range(3)]
    whole = fit(tmp_path, quiet_trainer, head, Every(tmp_path), Every(tmp_path, every_n_train_steps=4), data=data[0])
    (after,), (inside,) = tmp_path.glob("epoch=0-step=3.ckpt"), tmp_path.glob("epoch=1-step=4.ckpt")
    assert_same(whole, fit(tmp_path, quiet_trainer, head, resume=after, data=data[1], seed=99))
    assert_same(whole, fit(tmp_path, quiet_trainer, head, resume=inside, data=data[2], seed=99))


class Stop(Callback):
    """Sends SIGTERM to this process in the second batch of an epoch, as a cluster does, or presses Ctrl-C."""

    def __init__(self, kind, epoch):
        self.kind, self.epoch = kind, epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (self.epoch, 1):
            os.kill(os.getpid(), self.kind)


@pytest.fixture
def heard():
    """Ctrl-C is heard: a job that a shell put into the background ignores it, and so would the fit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("kind", "step"), [(signal.SIGTERM, "inside"), (signal.SIGINT, "before")])
def test_a_stopped_fit_leaves_a_state_to_go_on_from_exactly(tmp_path, quiet_trainer, heard, kind, step):
    head = Tree(num_params=4000)
    whole = fit(tmp_path, quiet_trainer, head)
    with contextlib.suppress(SystemExit):  # Lightning 2.6.0 ends a fit after Ctrl-C without it
        fit(tmp_path, quiet_trainer, head, LastCheckpoint(str(tmp_path)), Stop(kind, epoch=1))
    n = whole[0].num_training_batches
    last = tmp_path / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == (n + 2 if step == "inside" else n)
    assert_same(whole, fit(tmp_path, quiet_trainer, head, resume=last, seed=99))


def test_the_last_checkpoint_is_the_last_state_and_remembers_the_best(tmp_path, quiet_trainer):
    last, best = LastCheckpoint(str(tmp_path)), ModelCheckpoint(tmp_path, monitor="never", mode="max")

    class Metric(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.log("never", [0.5, 0.1, 0.9][trainer.current_epoch])

    fit(tmp_path, quiet_trainer, Tree(num_params=4000), last, best, Metric(), num_sanity_val_steps=0)
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert stored["epoch"] == EPOCHS - 1
    assert last.best_model_path == str(tmp_path / "last.ckpt")
    remembered = stored["callbacks"][best.state_key]
    assert remembered["best_model_score"] == pytest.approx(0.9)
    assert remembered["best_model_path"] == best.best_model_path != last.best_model_path


def benchmark(name):
    """A file of benchmarks/, which finds what benchmarks share beside it."""
    folder = Path(__file__).parents[2] / "benchmarks"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kills():
    return benchmark("kills")


@pytest.mark.slow
def test_two_kills_change_nothing(tmp_path, kills):
    with kills.Server(tmp_path) as server:
        experiment = kills.Kills(server, epochs=3, tests=False)
        experiment.chosen("killed", [kills.WRITING, kills.VALIDATING])
    assert experiment.stages == {"writing a file": 1, "later epochs": 1}
    assert experiment.wrong == []
    assert [path.name for path in (tmp_path / "killed" / "runs" / "digits").glob("version_*")] == ["version_0"]


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path, kills):
    found = kills.kills(tmp_path, least=34)
    assert found["random"] >= 20
    assert found["differences"] == []


@pytest.mark.slow
def test_a_fit_whose_one_process_of_two_was_killed_goes_on_as_if_it_had_not(tmp_path, kills):
    found = kills.kills_of_ranks(tmp_path, rounds=2)
    assert found["kills"] >= 2
    assert found["differences"] == []


@pytest.mark.slow
def test_what_every_door_writes_is_whole_under_signals_full_disks_and_folders_that_can_only_be_read(tmp_path):
    for name, door in benchmark("doors").attack_all(tmp_path, share=0.25).items():
        assert door["wrong"] == [], name
        assert sum(door["ended"].values()) >= 4, name
        parts = [path for path in door["left"] if path.startswith(".predictions.csv.")]  # kept for a day
        assert door["left"] == parts, name


TWO = """
import sys
from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl.callbacks import LastCheckpoint, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import MCDropout

if __name__ == "__main__":
    folder, name, seed, resume = sys.argv[1:]
    pl.seed_everything(int(seed), verbose=False)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    every = ModelCheckpoint(f"{folder}/{name}", filename="{epoch}", save_top_k=-1)
    callbacks = [every, LastCheckpoint(f"{folder}/{name}")]
    ddp = dict(accelerator="cpu", devices=2, strategy="ddp_spawn")
    trainer = pl.Trainer(max_epochs=3, default_root_dir=folder, callbacks=callbacks, **ddp, **quiet)
    model = BRAINet(8, head=MCDropout(num_params=2000))
    trainer.fit(model, datamodule=Digits(batch_size=128), ckpt_path=resume or None)
"""


@pytest.mark.slow
def test_two_processes_resume_exactly(tmp_path):
    (tmp_path / "script.py").write_text(TWO)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for name, seed, resume in (("whole", "0", ""), ("resumed", "99", str(tmp_path / "whole" / "epoch=0.ckpt"))):
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), name, seed, resume]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    one, other = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "resumed"))
    assert one["epoch"] == other["epoch"] == 2
    assert all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())
    assert len(one["brainet_random"]["now"]) == 2
    for mine, theirs in zip(one["brainet_random"]["now"], other["brainet_random"]["now"], strict=True):
        assert torch.equal(mine["torch"], theirs["torch"])
