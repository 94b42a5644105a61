"""The compiled head beside an MLP of equal size and layers: time and memory, as ratios within one run.

    python benchmarks/head.py            # docs/results/head.json
    python benchmarks/head.py --smoke    # shows in a few seconds that everything works

Batch 256; 16k and 240k parameters; 64, 512 and 784 features. MC-dropout runs on the MLP, its passes folded into one
large batch or one after the other, whichever is faster. Then a whole network: a ResNet-18 at 224 pixels by itself, with
its head swapped, and with all that `predict` says, in seconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torchvision
from common.command import add_out, results_folder
from common.data import relu_features
from common.store import stamp, write_whole
from common.tables import table
from common.timing import race
from common.training import loss
from torch import Tensor, nn

from brainet_pl import swap_head
from brainet_pl.network import BRAINetHead
from brainet_pl.network.mlp import hidden_width, mlp_layers
from brainet_pl.structure import GGT, learn_structure

CLASSES, BATCH, PASSES = 10, 256, 15
STAGES = [f"layer{i}" for i in (1, 2, 3, 4)]  # of a ResNet
EVERY = 10**6  # draws: as many as it takes for every branch of every node


def mlp(d: int, depth: int, num_params: int, dropout: float = 0.0) -> nn.Sequential:
    """dense → batch norm → ReLU, `depth` times with equal widths, then a dense output; nearest to the budget."""
    return mlp_layers(d, CLASSES, depth, hidden_width(d, CLASSES, depth, num_params), dropout)


def train_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward, backward, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def memory(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Bytes that a training step keeps for its backward pass, with gradients and the optimizer's two moments."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss(model(x), y)
    return sum(kept.values()) + 3 * sum(p.numel() * p.element_size() for p in model.parameters())


def mc_dropout(model: nn.Sequential, x: Tensor, folded: bool) -> Callable[[], Tensor]:
    """T passes with dropout on and batch norm in evaluation."""
    model.eval()
    for module in model:
        module.train(isinstance(module, nn.Dropout))

    def passes() -> Tensor:
        with torch.no_grad():
            if folded:
                return model(x.repeat(PASSES, 1)).view(PASSES, len(x), -1)
            return torch.stack([model(x) for _ in range(PASSES)])

    return passes


def compare(ggt: GGT, d: int, num_params: int, seconds: float) -> dict[str, Any]:
    """All ratios for one tree and size."""
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, d), torch.randint(CLASSES, (BATCH,))
    flat = mlp(d, max(1, ggt.depth), num_params)
    kinds: dict[str, dict[str, Any]] = {
        "all": {},
        "every": {"draws": EVERY},
        "sample": {"draws": 1},
        "batch": {"draws": 1, "sampling": "batch"},
    }
    heads = {name: BRAINetHead(ggt, CLASSES, num_params=num_params, **kind) for name, kind in kinds.items()}
    steps = {"mlp": train_step(flat, x, y)} | {name: train_step(head, x, y) for name, head in heads.items()}
    train = {name: found.median for name, found in race(steps, seconds).items()}
    ratio_memory = memory(heads["all"], x, y) / memory(flat, x, y)
    head, dropped = heads["all"].eval(), mlp(d, max(1, ggt.depth), num_params, dropout=0.1)
    flat.eval()

    def quiet(call: Callable[[Tensor], Any]) -> Callable[[], Any]:
        return torch.no_grad()(lambda: call(x))

    found = race(
        {
            "mlp": quiet(flat),
            "simultaneous": quiet(head.simultaneous),
            "stochastic": quiet(lambda x: head.stochastic(x, PASSES)),
            "folded": mc_dropout(dropped, x, True),
            "looped": mc_dropout(mlp(d, max(1, ggt.depth), num_params, dropout=0.1), x, False),
        },
        seconds,
    )
    infer = {name: times.median for name, times in found.items()}
    sampled = [head.plan.multiply_adds(dict(ggt.path(g))) for g in ggt.sample_uniform(100)]
    return {
        "features": d,
        "parameters": head.num_params,
        "sub-networks": ggt.num_subnetworks,
        "buckets": [[b.shape for b in level.buckets] for level in head.plan.levels],
        "mlp step ms": 1e3 * train["mlp"],
        "step / MLP": train["all"] / train["mlp"],
        "step / MLP, every branch": train["every"] / train["mlp"],
        "step / MLP, one draw": train["sample"] / train["mlp"],
        "step / MLP, one a batch": train["batch"] / train["mlp"],
        "simultaneous / MLP": infer["simultaneous"] / infer["mlp"],
        "15 passes / MC-dropout": infer["stochastic"] / min(infer["folded"], infer["looped"]),
        "memory / MLP": ratio_memory,
        "operations of a sampled network": float(np.mean(sampled)) / head.plan.multiply_adds(),
    }


def whole_network(layers: list[str] | None, size: int, seconds: float) -> dict[str, Any]:
    """A ResNet-18 of 1,000 classes whose head is swapped for one of 10, for one image and for 16 at a time."""
    torch.manual_seed(0)
    y = torch.arange(900) % CLASSES
    x = torch.rand(900, 3, 64, 64) + y[:, None, None, None] / CLASSES
    network = torchvision.models.resnet18().eval()
    swapped = swap_head(network, (x[:600], y[:600]), held=(x[600:], y[600:]), layers=layers).fit(
        max_epochs=2, progress=False
    )
    found: dict[str, Any] = {
        "layers": "the last" if layers is None else "all four stages",
        "features": swapped.head.ggt.num_variables,
    }
    for batch in (1, 16):
        images = torch.rand(batch, 3, size, size)
        calls = {"network": network, "swapped": swapped.eval(), "predict": swapped.predict}
        timed = {name: torch.no_grad()(lambda call=call, images=images: call(images)) for name, call in calls.items()}
        times = {name: t.median for name, t in race(timed, seconds, clock=time.process_time).items()}
        found |= {
            f"network ms, {batch}": 1e3 * times["network"] / batch,
            f"swapped / network, {batch}": times["swapped"] / times["network"],
            f"predict / network, {batch}": times["predict"] / times["network"],
        }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each race")
    add_out(parser)
    args = parser.parse_args(argv)
    if args.smoke:
        args.seconds = 0.1
    rows = []
    for d in (64,) if args.smoke else (64, 512, 784):
        for threshold in (0.05, 0.15):
            ggt = learn_structure(
                relu_features(5000, d), bootstrap="paper", test="gaussian", threshold=threshold, progress=False
            )
            for num_params in (16_000, 240_000):
                try:
                    row = compare(ggt, d, num_params, args.seconds)
                except ValueError as error:
                    print(f"d = {d}, threshold {threshold}, {num_params:,} parameters: {error}")
                    continue
                rows.append(row | {"threshold": threshold})
                print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    header = [k for k in rows[0] if k != "buckets"]
    table(header, [[row[k] for k in header] for row in rows])
    networks = [whole_network(layers, 64 if args.smoke else 224, 5 * args.seconds) for layers in (None, STAGES)]
    table(list(networks[0]), [list(row.values()) for row in networks])
    content = {"measured": stamp(), "rows": rows, "networks": networks}
    write_whole(results_folder(args) / "head.json", json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
