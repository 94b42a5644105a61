"""A head beside the layer that it replaces: it starts at the network's own answers, if these are answers at all."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import Backbone, BRAINet
from brainet_pl._utils.framework import ModelCheckpoint, pl
from brainet_pl.callbacks import FeatureCache, StructureLearning
from brainet_pl.network import Tree
from brainet_pl.tasks import Classification, Regression

D, CLASSES = 8, 3
OWN = "base_logits_or_linear"


def rows(n, seed=0):
    draw = torch.Generator().manual_seed(seed)
    causes = torch.randn(n, 3, generator=draw)
    x = causes @ torch.randn(3, D, generator=torch.Generator().manual_seed(9)) + 0.5 * torch.randn(n, D, generator=draw)
    return x, causes


def network(x, target, out, loss):
    """A network that was trained for a task."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Linear(12, out))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        loss(net(x), target).backward()
        optimizer.step()
    return net.eval()


class Data(pl.LightningDataModule):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.x[:300], self.y[:300]), 50, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(self.x[300:], self.y[300:]), 50)


@pytest.fixture(scope="module")
def classes():
    x, causes = rows(400)
    y = causes.argmax(1)
    return x, y, network(x[:300], y[:300], CLASSES, F.cross_entropy)


def fit(folder, quiet_trainer, model, data, *more, **settings):
    structure = StructureLearning(threshold=0.02, progress=False)
    trainer = quiet_trainer(folder, *more, structure, **settings)
    trainer.fit(model, datamodule=data)
    return trainer


def test_a_head_that_has_not_trained_answers_as_the_network_does(tmp_path, quiet_trainer, classes):
    x, y, net = classes
    model = BRAINet(CLASSES, backbone=net, head=Tree(skip=OWN), lr=1e-12, calibration=None)
    trainer = fit(tmp_path, quiet_trainer, model, Data(x, y), ModelCheckpoint(tmp_path, save_last=True))
    assert model.head.adds_base_logits
    expected = net(x[300:]).softmax(1)
    with torch.no_grad():
        torch.testing.assert_close(model(x[300:]).softmax(1), expected, rtol=1e-4, atol=1e-5)
        assert trainer.callback_metrics["val/cls/NLL"] == pytest.approx(
            F.nll_loss(expected.log(), y[300:]).item(), rel=1e-3
        )
        again = BRAINet.load_from_checkpoint(tmp_path / "last.ckpt", backbone=net).eval()
        assert again.head.adds_base_logits
        torch.testing.assert_close(again(x[300:]).softmax(1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", [True, False])
def test_it_learns_beside_them(tmp_path, quiet_trainer, classes, cached):
    x, y, net = classes
    pl.seed_everything(0, verbose=False)
    model = BRAINet(CLASSES, backbone=net, head=Tree(skip=OWN), lr=0.01)
    more = [FeatureCache(progress=False)] if cached else []
    fit(tmp_path, quiet_trainer, model, Data(x, y), *more, epochs=3)
    assert model.head.adds_base_logits
    with torch.no_grad():
        loss = F.nll_loss(model(x[:300]), y[:300])
    assert loss < F.cross_entropy(net(x[:300]), y[:300])


def test_a_learned_confidence_starts_from_nothing(classes):
    task, base_logits = Classification(CLASSES, loss="confidence"), classes[2](classes[0][:5])
    torch.testing.assert_close(task.base_outputs(base_logits), torch.cat([base_logits, torch.zeros(5, 1)], dim=1))


def test_answers_of_another_task_are_left_alone(tmp_path, quiet_trainer, classes):
    x, y, net = classes
    data = Data(x, (y + 1) % CLASSES)  # as many classes, but others
    model = BRAINet(CLASSES, backbone=net, head=Tree(skip=OWN))
    fit(tmp_path, quiet_trainer, model, data)
    assert not model.head.adds_base_logits
    assert model.head.skip is not None
    for head in (Tree(), Tree(skip="linear"), Tree(skip=None)):
        model = BRAINet(CLASSES, backbone=net, head=head)
        fit(tmp_path, quiet_trainer, model, Data(x, y))
        assert not model.head.adds_base_logits
        assert (model.head.skip is None) == (head.skip is None)
    model = BRAINet(4, backbone=net, head=Tree(skip=OWN))
    fit(tmp_path, quiet_trainer, model, Data(x, y))
    assert not model.head.adds_base_logits
    wrong = BRAINet(4, backbone=net, head=Tree(skip="base_logits"))
    with pytest.raises(ValueError, match="expected 4 base logits of the network, got 3: use skip='linear'"):
        fit(tmp_path, quiet_trainer, wrong, Data(x, y))
    none = BRAINet(CLASSES, head=Tree(skip="base_logits"))
    with pytest.raises(ValueError, match="expected the outputs of the network, got none"):
        fit(tmp_path, quiet_trainer, none, Data(x, y))


def test_a_regression_starts_at_the_networks_own_mean(tmp_path, quiet_trainer):
    x, causes = rows(400)
    y = 30 + 5 * causes.sum(1)
    net = network(x[:300], (y[:300, None] - 30) / 8, 1, F.mse_loss)
    other = copy.deepcopy(net)  # in units of its own
    with torch.no_grad():
        net[-1].weight.mul_(8)
        net[-1].bias.mul_(8).add_(30)
    model = BRAINet(task=Regression(), backbone=net, head=Tree(skip=OWN), lr=1e-12)
    fit(tmp_path, quiet_trainer, model, Data(x, y))
    assert model.head.adds_base_logits
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x[300:])[:, 0], net(x[300:]).squeeze(1), rtol=1e-4, atol=1e-3)
    model = BRAINet(task=Regression(), backbone=other, head=Tree(skip=OWN))
    fit(tmp_path, quiet_trainer, model, Data(x, y))
    assert not model.head.adds_base_logits


def test_a_network_that_trains_on_is_added_to_as_it_is_now(tmp_path, quiet_trainer, classes):
    x, y, net = classes
    model = BRAINet(
        CLASSES, backbone=Backbone(net, freeze=False, lr=0.01), head=Tree(skip=OWN), lr=1e-12, calibration=None
    )
    fit(tmp_path, quiet_trainer, model, Data(x, y))
    with torch.no_grad():
        readings = model.eval().backbone(x[300:], more=True)
        assert not np.allclose(readings.base_logits, net(x[300:]))
        torch.testing.assert_close(model(x[300:]).softmax(1), readings.base_logits.softmax(1), rtol=1e-4, atol=1e-5)
