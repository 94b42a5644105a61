"""A module with two heads, of which one becomes a BRAINet, and batches with names.

python examples/two_tasks.py
"""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from brainet_pl.backbones.batches import Columns
from brainet_pl.callbacks import Evaluation, SwapHead


class TwoTasks(pl.LightningModule):
    """As you have written it: a kind to tell, and a size to estimate."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.kind, self.size = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x):
        features = self.trunk(x)
        return {"kind": self.kind(features), "size": self.size(features).squeeze(1)}

    def training_step(self, batch, batch_idx):
        out = self(batch["x"])
        return F.cross_entropy(out["kind"], batch["kind"]) + F.mse_loss(out["size"], batch["size"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("test_size_mse", F.mse_loss(self(batch["x"])["size"], batch["size"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def things(n, seed):
    """Rows of 20 numbers around the centre of their kind."""
    g, centres = torch.Generator().manual_seed(seed), torch.randn(4, 20, generator=torch.Generator().manual_seed(9))
    kind, size = torch.randint(4, (n,), generator=g), torch.rand(n, generator=g)
    x = centres[kind] * (0.5 + size[:, None]) + torch.randn(n, 20, generator=g)
    return DataLoader([{"x": a, "kind": b, "size": c} for a, b, c in zip(x, kind, size, strict=True)], batch_size=32)


pl.seed_everything(0)
columns = Columns(inputs="x", target="kind")
evaluation = Evaluation(columns=columns, unknown={"far": {"x": 4 * torch.randn(200, 20)}})
settings = {"max_epochs": 8, "log_every_n_steps": 5, "enable_progress_bar": False}
trainer = pl.Trainer(callbacks=[SwapHead("kind", columns=columns, scores=["KNN"]), evaluation], **settings)
model = TwoTasks()
trainer.fit(model, things(640, 0), things(320, 1))
results = trainer.test(model, things(320, 2), verbose=False)[0]
for name in ("test_size_mse", "test/cls/Acc", "test/cls/NLL", "ood/far/knn/AUROC"):
    print(f"{name:20} {results[name]:.3f}")
