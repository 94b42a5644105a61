"""Names of classes: from the datamodule into checkpoints and predictions, and never for other labels."""

import csv

import pytest
import torch

from brainet_pl._utils.framework import ModelCheckpoint
from brainet_pl.callbacks import PredictionFile
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Linear

NAMES = ("0", "1", "2", "3", "4", "6", "7", "9")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, quiet_trainer):
    """A model of digits without 5 and 8, and its checkpoint."""
    folder = tmp_path_factory.mktemp("named")
    keep = ModelCheckpoint(folder, filename="model")
    model = BRAINet(8, head=Linear())
    quiet_trainer(folder, keep).fit(model, datamodule=Digits(held_out=(5, 8)))
    return model, folder / "model.ckpt"


def test_names_travel_in_the_checkpoint(fitted):
    model, file = fitted
    assert model.class_names == NAMES
    assert BRAINet.load_from_checkpoint(file).class_names == NAMES
    assert torch.load(file, weights_only=True)["brainet"]["class_names"] == list(NAMES)


def test_predictions_name_the_class_and_its_probabilities(fitted, tmp_path, quiet_trainer):
    model = BRAINet.load_from_checkpoint(fitted[1])
    trainer = quiet_trainer(tmp_path, PredictionFile())
    batches = trainer.predict(model, datamodule=Digits(held_out=(5, 8)))
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    expected = torch.cat([batch["probabilities"] for batch in batches])
    assert len(rows) == len(expected)
    for row, probabilities in zip(rows, expected, strict=True):
        assert row["class_name"] == NAMES[int(row["class"])]
        assert [float(row[f"probabilities_{name}"]) for name in NAMES] == pytest.approx(probabilities.tolist())
    assert "probabilities_5" not in rows[0]


def test_names_that_do_not_fit_are_refused(tmp_path, quiet_trainer):
    with pytest.raises(ValueError, match=r"expected 9 different names of classes, .* got 8 \(0, 1, 2, 3, 4, …\)"):
        quiet_trainer(tmp_path).fit(BRAINet(9, head=Linear()), datamodule=Digits(held_out=(5, 8)))
    data = Digits(held_out=(5, 8))
    setup = data.setup
    data.setup = lambda stage: (setup(stage), setattr(data, "class_names", "abcdefgh"))
    with pytest.raises(ValueError, match="expected class_names to be a list of texts"):
        quiet_trainer(tmp_path).fit(BRAINet(8, head=Linear()), datamodule=data)


def test_labels_of_other_classes_are_refused(fitted, tmp_path, quiet_trainer):
    model, file = fitted
    other = Digits(held_out=(8, 9))
    for run in (quiet_trainer(tmp_path).test, quiet_trainer(tmp_path).validate):
        with pytest.raises(ValueError, match=r"model was trained for, 0, 1, 2, 3, 4, 6, 7, 9, got 0, 1, 2, 3, 4, 5"):
            run(model, datamodule=other, verbose=False)
    with pytest.raises(ValueError, match="give data with the same classes"):
        quiet_trainer(tmp_path, epochs=2).fit(BRAINet(8, head=Linear()), datamodule=other, ckpt_path=file)
    resumed = BRAINet(8, head=Linear())
    quiet_trainer(tmp_path, epochs=2).fit(resumed, datamodule=Digits(held_out=(5, 8)), ckpt_path=file)
    assert resumed.class_names == NAMES


def test_a_regression_and_plain_loaders_have_no_names(tmp_path, quiet_trainer):
    model = BRAINet(task="Regression", head=Linear())
    quiet_trainer(tmp_path, fast_dev_run=True).fit(model, datamodule=Digits())
    assert model.class_names is None
    data = Digits()
    data.setup("fit")
    plain = BRAINet(8, head=Linear())
    quiet_trainer(tmp_path, fast_dev_run=True).fit(plain, data.train_dataloader(), data.val_dataloader())
    assert plain.class_names is None
