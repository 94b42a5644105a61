"""What `test_shares.py` runs in several processes: python shares.py FOLDER PART …

Processes are forked, so that only one of them imports everything; OMP_NUM_THREADS must be 1 for that.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import FeatureCache, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.distributed import collectives as together
from brainet_pl.features.extraction import extract_features
from brainet_pl.graphs import rai
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Tree
from brainet_pl.scores import Generative, Mahalanobis, ScoreContext, Stages
from brainet_pl.scores.fitting import fit_score_on_rows
from brainet_pl.structure import GGT, FeatureStream, learn_structure
from brainet_pl.structure.independence import PartialCorrelation
from brainet_pl.tasks.passes import Passes

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def table():
    """(900, 8) features of which each depends on the one before, and labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 8)).astype(np.float32)
    for j in range(1, 8):
        x[:, j] += 0.8 * x[:, j - 1]
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 3] > 0)


def processes(count, work, folder, timeout=60):
    """Run work(folder) in so many processes; its result of each is in the folder."""
    folder.mkdir()
    start_processes(_start, (count, work, folder, timeout), nprocs=count, start_method="fork")


def _start(rank, count, work, folder, timeout):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
    )
    (folder / f"{rank}.json").write_text(json.dumps(work(folder)))
    dist.destroy_process_group()


# -- structures -------------------------------------------------------------------------------------------------------


def trees(folder):
    """Trees and graphs of shares that are held, of shares that are streamed, and of shares that are empty."""
    x, _ = table()
    base_logits = x[together.rank() :: together.processes()]
    empty = x if together.rank() == 0 else x[:0]
    sources = {
        "held": FeatureStream.share(base_logits),
        "streamed": FeatureStream(lambda: np.array_split(base_logits, 7), shared=True),
        "cells": FeatureStream(lambda: np.array_split(base_logits, 7), resolution=100, shared=True),
        "empty": FeatureStream(lambda: np.array_split(empty, 3) if len(empty) else [], shared=True),
        "empty held": FeatureStream.share(empty),
    }
    found = {}
    for name, source in sources.items():
        for test in ("gaussian", "cmi"):
            ggt = learn_structure(source, test=test, max_order=2, progress=False)
            found[f"{name}, {test}"] = ggt.to_json()
    found["few rows"] = learn_structure(sources["streamed"], test="gaussian", max_rows=500, progress=False).to_json()
    found["rai"] = rai(sources["held"], test="fisher_z", threshold=0.01).directed.tolist()
    return found


def stages(folder):
    """A density of each of two layers, from equal shares and where one process has nothing."""
    x, y = (torch.from_numpy(part) for part in table())
    found = {}
    for name, rows in (
        ("held", slice(together.rank(), None, together.processes())),
        ("empty", slice(None) if together.rank() == 0 else slice(0, 0)),
    ):
        score = Stages(progress=False)
        score.set_context(ScoreContext(3, widths=(3, 5)))
        fit_score_on_rows(score, x[rows], y[rows])
        passes = Passes(torch.zeros(1, 50, 3), None, x[:50], torch.full((50, 3), 1 / 3))
        found[name] = score(passes)["stages"].tolist()
    return found


