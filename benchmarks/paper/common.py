"""What all experiments of the paper share: data, features, one training loop, measures, resumable results, tables."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from brainet_pl import uncertainty
from brainet_pl.backbones import make_backbone, remove_head
from brainet_pl.head import BRAINetHead
from brainet_pl.metrics import classification_metrics
from brainet_pl.ood import ood_metrics, predictive_scores
from brainet_pl.structure import GGT
from brainet_pl.structure.ggt import Branch, Leaf, Node, Tree

RESULTS = Path(__file__).parents[2] / "docs" / "results"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the public ResNet-20's inputs
VALIDATION = 2000  # test images set aside: the public weights have seen all training images
COLUMNS = {"max_softmax": "max p", "entropy": "entropy", "mutual_information": "MI", "expected_entropy": "exp. entropy"}
Cell = dict[str, float]


def arguments(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options of every experiment."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--cache", type=Path, help="folder for extracted features; DIR/cache if not given")
    parser.add_argument("--seeds", type=int, default=defaults.get("seeds", 5))
    parser.add_argument("--epochs", type=int, default=defaults.get("epochs", 20))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and figures")
    return parser


# -- results ----------------------------------------------------------------------------------------------------------


class Store:
    """Finished cells in a JSON file: a run that was cut goes on where it stopped."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"settings": settings, "cells": {}}
        if path.is_file():
            found = json.loads(path.read_text())
            if found.get("settings") == json.loads(json.dumps(settings)):
                self.content = found
            else:
                print(f"{path} was made with other settings: starting anew")

    def cell(self, key: str, make: Callable[[], Any]) -> Any:
        """The stored cell, or a new one."""
        if key not in self.content["cells"]:
            self.content["cells"][key] = make()
            self.save()
        return self.content["cells"][key]

    def save(self) -> None:
        """Whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1, sort_keys=True) + "\n")
        os.replace(part, self.path)


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """mean ± standard deviation."""
    mean = statistics.fmean(values) * scale
    deviation = statistics.stdev(values) * scale if len(values) > 1 else 0.0
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as a Markdown table."""
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print("| " + " | ".join(str(v) for v in row) + " |")


# -- data -------------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Features and labels; `train` may hold several augmented copies of each image, `plain` holds the originals."""

    train: tuple[Tensor, Tensor]
    plain: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    ood: dict[str, Tensor]


def cifar_features(data: Path, cache: Path | None = None, copies: int = 4) -> Data:
    """Frozen ResNet-20 features (N, 64) of CIFAR-10, SVHN and TinyImageNet; extracted once, then from the cache.

    The backbone has seen all training images, so a part of them is no fair validation set: the first 2,000 test images
    are the validation data, and the other 8,000 are the test data.
    """
    folder = cache or data / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    body = None

    def features(name: str, copy: int = 0) -> tuple[Tensor, Tensor]:
        nonlocal body
        path = folder / f"resnet20_{name}_{copy}.pt"
        if not path.is_file():
            if body is None:
                body = remove_head(make_backbone("cifar_resnet20", str(data / "resnet20_cifar10.pth")), None).eval()
            with np.load(data / f"{name}.npz") as arrays:
                x, y = torch.from_numpy(arrays["x"]).permute(0, 3, 1, 2), torch.from_numpy(arrays["y"]).long()
            torch.save((_extract(body, x, copy), y), path)
        found: tuple[Tensor, Tensor] = torch.load(path)
        return found

    plain = features("cifar10_train")
    parts = [plain, *(features("cifar10_train", copy) for copy in range(1, copies))]
    x, y = features("cifar10_test")
    return Data(
        train=(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])),
        plain=plain,
        val=(x[:VALIDATION], y[:VALIDATION]),
        test=(x[VALIDATION:], y[VALIDATION:]),
        ood={"svhn": features("svhn_test10k")[0], "tiny": features("tinyimagenet32")[0]},
    )


def _extract(body: nn.Module, images: Tensor, copy: int) -> Tensor:
    """uint8 (N, 3, 32, 32) → features; every copy but the first is a random crop after padding by 4, and flips."""
    draw = torch.Generator().manual_seed(copy)
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    found = []
    with torch.no_grad():
        for part in tqdm(images.split(500), desc=f"features, copy {copy}", leave=False):
            x = (part.float() / 255 - mean) / std
            if copy:
                x = nn.functional.pad(x, (4, 4, 4, 4))
                at = torch.randint(9, (len(x), 2), generator=draw).tolist()
                flip = torch.rand(len(x), generator=draw) < 0.5
                x = torch.stack([image[:, i : i + 32, j : j + 32] for image, (i, j) in zip(x, at, strict=True)])
                x = torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)
            found.append(body(x))
    return torch.cat(found)


