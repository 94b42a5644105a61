"""Streams without a length, which may never end: what reads training data at set-up stops by itself."""

import csv
import json
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from brainet_pl import BRAINet, swap_head
from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl.callbacks import Evaluation, FeatureCache, PredictionFile, StructureLearning
from brainet_pl.features import extraction as features
from brainet_pl.network import Bayes, Linear, Tree, stacked_tree
from brainet_pl.prediction.finite import first_bad_weight
from brainet_pl.scores import KNN, Mahalanobis
from brainet_pl.tasks import Regression


class Endless(IterableDataset):
    """Ready-made batches of 100 rows without end; it keeps count of the rows that were read."""

    def __init__(self):
        self.rows = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(100, 4, generator=generator)
            self.rows += len(x)
            yield x, 3 + 2 * x[:, 0]


@pytest.fixture
def endless(monkeypatch):
    monkeypatch.setattr(features, "STREAM_ROWS", 5_000)
    return Endless()


@pytest.fixture(autouse=True)
def in_time():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 60


def test_the_scale_of_a_regression_and_scores_take_the_first_rows(tmp_path, quiet_trainer, endless):
    model = BRAINet(task=Regression(), head=Linear(), scores=[KNN(), Mahalanobis()])
    trainer = quiet_trainer(tmp_path, limit_train_batches=3)
    with pytest.warns(UserWarning, match="got a stream: its first 5,000 rows stand for all of it"):
        trainer.fit(model, DataLoader(endless, batch_size=None))
    assert len(model.scores.members["KNN"].bank) == 5_000
    assert model.task.center.item() == pytest.approx(3, abs=0.2)
    assert model.task.scale.item() == pytest.approx(2, abs=0.2)
    assert endless.rows < 20_000


def test_a_structure_takes_max_rows_or_the_first_rows(tmp_path, quiet_trainer, endless):
    model = BRAINet(task=Regression(), head=Tree(num_params=500))
    learn = StructureLearning(max_rows=700, cache="", progress=False)
    quiet_trainer(tmp_path, learn, limit_train_batches=3).fit(model, DataLoader(endless, batch_size=None))
    assert model.ggt.num_rows == 700
    other = BRAINet(task=Regression(), head=Tree(num_params=500))
    learn = StructureLearning(cache="", progress=False)
    quiet_trainer(tmp_path, learn, limit_train_batches=3).fit(other, DataLoader(endless, batch_size=None))
    assert other.ggt.num_rows == 5_000


def test_swap_head_takes_max_rows_or_the_first_rows(endless):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    settings = {"num_classes": 2, "head": Tree(num_params=500), "progress": False}
    with pytest.warns(UserWarning, match="its first 5,000 rows"):
        swapped = swap_head(model, DataLoader(endless, batch_size=None), **settings)
    assert swapped.head.ggt.num_rows == 5_000
    swapped = swap_head(model, iter(endless), max_rows=200, **settings)
    assert swapped.head.ggt.num_rows == 200


