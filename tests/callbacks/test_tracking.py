"""How a run is introduced to W&B, and which checkpoints it hands over."""

from types import SimpleNamespace

import pytest

from brainet_pl.callbacks import LastCheckpoint, Tracking
from brainet_pl.callbacks import tracking as tracking_module
from brainet_pl.callbacks.tracking import chosen, introduce
from brainet_pl.framework import ModelCheckpoint, WandbLogger


def trainer(*loggers, stage="fit", data="digits"):
    source = SimpleNamespace(name=data)
    return SimpleNamespace(
        loggers=list(loggers), datamodule=source, state=SimpleNamespace(fn=SimpleNamespace(value=stage))
    )


def test_a_new_run_gets_name_group_tags_and_job(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    logger = WandbLogger(offline=True)
    introduce(trainer(logger, stage="test"), "Tree", "Classification")
    said = {"name": "digits-Tree-3", "group": "digits", "tags": ["Tree", "Classification"], "job_type": "test"}
    assert {key: logger._wandb_init[key] for key in said} == said


def test_what_the_user_says_stays_and_a_run_that_goes_on_is_left_alone():
    named = WandbLogger(offline=True, name="mine", tags=["a"], group="b")
    introduce(trainer(named), "Tree", "Classification")
    assert [named._wandb_init[key] for key in ("name", "tags", "group", "job_type")] == ["mine", ["a"], "b", "fit"]
    again = WandbLogger(offline=True, id="abc")
    introduce(trainer(again), "Tree", "Classification")
    assert again._wandb_init["name"] is None
    assert "group" not in again._wandb_init


def saved(kind, path, step, **settings):
    callback = kind(**settings)
    path.touch()
    callback.best_model_path, callback._last_global_step_saved = str(path), step
    return callback


@pytest.mark.parametrize(
    ("steps", "aliases"),
    [((20, 20), {"epoch.ckpt": ["best", "last"]}), ((10, 20), {"epoch.ckpt": ["best"], "last.ckpt": ["last"]})],
)
def test_the_best_and_the_last_checkpoint_are_handed_over(tmp_path, steps, aliases):
    best = saved(ModelCheckpoint, tmp_path / "epoch.ckpt", steps[0], monitor="val/cls/NLL")
    last = saved(LastCheckpoint, tmp_path / "last.ckpt", steps[1])
    found = chosen([best, last])
    assert {path.rpartition("/")[2]: words for path, words in found.items()} == aliases


def test_a_large_checkpoint_stays_where_it_is(tmp_path, monkeypatch):
    sent, told = [], []
    monkeypatch.setattr(tracking_module, "log_files", lambda *args: sent.append(args))
    monkeypatch.setattr(tracking_module, "rank_zero_info", told.append)
    (tmp_path / "last.ckpt").write_bytes(b"x" * 2_000_000)
    last = saved(LastCheckpoint, tmp_path / "last.ckpt", 1)
    fit = SimpleNamespace(loggers=[], callback_metrics={"val/cls/NLL": 0.5}, checkpoint_callbacks=[last])
    Tracking(most_megabytes=1)._keep(fit, SimpleNamespace(ggt=None))
    assert not sent
    assert "has 2 MB, and most_megabytes of Tracking is 1" in told[0]
    Tracking(most_megabytes=3)._keep(fit, SimpleNamespace(ggt=None))
    ((_, kind, paths, facts, name, aliases),) = sent
    assert (kind, [path.name for path in paths], name, aliases) == ("model", ["last.ckpt"], "model", ["latest", "last"])
    assert facts == {"val/cls/NLL": 0.5, "structure": None}
