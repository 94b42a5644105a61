"""Every door that writes, attacked at random moments: what stands there afterwards is the former, or whole.

    python benchmarks/reliability.py doors            # docs/results/reliability.json, the entry "doors"
    python benchmarks/reliability.py doors --smoke    # one attack of each kind

Each door writes over what it wrote before, in a forked child, so that a signal meets the work and not imports. SIGKILL,
SIGTERM and SIGINT come at random moments; a limit on the size of files stands for a full disk; a folder that can only
be read refuses the first write. After each attack another child reads what is there; at the end the door is used once
more, and nothing but its own files may be left.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.store import stamp, write_whole
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet, BRAINetClassifier, export_folder, load_swapped, swap_head
from brainet_pl._utils.framework import pl
from brainet_pl.backbones.loading import Backbone
from brainet_pl.callbacks import Evaluation, FeatureCache, PredictionFile
from brainet_pl.datamodules import Digits
from brainet_pl.evaluation.report.read import read_record
from brainet_pl.lightning.pretrained import from_pretrained, save_pretrained
from brainet_pl.network import Linear, Tree
from brainet_pl.scores import Mahalanobis
from brainet_pl.serving import ExportedModel

ROWS, MOST_SECONDS = 400, 120.0
SIGNALS = {"SIGKILL": 16, "SIGTERM": 4, "SIGINT": 4}  # name → how many are to end a writer at each door
FULL_DISKS, CAN_WRITE_ANYWHERE = 4, 1  # the latter is CAP_DAC_OVERRIDE of Linux
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Door(NamedTuple):
    """Something that writes.

    Attributes:
        write: Does it, in a folder.
        read: Reads what is there, and raises where that is not whole.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


