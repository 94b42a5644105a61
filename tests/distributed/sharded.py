"""What `test_sharded.py` runs: python sharded.py FOLDER STRATEGY PART. Lightning starts the second process itself."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from brainet_pl import Backbone, BRAINet
from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import BaselineComparison, Evaluation, LastCheckpoint, StructureLearning, SwapHead
from brainet_pl.datamodules import Digits
from brainet_pl.lightning import sharding
from brainet_pl.network import Tree
from brainet_pl.storage.sharded import read_whole
from brainet_pl.swap.layer import SwappedLayer

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def strategy(name):
    if name == "ddp":
        return pl.strategies.DDPStrategy(process_group_backend="gloo")
    return pl.strategies.ModelParallelStrategy(
        2, 1, process_group_backend="gloo", save_distributed_checkpoint=name == "folder"
    )


def model(seed):
    pl.seed_everything(seed, verbose=False)
    first, norm, more, last = nn.Linear(64, 24), nn.BatchNorm1d(24), nn.Linear(24, 24), nn.Linear(24, 8)
    body = nn.Sequential(first, norm, nn.ReLU(), more, nn.ReLU(), last)
    given = {"calibration": "TemperatureScaling", "scores": ["KNN"], "lr": 0.01}
    return BRAINet(8, backbone=Backbone(body, freeze=False, layers=None), head=Tree(num_params=6000), **given)


class Gathered(pl.Callback):
    """Counts the weights of a network that a process holds whole at a time, while the structure is learned."""

    def __init__(self):
        self.most, self.rows, self.handles = 0, 0, []

    def setup(self, trainer, pl_module, stage):
        network = pl_module.backbone if isinstance(pl_module, BRAINet) else pl_module

        def look(module, args):
            whole = [p for p in network.parameters() if not isinstance(p, DTensor)]
            if len(args[0]) > 2:  # two samples find the layers, before anything is sharded
                self.most, self.rows = max(self.most, sum(p.numel() for p in whole)), self.rows + len(args[0])

        for part in network.modules():
            if isinstance(part, nn.Linear | nn.BatchNorm1d):
                self.handles.append(part.register_forward_pre_hook(look))

    def on_fit_start(self, trainer, pl_module):
        for handle in self.handles:
            handle.remove()


def trainer_of(folder, name, epochs, *callbacks):
    keep = LastCheckpoint(str(folder / name))
    learn = StructureLearning(threshold=0.1, progress=False, cache="")
    given = [*callbacks, learn, keep, BaselineComparison(False), Evaluation(figures=False, report=False)]
    return pl.Trainer(
        **QUIET, devices=2, strategy=strategy(name), callbacks=given, max_epochs=epochs, num_sanity_val_steps=0,
        default_root_dir=str(folder / name),
    )  # fmt: skip


class Own(pl.LightningModule):
    """A module that knows nothing of brainet_pl, and says how it is sharded."""

    def __init__(self, seed):
        super().__init__()
        pl.seed_everything(seed, verbose=False)
        norm, last = torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 8)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 24), norm, torch.nn.ReLU(), last)

    def configure_model(self):
        if self.device_mesh is not None and not isinstance(self.model, FSDPModule):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        if dataloader_idx == 0:
            self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True, add_dataloader_idx=False)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Large(Own):
    """A module that no process ever holds: it is made without numbers, layer by layer in shares."""

    def __init__(self, seed):
        super().__init__(seed)
        self.model = None

    def configure_model(self):
        if self.model is None:
            with torch.device("meta"):
                self.model = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
            for part in (self.model[0], self.model[3], self.model):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


def own_run(folder, name, epochs, *callbacks):
    learn = StructureLearning(threshold=0.1, progress=False, cache="")
    given = {"calibration": "TemperatureScaling", "scores": ["KNN"], "structure": learn}
    swap = SwapHead("model.3", head=Tree(num_params=6000), **given)
    keep, watch = LastCheckpoint(str(folder / f"own-{name}")), Evaluation(figures=False, report=False)
    return pl.Trainer(
        **QUIET, devices=2, strategy=strategy(name), callbacks=[*callbacks, swap, keep, watch], max_epochs=epochs,
        num_sanity_val_steps=0, default_root_dir=str(folder / name),
    )  # fmt: skip


def own_fit(folder, name):
    trainer, module = own_run(folder, name, 2), Own(0)
    trainer.fit(module, datamodule=Digits(batch_size=64))
    write(trainer, folder / f"own-{name}-fit", module, trainer.callback_metrics)


def own_test(folder, name, source):
    trainer, module = own_run(folder, name, 2), Own(7)
    trainer.ckpt_path = str(folder / f"own-{source}" / "last.ckpt")
    found = trainer.test(module, datamodule=Digits(batch_size=64), verbose=False)[0]
    write(trainer, folder / f"own-{name}-from-{source}-test", module, found)


def own_resume(folder, name, source):
    trainer, module = own_run(folder / f"from-{source}", name, 3), Own(7)
    trainer.ckpt_path = str(folder / f"own-{source}" / "last.ckpt")
    trainer.fit(module, datamodule=Digits(batch_size=64))
    write(trainer, folder / f"own-{name}-from-{source}-resumed", module, trainer.callback_metrics)


def large_fit(folder, name):
    trainer, module = own_run(folder / "large", name, 1), Large(0)
    seen = []
    pass_through = nn.Linear.forward

    def counted(layer, x):
        seen.append(sum(p.numel() for p in module.parameters() if not isinstance(p, DTensor)))
        return pass_through(layer, x)

    nn.Linear.forward = counted  # of the very first pass on, those that learn the structure included
    trainer.fit(module, datamodule=Digits(batch_size=64))
    nn.Linear.forward = pass_through
    assert 0 < max(seen[:10]) <= (64 * 24 + 24) + 48, seen[:10]  # a layer, with what is in none of its own
    assert isinstance(module.model[3], SwappedLayer)


def large_resume(folder, name, source):
    trainer, module = own_run(folder / f"large-from-{source}", name, 3), Large(7)
    trainer.ckpt_path = str(folder / f"own-{source}" / "last.ckpt")
    trainer.fit(module, datamodule=Digits(batch_size=64))
    write(trainer, folder / f"large-{name}-from-{source}-resumed", module, trainer.callback_metrics)


def whole(module):
    state = module.state_dict()
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def write(trainer, path, module, numbers):
    state = whole(module)
    if trainer.is_global_zero:
        torch.save(state, path.with_suffix(".pt"))
        path.with_suffix(".json").write_text(json.dumps({k: float(v) for k, v in numbers.items()}))


def fit(folder, name):
    gathered = Gathered()
    trainer, module = trainer_of(folder, name, 2, gathered), model(0)
    trainer.fit(module, datamodule=Digits(batch_size=64))
    assert gathered.rows > 0
    if name != "ddp":
        # The largest layer, batch norm and the layer that was removed; the whole network has 2,408 weights.
        assert gathered.most == (64 * 24 + 24) + 48 + (24 * 8 + 8), gathered.most
        shares = [p.to_local().numel() for p in module.head.parameters()]
        assert max(shares) < 0.6 * module.head.num_params, shares
    write(trainer, folder / f"{name}-fit", module, trainer.callback_metrics)
    found = trainer.test(module, datamodule=Digits(batch_size=64), verbose=False)[0]
    write(trainer, folder / f"{name}-test", module, found)


def test(folder, name, source):
    trainer, module = trainer_of(folder, name, 2), model(7)  # another seed: it would learn another tree
    trainer.ckpt_path = str(folder / source / "last.ckpt")
    found = trainer.test(module, datamodule=Digits(batch_size=64), verbose=False)[0]
    write(trainer, folder / f"{name}-from-{source}-test", module, found)


def resume(folder, name, source):
    trainer, module = trainer_of(folder / f"from-{source}", name, 3), model(7)
    trainer.ckpt_path = str(folder / source / "last.ckpt")
    read, sizes = sharding.read_parts, []

    def counted(*given):
        content = read(*given)
        sizes.append([v.to_local().numel() if isinstance(v, DTensor) else v.numel() for v in tensors(content)])
        return content

    sharding.read_parts = counted
    trainer.fit(module, datamodule=Digits(batch_size=64))
    if name != "ddp" and source == "folder":  # a process has read its share of what trains alone
        (held,) = sizes
        assert sum(held) < 0.6 * sum(v.numel() for v in tensors(read_whole(trainer.ckpt_path))), sizes
    write(trainer, folder / f"{name}-from-{source}-resumed", module, trainer.callback_metrics)


def tensors(content):
    """Weights of the network, and what the optimizer keeps of all weights."""
    states = [v for state in content["optimizer_states"] for kept in state["state"].values() for v in kept.values()]
    return [v for k, v in content["state_dict"].items() if k.startswith("predictor.backbone.model")] + states


class Kill(pl.Callback):
    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder, name, rank):
    trainer_of(folder / "killed", name, 2, Kill(int(rank))).fit(model(0), datamodule=Digits(batch_size=64))


def late(folder, name, source):
    trainer = trainer_of(folder, name, 3)
    try:
        trainer.test(model(7), datamodule=Digits(batch_size=64), ckpt_path=str(folder / source / "last.ckpt"))
    except RuntimeError as error:
        if trainer.is_global_zero:
            (folder / "late.txt").write_text(str(error))


if __name__ == "__main__":
    folder_, name_, part, *rest = sys.argv[1:]
    globals()[part](Path(folder_), name_, *rest)
