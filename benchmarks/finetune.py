"""Fine-tuning: a published ResNet-20 and a new head trained together on CIFAR-10, a linear one and a BRAINet.

    python benchmarks/finetune.py --data DIR      # docs/results/finetune.json, about 20 minutes of one core

All heads are trained in the same way: Adam, 0.01 for the new head and 1e-4 for the backbone, batches of 32, random
crops and flips, a random part of the training images (the network has seen all of them before). The rates are tuned for
none of them; they replace a rate of 1e-3, with which no head had converged after 46 steps. The tree is learned from the
features of the published weights; "learned again" does so after every epoch. The first 2,000 test images are left out,
as in the other benchmarks, and the 5,000 after them are the test data; unknown are 2,000 images of SVHN. A run that was
cut goes on where it stopped.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where `common` is

import numpy as np
import torch
from common.command import arguments, parse
from common.data import BACKBONE, MEAN, STD, VALIDATION, Labelled
from common.measures import quality_of, separation
from common.store import Cell, Store
from common.tables import spread, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from brainet_pl import Backbone, BRAINet
from brainet_pl._utils.framework import pl
from brainet_pl.backbones.cifar import CifarResNet
from brainet_pl.backbones.loading import load_weights
from brainet_pl.callbacks import StructureLearning
from brainet_pl.datamodules.base import Samples, image_transform
from brainet_pl.network import HeadSettings, Linear, Tree

TEST, UNKNOWN, BATCH = 5_000, 2_000, 32
LR, BACKBONE_LR = 1e-2, 1e-4
HEADS: dict[str, tuple[HeadSettings, int | None]] = {  # settings, and after how many epochs the tree is learned again
    "linear": (Linear(), None),
    "BRAINet": (Tree(), None),
    "BRAINet, learned again": (Tree(), 1),
}


class Images(pl.LightningDataModule):
    """Training images with random crops and flips; for the structure, as they are."""

    def __init__(self, train: Labelled) -> None:
        super().__init__()
        self.x, self.y = train

    def train_dataloader(self) -> DataLoader[Any]:
        """Augmented."""
        data = Samples(self.x, self.y, image_transform(MEAN, STD, augment_size=32))
        return DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)

    def structure_dataloader(self) -> DataLoader[Any]:
        """As they are."""
        return DataLoader(Samples(self.x, self.y, image_transform(MEAN, STD)), batch_size=500)


def load(folder: Path | None, name: str, rows: slice) -> Labelled:
    """uint8 images (N, 3, 32, 32) and labels of a file; without a folder, noise whose mean tells the class."""
    if folder is None:
        draw = torch.Generator().manual_seed(len(name))
        y = torch.randint(10, (256,), generator=draw)
        x = (torch.rand(256, 3, 32, 32, generator=draw) * 100 + 15 * y.view(-1, 1, 1, 1)).to(torch.uint8)
        return x, y
    with np.load(folder / f"{name}.npz") as arrays:
        x, y = torch.from_numpy(arrays["x"][rows]), torch.from_numpy(arrays["y"][rows]).long()
    return x.permute(0, 3, 1, 2).contiguous(), y


def network(folder: Path | None) -> nn.Module:
    """The published ResNet-20; without a folder, a small one of random weights."""
    torch.manual_seed(0)
    return CifarResNet(8) if folder is None else load_weights(CifarResNet(20), folder / BACKBONE)


@torch.no_grad()
def run(images: Tensor, logits: Any) -> Tensor:
    """uint8 images (N, 3, 32, 32) → logits (T, N, C) of a function from a batch of inputs."""
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    return torch.cat([logits((part.float() / 255 - mean) / std) for part in images.split(500)], dim=1)


def measured(test: Labelled, unknown: Tensor, logits: Any) -> Cell:
    """Quality on test images, and how well scores tell unknown ones."""
    known = run(test[0], logits)
    return quality_of(known.softmax(-1).mean(0), test[1]) | separation(known, {"svhn": run(unknown, logits)})


def trained(body: nn.Module, name: str, train: Labelled, epochs: int, seed: int) -> tuple[BRAINet, Cell]:
    """A head trained together with a copy of the network."""
    head, every = HEADS[name]
    pl.seed_everything(seed, verbose=False)
    model = BRAINet(10, Backbone(body, freeze=False, lr=BACKBONE_LR), head, lr=LR)
    learn = StructureLearning(seed=seed, progress=False, cache="", every=every)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[learn],
        )
        trainer.fit(model, datamodule=Images(train))
    facts = {"seconds": time.process_time() - start, "params": float(model.head.num_params)}  # type: ignore[union-attr]
    return model.eval(), facts | ({"kept": learn.kept} if learn.kept is not None else {})


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is not in the file yet, and print the table."""
    parser = arguments(__doc__, seeds=2, epochs=3)
    parser.add_argument("--images", type=int, default=8_000, help="training images, a random part of all")
    args = parse(parser, argv)
    settings = {
        "images": args.images,
        "test": TEST,
        "unknown": UNKNOWN,
        "batch": BATCH,
        "lr": LR,
        "backbone_lr": BACKBONE_LR,
        "epochs": args.epochs,
    }
    store = Store(args.out / "finetune.json", settings)
    body = network(args.data).eval()
    test = load(args.data, "cifar10_test", slice(VALIDATION, VALIDATION + TEST))
    unknown = load(args.data, "svhn_test10k", slice(0, UNKNOWN))[0]
    store.cell("as published", lambda: measured(test, unknown, lambda x: body(x).unsqueeze(0)))
    x, y = load(args.data, "cifar10_train", slice(None))
    for seed in range(args.seeds):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: args.images]
        for name in HEADS:

            def fit(name: str = name, rows: Tensor = rows, seed: int = seed) -> Cell:
                model, facts = trained(body, name, (x[rows], y[rows]), args.epochs, seed)
                return measured(test, unknown, lambda x: model.predictor.passes(x).outputs) | facts

            store.cell(f"{name}/{seed}", fit)
    keys = ("err", "nll", "ece", "svhn/entropy/AUROC", "svhn/energy/AUROC", "params", "seconds")
    digits = dict(zip(keys, (2, 3, 3, 1, 1, 0, 0), strict=True))
    lines = []
    for name in ("as published", *HEADS):
        cells = [c for key, c in store.content["cells"].items() if key.split("/")[0] == name]
        found = [[cell[key] for cell in cells if key in cell] for key in keys]
        lines.append([name, *(spread(v, digits[k]) if v else "" for k, v in zip(keys, found, strict=True))])
    header = ["head", "error %", "NLL", "ECE", "SVHN AUROC, entropy", "SVHN AUROC, energy", "parameters", "seconds"]
    table(header, lines)


if __name__ == "__main__":
    main()
