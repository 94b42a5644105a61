"""A head for every pixel of street scenes on a frozen ImageNet network, beside a linear layer on the same cells.

    python benchmarks/pixels.py --data DIR    # docs/results/pixels.json, some five minutes
    python benchmarks/pixels.py --smoke

Every third training scene of CamVid (123), and all 101 validation scenes to test on: nothing is chosen by them.
Features are the ends of the five stages of an EfficientNet-Lite0 on a grid of 48 × 64 cells, 40,000 cells in all. In
"left out", pixels of cars, pedestrians and bicyclists are void in training, and the unknown ones in the test. `--data`
needs camvid and efficientnet_lite0.pth, and the package efficientnet-lite-pytorch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.store import Store
from common.tables import markdown
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl import swap_pixels
from brainet_pl.metrics.pixels import PixelSums
from brainet_pl.swap.pixels import PixelModel
from brainet_pl.tasks.linear import SoftmaxLayer, fit_softmax

GRID, PIXELS, EVERY, VOID = (48, 64), 40_000, 3, 11
NAMES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"]
LEFT_OUT = (8, 9, 10)
OURS, LINEAR, HEAD = "brainet_pl", "linear layer", "brainet_pl before calibration"


class Scenes(NamedTuple):
    """Images (N, 3, H, W) and masks (N, H, W)."""

    images: Tensor
    masks: Tensor


class Named(torch.utils.data.TensorDataset):
    """Scenes with the names of their classes."""

    classes = NAMES


def camvid(data: Path, split: str, every: int = 1) -> Scenes:
    """Some scenes of one split."""
    files = sorted((data / "camvid" / split / "images").glob("*.jpg"))[::every]
    images = [torch.from_numpy(np.asarray(Image.open(file))).permute(2, 0, 1) for file in files]
    masks = [np.asarray(Image.open(file.parents[1] / "labels" / f"{file.stem}.png")) for file in files]
    return Scenes(torch.stack(images).float() / 127.5 - 1, torch.from_numpy(np.stack(masks)).long())


def simulated(count: int, seed: int) -> Scenes:
    """Noise whose mean is the class."""
    draw = torch.Generator().manual_seed(seed)
    masks = torch.randint(0, VOID + 1, (count, 6, 8), generator=draw).repeat_interleave(8, 1).repeat_interleave(8, 2)
    return Scenes(torch.randn(count, 3, 48, 64, generator=draw) / 4 + masks[:, None] / VOID, masks)


def network_of(data: Path | None) -> nn.Module:
    """The frozen classifier."""
    if data is None:
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    from efficientnet_lite_pytorch import EfficientNet

    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(data / "efficientnet_lite0.pth", weights_only=True))
    return network


@torch.no_grad()
def answers(model: PixelModel, layer: SoftmaxLayer, scenes: Scenes) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The mask of each scene, and what each head says of its cells."""
    for image, mask in zip(*scenes, strict=True):
        maps = model.maps(image[None])[0]
        cells = maps.flatten(1).t()
        said = model.rows.describe(model.rows.passes(cells)).to_dict()
        alone = model.rows.passes(cells).predicted
        linear = layer(cells)
        parts = {
            OURS: said,
            LINEAR: {"probabilities": linear, "entropy": torch.special.entr(linear).sum(dim=1)},
            HEAD: {"probabilities": alone, "entropy": torch.special.entr(alone).sum(dim=1)},
        }
        folded = {}
        for name, values in parts.items():
            maps_of = {key: part.t().reshape(*part.shape[1:], *maps.shape[1:]) for key, part in values.items()}
            folded[name] = maps_of | {"class": maps_of["probabilities"].argmax(dim=0)}
        at_cells = F.interpolate(mask[None, None].double(), maps.shape[1:], mode="nearest-exact")[0, 0].long()
        yield at_cells, folded


