"""Folders of runs on the command line, files that are whole, and what a broken file does to a fit."""

import csv
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wandb
import yaml

from brainet_pl._utils.framework import CSVLogger, TensorBoardLogger, WandbLogger, pl
from brainet_pl._utils.lightning_private import logged_step
from brainet_pl._utils.stored import FORMAT
from brainet_pl.callbacks import StructureLearning, WholeCheckpointIO
from brainet_pl.cli import UsageError, main, shipped
from brainet_pl.datamodules import Digits
from brainet_pl.evaluation.report import write_report
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Tree
from brainet_pl.storage import runs
from brainet_pl.storage.format import RUN, STORED, Checkpoint

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


@pytest.fixture(autouse=True)
def _away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(runs.VERSION, "")


def stub(*loggers, rank=0):
    return SimpleNamespace(loggers=list(loggers), is_global_zero=rank == 0)


def begin(*loggers):
    """A fit that begins with these loggers."""
    runs.enter(stub(*loggers), None)
    return loggers[0]


def checkpoint(folder, step=4, wandb=None, name="last.ckpt"):
    folder.mkdir(parents=True, exist_ok=True)
    nothing = {"network": None, "removed": None, "layers": None, "pool": None, "evidence": "", "takes": None}
    head = {"ggt": None, "in_features": None, "base_logits": False, "class_names": None, "preset": None}
    content = {
        STORED: {"kind": "BRAINet", "format": FORMAT, "backbone": nothing, **head},
        RUN: {"wandb": wandb},
        "global_step": step,
    }
    torch.save(content, folder / name)
    return Checkpoint.read(folder / name)


def test_runs_that_begin_together_get_folders_of_their_own(tmp_path):
    start, found = threading.Barrier(8), []

    def one():
        logger = CSVLogger("runs", name="digits")
        start.wait()
        found.append(begin(logger).version)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


def test_loggers_and_processes_of_a_run_share_its_folder(tmp_path):
    first = CSVLogger("runs", name="digits"), TensorBoardLogger("runs", name="digits")
    begin(CSVLogger("runs", name="digits"))
    begin(*first)
    second = CSVLogger("runs", name="digits")
    runs.enter(stub(second, rank=1), None)
    assert [logger.version for logger in (*first, second)] == [1, 1, 1]


def log(logger, *steps, **more):
    for step in steps:
        logger.log_metrics({"train/loss": step / 2} | more, step)
    logger.save()


def rows(folder):
    return [(int(row["step"]), row["train/loss"]) for row in csv.DictReader((folder / "metrics.csv").open())]


def test_a_resumed_run_goes_on_in_its_folder_with_its_rows_and_its_wandb_id(tmp_path):
    folder = tmp_path / "runs" / "digits" / "version_1"
    begin(CSVLogger("runs", name="digits"))
    log(begin(CSVLogger("runs", name="digits")), *range(6))
    file = checkpoint(folder / "checkpoints", step=4, wandb="abc123")
    (folder / f".metrics.csv.{'0' * 32}.tmp").write_text("cut")  # a fit that was killed while it wrote
    os.utime(folder / f".metrics.csv.{'0' * 32}.tmp", (0, 0))
    log_, board = CSVLogger("runs", name="digits"), WandbLogger(offline=True)
    runs.enter(stub(log_, board), file)
    assert not list(folder.glob(".*.tmp"))
    assert log_.version == 1
    assert board.version == board._wandb_init["id"] == "abc123"
    assert board._wandb_init["resume"] == "allow"
    assert [step for step, _ in rows(folder)] == [0, 1, 2, 3]  # the others are trained again
    log(log_, 4, **{"val/new": 1.0})
    log(log_, 5)
    assert rows(folder) == [(step, str(step / 2)) for step in range(6)]


def test_rows_of_a_test_stay_and_a_row_cut_by_a_kill_goes(tmp_path):
    folder = tmp_path / "runs" / "digits" / "version_0"
    logger = begin(CSVLogger("runs", name="digits"))
    log(logger, 0, 1)
    logger.log_metrics({"test/cls/Acc": 0.5}, 2)
    log(logger, 2)
    whole = (folder / "metrics.csv").read_text()
    for cut in range(len(whole.rstrip("\n").rpartition("\n")[0]) + 1, len(whole)):
        (folder / "metrics.csv").write_text(whole[:cut])
        runs.enter(stub(CSVLogger("runs", name="digits")), checkpoint(folder / "checkpoints", step=2))
        assert rows(folder) == [(0, "0.0"), (1, "0.5"), (2, "")]


