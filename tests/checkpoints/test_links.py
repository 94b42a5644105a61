"""Links in the folder of a run lead nowhere: nothing outside of it is read, written or deleted."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from brainet_pl._utils.atomic import atomic_write
from brainet_pl._utils.inside import find_inside, place_inside, write_inside
from brainet_pl.cli import main
from brainet_pl.storage.format import check_callback_states

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]
SECRET = "-----BEGIN PRIVATE KEY-----"
OURS = ("record.json", "scores.csv", "structure.json", "report.html")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The folder of a run with a checkpoint, never tested."""
    folder = tmp_path_factory.mktemp("fitted")
    here = Path.cwd()
    os.chdir(folder)
    try:
        main([
            "fit", "--data=Digits", "--model.num_classes=8", "--model.head=Linear", "--trainer.logger=CSVLogger",
            "--trainer.logger.save_dir=runs", "--trainer.callbacks+=brainet_pl.callbacks.Evaluation",
            "--trainer.callbacks.image_shape=[8,8]", "--trainer.callbacks+=brainet_pl.callbacks.LastCheckpoint",
            "--trainer.max_epochs=1", "--trainer.limit_train_batches=2", *QUIET,
        ])  # fmt: skip
    finally:
        os.chdir(here)
    (path,) = folder.glob("runs/**/last.ckpt")
    return path.parents[1]


@pytest.fixture
def stranger(fitted, tmp_path, monkeypatch):
    """A copy of that folder as an archive of a stranger would leave it, and a home with files of one's own."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine").write_text(SECRET)
    (home / "0_0.png").write_bytes(b"my picture")
    run = tmp_path / "runs" / "lightning_logs" / "version_0"
    shutil.copytree(fitted, run)
    return run, home


def link(run, name, to):
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(to)


def untouched(home):
    return (home / "mine").read_text() == SECRET and sorted(p.name for p in home.iterdir()) == ["0_0.png", "mine"]


def test_a_report_replaces_a_link_and_reads_none(run, tmp_path):
    home, copy = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    (home / "mine").write_text(SECRET)
    shutil.copytree(run, copy)
    for name in ("report.html", "config.yaml"):
        link(copy, name, home / "mine")
    shutil.rmtree(copy / "figures")
    (home / "private.png").write_bytes((run / "figures" / "structure_tree.png").read_bytes())
    link(copy, "figures", home)
    with pytest.warns(UserWarning, match=r"ignored .*config\.yaml: it is a link out of its folder"):
        main(["report", str(copy)])
    page = (copy / "report.html").read_text()
    assert not (copy / "report.html").is_symlink()
    assert (home / "mine").read_text() == SECRET
    assert SECRET not in page
    assert "private" not in page
    with pytest.warns(UserWarning, match="ignored"):
        main(["compare", str(copy), "--out", str(tmp_path / "c.html")])
    assert SECRET not in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize("name", ["record.json", "metrics.csv", "structure.json"])
def test_no_linked_file_is_read(run, tmp_path, name):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (tmp_path / "mine").write_text(SECRET)  # reading it would be an error that shows the text
    link(copy, name, tmp_path / "mine")
    with pytest.warns(UserWarning, match=f"ignored .*{name}"):
        main(["report", str(copy)])


def test_a_test_replaces_links_of_its_own_files(stranger):
    run, home = stranger
    for name in OURS:
        link(run, name, home / "mine")
    with pytest.warns(UserWarning, match="ignored"):
        main(["test", "--ckpt_path", str(run / "checkpoints/last.ckpt"), *QUIET])
    assert untouched(home)
    written = [name for name in OURS if name != "structure.json"]  # a linear head has no structure
    assert all((run / name).is_file() and not (run / name).is_symlink() for name in written)


@pytest.mark.parametrize("name", ["metrics.csv", "hparams.yaml", "config_test.yaml", "config.yaml"])
def test_links_that_lightning_would_follow_are_refused(stranger, name):
    run, home = stranger
    link(run, name, home / "mine")
    words = ["test", "--ckpt_path", str(run / "checkpoints/last.ckpt"), "--data=Digits", *QUIET]
    with pytest.raises(ValueError, match=f"expected the files of a run in .*got {name}, a link to"):
        main(words)
    assert untouched(home)


@pytest.mark.parametrize("name", ["figures", "tables", "tables/test_most_uncertain"])
def test_a_linked_folder_is_neither_filled_nor_emptied(stranger, name):
    run, home = stranger
    link(run, name, home)
    with pytest.raises(ValueError, match=r"expected .* in.*, got .*a link to .*: delete the link"):
        main(["test", "--ckpt_path", str(run / "checkpoints/last.ckpt"), *QUIET])
    assert untouched(home)


def test_only_pictures_of_an_earlier_test_are_deleted(stranger):
    run, _ = stranger
    folder = run / "tables" / "test_most_uncertain"
    folder.mkdir(parents=True)
    for name in ("999_1.png", "holiday.png"):
        (folder / name).write_bytes(b"")
    main(["test", "--ckpt_path", str(run / "checkpoints/last.ckpt"), *QUIET])
    assert not (folder / "999_1.png").exists()
    assert (folder / "holiday.png").exists()


def test_predictions_replace_links(stranger):
    run, home = stranger
    link(run, "predictions.csv", home / "mine")
    main(["predict", "--ckpt_path", str(run / "checkpoints/last.ckpt"), *QUIET])
    assert untouched(home)
    assert (run / "predictions.csv").read_text().startswith("loader,sample")


def test_lightning_deletes_no_checkpoint_behind_a_link(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "more").symlink_to(tmp_path)
    trainer = SimpleNamespace(checkpoint_callbacks=[SimpleNamespace(dirpath=str(checkpoints))])
    state = {"ModelCheckpoint": {"best_k_models": {f"{checkpoints}/more/mine.ckpt": 0.5}}}
    with pytest.raises(ValueError, match="expected checkpoints in the folder of the run"):
        check_callback_states(state, trainer)
    check_callback_states({"ModelCheckpoint": {"best_k_models": {f"{checkpoints}/a.ckpt": 0.5}}}, trainer)


def test_the_door(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "mine").write_text(SECRET)
    (folder / "out").symlink_to(other)
    (folder / "file").write_text("here")
    (folder / "within").symlink_to("file")
    assert find_inside(folder, "within") == folder / "within"
    for name in ("out/mine", "../other/mine"):
        with pytest.warns(UserWarning, match="link out of its folder"):
            assert find_inside(folder, name) is None
        with pytest.raises(ValueError, match="inside"):
            place_inside(folder, name)
    assert find_inside(folder, "a\0b") is None
    assert find_inside(folder, "x" * 5000) is None
    (tmp_path / "shortcut").symlink_to(folder)  # which the user names, so it is the user's
    with write_inside(tmp_path / "shortcut", "deep/new") as temporary:
        temporary.write_text("new")
    assert (folder / "deep" / "new").read_text() == "new"


def test_an_atomic_write_replaces_a_link(tmp_path):
    (tmp_path / "mine").write_text(SECRET)
    (tmp_path / "file").symlink_to(tmp_path / "mine")
    with atomic_write(tmp_path / "file") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "mine").read_text() == SECRET
    assert (tmp_path / "file").read_text() == "new"
