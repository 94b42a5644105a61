"""How a run is introduced to W&B, and which checkpoints it hands over."""

import csv
import warnings
from types import SimpleNamespace

import pytest

from brainet_pl._utils.framework import Callback, CSVLogger, ModelCheckpoint, WandbLogger
from brainet_pl.callbacks import LastCheckpoint, Tracking
from brainet_pl.callbacks import tracking as tracking_module
from brainet_pl.callbacks.logging import run_folder
from brainet_pl.callbacks.tracking import chosen
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.storage.wandb import set_wandb_run_metadata


def trainer(*loggers, stage="fit", data="digits"):
    source = SimpleNamespace(name=data)
    return SimpleNamespace(
        loggers=list(loggers), datamodule=source, state=SimpleNamespace(fn=SimpleNamespace(value=stage))
    )


def test_a_new_run_gets_name_group_tags_and_job(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    logger = WandbLogger(offline=True)
    set_wandb_run_metadata(trainer(logger, stage="test"), "Tree", "Classification")
    said = {"name": "digits-Tree-3", "group": "digits", "tags": ["Tree", "Classification"], "job_type": "test"}
    assert {key: logger._wandb_init[key] for key in said} == said
    assert "anonymous" not in logger._wandb_init  # W&B warns of it


def test_what_the_user_says_stays_and_a_run_that_goes_on_is_left_alone():
    named = WandbLogger(offline=True, name="mine", tags=["a"], group="b")
    set_wandb_run_metadata(trainer(named), "Tree", "Classification")
    assert [named._wandb_init[key] for key in ("name", "tags", "group", "job_type")] == ["mine", ["a"], "b", "fit"]
    again = WandbLogger(offline=True, id="abc")
    set_wandb_run_metadata(trainer(again), "Tree", "Classification")
    assert again._wandb_init["name"] is None
    assert "group" not in again._wandb_init


def saved(kind, path, score=None, **settings):
    callback = kind(**settings)
    path.write_text(path.name)
    callback.best_model_path, callback.best_model_score = str(path), score
    return callback


def fitted(*callbacks):
    return SimpleNamespace(
        loggers=[], callback_metrics={"val/cls/NLL": 0.5, "val/cls/Acc": 0.8}, checkpoint_callbacks=list(callbacks)
    )


def test_the_best_and_the_last_checkpoint_are_handed_over(tmp_path):
    best = saved(ModelCheckpoint, tmp_path / "epoch.ckpt", 0.25, monitor="val/cls/NLL")
    last = saved(LastCheckpoint, tmp_path / "last.ckpt")
    assert chosen(fitted(best, last)) == [
        (["best"], tmp_path / "epoch.ckpt", {"val/cls/NLL": 0.25}),  # what else was measured is of the last epoch
        (["last"], tmp_path / "last.ckpt", {"val/cls/NLL": 0.5, "val/cls/Acc": 0.8}),
    ]
    (tmp_path / "epoch.ckpt").write_text("last.ckpt")
    (both,) = chosen(fitted(best, last))
    assert both == (["best", "last"], tmp_path / "last.ckpt", {"val/cls/NLL": 0.5, "val/cls/Acc": 0.8})
    (tmp_path / "epoch.ckpt").unlink()
    assert [one.aliases for one in chosen(fitted(best, last))] == [["last"]]
    assert chosen(fitted()) == []


def test_a_large_checkpoint_stays_where_it_is(tmp_path, monkeypatch):
    sent, told = [], []
    monkeypatch.setattr(tracking_module, "log_files", lambda *args, **more: sent.append((*args, more)))
    monkeypatch.setattr(tracking_module, "rank_zero_info", told.append)
    last = saved(LastCheckpoint, tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").write_bytes(b"x" * 2_000_000)
    fit = fitted(last)
    Tracking(most_megabytes=1)._keep(fit, SimpleNamespace(ggt=None))
    assert not sent
    assert "has 2 MB, and most_megabytes of Tracking is 1" in told[0]
    Tracking(most_megabytes=3)._keep(fit, SimpleNamespace(ggt=None))
    ((_, kind, paths, facts, more),) = sent
    assert (kind, [path.name for path in paths], more) == ("model", ["last.ckpt"], {"aliases": ["latest", "last"]})
    assert facts == {"val/cls/NLL": 0.5, "val/cls/Acc": 0.8, "structure": None}


def test_files_of_a_run_of_a_service_alone_lie_beside_its_checkpoints(tmp_path):
    """Two runs wrote report, record and scores into one working directory."""
    root, cloud = tmp_path / "here", WandbLogger(offline=True, save_dir=str(tmp_path), project="p", id="abc")
    assert run_folder(SimpleNamespace(default_root_dir=str(root), loggers=[cloud])) == tmp_path / "p" / "abc"
    run = tmp_path / "moved" / "abc"  # of a test that goes on with the run of its checkpoint
    assert run_folder(SimpleNamespace(default_root_dir=str(run), loggers=[cloud])) == run
    text = CSVLogger(str(tmp_path), name="digits", version=3)
    both = SimpleNamespace(default_root_dir=str(root), loggers=[cloud, text])
    assert run_folder(both) == tmp_path / "digits" / "version_3"
    assert run_folder(SimpleNamespace(default_root_dir=str(root), loggers=[])) == root


def test_ctrl_c_before_the_first_checkpoint_is_told(tmp_path, quiet_trainer):
    class Interrupt(Callback):
        epoch = 0

        def on_train_batch_end(self, trainer, *rest):
            if trainer.current_epoch == self.epoch:
                raise KeyboardInterrupt

    for epoch in (0, 1):
        Interrupt.epoch, last = epoch, LastCheckpoint(str(tmp_path / str(epoch)))
        fit = quiet_trainer(tmp_path, Interrupt(), last, epochs=2, enable_checkpointing=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(SystemExit):
                fit.fit(BRAINet(8, head="Linear"), datamodule=Digits())
        told = [one for one in said if "the fit was interrupted before its first epoch had ended" in str(one.message)]
        assert (len(told), (tmp_path / str(epoch) / "last.ckpt").exists()) == ((1, False), (0, True))[epoch]


def test_a_trainer_of_ones_own_keeps_the_rows_of_the_folder_it_goes_on_in(tmp_path, quiet_trainer):
    """With a version, Lightning deletes metrics.csv, whatever is resumed or tested."""

    def trainer(epochs):
        logger = CSVLogger(str(tmp_path), name="mine", version=0)
        settings = {"enable_checkpointing": True, "log_every_n_steps": 1}
        return quiet_trainer(tmp_path, LastCheckpoint(), epochs=epochs, logger=logger, **settings)

    def steps(name):
        with (folder / "metrics.csv").open(newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row.get(name)]

    folder, file = tmp_path / "mine" / "version_0", tmp_path / "mine" / "version_0" / "checkpoints" / "last.ckpt"
    data = Digits(batch_size=512)
    trainer(1).fit(BRAINet(8, head="Linear"), datamodule=data)
    first = steps("train/loss")
    model = BRAINet(8, head="Linear")
    trainer(2).fit(model, datamodule=data, ckpt_path=str(file))
    both = steps("train/loss")
    assert both == [*first, *range(len(first), 2 * len(first))]
    for _ in range(2):  # a test that is repeated, as after a kill
        trainer(2).test(model, datamodule=data, ckpt_path=str(file), verbose=False)
        assert len(steps("test/cls/Acc")) == 1
    assert steps("train/loss") == both
    trainer(1).fit(BRAINet(8, head="Linear"), datamodule=data)  # anew: nothing of it stays
    assert steps("train/loss") == first
    assert not steps("test/cls/Acc")
