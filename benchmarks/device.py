"""What the heads cost on your device, in five minutes: please send the printed table and device.json back.

    python benchmarks/device.py            # a GPU where there is one; device.json in docs/results
    python benchmarks/device.py --smoke    # shows in seconds, on a CPU, that everything works
    python benchmarks/device.py --expected # the table of docs/howto/machines.md, from arithmetic alone

Linear, an MLP of equal size and a tree: a training step, a prediction, their peak memory, what the host waits for, and
the same compiled and as CUDA graphs; beside them, the network that extracts the features. Times are medians in turns;
`held_bytes` is what a step keeps until its end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchvision
from common.arithmetic import A100, Work, all_reduce_seconds, count
from common.command import add_out, results_folder
from common.data import relu_features
from common.store import write_whole
from common.tables import table
from common.timing import race
from common.training import loss
from head import memory
from torch import Tensor

from brainet_pl.network import MLP, Head, Linear, Tree
from brainet_pl.network.base import run_head, train_head
from brainet_pl.structure import learn_structure

PASSES = 15
NETWORKS = {"ResNet-50": ("resnet50", 2048), "ViT-B/16": ("vit_b_16", 768)}


def heads(d: int, classes: int, rows: int) -> dict[str, Head]:
    """A linear layer, a tree of features that depend on each other, and an MLP of as many parameters."""
    ggt = learn_structure(relu_features(rows, d), progress=False, max_order=0 if d > 256 else 1)
    tree = Tree().build(d, classes, ggt)
    return {
        "linear": Linear().build(d, classes),
        "MLP": MLP(num_params=tree.num_params).build(d, classes),
        "tree": tree,
    }


def gradients(head: Head, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        head.train()
        head.zero_grad()
        loss(train_head(head, x, None), y).backward()

    return run


def training_step(head: Head, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward, backward, Adam."""
    optimizer, run = torch.optim.Adam(head.parameters(), lr=1e-3), gradients(head, x, y)

    def step() -> None:
        run()
        optimizer.step()

    return step


def prediction(head: Head, x: Tensor) -> Callable[[], Tensor]:
    """Averaged probabilities (B, C) of `PASSES` passes."""

    @torch.no_grad()
    def predict() -> Tensor:
        head.eval()
        found = run_head(head, x, PASSES, None)
        probs = found.values.softmax(dim=-1)
        return probs.mean(dim=0) if found.weights is None else torch.einsum("t...,t->...", probs, found.weights)

    return predict


def waited(call: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """A call that ends when the device has finished."""

    def run() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def peak(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes of the device's memory at the most during a call; None on a CPU, where torch does not know."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    waited(call, device)()
    return torch.cuda.max_memory_allocated(device) - before


def variants(call: Callable[[], Any], device: torch.device, smoke: bool) -> dict[str, Callable[[], Any]]:
    """The call as it is, compiled, and on a GPU as CUDA graphs; those that fail are left out with a line."""
    found = {"": call}
    modes = {} if smoke else {" compiled": "default"}
    if device.type == "cuda":
        modes |= {" graph": "reduce-overhead"}
    for name, mode in modes.items():
        compiled = torch.compile(call, mode=mode)
        try:
            for _ in range(3):
                compiled()
        except Exception as error:  # a user sends the rest back all the same
            print(f"left out{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        found[name] = compiled
    return found


def measure(d: int, classes: int, batch: int, device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each head, work and variant."""
    torch.manual_seed(0)
    x = torch.rand(batch, d, device=device)
    y = torch.randint(classes, (batch,), device=device)
    calls, rows = {}, []
    for name, head in heads(d, classes, 200 if args.smoke else 2000).items():
        head.to(device).train()
        held = memory(head, x, y)
        for part, call in (("step", training_step(head, x, y)), ("predict", prediction(head, x))):
            work = count(call)
            if part == "step":  # Adam reads how often it has stepped, which lies in the host's memory
                work = work._replace(reads=count(gradients(head, x, y)).reads)
            for variant, run in variants(call, device, args.smoke).items():
                key = f"{part} {name}{variant}"
                calls[key] = waited(run, device)
                rows.append({"what": key, "part": part, "parameters": head.num_params, **work._asdict()})
                rows[-1] |= {"peak_bytes": peak(run, device), "held_bytes": held if part == "step" else None}
    times = race(calls, 1.0 if args.smoke else 60.0)
    for row in rows:
        row["seconds"] = times[row["what"]].median
        row["ratio_to_linear"] = row["seconds"] / times[f"{row['part']} linear"].median
        row["ratio_to_mlp"] = row["seconds"] / times[f"{row['part']} MLP"].median
    return rows


def extraction(device: torch.device, batch: int, smoke: bool) -> dict[str, Any]:
    """Seconds of a ResNet for a batch of images."""
    network = (torchvision.models.resnet18 if smoke else torchvision.models.resnet50)().eval().to(device)
    images = torch.rand(batch, 3, *([64] * 2 if smoke else [224] * 2), device=device)

    @torch.no_grad()
    def run() -> None:
        network(images)

    seconds = race({"": waited(run, device)}, 0.5 if smoke else 20.0)[""].median
    return {"what": f"extract {batch} images", "seconds": seconds, **count(run)._asdict()}


def expected(classes: int = 1000, batch: int = 128, rows: int = 1000) -> list[dict[str, Any]]:
    """Networks of `NETWORKS` with each head at 224 pixels: counted without a device, then divided by a data sheet."""
    found = []
    for title, (name, d) in NETWORKS.items():
        with torch.device("meta"):
            network = getattr(torchvision.models, name)().eval()
            images = torch.empty(batch, 3, 224, 224)
        with torch.no_grad():
            found.append({"what": f"{title}, forward", **on_paper(count(lambda: network(images)), 0)})  # noqa: B023
        for kind, head in heads(d, classes, rows).items():
            x, y = torch.rand(batch, d), torch.randint(classes, (batch,))
            step, predict = count(training_step(head, x, y)), count(prediction(head, x))
            found.append({"what": f"{title}, {kind}: step", **on_paper(step, head.num_params)})
            found.append({"what": f"{title}, {kind}: predict", **on_paper(predict, 0)})
    return found


def on_paper(work: Work, parameters: int) -> dict[str, float]:
    """Work with the least milliseconds on one A100, as a CUDA graph, and with gradients of eight of them summed."""
    shared = all_reduce_seconds(parameters, 8, A100)
    return {
        **work._asdict(),
        "ms": 1e3 * work.seconds(A100),
        "ms_graph": 1e3 * work.seconds(A100, graph=True),
        "ms_reduce_8": 1e3 * shared,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write device.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--expected", action="store_true", help="count and divide, measure nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    device, begun = torch.device(args.device), time.perf_counter()
    if args.expected:
        rows = expected(*((10, 8, 200) if args.smoke else (args.classes, args.batch)))
        kind = "arithmetic"
    else:
        d, classes, batch = (16, 5, 8) if args.smoke else (args.features, args.classes, args.batch)
        rows = [extraction(device, 2 if args.smoke else 64, args.smoke), *measure(d, classes, batch, device, args)]
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table(keys, ([_shown(row.get(key)) for key in keys] for row in rows))
    content = {"device": kind, "torch": torch.__version__, "seconds": time.perf_counter() - begun, "rows": rows}
    name = "device_expected.json" if args.expected else "device.json"
    write_whole(results_folder(args) / name, json.dumps(content, indent=1))


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
