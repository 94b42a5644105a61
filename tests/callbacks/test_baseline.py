"""After a fit, a line compares the head with the network's own layer and with a linear one."""

import logging
import re

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet
from brainet_pl._utils.framework import CSVLogger, ModelCheckpoint, pl
from brainet_pl.callbacks import BaselineComparison, StructureLearning, baseline
from brainet_pl.callbacks.baseline import BEST, LAST, LINEAR, OWN, advice, judge
from brainet_pl.datamodules import Digits
from brainet_pl.network import MLP, Linear, Tree
from brainet_pl.tasks import Regression, linear


@pytest.fixture
def said(caplog, monkeypatch):
    """The lines that a fit said of what won, warnings among them."""
    caplog.set_level(logging.INFO)
    warn = baseline.rank_zero_warn
    monkeypatch.setattr(baseline, "rank_zero_warn", lambda line: (logging.getLogger().info(line), warn(line)))

    def lines():
        return [record.getMessage() for record in caplog.records if "validation samples, " in record.getMessage()]

    return lines


def numbers(line):
    """The NLL of each that a line names."""
    found = re.findall(r"([\w' ]+?) (-?[\d.e-]+)(?: NLL)?(?=[ ,]|$)", line.split(", each at")[0])
    return {name.strip(): float(value) for name, value in found}


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
    ahead = r"MLP 2\..* NLL, linear 0\.1.*last epoch: linear is ahead; one validation says little: train longer"
    with pytest.warns(UserWarning, match=ahead):
        fit(tmp_path, quiet_trainer, model, logger=logger)
    logger.save()
    logged = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    for key in ("versus/head/NLL", "versus/linear/NLL", "versus/linear/Error"):
        assert key in logged


def test_numbers_are_compared_with_ridge_regression(tmp_path, quiet_trainer, said):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(600, 3, generator=draw)
    y = x[:, 0] + 0.1 * torch.randn(600, generator=draw)

    class Numbers(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(x[:400], y[:400]), 64)

        def val_dataloader(self):
            return DataLoader(TensorDataset(x[400:], y[400:]), 100)

    with pytest.warns(UserWarning, match=r"Linear .* NLL, linear -0\.8.*linear is ahead"):  # log 0.1 + 1.42 = -0.88
        fit(tmp_path, quiet_trainer, BRAINet(task=Regression(), head=Linear(), lr=1e-4), data=Numbers())


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
    with pytest.warns(
        UserWarning, match=f"{OWN} 0.1.*{OWN} is ahead;.*add to that layer, --model.head.skip base_logits"
    ):
        fit(tmp_path, quiet_trainer, model, StructureLearning(threshold=0.1, progress=False))
    followed = BRAINet(8, backbone=net, head=Tree(num_params=4000, skip="base_logits"), lr=1e-5)
    fit(tmp_path, quiet_trainer, followed, StructureLearning(threshold=0.1, progress=False))
    before, after = map(numbers, said())
    assert after["BRAINet"] < 0.5 * before["BRAINet"]


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
    without, base_logits = (Tree(skip=skip).build(4, 2, tree) for skip in (None, "base_logits"))

    def told(head, ahead, curve=(0.3, 0.2, 0.2), when=BEST, gain=None, plenty=True):
        return "; ".join(advice(head, ahead, curve, when, gain, "val/cls/NLL", plenty))

    assert told(without, LINEAR) == "use --model.head Linear"
    assert "with a penalty, as of scikit-learn" in told(without, LINEAR, plenty=False)
    assert told(without, OWN) == "add to that layer, --model.head.skip base_logits; or keep that layer"
    assert told(base_logits, OWN) == "keep that layer"
    assert told(base_logits, LINEAR) == "use --model.head Linear"
    assert told(without, None) == ""
    falling = told(without, LINEAR, (1.63, 0.98, 0.49))
    assert falling == "validation NLL was still falling at the last validation, from 0.98 to 0.49: train longer " \
        "(--trainer.max_epochs)"  # fmt: skip
    assert told(without, None, (1.63, 0.98, 0.49)) == falling  # also where the head wins
    rose = told(base_logits, None, (0.5, 0.2, 0.3), LAST)
    assert rose == "validation NLL was 0.2 at validation 2 of 3 and is 0.3: keep the best epoch, ModelCheckpoint(" \
        "monitor='val/cls/NLL')"  # fmt: skip
    assert told(base_logits, None, (0.5, 0.2, 0.3), BEST) == ""
    gain = 0.1 + 0.1 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert "0.104 from the NLL: --model.calibration TemperatureScaling" in told(base_logits, None, gain=gain)
    assert told(base_logits, None, gain=gain - 0.095) == ""  # no more than noise


class Rows(pl.LightningDataModule):
    """Two classes that a few of many columns tell, with errors: a head that trains on few rows learns noise."""

    def __init__(self, train=200, columns=20, strength=1.0, seed=0):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(train + 1000, columns, generator=draw)
        y = (strength * x[:, :3].sum(dim=1) + torch.randn(len(x), generator=draw) > 0).long()
        self.parts = [TensorDataset(x[rows], y[rows]) for rows in (slice(train), slice(train, -500), slice(-500, None))]

    def train_dataloader(self):
        return DataLoader(self.parts[0], 50, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], 500)

    def test_dataloader(self):
        return DataLoader(self.parts[2], 500)


