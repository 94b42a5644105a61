"""Modules that know nothing of brainet_pl, with a callback more in their Trainer."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchmetrics
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import restore_layers, swap_layer
from brainet_pl._utils.framework import CSVLogger, ModelCheckpoint, pl
from brainet_pl.backbones.batches import Columns
from brainet_pl.callbacks import Evaluation, LastCheckpoint, StructureLearning, SwapHead
from brainet_pl.model.in_place import SwappedLayer, every_branch, stored_layers, swapped_layers
from brainet_pl.network import MLP, Ensemble, Laplace, Tree
from brainet_pl.network.base import train_head

ROOT = Path(__file__).parents[2]


def images(n=240, classes=4, seed=0):
    y = torch.arange(n) % classes
    pattern = torch.linspace(-1, 1, 3 * 8 * 8).view(3, 8, 8)
    x = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) + y[:, None, None, None] * pattern
    return x, y


def loader(first, last, shuffle=False, named=False):
    x, y = images()
    data = TensorDataset(x[first:last], y[first:last])
    collate = None
    if named:
        data, collate = range(first, last), lambda rows: {"pixels": x[rows], "color": y[rows], "shape": y[rows] % 2}
    return DataLoader(data, batch_size=24, shuffle=shuffle, collate_fn=collate)


def loaders(**settings):
    return loader(0, 120, True, **settings), loader(120, 240, **settings)


# -- the foreign modules ----------------------------------------------------------------------------------------------


class LitClassifier(pl.LightningModule):
    """Lightning's own example of a classifier (examples/pytorch/basics/backbone_image_classifier.py)."""

    def __init__(self, learning_rate=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.l1, self.l2 = nn.Linear(3 * 8 * 8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return torch.relu(self.l2(torch.relu(self.l1(x.view(x.size(0), -1))))) if False else self.net(x)

    def net(self, x):
        return self.l2(torch.relu(self.l1(x.view(x.size(0), -1))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self(x), y), on_step=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class Torchvision(pl.LightningModule):
    """A network of torchvision with metrics, a scheduler and two groups of parameters."""

    def __init__(self):
        super().__init__()
        self.model = torchvision.models.shufflenet_v2_x0_5(num_classes=4)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)

    def forward(self, x):
        return self.model(F.interpolate(x, size=32))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("val/accuracy", self.accuracy)

    def test_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("test/accuracy", self.accuracy)

    def configure_optimizers(self):
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("fc.")]
        groups = [{"params": rest, "lr": 1e-3}, {"params": self.model.fc.parameters(), "lr": 1e-2}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class TwoTasks(pl.LightningModule):
    """Two heads on one trunk, batches with names, no use of forward in its steps."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"color": nn.Linear(16, 4), "shape": nn.Linear(16, 2)})

    def forward(self, pixels):
        features = self.trunk(pixels)
        return {name: head(features) for name, head in self.heads.items()}

    def training_step(self, batch, batch_idx):
        out = self(batch["pixels"])
        return sum(F.cross_entropy(logits, batch[name]) for name, logits in out.items())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class GAN(pl.LightningModule):
    """Two optimizers, a generator as forward, and a discriminator of one output."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3 * 8 * 8))
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, z):
        return self.generator(z).view(-1, 3, 8, 8)

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        real, fake = batch[0], self(torch.randn(len(batch[0]), 5))
        for optimizer, images_, label in ((one, fake, 1.0), (other, torch.cat([real, fake.detach()]), 0.0)):
            out = self.discriminator(images_)
            self.manual_backward(F.binary_cross_entropy_with_logits(out, torch.full_like(out, label)))
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts]


def texts(transformers):
    """A classifier of Hugging Face with the weights of a random number generator, in a LightningModule."""

    class Texts(pl.LightningModule):
        def __init__(self):
            super().__init__()
            sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            config = transformers.BertConfig(vocab_size=40, num_labels=4, max_position_embeddings=16, **sizes)
            self.bert = transformers.BertForSequenceClassification(config)

        def forward(self, **batch):
            return self.bert(**batch)

        def training_step(self, batch, batch_idx):
            return self(**batch).loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self(**batch).loss)

        def test_step(self, batch, batch_idx):
            self.log("test_loss", self(**batch).loss)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=5e-3)

    return Texts()