def test_a_new_column_is_written_whole(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "digits" / "version_0"
    logger = begin(CSVLogger("runs", name="digits"))
    log(logger, 0, 1)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log(logger, 2, **{"val/new": 1.0})
    assert rows(folder) == [(0, "0.0"), (1, "0.5")]


def test_a_checkpoint_that_was_copied_begins_another_run(tmp_path):
    log(begin(CSVLogger("runs", name="digits")), 0, 1)
    logger, board = CSVLogger("runs", name="digits"), WandbLogger(offline=True)
    runs.enter(stub(logger, board), checkpoint(tmp_path / "elsewhere", wandb="abc123"))
    assert (logger.version, board.version) == (1, None)


@pytest.mark.parametrize("hostile", ["../../elsewhere", "a b", "", 7, ["abc"], {"id": "abc"}, "x" * 65])
def test_an_id_of_wandb_that_is_more_than_an_id_is_not_taken(tmp_path, hostile):
    folder = tmp_path / "runs" / "digits" / "version_0"
    log(begin(CSVLogger("runs", name="digits")), 0, 1)
    board = WandbLogger(offline=True)
    with pytest.warns(UserWarning, match="a run of its own"):
        runs.enter(stub(CSVLogger("runs", name="digits"), board), checkpoint(folder / "checkpoints", 1, hostile))
    assert board.version is None
    assert board._wandb_init["id"] is None


def test_last_is_the_newest_run_even_if_it_has_no_checkpoint_yet(tmp_path):
    def found():
        return runs.find(stub(CSVLogger("runs", name="digits")), "last")

    folders = [tmp_path / "runs" / "digits" / f"version_{n}" / "checkpoints" for n in range(3)]
    assert found() is None
    for n in (0, 1):
        begin(CSVLogger("runs", name="digits"))
        file = checkpoint(folders[n])
        os.utime(file.path, (2e9 - n, 2e9 - n))  # whatever the clock says
    assert found() == os.path.relpath(file.path)
    runs.enter(stub(CSVLogger("runs", name="digits")), Checkpoint.read(folders[0] / "last.ckpt"))  # after the other
    assert found() == os.path.relpath(folders[0] / "last.ckpt")
    for wrong in ("", "{", "[]", '{"run": 5, "highest": 1}', '{"run": [], "highest": 1}'):
        (tmp_path / "runs" / "digits" / runs.LAST_FIT).write_text(wrong)
        assert found() == os.path.relpath(file.path)
    begin(CSVLogger("runs", name="digits"))
    (tmp_path / "runs" / "digits" / "version_7").mkdir()  # of a test: it has no folder for checkpoints
    assert found() is None
    assert runs.find(stub(), "some/file.ckpt") == "some/file.ckpt"


def test_the_command_line_goes_on_with_folder_best_and_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    fit = ["fit", "--config", "digits", "--ckpt_path=last", *QUIET]
    first = main([*fit, "--trainer.max_epochs=2"])
    (number,) = [logger.version for logger in first.trainer.loggers if isinstance(logger, WandbLogger)]
    wandb.finish()
    folder = tmp_path / "runs" / "digits" / "version_0"
    before = (folder / "metrics.csv").read_text().splitlines()
    while before[-1].startswith(","):  # what won is said after the last checkpoint, and then again
        before.pop()
    second = main([*fit, "--trainer.max_epochs=3"])
    wandb.finish()
    best = [cli.trainer.checkpoint_callback for cli in (first, second)]
    assert second.trainer.current_epoch == 3
    assert [logger.version for logger in second.trainer.loggers] == [0, number]
    assert (folder / "metrics.csv").read_text().splitlines()[: len(before)] == before
    assert best[1].best_model_score <= best[0].best_model_score
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == sorted([os.path.basename(best[1].best_model_path), "last.ckpt", "structure.json"])


# -- a test goes on with the run of its checkpoint --------------------------------------------------------------------


class Asked(SimpleNamespace):
    """What `continue_run` asks of a Trainer."""

    def __init__(self, *loggers):
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
        super().__init__(loggers=list(loggers), is_global_zero=True, fit_loop=loop, _default_root_dir="elsewhere")


def test_a_test_goes_on_with_the_run_of_its_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "digits" / "version_1"
    begin(CSVLogger("runs", name="digits"))
    log(begin(CSVLogger("runs", name="digits")), *range(6))
    file = checkpoint(folder / "checkpoints", step=4, wandb="abc123")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")  # wherever it is started
    text, board, cloud = CSVLogger("runs"), TensorBoardLogger("logs"), WandbLogger(offline=True, save_dir="runs")
    trainer = Asked(text, board, cloud)
    assert runs.continue_run(trainer, file.path) == folder  # or the file, already read
    assert [Path(logger.log_dir) for logger in (text, board)] == [folder, folder]
    assert (cloud.version, cloud.save_dir) == ("abc123", str(tmp_path / "runs"))
    assert logged_step(trainer) == 4
    text.log_metrics({"test/cls/Acc": 0.5}, logged_step(trainer))
    text.save()
    assert [step for step, _ in rows(folder)] == [*range(6), 4]  # what was logged while training stays
    assert not list((tmp_path / "away").iterdir())


def test_without_a_logger_files_of_a_test_go_to_the_run(tmp_path):
    log(begin(CSVLogger("runs", name="digits")), 0)
    folder = tmp_path / "runs" / "digits" / "version_0"
    trainer = Asked()
    runs.continue_run(trainer, checkpoint(folder / "checkpoints"))
    assert trainer._default_root_dir == str(folder)


@pytest.mark.parametrize("place", ["copied", "copied/checkpoints"])
def test_a_copied_checkpoint_is_no_part_of_a_run(tmp_path, place):
    trainer = Asked(CSVLogger("runs", name="digits"), WandbLogger(offline=True))
    assert runs.continue_run(trainer, checkpoint(tmp_path / place, wandb="abc123")) is None
    assert [logger._version if hasattr(logger, "_version") else logger.version for logger in trainer.loggers] == [
        None
    ] * 2
    runs.begin(trainer)
    assert not (tmp_path / "runs" / "digits" / "version_0" / "checkpoints").exists()  # the mark of a fit
    assert trainer.loggers[0].version == 0


def test_a_run_of_wandb_alone_is_told_by_its_name(tmp_path):
    trainer = Asked(WandbLogger(offline=True))
    folder = tmp_path / "brainet" / "abc123"
    assert runs.continue_run(trainer, checkpoint(folder / "checkpoints", wandb="abc123")) == folder
    assert trainer.loggers[0].version == "abc123"
    assert trainer._default_root_dir == str(folder)


def test_loggers_that_the_user_puts_elsewhere_stay_there(tmp_path):
    log(begin(CSVLogger("runs", name="digits")), 0)
    file = checkpoint(tmp_path / "runs" / "digits" / "version_0" / "checkpoints", wandb="abc123")
    mine, cloud = CSVLogger("mine"), WandbLogger(offline=True)
    assert runs.join(Asked(mine, cloud), file) is None
    assert (Path(mine.log_dir).parts[0], cloud.version) == ("mine", None)
    same = CSVLogger("runs", name="digits")
    assert runs.join(Asked(same), file) == Path(same.log_dir).resolve() == file.path.parents[1]


def test_a_trainer_that_has_logged_can_not_change_its_run(tmp_path):
    log(begin(CSVLogger("runs", name="digits")), 0)
    file = checkpoint(tmp_path / "runs" / "digits" / "version_0" / "checkpoints")
    used = CSVLogger("others")
    log(used, 0)
    with pytest.raises(RuntimeError, match="expected a Trainer that has not logged yet, got one whose CSVLogger"):
        runs.continue_run(Asked(used), file)


def test_the_readme_has_one_run(tmp_path, monkeypatch):
    """`brainet fit`, then `brainet test` of its checkpoint: one folder, one W&B run, one report."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []

    def done(*words):
        cli = main([*words, *QUIET])
        ids.append(cli.trainer.loggers[1].version)
        wandb.finish()
        return cli

    fitted = done("fit", "--config", "digits", "--trainer.max_epochs=2", "--test")
    folder = tmp_path / "runs" / "digits" / "version_0"
    config, file = (folder / "config.yaml").read_text(), folder / "checkpoints" / "last.ckpt"
    first = json.loads((folder / "record.json").read_text())
    (accuracy,) = (metric["value"] for metric in first["metrics"] if metric["key"] == "test/cls/Acc")
    assert accuracy == pytest.approx(float(fitted.trainer.callback_metrics["test/cls/Acc"]))
    done("test", "--ckpt_path", str(file))
    assert ids[1] == ids[0]
    assert [path.name for path in folder.parent.glob("version_*")] == ["version_0"]
    assert (folder / "config.yaml").read_text() == config
    assert yaml.safe_load((folder / "config_test.yaml").read_text())["ckpt_path"] == str(file)
    tested = [row for row in csv.DictReader((folder / "metrics.csv").open()) if row["test/cls/Acc"]]
    assert [int(row["step"]) for row in tested] == [26]  # a second test of a run replaces its row
    page = write_report(folder).read_text()
    assert 'id="training"' in page
    assert 'id="unknown"' in page
    done("test", "--ckpt_path", str(file), "--new_run")
    assert ids[2] != ids[0]
    assert (folder.parent / "version_1" / "record.json").is_file()
    shutil.copy(file, "copied.ckpt")
    with pytest.raises(UsageError, match=r"expected data for copied\.ckpt, got none: .* give them, as --data"):
        main(["predict", "--ckpt_path", "copied.ckpt", *QUIET])
    done("predict", "--ckpt_path", "copied.ckpt", "--config", "digits")
    assert ids[3] not in ids[:3]
    assert (folder.parent / "version_2" / "predictions.csv").is_file()


def test_a_run_of_wandb_alone_is_tested_with_nothing_but_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["--data=Digits", "--data.batch_size=32", "--model.num_classes=8", "--model.head=Linear"]
    logger = ["--trainer.logger=WandbLogger", "--trainer.logger.save_dir=runs", "--trainer.logger.project=p"]
    fitted = main(["fit", *words, *logger, "--trainer.max_epochs=1", *QUIET])
    wandb.finish()
    file = Path(fitted.trainer.checkpoint_callback.best_model_path)
    assert file.resolve().parents[2] == tmp_path / "runs" / "p"
    tested = main(["test", "--ckpt_path", str(file), *QUIET])
    wandb.finish()
    assert tested.datamodule.batch_size == 32
    assert tested.trainer.logger.version == fitted.trainer.logger.version == file.parents[1].name


def test_every_shipped_configuration_keeps_a_best_and_the_last():
    for path in shipped().values():
        used = {c["class_path"].rpartition(".")[2]: c for c in yaml.safe_load(path.read_text())["trainer"]["callbacks"]}
        assert "monitor" in used["ModelCheckpoint"]["init_args"], path.name
        assert "LastCheckpoint" in used, path.name


def test_a_checkpoint_is_written_beside_its_target_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "another_file_system"))
    path = tmp_path / "new" / "last.ckpt"
    WholeCheckpointIO().save_checkpoint({"a": torch.ones(2)}, path)
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(2))
    before = path.read_bytes()

    def full(content, file):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        WholeCheckpointIO().save_checkpoint({"a": torch.zeros(2)}, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("content", ['{"cut": [1, 2', '{"a": 1}'])
def test_a_broken_file_in_the_structure_cache_is_set_aside_and_learned_again(tmp_path, quiet_trainer, content):
    def fit():
        pl.seed_everything(0, verbose=False)
        model = BRAINet(8, head=Tree(num_params=2000))
        learn = StructureLearning(threshold=0.2, max_rows=300, progress=False, cache=str(tmp_path / "cache"))
        quiet_trainer(tmp_path, learn, fast_dev_run=True).fit(model, datamodule=Digits())
        return model.ggt

    learned = fit()
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(content)
    with pytest.warns(UserWarning, match=rf"set .*aside as {file.name}\.bad"):
        again = fit()
    assert again.fingerprint == learned.fingerprint
    assert file.with_name(f"{file.name}.bad").read_text() == content
