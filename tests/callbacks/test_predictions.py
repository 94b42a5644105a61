"""The file of predictions: whole or not there, whoever else writes beside it."""

import csv
import os
import random
import resource
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import PredictionFile


class Numbers(pl.LightningModule):
    """Predicts its input, and does something in the middle of it."""

    def __init__(self, then, at):
        super().__init__()
        self.then, self.at = then, at

    def predict_step(self, batch, batch_idx):
        if batch_idx == self.at:
            self.then()
        return {"value": batch[0]}


def rows(path):
    with path.open(newline="") as file:
        return [float(row["value"]) for row in csv.DictReader(file)]


def predict(folder, quiet_trainer, count, then=lambda: None, at=2):
    loader = DataLoader(TensorDataset(torch.arange(float(count))), batch_size=10)
    quiet_trainer(folder, PredictionFile()).predict(Numbers(then, at), loader, return_predictions=False)


def test_two_predictions_at_once_write_files_of_their_own(tmp_path, quiet_trainer):
    """They shared a part file: the first ended with the rows that the second had written so far."""

    def another():
        predict(tmp_path, quiet_trainer, 70)
        assert rows(tmp_path / "predictions.csv") == list(range(70))

    predict(tmp_path, quiet_trainer, 50, another)
    assert rows(tmp_path / "predictions.csv") == list(range(50))
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]


def test_rows_that_are_missing_are_noticed(tmp_path, quiet_trainer):
    predict(tmp_path, quiet_trainer, 5)

    def truncate():
        (part,) = tmp_path.glob(".predictions.csv.*")
        os.truncate(part, part.stat().st_size // 2)

    with pytest.raises(
        RuntimeError, match=r"expected 5,000 predictions in .*, found [0-9,]+: something else has changed"
    ):
        predict(tmp_path, quiet_trainer, 5_000, truncate, at=400)
    assert rows(tmp_path / "predictions.csv") == list(range(5))


def test_a_prediction_that_fails_says_where_its_rows_are(tmp_path, quiet_trainer):
    def fail():
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"), pytest.warns(UserWarning, match="rows so far are in") as said:
        predict(tmp_path, quiet_trainer, 50, fail)
    (part,) = tmp_path.iterdir()
    assert str(part) in "".join(str(one.message) for one in said)
    assert rows(part) == list(range(20))


def in_a_process(work):
    """Run `work` in a forked process; gives its number."""
    number = os.fork()
    if number:
        return number
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path, quiet_trainer):
    predict(tmp_path, quiet_trainer, 5)

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        predict(tmp_path, quiet_trainer, 5_000)

    _, status = os.waitpid(in_a_process(limited), 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert rows(tmp_path / "predictions.csv") == list(range(5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_prediction_that_is_killed_leaves_the_file_as_it_was_or_whole(tmp_path, quiet_trainer, name):
    draw, whole = random.Random(name), [list(range(5)), list(range(3_000))]
    for _ in range(12):
        predict(tmp_path, quiet_trainer, 5)
        number = in_a_process(lambda: predict(tmp_path, quiet_trainer, 3_000))
        time.sleep(draw.random())
        os.kill(number, getattr(signal, name))
        os.waitpid(number, 0)
        assert rows(tmp_path / "predictions.csv") in whole
    left = [path for path in tmp_path.iterdir() if path.name != "predictions.csv"]
    for path in left:
        os.utime(path, (0, 0))  # as if a day had passed
    predict(tmp_path, quiet_trainer, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]
