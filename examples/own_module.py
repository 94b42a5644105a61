"""A torchvision network in a LightningModule of your own: one callback more, and its last layer is a BRAINet.

python examples/own_module.py
"""

import pytorch_lightning as pl
import torch
import torchmetrics
import torchvision
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl.callbacks import Evaluation, LastCheckpoint, SwapHead


class Classifier(pl.LightningModule):
    """As you have written it: brainet_pl is not mentioned."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = torchvision.models.ShuffleNetV2([1, 1, 1], [8, 16, 24, 32, 32], num_classes=3)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


def stripes(n, seed):
    """Images with stripes of three widths: the class."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    waves = torch.sin(torch.arange(32)[None, :] * 0.4 * (1.0 + y[:, None]))
    x = waves[:, None, None, :] + 0.5 * torch.randn(n, 3, 32, 32, generator=g)
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=seed == 0)


train, val, test = stripes(480, 0), stripes(240, 1), stripes(240, 2)
noise = {"noise": 2 * torch.randn(200, 3, 32, 32)}  # nothing that training has seen

pl.seed_everything(0)
swap = SwapHead("model.fc", calibration="TemperatureScaling", scores=["KNN"])
keep = LastCheckpoint("checkpoints")
settings = {"max_epochs": 5, "log_every_n_steps": 5, "enable_progress_bar": False}
trainer = pl.Trainer(callbacks=[swap, Evaluation(unknown=noise), keep], **settings)
trainer.fit(Classifier(), train, val)

fresh = Classifier()  # another process: the checkpoint brings the head
results = trainer.test(fresh, test, ckpt_path="checkpoints/last.ckpt", verbose=False)[0]
for name in ("test_accuracy", "test/scaled/cal/ECE", "ood/noise/knn/AUROC", "verdict/noise/Unknown"):
    print(f"{name:24} {results[name]:.3f}")
