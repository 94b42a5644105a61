"""Memory and time of tests and predictions over many samples, each size in a process of its own."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common.store import stamp, write_whole
from common.tables import table
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from brainet_pl._utils.framework import pl
from brainet_pl.calibration import TemperatureScaling
from brainet_pl.callbacks import Evaluation, PredictionFile, StructureLearning
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Tree
from brainet_pl.scores import Mahalanobis

FEATURES, CLASSES, BATCH, LIMIT = 8, 4, 2000, 1.5
SETS = {"test": 0.0, "near": 0.5, "far": 2.0, "odd": 1.0}  # name → how far the unknown are from the known
SIZES = (250_000, 500_000, 1_000_000)
MIB = 2**20


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches that are made when they are asked for, so that the data itself takes no memory."""

    def __init__(self, samples: int, shift: float) -> None:
        self.samples, self.shift = samples, shift

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(round(10 * self.shift))
        centers = 2 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(9))
        for start in range(0, self.samples, BATCH):
            n = min(BATCH, self.samples - start)
            y = torch.randint(CLASSES, (n,), generator=draw)
            yield centers[y] + self.shift + torch.randn(n, FEATURES, generator=draw), y

    def __len__(self) -> int:
        return -(-self.samples // BATCH)


def loader(samples: int, shift: float = 0.0) -> DataLoader[Any]:
    """A loader of a stream."""
    return DataLoader(Stream(samples, shift), batch_size=None)


def peak() -> float:
    """The most memory that this process has held so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(kind: str, samples: int) -> dict[str, float]:
    """A test or a prediction over so many samples of each set; what a small one takes is not counted."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    model = BRAINet(CLASSES, head=Tree(2000), scores=[Mahalanobis()], calibration=TemperatureScaling())

    def run(n: int, folder: str) -> float:
        callbacks = [Evaluation(), PredictionFile(), StructureLearning(progress=False)]
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, callbacks=callbacks, **quiet)  # type: ignore[arg-type]
        if model.head is None:
            trainer.fit(model, loader(2 * BATCH), loader(BATCH))
        start = time.perf_counter()
        loaders = {name: loader(n, shift) for name, shift in SETS.items()}
        if kind == "test":
            trainer.test(model, loaders, verbose=False)
        else:
            trainer.predict(model, loaders, return_predictions=False)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        run(2 * BATCH, folder)
        before = peak()
        seconds = run(samples, folder)
    return {"samples of each set": samples, "MiB before": before, "MiB beyond": peak() - before, "seconds": seconds}


def main(argv: Sequence[str], out: Path) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="reliability.py load", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="samples of each of the four sets")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "SAMPLES"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:  # in a process of its own, because the most memory of a process never falls
        print(json.dumps(measure(args.measure[0], int(args.measure[1]))))
        return
    rows = []
    for kind in ("test", "predict"):
        for samples in args.sizes:
            command = [sys.executable, str(Path(__file__).with_name("reliability.py")), "load"]
            done = subprocess.run(
                [*command, "--measure", kind, str(samples)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"expected the {kind} of {samples:,} samples to end, got\n{done.stderr[-3000:]}")
            rows.append({"command": kind} | json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    table(list(rows[0]), [list(row.values()) for row in rows])
    worst = max(row["MiB beyond"] for row in rows)
    print(f"\nat the most {worst / 1024:.2f} GiB beyond a small run; the limit is {LIMIT} GiB")
    known = json.loads(out.read_text()) if out.is_file() else {}
    write_whole(
        out,
        json.dumps(known | {"load": rows, "measured": known.get("measured", {}) | {"load": stamp()}}, indent=1) + "\n",
    )
