"""What `test_samples.py` runs, in one process and in more: python sizes.py FOLDER PROCESSES BATCH SIZE …

Data of these sizes is fitted, validated, tested and predicted.
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from brainet_pl._utils.framework import pl
from brainet_pl.calibration import Conformal
from brainet_pl.callbacks import Evaluation, PredictionFile
from brainet_pl.datamodules.base import Samples
from brainet_pl.distributed.collectives import all_gather
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.measures import Measure
from brainet_pl.network import MLP

CLASSES = 4
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def samples(count, numbers, seed=0):
    """(count, 6) features of which labels or numbers depend, and few values, so that predictions are tied."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 2, (count, 6), generator=generator).float()
    return Samples(x, x.sum(dim=1) if numbers else x.sum(dim=1).long() % CLASSES)


class F1(MulticlassF1Score, Measure):
    """A measure of torchmetrics that can't be updated by an empty batch."""


class Still(BRAINet):
    """A fit that only validates: the weights do not move."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0


def visit(folder, processes, most, batch, count, numbers):
    """Every hook over `count` samples; gives all that was measured and predicted."""
    pl.seed_everything(0, verbose=False)
    data = samples(count, numbers)
    loader = DataLoader(data, batch_size=batch)
    unknown = DataLoader(samples(count, numbers, seed=1), batch_size=batch)
    kind = {"task": "Regression"} if numbers else {"num_classes": CLASSES, "metrics": [F1(CLASSES)]}
    model = Still(head=MLP(1000, norm=None), scores=[], passes=1, conformal=Conformal(), **kind)
    trainer = pl.Trainer(
        accelerator="cpu", devices=processes, default_root_dir=str(folder), precision="64-true",
        callbacks=[Evaluation(figures=False, report=False), PredictionFile()], max_epochs=1, **QUIET,
    )  # fmt: skip
    trainer.fit(model, loader, loader)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for run in (trainer.validate, trainer.test):
        run(model, loader if run == trainer.validate else {"known": loader, "unknown": unknown}, verbose=False)
        found |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    if count < most:  # Lightning lets no process predict that has no sample of its own
        return {"metrics": found, "rows": []}
    trainer.predict(model, loader, return_predictions=False)
    return {"metrics": found, "rows": (folder / "predictions.csv").read_text().splitlines()}


def left_over(folder, processes, batch):
    """A fit whose last batch of each process is one sample, which batch norm can't train on; gives the weights."""
    trainer = pl.Trainer(accelerator="cpu", devices=processes, default_root_dir=str(folder), max_epochs=2, **QUIET)
    pl.seed_everything(0, verbose=False)
    model = BRAINet(CLASSES, head=MLP(1000), lr=0.01)
    trainer.fit(model, DataLoader(samples(processes * (batch + 1), False), batch_size=batch))
    assert trainer.global_step == 4
    weights = [parameter.detach() for parameter in model.parameters()]
    for others in all_gather(weights):
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(weights, others, strict=True))


def work(rank, processes, most, batch, sizes, folder, port):
    """All sizes in one process of a group."""
    torch.set_num_threads(1)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    os.environ |= group | {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    found = {}
    for count in sizes:
        for kind in ("classes", "numbers"):
            found[f"{count} {kind}"] = visit(folder, processes, most, batch, count, kind == "numbers")
    if processes > 1 and batch > 1:
        left_over(folder, processes, batch)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    most, batch, *sizes = map(int, sys.argv[2:])
    for several in range(1, most + 1):
        folder = Path(sys.argv[1]) / str(several)
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start_processes(work, (several, most, batch, sizes, folder, port), nprocs=several, start_method="fork")
