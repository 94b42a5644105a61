"""`brainet test` says what may be answered, `brainet labels` and `brainet rank` write their pages; one small run."""

import csv
from pathlib import Path

import pytest

from brainet_pl.cli import main

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


@pytest.mark.integration
def test_a_run_from_the_terminal(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    caplog.set_level("INFO")
    main(["fit", "--config", "digits", "--trainer.max_epochs=3", "--model.risk=0.3", "--test", *QUIET])
    said = caplog.text + capsys.readouterr().out
    assert "risk control: answers" in said
    assert "at most 30 % wrong, 95 % sure" in said
    (checkpoint,) = Path().rglob("last.ckpt")
    (page,) = Path().rglob("report.html")
    assert "Risk control answers" in page.read_text()
    main(["labels", "--ckpt_path", str(checkpoint), "--out", "labels", "--top", "12", "--image_shape", "8,8"])
    assert "labels look wrong" in capsys.readouterr().out
    with Path("labels/labels.csv").open() as file:
        assert len(list(csv.DictReader(file))) > 800
    assert Path("labels/labels.html").read_text().count("data:image/png") == 12
    main(["rank", "--ckpt_path", str(checkpoint), "--out", "rank", "--k", "9", "--image_shape", "8,8"])
    assert "label these 9 samples next" in capsys.readouterr().out
    assert Path("rank/rank.png").is_file()
