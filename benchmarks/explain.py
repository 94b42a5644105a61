"""Whether an explanation points at what is strange: patches pasted into images, values changed in rows of tables.

    python benchmarks/explain.py --data DIR     # docs/results/explain.json, some ten minutes on one core
    python benchmarks/explain.py --smoke

`places`: a square of another data set is pasted into each of 60 known images: photographs of clothes into street scenes
(CamVid, EfficientNet-Lite0 of ImageNet), letters (notMNIST) into digits, house numbers (SVHN) into CIFAR-10. AUROC of
its pixels among all pixels, and pointing: the share of images whose strangest place lies in it. Learned wiring, as
`explain` has it, beside the same with the wiring of shuffled channels, without wiring, the nearest of 4,000 known cells
(as PatchCore, on the same stages, surprises and smoothing), the gradient of the energy times the last stage (as
Grad-CAM), and the parts of the pooled score that the verdict reads, which add up to it exactly.

`columns`: in each of 200 rows that were held out, one number is changed. "far" sets it four deviations from the mean of
its column, "another row's" takes the value of another row, which is usual by itself. Counted are rows whose score is
above that of 95 % of the rows held out after the change, and was not before. First is the column of the largest relief,
of the largest part of the score, of the largest distance from the mean in deviations, and whose median lowers the score
of an isolation forest most (the package shap was not at hand: this is its ablation).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from common.command import add_out, results_folder
from common.data import MEAN, STD, mnist_pixels
from common.store import Store
from PIL import Image
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl import Backbone, BRAINetClassifier
from brainet_pl.explain.places import HELD, CaughtMaps, tapped
from brainet_pl.scores import Stages
from brainet_pl.scores.cells import MOST_SIDE, CellDensity, StageMaps, rows_of
from brainet_pl.structure import learn_structure

KNOWN, PASTED, CELLS = 128, 60, 4000
TABLES = {"ionosphere": 34, "german": 20, "sonar": 60, "horse-colic": 22, "auto_imports": 25, "winequality-white": 11}
LABELS = {"horse-colic": 23, "auto_imports": 3}  # the last column of all others
CHANGED = 200


class Task(NamedTuple):
    """A network with its classification layer, known images, and images with a patch and where it is (N, H, W)."""

    network: nn.Module
    known: Tensor
    pasted: Tensor
    mask: Tensor


# -- places -----------------------------------------------------------------------------------------------------------


def paste(known: Tensor, patches: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Patches (N, C, s, s) at random places of images (N, C, H, W), and where they are."""
    rng, side = np.random.default_rng(seed), patches.shape[-1]
    found, mask = known.clone(), torch.zeros(len(known), *known.shape[2:])
    for row, patch in enumerate(patches):
        top, left = (int(rng.integers(0, size - side)) for size in known.shape[2:])
        found[row, :, top : top + side, left : left + side] = patch
        mask[row, top : top + side, left : left + side] = 1
    return found, mask


def read(files: Sequence[Path], size: tuple[int, int]) -> Tensor:
    """Photographs (N, 3, H, W) from -1 to 1."""
    images = [np.asarray(Image.open(file).convert("RGB").resize(size)) for file in files]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def streets(data: Path) -> Task:
    """Photographs of clothes in street scenes."""
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(data / "efficientnet_lite0.pth", weights_only=True))
    rng = np.random.default_rng(0)

    def some(pattern: str, count: int) -> list[Path]:
        files = sorted(data.glob(pattern))
        return [files[i] for i in rng.permutation(len(files))[:count]]

    known = read(some("camvid/train/images/*", KNOWN), (512, 384))
    test = read(some("camvid/val/images/*", PASTED), (512, 384))
    return Task(network, known, *paste(test, read(some("clothing/*/*/*.jpg", PASTED), (48, 48))))