def test_a_linear_head_is_level_with_the_linear_layer(tmp_path, quiet_trainer, said):
    fit(tmp_path, quiet_trainer, BRAINet(8, head=Linear(), lr=0.05), epochs=30)
    found = numbers(said()[0])
    assert found["Linear"] == pytest.approx(found["linear"], rel=0.12)


def test_the_linear_layer_has_all_training_samples_or_the_line_says_how_many(
    tmp_path, quiet_trainer, said, monkeypatch
):
    """Few columns say little, so that 2,048 of 9,000 samples make a worse layer."""
    data = Rows(9000, 150, strength=0.15)
    fit(tmp_path, quiet_trainer, BRAINet(2, head=Linear(), lr=1e-3), epochs=3, data=data)
    whole = said()[-1]
    assert "training samples" not in whole
    peer = LogisticRegression(C=1e-3, max_iter=300).fit(*(part.numpy() for part in data.parts[0].tensors))
    theirs = log_loss(data.parts[1].tensors[1], peer.predict_proba(data.parts[1].tensors[0].numpy()))
    assert numbers(whole)["linear"] == pytest.approx(theirs, rel=0.01)
    # a backbone would have to run again: in a tenth of one epoch, no more than the sample that is there anyway
    net = nn.Sequential(nn.Linear(150, 150), nn.Linear(150, 2))
    nn.init.eye_(net[0].weight)
    fit(tmp_path, quiet_trainer, BRAINet(2, backbone=net, head=Linear(), lr=1e-3), epochs=1, data=data)
    assert "(2,048 of 9,000 training samples)" in said()[-1]
    assert numbers(said()[-1])["linear"] > numbers(whole)["linear"] + 0.003
    fit(tmp_path, quiet_trainer, BRAINet(2, backbone=net, head=Linear(), lr=1e-3), epochs=5, data=data)
    assert "(4,500 of 9,000 training samples)" in said()[-1]
    monkeypatch.setattr(linear, "MOST_WORK", 3000 * 150 * 2)
    fit(tmp_path, quiet_trainer, BRAINet(2, head=Linear(), lr=1e-3), data=data)
    assert "(3,000 of 9,000 training samples)" in said()[-1]


def test_training_longer_helps_where_it_is_advised(tmp_path, quiet_trainer, said):
    for epochs in (1, 3, 12):
        fit(tmp_path, quiet_trainer, BRAINet(8, head=MLP(num_params=4000), lr=0.003), epochs=epochs)
    one, three, twelve = said()
    assert "one validation says little: train longer (--trainer.max_epochs)" in one
    assert "still falling at the last validation" in three
    assert numbers(one)["MLP"] > numbers(three)["MLP"] > 1.2 * numbers(twelve)["MLP"]


def test_the_best_epoch_and_a_temperature_help_where_they_are_advised(tmp_path, quiet_trainer, said):
    """A network that learns 200 rows by heart is best early, and too sure at the end."""
    uncalibrated = {"head": MLP(num_params=4000), "lr": 0.01, "calibration": None}
    model = BRAINet(2, **uncalibrated)
    trainer = fit(tmp_path, quiet_trainer, model, epochs=20, data=Rows())
    plain = trainer.test(model, datamodule=Rows(), verbose=False)[0]["test/cls/NLL"]
    best = ModelCheckpoint(tmp_path, monitor="val/cls/NLL", mode="min")
    fit(tmp_path, quiet_trainer, BRAINet(2, **uncalibrated), best, epochs=20, data=Rows())
    last, kept = said()
    assert "keep the best epoch, ModelCheckpoint(monitor='val/cls/NLL')" in last
    assert "--model.calibration TemperatureScaling" in last
    assert "keep the best epoch" not in kept
    assert numbers(kept)["MLP"] < numbers(last)["MLP"]
    model = BRAINet(2, head=MLP(num_params=4000), lr=0.01, calibration="TemperatureScaling")
    trainer = fit(tmp_path, quiet_trainer, model, epochs=20, data=Rows())
    assert "TemperatureScaling" not in said()[-1]
    assert trainer.test(model, datamodule=Rows(), verbose=False)[0]["test/scaled/cls/NLL"] < 0.9 * plain


def test_a_linear_head_helps_where_it_is_advised(tmp_path, quiet_trainer, said):
    found = []
    for rows, head in ((3000, MLP(num_params=600)), (3000, Linear()), (300, MLP(num_params=600))):
        best = ModelCheckpoint(tmp_path / f"{rows}{head}", monitor="val/cls/NLL", mode="min")
        data = Rows(rows, 60, strength=2.0)
        fit(tmp_path, quiet_trainer, BRAINet(2, head=head, lr=0.01), best, epochs=8, data=data)
        found.append(said()[-1])
    assert found[0].endswith("linear is ahead; use --model.head Linear")
    assert numbers(found[1])["Linear"] < 0.98 * numbers(found[0])["MLP"]
    assert "linear is ahead; use a linear layer with a penalty" in found[2]


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
