"""The file of predictions: whole or not there, whoever else writes beside it."""

import csv
import os

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
