"""How a run is introduced to W&B, and which checkpoints it hands over."""

from types import SimpleNamespace

from brainet_pl._utils.framework import ModelCheckpoint, WandbLogger
from brainet_pl.callbacks import LastCheckpoint, Tracking
from brainet_pl.callbacks import tracking as tracking_module
from brainet_pl.callbacks.tracking import chosen
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