def small_network() -> nn.Module:
    """Three stages and a classification layer for images of one channel."""

    def stage(inside: int, outside: int, stride: int) -> nn.Module:
        first = [nn.Conv2d(inside, outside, 3, stride, 1), nn.BatchNorm2d(outside), nn.ReLU()]
        return nn.Sequential(*first, nn.Conv2d(outside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU())

    stages = [stage(1, 16, 1), stage(16, 32, 2), stage(32, 64, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def digits(data: Path) -> Task:
    """Letters in digits."""
    (x, y), (test, _) = mnist_pixels(data)
    x, y, test = x[:5000].view(-1, 1, 28, 28), y[:5000], test.view(-1, 1, 28, 28)
    torch.manual_seed(0)
    network = small_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(240):
        rows = torch.randint(len(x), (64,))
        loss = F.cross_entropy(network.train()(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with np.load(data / "notmnist_test.npz") as arrays:
        letters = torch.from_numpy(arrays["x"][:PASTED]).float().view(PASTED, 1, 28, 28)
    letters = F.interpolate(letters / letters.max(), size=(10, 10), mode="area")
    return Task(network, x[:KNOWN], *paste(test[:PASTED], letters))


def objects(data: Path) -> Task:
    """House numbers in pictures of ten kinds of objects."""
    from brainet_pl.backbones.cifar import CifarResNet

    def images(name: str, count: int) -> Tensor:
        with np.load(data / f"{name}.npz") as arrays:
            x = torch.from_numpy(arrays["x"][:count]).permute(0, 3, 1, 2).float() / 255
        return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)

    weights = torch.load(data / "resnet20_cifar10.pth", map_location="cpu", weights_only=True)
    network = CifarResNet()
    network.load_state_dict({name.removeprefix("module."): v for name, v in weights.get("state_dict", weights).items()})
    patches = F.interpolate(images("svhn_test10k", PASTED), size=(12, 12), mode="area")
    return Task(network, images("cifar10_train", KNOWN), *paste(images("cifar10_test", PASTED), patches))


def smoke(data: Path | None = None) -> Task:
    """Noise in smooth images, by a network of random weights."""
    draw = torch.Generator().manual_seed(0)
    known = F.avg_pool2d(torch.randn(48, 1, 32, 32, generator=draw), 5, 1)
    return Task(small_network(), known[:40], *paste(known[40:], torch.randn(8, 1, 9, 9, generator=draw)))


class NearestCells(CellDensity):
    """The distance of a cell to the nearest of some known cells, in deviations."""

    def fit(self, cells: Tensor, tree: Any = None) -> NearestCells:
        """Keep some of the cells."""
        self.centre, self.deviation = cells.mean(dim=0), cells.std(dim=0).clamp_min(1e-6)
        self.bank = ((cells - self.centre) / self.deviation)[:CELLS]
        return self

    def forward(self, maps: Tensor) -> Tensor:
        """Maps (B, C, H, W) → the distance of each cell, (B, H, W)."""
        cells = (rows_of(maps) - self.centre) / self.deviation
        found = torch.cat([torch.cdist(part, self.bank).amin(dim=1) for part in cells.split(4096)])
        return found.view(len(maps), *maps.shape[2:])


def wired(change: str) -> Callable[[Tensor], CellDensity]:
    """Densities of cells with the wiring of shuffled channels, or with none."""

    def make(cells: Tensor) -> CellDensity:
        width = min(cells.shape[1], 128)
        columns = torch.randn(len(cells), width, generator=torch.Generator().manual_seed(1))  # depend on nothing
        if change == "shuffled":
            # The tree of the channels that are read, each under the name of another.
            chosen = torch.randperm(cells.shape[1], generator=torch.Generator().manual_seed(0))[:width].sort().values
            columns = cells[:, chosen][:, torch.randperm(width, generator=torch.Generator().manual_seed(1))]
        threshold = max(0.001, 6 / len(cells)) if change == "shuffled" else 9.0
        tree = learn_structure(columns, test="gaussian", threshold=threshold, bins=4, s=1, max_order=1, progress=False)
        return CellDensity().fit(cells, tree)

    return make


def places(task: Task) -> dict[str, Any]:
    """Every way to point, on one task."""
    score = Stages()
    backbone = Backbone(task.network.eval(), layers=None).build()
    backbone.add_view(score.taps)
    backbone.eval().trace(task.known[:2])
    taps = tapped(backbone, score)
    caught, parts = CaughtMaps(taps), []
    with torch.no_grad(), caught.catching(backbone):
        for batch in torch.cat([task.known, task.pasted]).split(16):
            backbone(batch)
            parts.append(caught.collect())
    maps = [torch.cat(stage) for stage in zip(*parts, strict=True)]
    count, held = len(task.known), torch.arange(len(task.known)) % HELD == HELD - 1
    fitted, others = ([[stage[:count][rows]] for stage in maps] for rows in (~held, held))
    made: dict[str, Callable[[Tensor], CellDensity] | None] = {
        "learned": None,
        "shuffled": wired("shuffled"),
        "no edges": wired("none"),
        "nearest cells": lambda cells: NearestCells().fit(cells),
    }
    found: dict[str, Any] = {}
    new = [stage[count:] for stage in maps]
    for name, make in made.items():
        found[name] = pointed(StageMaps().fit(fitted, others, make)(new).surprise, task.mask)
    found["energy gradient"] = pointed(energy_gradient(task.network, task.pasted), task.mask)
    found["parts of the pooled score"] = pointed(pooled_parts(maps, count), task.mask)
    return found


def energy_gradient(network: nn.Module, images: Tensor) -> Tensor:
    """The last map times the mean gradient of the energy, absolute (Grad-CAM with the energy in place of a class)."""
    backbone = Backbone(network, layers=None).build()
    score = Stages()
    backbone.add_view(score.taps)
    backbone.trace(images[:2])
    layer, found = tapped(backbone, score)[-1].layer, []
    for batch in images.split(16):
        kept: list[Tensor] = []
        handle = network.get_submodule(layer).register_forward_hook(lambda *passed, kept=kept: kept.append(passed[2]))
        energy = -network(batch.clone().requires_grad_()).logsumexp(dim=1).sum()
        handle.remove()
        (slope,) = torch.autograd.grad(energy, kept)
        found.append((slope.mean(dim=(2, 3), keepdim=True) * kept[0]).sum(dim=1).abs().detach())
    return torch.cat(found)


def pooled_parts(maps: Sequence[Tensor], count: int) -> Tensor:
    """Each place's part in the pooled scores of all stages: means and deviations are themselves means over places."""
    size, total = maps[0].shape[2:], torch.zeros(len(maps[0]) - count, *maps[0].shape[2:])
    for stage in maps:
        pooled = torch.cat([stage.mean(dim=(2, 3)), stage.flatten(2).std(dim=2, correction=0)], dim=1)
        mean = pooled[:count].mean(dim=0)
        density = CellDensity().fit(pooled[:count])
        error = pooled[count:][:, density.channels] @ density.weight - density.bias
        slope = torch.zeros(len(error), pooled.shape[1])
        slope[:, density.channels] = error @ density.weight.T / density(pooled[:count, :, None, None]).std()
        new, channels = stage[count:], stage.shape[1]
        centre = new.mean(dim=(2, 3), keepdim=True)
        spread = (new - centre).square() / pooled[count:, channels:, None, None].clamp_min(1e-6)
        both = torch.cat([new - mean[:channels, None, None], spread - mean[channels:, None, None]], dim=1)
        part = (slope[:, :, None, None] * both).sum(dim=1, keepdim=True)
        total += F.interpolate(part, size=size, mode="bilinear")[:, 0]
    return F.avg_pool2d(total[:, None], 3, 1, 1, count_include_pad=False)[:, 0]


def pointed(heat: Tensor, mask: Tensor) -> dict[str, Any]:
    """AUROC of pixels and pointing of each image, (N,)."""
    side = MOST_SIDE if max(mask.shape[1:]) > 4 * MOST_SIDE else max(mask.shape[1:])
    size = [round(side * length / max(mask.shape[1:])) for length in mask.shape[1:]]
    heat = F.interpolate(heat[:, None], size=size, mode="bilinear")[:, 0]
    inside = F.interpolate(mask[:, None], size=size, mode="area")[:, 0] > 0.5
    pixels = [roc_auc_score(i.flatten().numpy(), h.flatten().numpy()) for i, h in zip(inside, heat, strict=True)]
    hits = [bool(i.flatten()[h.argmax()]) for i, h in zip(inside, heat, strict=True)]
    return {"pixels": [round(value, 4) for value in pixels], "hits": [float(hit) for hit in hits]}


# -- columns ----------------------------------------------------------------------------------------------------------


def columns(frame: pd.DataFrame, label: int) -> dict[str, Any]:
    """How often the changed column of a row is named first, by each way to rank columns."""
    y = frame.iloc[:, label].astype(str)
    y = y.where(y.map(y.value_counts()) >= 10, "other").to_numpy() if y.nunique() < 20 else y > y.median()
    x = frame.drop(columns=frame.columns[label])
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    test, train = order[: min(CHANGED, len(x) // 4)], order[min(CHANGED, len(x) // 4) :]
    model = BRAINetClassifier(random_state=0, max_epochs=1, members=1).fit(x.iloc[train], y[train])
    numbers = [name for name in x.columns if x[name].dtype.kind in "fi" and x[name].nunique() > 5]
    before = model.explain(x.iloc[test]).prediction["generative"]
    forest = IsolationForest(random_state=0).fit(model.encoded_rows(x.iloc[train]).numpy())
    found: dict[str, Any] = {}
    for kind in ("far", "another row's"):
        new = x.iloc[test].copy().astype(dict.fromkeys(numbers, float))
        changed = rng.choice(numbers, len(test))
        for row, name in enumerate(changed):
            known = x[name].iloc[train]
            far = known.mean() + 4 * rng.choice([-1, 1]) * known.std()
            new.iloc[row, new.columns.get_loc(name)] = far if kind == "far" else rng.choice(known.dropna())
        found[kind] = _first(model, forest, new, changed, before)
    return found


def _first(model: Any, forest: IsolationForest, new: pd.DataFrame, changed: Any, before: Tensor) -> dict[str, float]:
    explained = model.explain(new)
    parts = explained.columns
    names = [units.name for units in parts.units]
    usual = before.quantile(0.95)
    detectable = ((explained.prediction["generative"] > usual) & (before <= usual)).numpy()
    z = torch.stack([parts.values[:, list(one.places)].abs().amax(dim=1) for one in parts.units], dim=1)
    rows = model.encoded_rows(new).numpy()
    base = forest.score_samples(rows)
    medians = np.zeros(rows.shape[1])  # rows are encoded as deviations from the median, and as ones and zeros
    relief = []
    for one in parts.units:
        moved = rows.copy()
        moved[:, list(one.places)] = medians[list(one.places)]
        relief.append(torch.from_numpy(forest.score_samples(moved) - base))
    ways = {"relief": parts.relief, "part": parts.parts, "distance": z, "forest": torch.stack(relief, dim=1)}
    right = {way: np.array([names[i] for i in rank.argmax(dim=1).tolist()]) == changed for way, rank in ways.items()}
    counts = {"detectable": float(detectable.sum()), "rows": float(len(new))}
    return counts | {way: float(hit[detectable].sum()) for way, hit in right.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not in the results file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with camvid, clothing, tables, …")
    add_out(parser)
    args = parser.parse_args(argv)
    if args.data is None and not args.smoke:
        parser.error("expected the folder with the data, got none: give --data DIR, or try --smoke")
    store = Store(results_folder(args) / "explain.json", {"known": KNOWN, "pasted": PASTED, "smoke": args.smoke})
    tasks = {"smoke": smoke} if args.smoke else {"streets": streets, "digits": digits, "objects": objects}
    for name, make in tasks.items():
        for way, cell in store.cell(f"places/{name}", lambda make=make: places(make(args.data))).items():
            print(name, way, f"pixels {np.mean(cell['pixels']):.3f}, pointing {np.mean(cell['hits']):.2f}")
    for name, width in ({} if args.smoke else TABLES).items():
        frame = pd.read_csv(args.data / "tables" / f"{name}.csv", header=None, na_values="?").rename(columns=str)
        label = LABELS.get(name, frame.shape[1] - 1)
        print(name, width, store.cell(f"columns/{name}", lambda frame=frame, label=label: columns(frame, label)))


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s")
