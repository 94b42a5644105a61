"""Streams without a length, which may never end: what reads training data at set-up stops by itself."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from brainet_pl import BRAINet, swap_head
from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import FeatureCache, StructureLearning
from brainet_pl.features import extraction as features
from brainet_pl.network import Bayes, Linear, Tree
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
