"""Explanations where verdicts are shown: the file of predictions, and the table of the most unknown inputs."""

import csv

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet
from brainet_pl.callbacks import Evaluation, PredictionFile, StructureLearning
from brainet_pl.network import Tree

pytestmark = pytest.mark.integration


def rows(count, seed):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    x = torch.randn(count, 1, generator=draw) + 0.3 * torch.randn(count, 4, generator=draw) + y[:, None]
    return TensorDataset(x, y)


def test_predictions_and_reports_say_why(tmp_path, quiet_trainer):
    train, held, test = rows(300, 0), rows(200, 1), rows(40, 2)
    test.tensors[0][7, 2] += 6.0
    model = BRAINet(2, head=Tree(num_params=500), scores=["Generative"])
    callbacks = [StructureLearning(progress=False), Evaluation(most_uncertain=3, image_shape=(2, 2))]
    trainer = quiet_trainer(tmp_path, *callbacks, PredictionFile(explain=True), epochs=2)
    trainer.fit(model, DataLoader(train, batch_size=50), DataLoader(held, batch_size=50))
    trainer.test(model, DataLoader(test, batch_size=16), verbose=False)
    (file,) = tmp_path.rglob("test_most_unknown.csv")
    with file.open(newline="") as content:
        table = list(csv.DictReader(content))
    assert [len(table), table[0]["sample"], table[0]["set"]] == [3, "7", "test"]
    assert table[0]["why"].startswith("Stranger than all 200 calibration rows")
    assert "strangest at the bottom left" in table[0]["why"]
    assert all((file.parent / table[0][name]).is_file() for name in ("picture", "where"))
    (page,) = tmp_path.rglob("report.html")
    assert "Most unknown inputs" in page.read_text(encoding="utf-8")
    trainer.predict(model, DataLoader(test, batch_size=16), return_predictions=False)
    (file,) = tmp_path.rglob("predictions.csv")
    with file.open(newline="") as content:
        said = list(csv.DictReader(content))
    assert said[7]["because_1"].startswith("column 2 is ")
    assert {"because_1", "because_2", "because_3"} <= set(said[0])
