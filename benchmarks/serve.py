"""A served model beside its bare backbone: throughput, latency, and a stop under load.

A frozen ResNet-20 with a linear head, a density and calibration on CIFAR-10 is exported and served by `brainet serve`.
"Bare" is backbone and last layer alone as ONNX, in onnxruntime, one thread, in this process. Requests carry one image
file each, over the loopback, from so many clients at a time.

    python benchmarks/serve.py --data DIR
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import torch
from common.command import arguments, parse
from common.data import BACKBONE, MEAN, STD
from common.store import Store
from common.tables import table
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet, ExportedModel, export_folder
from brainet_pl._utils.framework import pl
from brainet_pl.backbones.cifar import CifarResNet
from brainet_pl.backbones.loading import Backbone
from brainet_pl.calibration import TemperatureScaling
from brainet_pl.network import Linear
from brainet_pl.scores import Mahalanobis
from brainet_pl.serving.images import ImageSteps

ROOT = Path(__file__).parents[1]
STEPS = ImageSteps(32, 32, tuple(MEAN), tuple(STD))
CLIENTS = (1, 8)
LOST = (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)  # the model saw nothing of it


def images(data: Path | None, name: str, count: int) -> tuple[Any, Tensor]:
    """Bytes (N, 32, 32, 3) and labels (N,)."""
    if data is None:
        draw = np.random.default_rng(len(name))
        return draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), torch.arange(count) % 10
    with np.load(data / f"{name}.npz") as arrays:
        return arrays["x"][:count], torch.from_numpy(arrays["y"][:count].astype(np.int64))


def scaled(x: Any) -> Tensor:
    """Bytes (N, H, W, C) → what the network reads."""
    return torch.from_numpy(np.stack([STEPS.finish(one.transpose(2, 0, 1)) for one in x]))


def fitted(data: Path | None, count: int, epochs: int) -> BRAINet:
    """The model that is served."""
    pl.seed_everything(0, verbose=False)
    if data is None:
        backbone = Backbone(CifarResNet(20), head_layer="linear", layers=None)
    else:
        backbone = Backbone("cifar_resnet20", str(data / BACKBONE), layers=None)
    model = BRAINet(10, backbone=backbone, head=Linear(), scores=[Mahalanobis()], calibration=TemperatureScaling())
    x, y = images(data, "cifar10_train", count)
    parts = [(scaled(x[a:b]), y[a:b]) for a, b in ((0, count * 3 // 4), (count * 3 // 4, count))]
    loaders = [DataLoader(TensorDataset(*part), 128) for part in parts]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **quiet).fit(model, *loaders)
    return model.eval()


class Bare(nn.Module):
    """Features and one linear layer, as anybody would serve them."""

    def __init__(self, model: BRAINet, width: int) -> None:
        super().__init__()
        self.body, self.last = model.predictor.backbone, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs → probabilities (B, 10)."""
        found: Tensor = self.last(self.body(x)).softmax(1)
        return found


def bare_session(model: BRAINet, folder: Path) -> onnxruntime.InferenceSession:
    """The bare backbone in onnxruntime, one thread."""
    x = torch.zeros(4, 3, 32, 32)
    with torch.no_grad():
        bare = Bare(model, model.predictor.backbone(x).shape[1]).eval()
        path = str(folder / "bare.onnx")
        torch.onnx.export(
            bare, (x,), path, input_names=["input"], dynamic_shapes={"x": {0: "batch"}}, dynamo=True, verbose=False
        )
    return session_of(path)


def session_of(path: str | Path) -> onnxruntime.InferenceSession:
    """A graph in onnxruntime, one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def measured(call: Callable[[], Any], count: int, images_each: int) -> dict[str, float]:
    """The summary of so many calls in this process."""
    used = time.process_time()
    seconds = timed(call, count)
    return summary(seconds, (time.process_time() - used) / ((count + 1) * images_each), images_each)


def timed(call: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of so many calls."""
    call()
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def summary(
    seconds: list[float], processor: float, images_each: int = 1, wall: float | None = None
) -> dict[str, float]:
    """Median and 99th percentile of calls and processor time of an image in milliseconds, and images in a second."""
    total = sum(seconds) if wall is None else wall
    return {
        "median, ms": 1e3 * float(np.median(seconds)),
        "p99, ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "images/s": images_each * len(seconds) / total,
        "processor, ms": 1e3 * processor,
    }


def alarm_cost(model: ExportedModel, x: Any, count: int) -> dict[str, float]:
    """The monitor's time after each prediction, with all features; beside it the share of the prediction's own."""
    monitor = model.monitor()
    assert monitor is not None
    spent: list[tuple[float, float, float]] = []
    for _ in range(count):
        begin = time.process_time()
        outputs = model.predict(x)
        between, wall = time.process_time(), time.perf_counter()
        monitor.update(model.signals(outputs))
        spent.append((between - begin, time.process_time() - between, time.perf_counter() - wall))
    inference, watching, _ = np.median(spent, axis=0) / len(x)
    return summary([one[2] for one in spent], watching, len(x)) | {"share of inference": watching / inference}


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`brainet serve` in a process of its own, and its address."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "brainet_pl.cli", "serve", str(folder), "--port", "0"]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"serving on (\S+)", line):
            return server, found[1]
    raise RuntimeError("the server did not start")


