"""`brainet monitor`: files of predictions in, an alarm and a picture out."""

import csv
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import ModelCheckpoint
from brainet_pl.callbacks import PredictionFile
from brainet_pl.cli import main
from brainet_pl.cli.monitor import EXIT_ALARM, read_reference, read_rows
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.monitoring.signals import half_for_the_first, signals_of
from brainet_pl.network import Linear
from brainet_pl.scores import Mahalanobis


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(path, rng, count, shift=0.0, classes=4, header=True):
    with open(path, "w" if header else "a", newline="") as file:
        rows = csv.writer(file)
        if header:
            rows.writerow(["loader", "sample", "file", "class", "known_p", "energy", "joint"])
        for i in range(count):
            a, b = rng.normal(shift, size=2)
            rows.writerow([0, i, f'a "{i}".png', rng.integers(classes), rng.uniform(1e-3, 1), a, a + b])


def exit_status(words):
    try:
        main(["monitor", *map(str, words)])
    except SystemExit as end:
        return end.code
    return 0


def test_a_change_is_told_and_drawn(capsys):
    rng = np.random.default_rng(0)
    written("held.csv", rng, 300)
    written("clean.csv", rng, 400)
    assert exit_status(["clean.csv", "--reference", "held.csv"]) == 0
    assert "400 inputs" in capsys.readouterr().out
    written("stream.csv", rng, 200)
    written("stream.csv", rng, 100, shift=2.0, header=False)
    assert exit_status(["stream.csv", "--reference", "held.csv", "--out", "deep/picture.png"]) == EXIT_ALARM
    said = capsys.readouterr().out
    assert "ALARM at input 20" in said
    assert "evidence by signal: joint " in said
    assert 'strangest inputs before the alarm, by file: a "' in said
    assert Path("deep/picture.png").read_bytes()[:4] == b"\x89PNG"
    # Of the classes alone: only two of four are left.
    written("prior.csv", rng, 200, classes=4)
    written("prior.csv", rng, 200, classes=2, header=False)
    assert exit_status(["prior.csv", "--reference", "held.csv"]) == EXIT_ALARM
    assert "as answer shows" in capsys.readouterr().out


def test_p_values_alone(capsys):
    rng = np.random.default_rng(1)
    for name, low in (("clean.csv", 0), ("strange.csv", -25)):
        p = (1 + np.clip(rng.integers(low, 51, 150), 0, 50)) / 51
        np.savetxt(name, p, header="known_p", comments="")
        assert exit_status([name, "--reference", "50"]) == (EXIT_ALARM if low else 0)


def test_scores_of_a_checkpoint(folder, quiet_trainer):
    """From a fit to the predictions of noise to the alarm, by the scores that the checkpoint keeps."""
    keep = ModelCheckpoint(folder, filename="model")
    model = BRAINet(8, head=Linear(), scores=[Mahalanobis()])
    trainer = quiet_trainer(folder, keep, PredictionFile())
    trainer.fit(model, datamodule=Digits())
    noise = DataLoader(TensorDataset(torch.rand(60, 64)), 20)
    trainer.predict(model, noise, return_predictions=False)
    watched = read_reference("model.ckpt")
    assert list(watched.held) == watched.columns == ["joint", "energy"]
    assert len(watched.held["joint"]) == 152
    assert exit_status(["predictions.csv", "--reference", "model.ckpt"]) == EXIT_ALARM
    with pytest.raises(ValueError, match="expected columns among"):
        read_reference("model.ckpt", ["nothing"])


def test_a_growing_file_is_followed(capsys):
    rng = np.random.default_rng(2)
    written("held.csv", rng, 300)
    written("stream.csv", rng, 50)

    def add():
        for _ in range(20):
            time.sleep(0.2)
            written("stream.csv", rng, 5, shift=3.0, header=False)

    adding = threading.Thread(target=add)
    adding.start()
    begin = time.monotonic()
    code = exit_status(["stream.csv", "--reference", "held.csv", "--follow", "--timeout", "5"])
    assert time.monotonic() - begin < 15
    adding.join()
    assert code == EXIT_ALARM
    assert capsys.readouterr().out.count(" inputs, evidence ") >= 2


def test_half_a_line_waits_for_the_rest(tmp_path):
    path = tmp_path / "part.csv"
    path.write_text('a,b\n1,"x\ny"\n2')
    with path.open(newline="") as file:
        found = list(read_rows(file, follow=True, timeout=0.0))
    assert found == [[["a", "b"]], [["1", "x\ny"]]]
    with path.open(newline="") as file:
        assert [row for batch in read_rows(file, False, None) for row in batch][-1] == ["2"]


def test_signals_are_score_doubt_and_answer():
    found = signals_of({"class": [1, 0], "energy": [3.0, -2.0], "knn": [0.1, 5.0]})
    assert list(found) == ["knn", "energy", "answer"]
    assert 1 < found["answer"][0] < 2
    assert 0 < found["answer"][1] < 1
    assert list(signals_of({"mean": [1.0], "std": [2.0]})) == ["std", "answer"]
    assert half_for_the_first(found) == {"knn": 1.0, "energy": 0.5, "answer": 0.5}
    with pytest.raises(ValueError, match="expected a class, a mean or scores"):
        signals_of({"known": [True]})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.csv", "--reference", "5"], r"expected a file of predictions, got none\.csv"),
        (["stream.csv", "--reference", "none.csv"], "expected --reference to be a CSV file"),
        (["stream.csv", "--reference", "held.csv", "--columns", "nothing"], "got none called nothing"),
        (["bad.csv", "--reference", "held.csv", "--columns", "joint"], "number in column joint of row 2, got 'x'"),
        (["empty.csv", "--reference", "held.csv"], "expected rows of predictions"),
    ],
)
def test_what_cant_be_meant_is_said(folder, words, message):
    rng = np.random.default_rng(3)
    written("held.csv", rng, 20)
    written("stream.csv", rng, 20)
    (folder / "bad.csv").write_text("joint\n1\nx\n")
    (folder / "empty.csv").write_text("joint\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(["monitor", *words])