def text_loaders():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 4
    ids = torch.randint(10, (240, 12), generator=g) + 10 * y[:, None]
    rows = [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": label} for i, label in zip(ids, y)]
    return DataLoader(rows[:120], batch_size=24, shuffle=True), DataLoader(rows[120:], batch_size=24)


QUICK = StructureLearning(threshold=0.1, progress=False, cache="")


def swap(layer=None, **settings):
    return SwapHead(layer, structure=copy.deepcopy(QUICK), **settings)


def foreign(name):
    """The module, its data, the path of its layer, what `Evaluation` needs, and unknown inputs."""
    noise = 5 * torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    if name == "lightning":
        return LitClassifier, loaders(), swap(), {"unknown": {"noise": noise}}
    if name == "torchvision":
        return Torchvision, loaders(), swap("model.fc"), {"unknown": {"noise": noise}}
    if name == "tasks":
        columns = Columns(inputs="pixels", target="color")
        noisy = DataLoader([{"pixels": one} for one in noise], batch_size=16)
        given = {"columns": columns, "unknown": {"noise": noisy}}
        return TwoTasks, loaders(named=True), swap("heads.color", columns=columns), given
    transformers = pytest.importorskip("transformers")
    noisy = [{"input_ids": torch.randint(40, (12,)), "attention_mask": torch.ones(12).long()} for _ in range(50)]
    unknown = {"noise": DataLoader(noisy, batch_size=16)}
    return lambda: texts(transformers), text_loaders(), swap("bert.classifier"), {"unknown": unknown}


NAMES = ["lightning", "torchvision", "tasks", "texts"]


def state_equal(one, other):
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    for key in a:
        assert torch.equal(a[key], b[key]), key


class Killed(Exception):
    pass


class Kill(pl.Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == self.epoch and batch_idx == 2:
            raise Killed


@pytest.mark.parametrize("name", NAMES)
def test_fit_kill_resume_test_and_report(name, tmp_path, quiet_trainer):
    make, (train, held), callback, given = foreign(name)
    pl.seed_everything(3, verbose=False)
    whole = make()
    begin = copy.deepcopy(whole.state_dict())
    logger = CSVLogger(str(tmp_path), name="run")
    trainer = quiet_trainer(tmp_path, callback, Evaluation(**given), epochs=3, logger=logger)
    trainer.fit(whole, train, held)
    results = trainer.test(whole, held, verbose=False)[0]
    assert results["ood/noise/entropy/AUROC"] >= 0 and results["test/cls/Acc"] > 0.4
    page = (Path(logger.log_dir) / "report.html").read_text()
    record = json.loads((Path(logger.log_dir) / "record.json").read_text())
    assert "noise" in page and record["model"]["head"] == "Tree" and record["tree"] is not None

    pl.seed_everything(3, verbose=False)
    killed = make()
    killed.load_state_dict(begin)
    keep = LastCheckpoint(str(tmp_path / "kept"))
    with pytest.raises(Killed):
        trainer = quiet_trainer(tmp_path, copy.deepcopy(callback), keep, Kill(2), epochs=3)
        trainer.fit(killed, *foreign(name)[1])
    pl.seed_everything(11, verbose=False)  # another process knows nothing of the first
    resumed = make()
    fresh = foreign(name)
    trainer = quiet_trainer(tmp_path, fresh[2], LastCheckpoint(str(tmp_path / "more")), epochs=3)
    trainer.fit(resumed, *fresh[1], ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
    state_equal(whole, resumed)

    tested = make()
    trainer = quiet_trainer(tmp_path, foreign(name)[2], Evaluation(**given))
    again = trainer.test(tested, held, ckpt_path=str(tmp_path / "more" / "last.ckpt"), verbose=False)[0]
    state_equal(whole, tested)
    assert again["test/cls/NLL"] == pytest.approx(results["test/cls/NLL"], rel=1e-6)
    elsewhere = restore_layers(make(), torch.load(tmp_path / "more" / "last.ckpt", weights_only=True))
    state_equal(whole, elsewhere)
