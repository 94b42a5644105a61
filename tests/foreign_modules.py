"""LightningModules that know nothing of brainet_pl, and what they are trained with.

python foreign_modules.py FOLDER NAME [ema|swa|rate|compiled] fits and tests one, and goes on after a kill.
"""

import copy
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torchmetrics
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import CSVLogger, pl
from brainet_pl.backbones.batches import Columns
from brainet_pl.callbacks import Evaluation, LastCheckpoint, StructureLearning, SwapHead


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
        self.model = torchvision.models.ShuffleNetV2([1, 1, 1], [8, 16, 24, 32, 32], num_classes=4)
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
        groups = [{"params": rest, "lr": 1e-2}, {"params": self.model.fc.parameters(), "lr": 1e-1}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


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


class SemiSupervisedGAN(GAN):
    """A discriminator that also tells the classes: four of real images and one of made ones."""

    def __init__(self):
        super().__init__()
        self.discriminator[3] = nn.Linear(16, 5)

    def forward(self, x):
        return self.discriminator(x)

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        real, y = batch
        fake, made = self.generator(torch.randn(len(y), 5)).view(-1, 3, 8, 8), torch.full_like(y, 4)
        for optimizer, images_, labels in (
            (one, fake, y),  # to be taken for real ones
            (other, torch.cat([real, fake.detach()]), torch.cat([y, made])),
        ):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(images_), labels))
            optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))


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
    rows = [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": label} for i, label in zip(ids, y, strict=True)
    ]
    return DataLoader(rows[:120], batch_size=24, shuffle=True), DataLoader(rows[120:], batch_size=24)


QUICK = StructureLearning(threshold=0.1, progress=False, cache="")


def swap(layer=None, **settings):
    return SwapHead(layer, structure=copy.deepcopy(QUICK), **settings)


def foreign(name, **settings):
    """The module, its data, the callback for its layer, and what `Evaluation` needs."""
    noise = 5 * torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    if name == "lightning":
        return LitClassifier, loaders(), swap(**settings), {"unknown": {"noise": noise}}
    if name == "torchvision":
        return Torchvision, loaders(), swap("model.fc", **settings), {"unknown": {"noise": noise}}
    if name == "tasks":
        columns = Columns(inputs="pixels", target="color")
        noisy = DataLoader([{"pixels": one} for one in noise], batch_size=16)
        given = {"columns": columns, "unknown": {"noise": noisy}}
        return TwoTasks, loaders(named=True), swap("heads.color", columns=columns, **settings), given
    if name == "gan":
        return SemiSupervisedGAN, loaders(), swap("discriminator.3", **settings), {"unknown": {"noise": noise}}
    import transformers

    ids = torch.randint(40, (50, 12), generator=torch.Generator().manual_seed(9))
    unknown = {"noise": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
    return lambda: texts(transformers), text_loaders(), swap("bert.classifier", **settings), {"unknown": unknown}


# -- a process of its own ---------------------------------------------------------------------------------------------


class Kill(pl.Callback):
    """Ends the process as `kill -9` does, in the middle of an epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 2 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def run(model, data, swap, evaluation, extra, folder, **settings):
    """All that a user adds: these lines, and the callbacks in the Trainer."""
    keep = LastCheckpoint(str(folder))
    trainer = pl.Trainer(callbacks=[swap, *extra, Evaluation(figures=False, **evaluation), keep], **settings)
    trainer.fit(model, *data, ckpt_path="last")
    return trainer.test(model, data[1], verbose=False)[0]


AVERAGES = {
    "ema": lambda: pl.callbacks.EMAWeightAveraging(decay=0.9),
    "swa": lambda: pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
}


def main(folder, name, extra=None):
    folder = Path(folder)
    pl.seed_everything(int(os.environ.get("SEED", "3")), verbose=False)
    make, data, swap, evaluation = foreign(name, calibration="TemperatureScaling", scores=["KNN"])
    model = make()
    more = [AVERAGES[extra]()] if extra in AVERAGES else []
    more += [Kill()] if "KILL" in os.environ else []
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    if extra == "rate":
        tuner = pl.tuner.Tuner(pl.Trainer(callbacks=[swap], logger=False, max_epochs=4, **quiet))
        tuner.lr_find(model, *data, num_training=15)
    given = torch.compile(model, backend="aot_eager") if extra == "compiled" else model
    logger = CSVLogger(str(folder), name="run", version=0)
    results = run(given, data, swap, evaluation, more, folder, logger=logger, max_epochs=4, **quiet)
    torch.save(model.state_dict(), folder / "end.pt")
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