def test_bayes_and_the_cache_of_features_say_what_to_set(tmp_path, quiet_trainer, endless):
    class Stream(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(endless, batch_size=None)

        val_dataloader = train_dataloader

    model = BRAINet(task=Regression(), head=Bayes(num_params=500))
    with pytest.raises(ValueError, match="got a stream without a length: set limit_train_batches"):
        quiet_trainer(tmp_path, epochs=-1, max_steps=5).fit(model, DataLoader(endless, batch_size=None))
    with pytest.raises(RuntimeError, match="got a stream, which may not fit into memory: train without the cache"):
        quiet_trainer(tmp_path, FeatureCache()).fit(BRAINet(task=Regression(), head=Linear()), Stream())


def test_a_loader_with_a_length_is_read_whole(endless):
    batches = [torch.zeros(10, 2)] * 3
    assert features.bounded(batches, 5) is batches
    assert features.is_sized(DataLoader(range(5)))
    assert not features.is_sized(DataLoader(endless))


class Stream(IterableDataset):
    """Samples one by one, of unknown length."""

    def __init__(self, n=320, seed=0, shift=0.0):
        self.n, self.seed, self.shift = n, seed, shift

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        for i in range(self.n):
            yield 3 * torch.eye(3, 4)[i % 3] + torch.randn(4, generator=generator) + self.shift, i % 3


def stream(*args, **settings):
    return DataLoader(Stream(*args, **settings), batch_size=32)


class StreamData(pl.LightningDataModule):
    """Streams in every place, an unknown set among them."""

    def train_dataloader(self):
        return stream()

    def val_dataloader(self):
        return stream(200, 1)

    def test_dataloader(self):
        return {"test": stream(160, 2), "far": stream(96, 3, 20.0)}

    def predict_dataloader(self):
        return [stream(50, 4), stream(30, 5)]


def fitted(tmp_path, quiet_trainer, *callbacks, **settings):
    model = BRAINet(3, head=Tree(num_params=500), scores=["KNN"], calibration="TemperatureScaling", lr=0.01)
    trainer = quiet_trainer(tmp_path, StructureLearning(cache="", progress=False), *callbacks, epochs=2, **settings)
    return model, trainer


def test_a_validation_stream(tmp_path, quiet_trainer):
    x, y = (torch.stack([torch.as_tensor(s[i]) for s in Stream()]) for i in (0, 1))
    model, trainer = fitted(tmp_path, quiet_trainer)
    trainer.fit(model, DataLoader(TensorDataset(x, y), 32, shuffle=True), stream(200, 1))
    assert trainer.callback_metrics["val/cls/Acc"] > 0.8
    assert len(model.scores.reference["knn"]) == 200
    assert len(model.validation_sample().targets) == 200


def test_streams_in_every_place(tmp_path, quiet_trainer, caplog, recwarn):
    caplog.set_level("INFO")
    model, trainer = fitted(tmp_path, quiet_trainer, Evaluation(), PredictionFile(), ModelCheckpoint(tmp_path))
    data = StreamData()
    trainer.fit(model, datamodule=data)
    said = [str(warning.message) for warning in recwarn] + [record.getMessage() for record in caplog.records]
    assert any(", linear 0." in line and "on 200 validation samples" in line for line in said)
    trainer.validate(model, datamodule=data, verbose=False)
    results = {k: v for part in trainer.test(model, datamodule=data, verbose=False) for k, v in part.items()}
    assert results["test/cls/Acc"] > 0.8
    assert any("far" in name for name in results), results
    record = json.loads(next(tmp_path.rglob("record.json")).read_text())
    assert [part["samples"] for part in record["sets"]] == [160, 96]
    trainer.predict(model, datamodule=data)
    rows = list(csv.DictReader(next(tmp_path.rglob("predictions.csv")).open()))
    assert [(int(r["loader"]), int(r["sample"])) for r in rows] == [(0, i) for i in range(50)] + [
        (1, i) for i in range(30)
    ]
    again = BRAINet.load_from_checkpoint(next(tmp_path.glob("*.ckpt")))
    assert len(trainer.predict(again, stream(40))) == 2


def test_streams_that_never_end_and_limits(tmp_path, quiet_trainer, endless):
    model = BRAINet(task=Regression(), head=Linear())
    limits = {f"limit_{stage}_batches": 4 for stage in ("train", "val", "test", "predict")}
    trainer = quiet_trainer(tmp_path, Evaluation(), PredictionFile(), **limits)
    load = DataLoader(endless, batch_size=None)
    trainer.fit(model, load, load)
    trainer.validate(model, load, verbose=False)
    trainer.test(model, load, verbose=False)
    assert len(trainer.predict(model, load)) == 4
    assert len(next(tmp_path.rglob("predictions.csv")).read_text().splitlines()) == 401


def test_steps_alone_end_a_fit_of_streams(tmp_path, quiet_trainer, endless):
    model = BRAINet(task=Regression(), head=Linear())
    trainer = quiet_trainer(tmp_path, epochs=-1, max_steps=30, val_check_interval=10, limit_val_batches=2)
    load = DataLoader(endless, batch_size=None)
    trainer.fit(model, load, load)
    assert trainer.global_step == 30


def test_the_cache_of_features_refuses_a_validation_stream(tmp_path, quiet_trainer):
    class Half(StreamData):
        def train_dataloader(self):
            return DataLoader(list(Stream()), batch_size=32)

    with pytest.raises(RuntimeError, match="got a stream, which may not fit into memory: train without the cache"):
        quiet_trainer(tmp_path, FeatureCache()).fit(BRAINet(3, head=Linear()), datamodule=Half())


@pytest.mark.parametrize("head", [Linear(), Tree(num_params=500, inference="simultaneous")])
def test_skipped_batches_of_a_stream(tmp_path, quiet_trainer, head):
    class Holes(Stream):
        def __iter__(self):
            for i, (x, y) in enumerate(super().__iter__()):
                yield (x * float("nan") if i == 40 else x), y

    model = BRAINet(3, head=head, on_nan="skip")
    model.set_structure(stacked_tree(4, 2))
    with pytest.warns(UserWarning, match="skipped 1 batches of epoch 0"):
        quiet_trainer(tmp_path).fit(model, DataLoader(Holes(), batch_size=32), stream(200, 1))
    assert first_bad_weight(model.predictor) is None
    assert model.eval().predict_step(torch.zeros(2, 4), 0)["probabilities"].isfinite().all()