def measured(data: Path | None, train: Scenes, test: Scenes, unknown: tuple[int, ...], seed: int) -> dict[str, Any]:
    """All measures of one fit, at the cells, and of ours at all pixels too."""
    classes = len(NAMES) - len(unknown)
    odd = torch.isin(train.masks, torch.tensor(unknown, dtype=torch.long))
    known = Named(train.images, train.masks.masked_fill(odd, VOID))
    known.classes = NAMES[:classes]
    grid = None if data is None else GRID
    model = swap_pixels(network_of(data), known, classes, grid=grid, ignore_index=VOID, progress=False)
    start = time.process_time()
    cells = model.sample_cells(torch.utils.data.DataLoader(known, 16), "train", PIXELS, seed)
    features = time.process_time() - start
    start = time.process_time()
    layer = fit_softmax(cells.features, cells.labels, classes)
    linear_seconds = time.process_time() - start
    assert layer is not None
    start = time.process_time()
    model.fit(pixels=PIXELS, seed=seed, progress=False)
    seconds = {"features": features, LINEAR: linear_seconds, OURS: time.process_time() - start - features}
    sums = {name: PixelSums(classes, VOID, unknown) for name in (OURS, LINEAR, HEAD)}
    gaps = []
    for mask, folded in answers(model, layer, test):
        there = torch.isin(mask, torch.tensor(unknown, dtype=torch.long))
        nll = {}
        for name, said in folded.items():
            one = PixelSums(classes, VOID)
            for total in (sums[name], one):
                total.update(said, mask.masked_fill(there, VOID), there)
            nll[name] = one.compute()["NLL"]
        gaps.append(nll[LINEAR] - nll[OURS])
    gap = torch.tensor(gaps)
    whole = model.measure(test, unknown).compute()
    return {
        "cells": {name: total.compute() for name, total in sums.items()},
        "pixels": whole,
        "seconds": seconds,
        "gain": [float(gap.mean()), float(gap.std()) / math.sqrt(len(gap))],
        "used": str(model.rows.comparison),
        "_model": model,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure all seeds; finished ones are kept."""
    args = parse(arguments(__doc__, seeds=1), argv)
    torch.set_num_threads(1)
    settings = {"grid": GRID, "pixels": PIXELS, "every": EVERY, "left out": [NAMES[i] for i in LEFT_OUT]}
    store = Store(args.out / "pixels.json", settings)
    if args.data is None:
        train, test = simulated(12, 0), simulated(4, 1)
    else:
        train, test = camvid(args.data, "train", EVERY), camvid(args.data, "val")
    for seed in range(args.seeds):
        for name, unknown in (("all classes", ()), ("left out", LEFT_OUT)):

            def make(unknown: tuple[int, ...] = unknown, seed: int = seed) -> dict[str, Any]:
                found = measured(args.data, train, test, unknown, seed)
                model = found.pop("_model")
                if unknown and not seed:
                    model.report(args.out / "pixels.png", test, unknown, images=3)
                return found

            print(name, seed, store.cell(f"{name}/{seed}", make), flush=True)
    print(summary(store.content["cells"]))


def summary(cells: dict[str, Any]) -> str:
    """Means over seeds, at the cells."""
    rows = []
    for name in (LINEAR, HEAD, OURS):
        known = [cell["cells"][name] for key, cell in cells.items() if key.startswith("all classes/")]
        odd = [cell["cells"][name] for key, cell in cells.items() if key.startswith("left out/")]
        means = {key: sum(one[key] for one in known) / len(known) for key in ("NLL", "accuracy", "mIoU", "ECE")}
        shares = [f"{100 * means[key]:.1f}" for key in ("accuracy", "mIoU")]
        rows.append([name, f"{means['NLL']:.3f}", *shares, f"{means['ECE']:.3f}"])
        for key in ("entropy/AUROC", "entropy/FPR95"):
            rows[-1].append(f"{100 * sum(one[key] for one in odd) / len(odd):.1f}" if odd else "–")
        for key in ("unlike/AUROC", "unlike/FPR95"):
            there = [one[key] for one in odd if key in one]
            rows[-1].append(f"{100 * sum(there) / len(there):.1f}" if there else "–")
    header = ["head", "NLL", "accuracy, %", "mIoU, %", "ECE", "AUROC of classes left out, by entropy", "FPR95"]
    header += ["AUROC by `known_p`", "FPR95"]
    gains = [cell["gain"] for key, cell in cells.items() if key.startswith("all classes/")]
    seconds = [cell["seconds"][OURS] for cell in cells.values()]
    gain = f"{gains[0][0]:.3f} ± {gains[0][1]:.3f}"
    return (
        f"{markdown(header, rows)}\n\nThe NLL of a scene is lower than the linear layer's by {gain} (standard error "
        f"over scenes, which follow one another in a drive). Processor time of a fit without features: "
        f"{', '.join(f'{one:.0f} s' for one in seconds)}."
    )


if __name__ == "__main__":
    main()