class Models:
    """One small fitted model of each kind; children inherit them."""

    def __init__(self, folder: Path) -> None:
        pl.seed_everything(0, verbose=False)
        self.folder, self.data = folder, Digits(batch_size=64)
        self.model = BRAINet(8, head=Linear(), scores=[Mahalanobis()])
        self.trainer(folder).fit(self.model, datamodule=self.data)
        x = np.random.default_rng(0).normal(size=(ROWS, 4)).cumsum(axis=1)
        y = (x[:, 3] > 0).astype(int)
        self.x = torch.tensor(x, dtype=torch.float32)
        self.estimator = BRAINetClassifier(max_epochs=1, members=1).fit(x, y)
        data = TensorDataset(self.x, torch.tensor(y))
        self.swapped = swap_head(self.network(), data, num_classes=2, head=Tree(num_params=300), progress=False)

    def trainer(self, folder: Path, *callbacks: Any) -> pl.Trainer:
        """A quiet trainer of one epoch."""
        return pl.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, callbacks=[*callbacks], **QUIET)

    def network(self) -> nn.Module:
        """What a head is swapped into."""
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

    def doors(self) -> dict[str, Door]:
        """Name → a door."""
        return {
            "prediction": Door(self.predict, self.read_predictions),
            "test": Door(self.test, self.read_test),
            "feature cache": Door(self.fit_from_cache, self.fit_from_cache),
            "export": Door(self.export, self.read_export),
            "hub folder": Door(self.share, lambda folder: from_pretrained(folder / "hub")),
            "estimator": Door(
                lambda folder: self.estimator.save(folder / "estimator.pt"),
                lambda folder: BRAINetClassifier.load(folder / "estimator.pt").predict(self.x.numpy()),
            ),
            "swapped model": Door(
                lambda folder: self.swapped.save(folder / "swapped.pt"),
                lambda folder: load_swapped(folder / "swapped.pt", self.network())(self.x),
            ),
        }

    def predict(self, folder: Path) -> None:
        """A prediction of inputs in many batches."""
        inputs = DataLoader(TensorDataset(torch.rand(ROWS, 64)), batch_size=5)
        self.trainer(folder, PredictionFile()).predict(self.model, inputs, return_predictions=False)

    def read_predictions(self, folder: Path) -> None:
        """All rows, in their order."""
        with (folder / "predictions.csv").open(newline="") as file:
            places = [int(row["sample"]) for row in csv.DictReader(file)]
        assert places == list(range(ROWS)), f"{len(places)} of {ROWS} rows"

    def test(self, folder: Path) -> None:
        """A test with its record and page."""
        self.trainer(folder, Evaluation(figures=False)).test(self.model, datamodule=self.data, verbose=False)

    def read_test(self, folder: Path) -> None:
        """A record, and a page that ends."""
        assert read_record(folder) is not None
        assert (folder / "report.html").read_text().rstrip().endswith("</html>")
        with (folder / "scores.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert all(None not in row.values() for row in rows), "a row of scores.csv that is cut"

    def fit_from_cache(self, folder: Path) -> None:
        """A fit from stored features, which has to give the same weights whatever is stored."""
        pl.seed_everything(0, verbose=False)
        backbone = Backbone(nn.Sequential(nn.Linear(64, 16), nn.ReLU()), head_layer="")
        model = BRAINet(8, backbone=backbone, head=Linear())
        cache = FeatureCache(str(folder / "features"), progress=False)
        self.trainer(folder, cache).fit(model, datamodule=Digits(batch_size=64))
        total = sum(float(weights.detach().double().abs().sum()) for weights in model.parameters())
        known = self.folder / "total.txt"
        if not known.exists():
            known.write_text(repr(total))
        assert float(known.read_text()) == total, "other weights from stored features"

    def export(self, folder: Path) -> None:
        """An exported folder."""
        export_folder(self.model, folder / "export", torch.rand(4, 64))

    def read_export(self, folder: Path) -> None:
        """Answers of the exported model."""
        answers = ExportedModel(folder / "export", 1).predict(np.zeros((2, 64), dtype=np.float32))
        assert np.isfinite(answers["probabilities"]).all()

    def share(self, folder: Path) -> None:
        """A folder as hubs take it."""
        save_pretrained(self.model, folder / "hub")


# -- attacks ----------------------------------------------------------------------------------------------------------


def forked(call: Callable[[], Any], log: Path) -> int:
    """The process of a child that does something; it ends with 0, or with 1 and a traceback in the log."""
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status, out = 1, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        call()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(child: int) -> int:
    """The status that a child ends with, which it may take two minutes to."""
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError("still running")


class Attack:
    """One door in one folder, where it has written once.

    Args:
        door: what is attacked.
        folder: where.
    """

    def __init__(self, door: Door, folder: Path) -> None:
        self.door, self.folder, self.log = door, folder, folder.with_suffix(".log")
        folder.mkdir()
        start = time.monotonic()
        self.check(ended(forked(lambda: door.write(folder), self.log)) == 0, "the first write")
        self.seconds = time.monotonic() - start
        self.files = set(self.names())
        self.largest = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def names(self) -> Iterator[str]:
        """What is in the folder; numbers of versions aside."""
        return (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def check(self, right: bool, what: str) -> None:
        """Raise with the log of the child where something is wrong."""
        if not right:
            raise AssertionError(f"{what}\n{self.log.read_text()[-2000:]}")

    def check_whole(self, after: str) -> None:
        """What is there is whole."""
        self.check(ended(forked(lambda: self.door.read(self.folder), self.log)) == 0, f"not whole after {after}")

    def signalled(self, name: str, seconds: float) -> bool:
        """Whether a signal after so many seconds ended the writer."""
        child = forked(lambda: self.door.write(self.folder), self.log)
        time.sleep(seconds)
        os.kill(child, getattr(signal, name))  # it is not reaped yet, so this is nobody else's number
        status = ended(child)
        self.check_whole(name)
        return status != 0

    def full_disk(self, size: int) -> bool:
        """Whether a writer that may write so many bytes said that it could not, and named a file."""

        def write() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            self.door.write(self.folder)

        status = ended(forked(write, Path(os.devnull)))
        self.check_whole(f"a limit of {size} bytes")
        return status != 0

    def only_read(self) -> bool:
        """Whether a writer noticed that the folder can only be read."""
        folders = [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]
        with read_only(folders):
            status = ended(forked(lambda: (lose_privileges(), self.door.write(self.folder)), self.log))
        self.check_whole("a folder that can only be read")
        return status != 0

    def finish(self) -> list[str]:
        """Use the door once more; gives what was left that is none of its files."""
        time.sleep(2.5)  # a temporary file counts as left once it is two seconds old
        self.check(ended(forked(lambda: self.door.write(self.folder), self.log)) == 0, "a write after the attacks")
        self.check_whole("a last write")
        return sorted(set(self.names()) - self.files)


@contextmanager
def read_only(folders: Sequence[Path]) -> Iterator[None]:
    """No file of these folders can be made, renamed or deleted."""
    for folder in folders:
        folder.chmod(0o555)
    try:
        yield
    finally:
        for folder in folders:
            folder.chmod(0o755)


def lose_privileges() -> None:
    """Let permissions of files bind this process also where it is the administrator's (Linux)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    held = (ctypes.c_uint32 * 6)()
    system = ctypes.CDLL(None, use_errno=True)
    if system.capget(header, held) == 0:
        held[0] &= ~(1 << CAN_WRITE_ANYWHERE)
        system.capset(header, held)


def attack(name: str, door: Door, folder: Path, rng: random.Random, share: float) -> dict[str, Any]:
    """All attacks on one door: how many of each there were, how many ended the writer, and what was left or wrong."""
    tried: Counter[str] = Counter()
    stopped: Counter[str] = Counter()
    wrong: list[str] = []
    under = Attack(door, folder)

    def count(kind: str, call: Callable[[], bool]) -> None:
        tried[kind] += 1
        try:
            stopped[kind] += call()
        except (AssertionError, TimeoutError) as error:
            wrong.append(f"{name}, {kind}: {error}")

    for kind, times in SIGNALS.items():
        while stopped[kind] < max(1, times * share) and tried[kind] < max(3, 3 * times * share):
            moment = rng.random() * under.seconds  # some come when the writer is done
            count(kind, lambda kind=kind, moment=moment: under.signalled(kind, moment))  # type: ignore[misc]
    for _ in range(max(1, round(FULL_DISKS * share))):
        size = rng.randrange(under.largest)
        count("full disk", lambda size=size: under.full_disk(size))  # type: ignore[misc]
    count("read-only folder", under.only_read)
    left = under.finish()
    return {"tried": dict(tried), "ended": dict(stopped), "wrong": wrong, "left": left}


def attack_all(folder: Path, share: float = 1.0, seed: int = 0) -> dict[str, Any]:
    """Door → what came of the attacks on it."""
    rng, found = random.Random(seed), {}
    for name, door in Models(folder).doors().items():
        found[name] = attack(name, door, folder / name.replace(" ", "_"), rng, share)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str], out: Path) -> None:
    """Attack all doors, and write what came of it beside the other results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="other moments")
    parser.add_argument("--smoke", action="store_true", help="one attack of each kind")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = attack_all(Path(folder), 0.0 if args.smoke else 1.0, args.seed)
    results = json.loads(out.read_text()) if out.is_file() else {}
    results["doors"] = found
    results.setdefault("measured", {})["doors"] = stamp()
    write_whole(out, json.dumps(results, indent=1, sort_keys=True) + "\n")
