"""The checkpoint file: read once, older formats upgraded, everything else refused."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from brainet_pl import BRAINet
from brainet_pl.cli import main
from brainet_pl.scores.reference import current_name
from brainet_pl.storage import format as file_format
from brainet_pl.storage.format import CONFIG, FORMAT, STORED, Checkpoint, upgrade

OLD = Path(__file__).with_name("format5.bin")  # of version 0.2.0, with what that version predicts
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]


def network():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def old():
    return torch.load(OLD, weights_only=True)


def saved(content, path):
    torch.save(content, path)
    return path


def test_a_checkpoint_of_version_0_2_predicts_what_it_did(old, tmp_path):
    assert old[STORED]["format"] == 5
    assert any(name.startswith("backbone.own.") for name in old["state_dict"])
    model = BRAINet.load_from_checkpoint(OLD, backbone=network()).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        predicted = model.predict_step([torch.linspace(-2, 2, 20).view(4, 5).sin()], 0)
    then = {current_name(name): values for name, values in old["predicted"].items()}
    assert predicted.keys() == then.keys()
    for name, values in then.items():
        torch.testing.assert_close(predicted[name], values, rtol=1e-5, atol=1e-6, msg=name)


def test_an_old_file_is_checked_as_it_was_written(old, tmp_path):
    old["state_dict"]["backbone.own.bias"] += 1
    with pytest.raises(ValueError, match="got another state_dict: the file is damaged"):
        BRAINet.load_from_checkpoint(saved(old, tmp_path / "damaged.ckpt"), backbone=network())


def test_upgrading_renames_and_happens_once(old):
    averaged = {"backbone.own.bias": torch.ones(3), "backbone.ownership": torch.ones(1)}
    old |= {"current_model_state": dict(averaged), "callbacks": {"swa": {"average_model_state": dict(averaged)}}}
    upgrade(old)
    assert (old[STORED]["format"], old[STORED]["base_logits"], "own" in old[STORED]) == (FORMAT, True, False)
    for weights in (old["current_model_state"], old["callbacks"]["swa"]["average_model_state"]):
        assert sorted(weights) == ["predictor.backbone.base_layer.bias", "predictor.backbone.ownership"]
    names = list(old["state_dict"])
    upgrade(old)
    assert list(old["state_dict"]) == names


@pytest.mark.parametrize("number", [None, 1, 4, FORMAT + 1])
def test_other_formats_are_refused(number, old, tmp_path):
    old[STORED]["format"] = number
    with pytest.raises(ValueError, match=rf"expected a checkpoint of format 5 or {FORMAT}, .*train the model again"):
        Checkpoint.read(saved(old, tmp_path / "other.ckpt"))


@pytest.mark.parametrize("change", [{CONFIG: [1]}, {"global_step": "1"}])
def test_what_is_no_setting_is_refused(change, old, tmp_path):
    with pytest.raises(ValueError, match="expected settings and the number of training steps"):
        Checkpoint.read(saved(old | change, tmp_path / "other.ckpt"))


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
    main(["fit", "--ckpt_path", file, "--trainer.max_epochs=2", *QUIET])
    shutil.copy(file, "copied.ckpt")
    main(["predict", "--ckpt_path", "copied.ckpt", "--data=Digits", *QUIET])
    assert ours == [Path(file), Path(file), Path("copied.ckpt")]
