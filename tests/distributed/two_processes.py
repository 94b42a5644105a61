"""What `test_ranks.py` runs in one and in two processes: python two_processes.py FOLDER PART …

Processes are forked, so that only one of them imports everything; OMP_NUM_THREADS must be 1 for that.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from brainet_pl._utils.framework import pl
from brainet_pl.calibration import Conformal
from brainet_pl.callbacks import Evaluation, PredictionFile, StructureLearning, SwapHead
from brainet_pl.datamodules import Digits, Shifts
from brainet_pl.datamodules.base import Samples
from brainet_pl.distributed.collectives import all_gather
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.passes import pass_metrics
from brainet_pl.network import Tree
from brainet_pl.scores import KNN, Generative, Mahalanobis, Verdict

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Uneven(Digits):
    """No set can be shared by two processes evenly, and one has a single sample."""

    def __init__(self, numbers: bool, shifts: Shifts | None = None) -> None:
        super().__init__(batch_size=32, shifts=shifts)
        self.numbers = numbers

    def setup(self, stage):
        super().setup(stage)
        self.train_set = self.structure_set = self.part(self.structure_set, 301)
        self.val_set = self.part(self.val_set, 1 if self.numbers else 51)
        self.test_set = Samples(*self.part(self.test_set, 133).tensors)
        held = self.ood_sets["held_out"]
        unknown = {"held_out": self.part(held, 57), "one": Subset(held, [99])}
        self.ood_sets = unknown if self.shifts is None else {}

    def part(self, samples, n):
        x, y = zip(*(samples[i] for i in range(n)), strict=True)
        x = torch.stack(x)
        return TensorDataset(x, x.std(dim=1) if self.numbers else torch.tensor(y))

    def predict_dataloader(self):
        return {"known": self._loader(self.test_set), "one": DataLoader(Subset(self.ood_sets["held_out"], [1, 2, 3]))}


class Still(BRAINet):
    """A fit that only validates: neither weights nor batch norm move."""

    def training_step(self, batch, batch_idx):
        return sum((p * 0).sum() for p in self.head.parameters())


class Told(Evaluation):
    """Writes down what only figures show, without the time it takes to draw them."""

    def _write(self, trainer, pl_module, record):
        super()._write(trainer, pl_module, record)
        parts = {f"{part.name}/{name}": v.tolist() for part in record.sets.values() for name, v in part.running.items()}
        sums = {} if record.known.sums is None else pass_metrics(record.known.sums)
        (Path(trainer.default_root_dir) / "passes.json").write_text(json.dumps(sums | parts))


def trainer_of(folder, devices, *callbacks, timeout=60):
    """A Trainer in 64 bits, so that the sizes of batches do not show in the last digits."""
    strategy = (
        pl.strategies.DDPStrategy(start_method="fork", timeout=timedelta(seconds=timeout)) if devices > 1 else "auto"
    )
    return pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, default_root_dir=str(folder), precision="64-true",
        callbacks=list(callbacks), max_epochs=1, num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip


def evaluate(folder, devices):
    """Fit, test and predict with the checkpoint of each task; everything that comes out is in the folder."""
    for task in ("classification", "regression"):
        pl.seed_everything(0, verbose=False)
        scores = [Generative(progress=False), Mahalanobis()]
        scores += [KNN(k=5)] if task == "regression" else []  # see below
        # Of a named score no `joint` is made: forked processes hang with more metrics than a pipe holds.
        settings = {"conformal": Conformal(), "verdict": Verdict("generative")}
        model = Still.load_from_checkpoint(folder / f"{task}.ckpt", scores=scores, **settings)
        model.head.inference = "enumerated"  # no draws
        data, out = Uneven(task == "regression"), folder / task / str(devices)
        trainer = trainer_of(out, devices, Told(figures=False), PredictionFile())
        trainer.fit(model, datamodule=data)
        model.float()  # what comes back from forked processes is in 32 bits, what one process leaves is not
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.test(model, datamodule=data, verbose=False)
        found |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        for name, value in model.predictor.state_dict().items():
            # Not the blueprint: a text, whose last digits depend on the number of threads.
            # Nor the samples that a new one resembles: several processes keep none.
            if name.startswith(("scores.", "calibration.", "conformal.")) and not name.endswith("blueprint"):
                if name.startswith("scores.known"):
                    continue
                found[name] = value.double().flatten().tolist()
        trainer.predict(model, datamodule=data, return_predictions=False)
        (out / "found.json").write_text(json.dumps(found))
        if task == "classification":
            # On its own: forked processes of Lightning hang where a test sends more than 64 KB back, some 200 metrics.
            data = Uneven(False, Shifts("noise", severities=(2, 5), limit=31))
            trainer = trainer_of(out / "shift", devices, Evaluation(figures=False))
            trainer.test(model, datamodule=data, verbose=False)


class Learning(StructureLearning):
    """Writes down what each process hears, and when."""

    def setup(self, trainer, pl_module, stage):
        self.rank, heard = trainer.global_rank, "fine"
        start = time.monotonic()
        try:
            super().setup(trainer, pl_module, stage)
        except BaseException as error:
            heard = str(error)
            raise
        finally:
            path = Path(trainer.default_root_dir) / f"heard{trainer.global_rank}.json"
            path.write_text(json.dumps([heard, time.monotonic() - start]))


class Broken(Learning):
    def _obtain(self, *given):
        raise OSError("no space is left for the structure")


class Slow(Learning):
    """Learns for longer than the process group waits."""

    def _obtain(self, *given):
        time.sleep(9)
        return super()._obtain(*given)


class Alone(Learning):
    """The first process learns for a minute; the other one dies."""

    def setup(self, trainer, pl_module, stage):
        if trainer.global_rank == 1:
            os._exit(3)
        super().setup(trainer, pl_module, stage)

    def _obtain(self, *given):
        time.sleep(60)


def fit(folder, kind, timeout):
    """A fit whose structure learning goes wrong, or takes long."""
    folder = folder / kind.__name__
    folder.mkdir()
    trainer = trainer_of(folder, 2, kind(threshold=0.1, progress=False), timeout=timeout)
    start, error = time.monotonic(), "none"
    try:
        trainer.fit(BRAINet(8, head=Tree(4000)), datamodule=Digits())
    except Exception as failure:
        error = str(failure)
    (folder / "end.json").write_text(json.dumps([error, time.monotonic() - start]))


class Foreign(pl.LightningModule):
    """A module that knows nothing of brainet_pl."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def swapped(folder, devices):
    """Fit a foreign module, and test it from its checkpoint; the processes must agree in all but their samples."""
    data, out = Uneven(False), folder / "swap" / str(devices)
    data.setup("fit")
    train, held = data._loader(data.train_set), data._loader(data.val_set)
    pl.seed_everything(0, verbose=False)
    learn = StructureLearning(threshold=0.1, progress=False, cache="")
    settings = {"structure": learn, "calibration": "TemperatureScaling", "scores": ["KNN"]}
    unknown = {"noise": 9 * torch.randn(57, 64, generator=torch.Generator().manual_seed(0))}
    trainer = trainer_of(out, devices, SwapHead(**settings), SameInAll())
    trainer.fit(Foreign(), train, held)
    trainer.save_checkpoint(out / "last.ckpt")
    test = trainer_of(out, devices, SwapHead(), Evaluation(figures=False, report=False, unknown=unknown))
    test.test(Foreign(), held, ckpt_path=str(folder / "swap" / "1" / "last.ckpt"), verbose=False)
    found = {name: float(value) for name, value in test.callback_metrics.items()}
    (out / "found.json").write_text(json.dumps(found))


class SameInAll(pl.Callback):
    """Compares what the processes have at the end of a fit."""

    def on_fit_end(self, trainer, pl_module):
        state = pl_module.state_dict()
        for other in all_gather(state):
            assert all(torch.equal(state[key], other[key]) for key in state), "the processes differ"


PARTS = {
    "swap": lambda folder: swapped(folder, 2),
    "evaluate": lambda folder: evaluate(folder, 2),
    "broken": lambda folder: fit(folder, Broken, 600),
    "slow": lambda folder: fit(folder, Slow, 5),
    "alone": lambda folder: fit(folder, Alone, 600),
}

if __name__ == "__main__":
    for part in sys.argv[2:]:
        PARTS[part](Path(sys.argv[1]))
