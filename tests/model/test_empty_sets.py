"""A set without a sample is refused by its own name: Lightning leaves it out, and blame falls on others."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import Evaluation, FeatureCache, StructureLearning
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Linear, Tree


class Rows(pl.LightningDataModule):
    """So many random rows of three classes in each set."""

    def __init__(self, **counts):
        super().__init__()
        self.counts = {"train": 40, "val": 30, "test": 10} | counts

    def loader(self, name):
        count = self.counts[name]
        return DataLoader(TensorDataset(torch.rand(count, 6), torch.arange(count) % 3), batch_size=8)

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("val")

    def test_dataloader(self):
        return self.loader("test")

    predict_dataloader = test_dataloader


@pytest.mark.parametrize("head", [Linear(), Tree(2000)], ids=["linear", "tree"])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(("empty", "kind"), [("train", "training"), ("val", "validation")])
def test_a_fit(tmp_path, quiet_trainer, head, cache, empty, kind):
    callbacks = [StructureLearning(progress=False, cache="")] if head.needs_tree else []
    callbacks += [FeatureCache(progress=False, folder="")] if cache else []
    with pytest.raises(
        ValueError, match=f"expected {kind} (samples|data).*, got (an empty|no sample|a loader without)"
    ):
        quiet_trainer(tmp_path, *callbacks).fit(BRAINet(3, head=head), datamodule=Rows(**{empty: 0}))


@pytest.mark.parametrize(("run", "kind"), [("validate", "validation"), ("test", "test"), ("predict", "prediction")])
def test_what_follows(tmp_path, quiet_trainer, run, kind):
    model = BRAINet(3, head=Linear())
    quiet_trainer(tmp_path).fit(model, datamodule=Rows())
    with pytest.raises(ValueError, match=f"expected {kind} samples, got a loader without a batch: check the {kind}"):
        getattr(quiet_trainer(tmp_path), run)(model, datamodule=Rows(val=0, test=0))


class Foreign(pl.LightningModule):
    """A module that knows nothing of brainet_pl."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def test_step(self, batch, batch_idx):
        pass


def test_an_evaluation_of_a_foreign_module(tmp_path, quiet_trainer):
    with pytest.raises(ValueError, match="expected test samples, got a loader without a batch"):
        quiet_trainer(tmp_path, Evaluation()).test(Foreign(), datamodule=Rows(test=0))