def broken(folder):
    """A share with a value that is no number: what each process hears of it."""
    x, _ = table()
    if together.rank() == 1:
        x = x.copy()
        x[5, 2] = np.nan
    try:
        learn_structure(FeatureStream.share(x), test="gaussian", progress=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class SlowTest(PartialCorrelation):
    """Takes longer than the group waits."""

    name = "slow_gaussian"

    @classmethod
    def on(cls, data, weights, threshold):
        found = super().on(data, weights, threshold)
        time.sleep(4)
        return found


def slow(folder):
    x, _ = table()
    base_logits = x[together.rank() :: together.processes()]
    return learn_structure(FeatureStream.share(base_logits), test=SlowTest, max_order=0, progress=False).to_json()


# -- Lightning --------------------------------------------------------------------------------------------------------


class Few(Digits):
    def setup(self, stage):
        super().setup(stage)
        self.train_set = self.structure_set = torch.utils.data.Subset(self.structure_set, range(450))


class Counting(nn.Sequential):
    """A backbone that counts the rows it sees before training."""

    rows = 0

    def forward(self, x):
        self.rows += len(x)
        return super().forward(x)


def fit(folder, devices, cached):
    """Learn the structure and fit scores with so many processes; trees, weights and rows seen are in the folder."""
    pl.seed_everything(0, verbose=False)
    backbone = Counting(nn.Linear(64, 10), nn.ReLU())
    scores = [Generative(progress=False), Mahalanobis()]
    model = BRAINet(8, backbone=backbone, head=Tree(4000), scores=scores)
    callbacks = [StructureLearning(threshold=0.05, progress=False, cache=""), Seen(folder)]
    if cached:
        callbacks.append(FeatureCache(progress=False))
    strategy = pl.strategies.DDPStrategy(start_method="fork", timeout=timedelta(seconds=60)) if devices > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, default_root_dir=str(folder), callbacks=callbacks,
        max_epochs=1, limit_train_batches=1, limit_val_batches=0, num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip
    trainer.fit(model, datamodule=Few())


class Seen(pl.Callback):
    """Writes down what each process has when training begins."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        named = {k: v.double().tolist() for k, v in pl_module.scores.state_dict().items() if "blueprint" not in k}
        head = {k: v.double().sum().item() for k, v in pl_module.head.state_dict().items()}
        found = {
            "ggt": pl_module.ggt.to_json(),
            "density": pl_module.scores.members["Generative"].density.ggt.to_json(),
            "scores": named,
            "head": head,
            "rows": pl_module.backbone.model.rows,
        }
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def lightning(folder):
    for devices in (1, 2, 3):
        (folder / f"fit{devices}").mkdir()
        fit(folder / f"fit{devices}", devices, cached=False)
    (folder / "cached").mkdir()
    fit(folder / "cached", 2, cached=True)


# -- sharded backbones ------------------------------------------------------------------------------------------------


def backbone():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12), nn.ReLU())
    for layer in (layers[0], layers[2]):
        fully_shard(layer)
    return fully_shard(layers)


def steps(features, labels, head, optimizer, first, last):
    """Train a head on this process's share; gradients are averaged over processes."""
    for step in range(first, last):
        torch.manual_seed(step)  # all processes draw the same sub-network
        optimizer.zero_grad()
        logits = head(features)  # (M, B, C) of the M sub-networks of a step
        draws = logits.numel() // logits.shape[-1] // len(labels)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.repeat(draws))
        loss.backward()
        for parameter in head.parameters():
            if parameter.grad is not None:
                parameter.grad = together.total(parameter.grad) / together.processes()
        optimizer.step()
    return float(loss)


def sharded(folder):
    """Extract, learn, train, save and resume with a backbone whose weights lie in two processes."""
    x, y = (torch.from_numpy(part) for part in table())
    batches = list(zip(x.split(100), y.split(100), strict=True))[together.rank() :: together.processes()]  # 5 and 4
    body = backbone()
    features = extract_features(body, batches, progress=False)
    labels = torch.cat([labels for _, labels in batches])
    ggt = learn_structure(FeatureStream.share(features), test="gaussian", progress=False)
    torch.manual_seed(1)
    head = Tree(2000).build(features.shape[1], 3, ggt)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    first = steps(features, labels, head, optimizer, 0, 10)
    whole = get_model_state_dict(body, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    state = {"ggt": ggt.to_dict(), "head": head.state_dict(), "optimizer": optimizer.state_dict(), "backbone": whole}
    if together.rank() == 0:
        torch.save(state, folder / "state.pt")
    dist.barrier()
    end = steps(features, labels, head, optimizer, 10, 20)

    state = torch.load(folder / "state.pt", weights_only=True)
    other = backbone()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    set_model_state_dict(
        other, state["backbone"], options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    again = Tree(2000).build(features.shape[1], 3, GGT.from_dict(state["ggt"]))
    again.load_state_dict(state["head"])
    resumed = torch.optim.Adam(again.parameters(), lr=0.01)
    resumed.load_state_dict(state["optimizer"])
    same = extract_features(other, batches, progress=False)
    steps(same, labels, again, resumed, 10, 20)
    return {
        "ggt": ggt.to_json(),
        "rows": len(features),
        "losses": [first, end],
        "features": bool(torch.equal(features, same)),
        "resumed": all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True)),
        "share": sum(p.to_local().numel() for p in body.parameters()),
        "weights": sum(parameter.sum().item() for parameter in head.parameters()),
    }


PARTS = {
    "trees": lambda folder: [processes(count, trees, folder / f"trees{count}") for count in (2, 3)],
    "stages": lambda folder: processes(2, stages, folder / "stages"),
    "broken": lambda folder: processes(2, broken, folder / "broken"),
    "slow": lambda folder: processes(2, slow, folder / "slow", timeout=3),
    "sharded": lambda folder: processes(2, sharded, folder / "sharded"),
    "lightning": lightning,
}

if __name__ == "__main__":
    for part in sys.argv[2:]:
        PARTS[part](Path(sys.argv[1]))