def mnist_pixels(data: Path, name: str = "MNIST", pool: int = 1) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(x, y) of training and test images, pixels (N, 784/pool²) between 0 and 1."""
    from torchvision import datasets

    source = getattr(datasets, name)
    splits = []
    for train in (True, False):
        found = source(str(data), train=train)
        x = found.data.float().unsqueeze(1) / 255
        x = nn.functional.avg_pool2d(x, pool) if pool > 1 else x
        splits.append((x.flatten(1), found.targets.long()))
    return splits[0], splits[1]


# -- models -----------------------------------------------------------------------------------------------------------


def shuffled(ggt: GGT, seed: int = 0) -> GGT:
    """The control: the same tree with its variables exchanged at random, so that the wiring is no longer the data's.

    Scores stay with their leaves, so the posterior over branches is the same.
    """
    new = np.random.default_rng(seed).permutation(ggt.num_variables)

    def rename(node: Tree) -> Tree:
        names = [int(new[v]) for v in node.variables]
        if isinstance(node, Leaf):
            parents = [tuple(int(new[p]) for p in pa) for pa in node.parents]
            order = np.argsort(names)
            return Leaf(tuple(names[i] for i in order), tuple(tuple(sorted(parents[i])) for i in order), node.score)
        branches = (Branch(tuple(rename(a) for a in b.ancestors), rename(b.descendant)) for b in node.branches)
        return Node(tuple(sorted(names)), tuple(branches))

    return GGT(rename(ggt.root), ggt.num_variables, ggt.num_rows, ggt.settings)


def train(
    head: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    lr: float = 1e-3,
    batch: int = 256,
    seed: int = 0,
    decay: bool = False,
    penalty: Callable[[], Tensor] | None = None,
    name: str = "",
) -> nn.Module:
    """Adam with a fixed rate (the paper), or decaying to 0 along a cosine; batches drawn by `seed`."""
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    steps = epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if decay else None
    draw = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(epochs), desc=name or type(head).__name__, leave=False):
        head.train()
        order = torch.randperm(len(x), generator=draw)
        for rows in order[: len(x) // batch * batch].view(-1, batch):
            optimizer.zero_grad()
            value = loss(head(x[rows]), y[rows])
            if penalty is not None:
                value = value + penalty()
            value.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return head.eval()


@torch.no_grad()
def outputs_of(head: nn.Module, x: Tensor, passes: int = 15, mode: str = "stochastic", seed: int = 0) -> Tensor:
    """(T, N, O) of a BRAINet head in one of its modes, or of any head for comparison."""
    torch.manual_seed(seed)
    found = []
    for part in x.split(2000):
        if not isinstance(head, BRAINetHead):
            found.append(head.passes(part, passes))
        elif mode == "simultaneous":
            found.append(head.simultaneous(part).unsqueeze(0))
        else:  # the same sub-networks for all parts
            found.append(head.stochastic(part, passes, generator=torch.Generator().manual_seed(seed)).logits)
    return torch.cat(found, dim=1)


# -- measures ---------------------------------------------------------------------------------------------------------


def quality(logits: Tensor, y: Tensor) -> Cell:
    """Error in %, NLL, Brier, ECE of the averaged prediction."""
    probs = uncertainty.predictive(logits.float().softmax(-1))
    return quality_of(probs, y)


def quality_of(probs: Tensor, y: Tensor) -> Cell:
    """The same of probabilities (N, C)."""
    metrics = classification_metrics(probs.shape[1], "")
    metrics.update(probs, y)
    found = {name: float(value) for name, value in metrics.compute().items()}
    renamed = {"nll": "cls/NLL", "brier": "cls/Brier", "ece": "cal/ECE"}
    return {"err": 100 * (1 - found["cls/Acc"])} | {name: found[key] for name, key in renamed.items()}


def separation(known: Tensor, unknown: dict[str, Tensor]) -> Cell:
    """Logits (T, N, C) of test and unknown inputs → AUROC and AUPR-out in %, by set and score."""
    inside = predictive_scores(known.softmax(-1), known)
    found = {}
    for name, logits in unknown.items():
        for score, values in predictive_scores(logits.softmax(-1), logits).items():
            measured = ood_metrics(inside[score], values)
            found[f"{name}/{score}/AUROC"] = 100 * measured["AUROC"]
            found[f"{name}/{score}/AUPR"] = 100 * measured["AUPR_out"]
    return found
