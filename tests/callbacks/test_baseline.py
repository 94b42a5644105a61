"""After a fit, a line compares the head with the network's own layer and with a linear one."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet
from brainet_pl._utils.framework import CSVLogger, ModelCheckpoint, pl
from brainet_pl.callbacks import BaselineComparison, StructureLearning
from brainet_pl.callbacks.baseline import LINEAR, OWN, advice, judge
from brainet_pl.datamodules import Digits
from brainet_pl.network import MLP, Linear, Tree
from brainet_pl.tasks import Regression


@pytest.fixture
def said(caplog):
    """The lines that a fit said of what won, warnings among them."""
    caplog.set_level(logging.INFO)

    def lines():
        return [record.getMessage() for record in caplog.records if "validation samples, " in record.getMessage()]

    return lines


def fit(tmp_path, quiet_trainer, model, *callbacks, epochs=1, data=None, **settings):
    pl.seed_everything(0, verbose=False)
    trainer = quiet_trainer(tmp_path, *callbacks, epochs=epochs, **settings)
    trainer.fit(model, datamodule=data or Digits())
    return trainer


def test_a_head_that_wins_says_so_with_the_numbers_of_its_best_checkpoint(tmp_path, quiet_trainer, said):
    model = BRAINet(8, head=Tree(num_params=4000), lr=0.01)
    best = ModelCheckpoint(tmp_path, monitor="val/cls/NLL", mode="min")
    fit(tmp_path, quiet_trainer, model, StructureLearning(progress=False), best, epochs=12)
    (line,) = said()
    assert ", linear 0.1" in line
    assert "on 152 validation samples, at the best checkpoint" in line
    assert "ahead" not in line
    told = float(line.removeprefix("BRAINet ").split()[0])
    assert told < 0.18
    assert told == pytest.approx(float(best.best_model_score), rel=0.2)  # other draws of sub-networks


def test_a_head_that_loses_is_warned_of_with_what_to_try(tmp_path, quiet_trainer, said):
    logger = CSVLogger(tmp_path)
    model = BRAINet(8, head=MLP(num_params=4000), lr=1e-5)
    with pytest.warns(UserWarning, match=r"MLP 2\..* NLL, linear 0\.1.*last epoch: linear is ahead; try more epochs"):
        fit(tmp_path, quiet_trainer, model, logger=logger)
    logger.save()
    logged = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "versus/head/NLL" in logged
    assert "versus/linear/NLL" in logged


def test_numbers_are_compared_with_ridge_regression(tmp_path, quiet_trainer, said):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(600, 3, generator=draw)
    y = x[:, 0] + 0.1 * torch.randn(600, generator=draw)

    class Rows(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(x[:400], y[:400]), 64)

        def val_dataloader(self):
            return DataLoader(TensorDataset(x[400:], y[400:]), 100)

    with pytest.warns(UserWarning, match=r"Linear .* NLL, linear -0\.8.*linear is ahead"):  # log 0.1 + 1.42 = -0.88
        fit(tmp_path, quiet_trainer, BRAINet(task=Regression(), head=Linear(), lr=1e-4), data=Rows())


def test_the_layer_that_a_head_replaces_is_compared_too(tmp_path, quiet_trainer, said):
    """A network whose own layer is already right cannot be beaten by a head that has not trained."""
    digits = Digits()
    digits.setup("fit")
    x = torch.stack([digits.train_set[i][0] for i in range(len(digits.train_set))])
    y = torch.tensor([int(digits.train_set[i][1]) for i in range(len(digits.train_set))])
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    model = BRAINet(8, backbone=net, head=Tree(num_params=4000, skip=None), lr=1e-5)
    with pytest.warns(UserWarning, match=f"{OWN} 0.1.*{OWN} is ahead; try Tree"):
        fit(tmp_path, quiet_trainer, model, StructureLearning(threshold=0.1, progress=False))


def test_silence_where_it_is_asked_for_or_nothing_can_be_said(tmp_path, quiet_trainer, said):
    fit(tmp_path, quiet_trainer, BRAINet(8, head=Linear(), lr=0.01), BaselineComparison(False))
    fit(tmp_path, quiet_trainer, BRAINet(8, head=Linear(), lr=0.01), fast_dev_run=True)
    fit(tmp_path, quiet_trainer, BRAINet(8, head=Linear(), lr=0.01), limit_val_batches=0)
    assert said() == []


def test_the_weights_and_random_numbers_of_a_fit_are_the_same_with_and_without(tmp_path, quiet_trainer):
    found = []
    for say in (True, False):
        model = BRAINet(8, head=Tree(num_params=4000), lr=0.01)
        fit(tmp_path, quiet_trainer, model, StructureLearning(threshold=0.1, progress=False), BaselineComparison(say))
        found.append((model.state_dict(), torch.rand(3)))
    (a, drawn), (b, also) = found
    assert torch.equal(drawn, also)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_noise_is_not_a_loss_and_the_reverse_is():
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(100, generator=draw)
    assert judge({"a": 0.01 + noise, LINEAR: torch.zeros(100) + noise.flip(0)}, "a").ahead is None
    assert judge({"a": 0.01 + noise.abs(), LINEAR: noise.abs()}, "a").ahead == LINEAR


def test_advice_names_what_the_head_does_not_do_yet():
    from brainet_pl.network.ensemble import stacked_tree

    tree = stacked_tree(4, 1)
    without, base_logits = (Tree(skip=skip).build(4, 2, tree) for skip in (None, "own"))
    assert "skip='linear'" in advice(without, LINEAR, "at the best checkpoint")
    assert "skip='base_logits'" in advice(without, OWN, "at the best checkpoint")
    assert "skip" not in advice(base_logits, OWN, "at the best checkpoint")
    assert "more epochs" in advice(base_logits, OWN, "after the last epoch")


@pytest.mark.parametrize(
    ("classes", "held", "why"),
    [
        (200, 150, "takes 5 samples of each of 200 classes, more than 640 training samples"),
        (3, 60, "60 validation samples are"),
    ],
)
def test_what_is_not_compared_is_said_in_one_line(tmp_path, quiet_trainer, caplog, classes, held, why):
    caplog.set_level(logging.INFO)
    x, y = torch.randn(640, 4), torch.arange(640) % classes
    rows = TensorDataset(x, y)
    loaders = DataLoader(rows, 64), DataLoader(TensorDataset(x[:held], y[:held]), 64)
    quiet_trainer(tmp_path).fit(BRAINet(classes, head=MLP()), *loaders)
    lines = [r.getMessage() for r in caplog.records if "not compared with a linear layer" in r.getMessage()]
    assert len(lines) == 1
    assert why in lines[0]