def processor_seconds(pid: int) -> float:
    """What a process has used so far; unlike latency it hardly depends on what else the machine does."""
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def ask(server: int, address: str, files: list[bytes], clients: int, requests: int) -> dict[str, float]:
    """Latency, throughput and the server's processor time of so many clients, each with its connection."""

    def one(number: int) -> list[float]:
        with httpx.Client(timeout=60) as client:
            place = iter(range(10**9))

            def send() -> None:
                file = files[(number + next(place)) % len(files)]
                client.post(f"{address}/predict/images", files={"f": file}).raise_for_status()

            return timed(send, requests)

    begin, used = time.perf_counter(), processor_seconds(server)
    with ThreadPoolExecutor(clients) as crowd:
        seconds = [value for part in crowd.map(one, range(clients)) for value in part]
    each = (processor_seconds(server) - used) / (clients * (requests + 1))
    return summary(seconds, each, wall=time.perf_counter() - begin)


def stopped(server: subprocess.Popen[str], address: str, files: list[bytes]) -> dict[str, float]:
    """SIGTERM while eight clients ask: inputs that the model saw and nobody was told of."""
    counted = re.search(r"^brainet_inputs_total (\S+)$", httpx.get(f"{address}/metrics").text, re.M)
    before = int(float(counted[1])) if counted else 0
    answered, begun = [], threading.Event()

    def one(_: int) -> None:
        with httpx.Client(timeout=60) as client:
            while True:
                try:
                    client.post(f"{address}/predict/images", files={"f": files[0]}).raise_for_status()
                except LOST:
                    return
                answered.append(1)
                if len(answered) > 30:
                    begun.set()

    with ThreadPoolExecutor(8) as crowd:
        asked = [crowd.submit(one, i) for i in range(8)]
        begun.wait(60)
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=60)
        for task in asked:
            task.result(timeout=60)
    seen = int(re.search(r"requests, (\d+) inputs", said)[1]) - before  # type: ignore[index]
    return {"answered": float(len(answered)), "lost": float(seen - len(answered)), "exit": float(server.returncode)}


def main(argv: list[str] | None = None) -> None:
    """Measure it all."""
    parser = arguments(__doc__, epochs=2)
    parser.add_argument("--requests", type=int, default=100, help="of every client")
    args = parse(parser, argv)
    torch.set_num_threads(1)
    requests, count = (20, 1200) if args.smoke else (args.requests, 2000)
    load = None if args.smoke else round(os.getloadavg()[0], 1)  # of the machine before anything was measured
    store = Store(args.out / "serve.json", {"requests": requests, "epochs": args.epochs, "load": load})
    with tempfile.TemporaryDirectory() as scratch:
        model = fitted(args.data, count, args.epochs)
        x, _ = images(args.data, "cifar10_test", count // 2)
        folder = export_folder(model, Path(scratch) / "model", held=scaled(x[: count // 4]), images=STEPS)
        x = x[count // 4 :]
        files = []
        for one in x[:50]:
            file = io.BytesIO()
            Image.fromarray(one).save(file, "PNG")
            files.append(file.getvalue())
        given = scaled(x).numpy()
        bare, whole = bare_session(model, Path(scratch)), ExportedModel(folder, 1)
        lines = {}
        for size in (1, 64):
            part = given[:size]
            for label, call in {
                "bare backbone": lambda part=part: bare.run(None, {"input": part}),
                "exported folder": lambda part=part: whole.predict(part),
            }.items():
                lines[f"{label}, {size} at a time"] = measured(call, max(5, requests // size), size)
        for size in (64, 256):
            lines[f"drift alarm, {size} at a time"] = alarm_cost(whole, given[:size], max(9, requests // 8))
        server, address = start(folder)
        try:
            for clients in CLIENTS:
                lines[f"served, {clients} clients"] = ask(server.pid, address, files, clients, requests)
            for line, cells in lines.items():
                store.cell(line, lambda cells=cells: cells)
            store.cell("stop under load", lambda: stopped(server, address, files))
        finally:
            server.kill()
    cells = store.content["cells"]
    columns = ("median, ms", "p99, ms", "images/s", "processor, ms")
    table(["", *columns], [[line, *(cells[line][key] for key in columns)] for line in lines])
    print("stop under load", cells["stop under load"])
    for size in (64, 256):
        share = cells[f"drift alarm, {size} at a time"]["share of inference"]
        print(f"drift alarm, {size} inputs at a time: {share:.2%} of the exported model's processor time")


if __name__ == "__main__":
    main()
