"""The checkpoint file: read once, other formats refused."""

import shutil
from pathlib import Path

import pytest
import torch

from brainet_pl._utils.stored import FORMAT
from brainet_pl.cli import main
from brainet_pl.lightning.module import BRAINet
from brainet_pl.storage import format as file_format
from brainet_pl.storage.format import CONFIG, HPARAMS, STORED, Checkpoint

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]


@pytest.fixture
def content():
    """A checkpoint with as little as can be in it."""
    model = BRAINet(3)
    content = {"state_dict": model.state_dict(), HPARAMS: dict(model.hparams), "global_step": 0}
    model.on_save_checkpoint(content)
    del content[STORED]["digest"]
    return content


def saved(content, path):
    torch.save(content, path)
    return path


@pytest.mark.parametrize("number", [None, 1, 4, FORMAT + 1])
def test_other_formats_are_refused(number, content, tmp_path):
    content[STORED]["format"] = number
    with pytest.raises(ValueError, match=rf"expected a checkpoint, a BRAINet of format {FORMAT}, .* format {number}"):
        Checkpoint.read(saved(content, tmp_path / "other.ckpt"))


@pytest.mark.parametrize("change", [{CONFIG: [1]}, {"global_step": "1"}])
def test_what_is_no_setting_is_refused(change, content, tmp_path):
    with pytest.raises(ValueError, match="expected settings and the number of training steps"):
        Checkpoint.read(saved(content | change, tmp_path / "other.ckpt"))


def test_the_command_line_reads_a_checkpoint_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data=Digits", "--model.num_classes=8", "--model.head=Linear", "--trainer.logger=CSVLogger"]
    fit = main(["fit", *words, "--trainer.logger.save_dir=runs", "--trainer.max_epochs=1", *QUIET])
    file = fit.trainer.checkpoint_callback.best_model_path
    ours, read = [], file_format.read_tensors

    def counted(path):
        ours.append(Path(path))
        return read(path)

    monkeypatch.setattr(file_format, "read_tensors", counted)
    tested = main(["test", "--ckpt_path", file, *QUIET])
    assert type(tested.datamodule).__name__ == "Digits"  # of the run's config.yaml
    assert tested.trainer.log_dir == fit.trainer.log_dir
    assert set(torch.load(file, weights_only=True)[CONFIG]) == {"model", "structure"}
    resumed = main(["fit", "--ckpt_path", file, "--trainer.max_epochs=2", *QUIET])
    better = resumed.trainer.checkpoint_callback.best_model_path  # which the next command is printed for
    shutil.copy(file, "copied.ckpt")
    main(["predict", "--ckpt_path", "copied.ckpt", "--data=Digits", *QUIET])
    assert ours == [Path(file), Path(file), Path(better), Path("copied.ckpt")]
