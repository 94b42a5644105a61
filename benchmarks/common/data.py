"""Data of the benchmarks; where no folder is given, a small synthetic stand-in of the same shape."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm.auto import tqdm

from brainet_pl.backbones.loading import Backbone
from brainet_pl.datamodules.uci import FOLDERS

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the public ResNet-20's inputs
VALIDATION = 2000  # test images set aside: the public weights have seen all training images
BACKBONE = "resnet20_cifar10.pth"
Labelled = tuple[Tensor, Tensor]


class Data(NamedTuple):
    """Features and labels; `train` may hold several augmented copies of each image, `plain` holds the originals."""

    train: Labelled
    plain: Labelled
    val: Labelled
    test: Labelled
    ood: dict[str, Tensor]


# -- features of images -----------------------------------------------------------------------------------------------


def cifar_features(data: Path | None, cache: Path | None = None, copies: int = 4) -> Data:
    """Frozen ResNet-20 features (N, 64) of CIFAR-10, SVHN and TinyImageNet; extracted once, then from the cache.

    The backbone has seen all training images, so a part of them is no fair validation set: the first 2,000 test images
    are the validation data, and the other 8,000 are the test data.
    """
    if data is None:
        return synthetic_features()
    folder = cache or data / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    body = None

    def features(name: str, copy: int = 0) -> Labelled:
        nonlocal body
        path = folder / f"resnet20_{name}_{copy}.pt"
        if not path.is_file():
            if body is None:
                body = Backbone("cifar_resnet20", str(data / BACKBONE)).build()
            with np.load(data / f"{name}.npz") as arrays:
                x, y = torch.from_numpy(arrays["x"]).permute(0, 3, 1, 2), torch.from_numpy(arrays["y"]).long()
            torch.save((_extract(body, x, copy), y), path)
        found: Labelled = torch.load(path)
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


def last_layer(data: Path | None) -> nn.Linear:
    """The public network's own last layer, from 64 features to 10 classes; without a folder, one of random weights."""
    layer = nn.Linear(64, 10)
    if data is not None:
        weights = torch.load(data / BACKBONE, map_location="cpu", weights_only=True)
        weights = {k.removeprefix("module."): v for k, v in weights.get("state_dict", weights).items()}
        layer.load_state_dict({"weight": weights["linear.weight"], "bias": weights["linear.bias"]})
    return layer


def mnist_pixels(data: Path | None, name: str = "MNIST", pool: int = 1) -> tuple[Labelled, Labelled]:
    """(x, y) of training and test images, pixels (N, 784/pool²) between 0 and 1; synthetic ones are (N, 49)."""
    if data is None:
        return synthetic_pixels(600), synthetic_pixels(200, seed=1)
    from torchvision import datasets

    source = getattr(datasets, name)
    splits = []
    for train in (True, False):
        found = source(str(data), train=train)
        x = found.data.float().unsqueeze(1) / 255
        x = nn.functional.avg_pool2d(x, pool) if pool > 1 else x
        splits.append((x.flatten(1), found.targets.long()))
    return splits[0], splits[1]


# -- synthetic --------------------------------------------------------------------------------------------------------


def relu_features(n: int, d: int, seed: int = 0) -> NDArray[np.float32]:
    """(n, d) features with shared causes behind a ReLU."""
    rng = np.random.default_rng(seed)
    causes = rng.normal(size=(n, 20))
    mixing = rng.normal(size=(20, d)) * (rng.random((20, d)) < 0.15)
    return np.maximum(causes @ mixing + 0.7 * rng.normal(size=(n, d)) - 0.3, 0).astype(np.float32)


def synthetic_features(n: int = 900, d: int = 64, classes: int = 10) -> Data:
    """Dependent features with a shift for each class; the unknown have causes of their own."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (n,), generator=draw)
    x = torch.from_numpy(relu_features(n, d)) + 2 * torch.rand(classes, d, generator=draw)[y]
    third = n // 3
    train, val, test = ((x[i : i + third], y[i : i + third]) for i in (0, third, 2 * third))
    ood = {name: torch.from_numpy(relu_features(third, d, seed)) for seed, name in enumerate(("svhn", "tiny"), start=1)}
    return Data(train, train, val, test, ood)


def synthetic_pixels(n: int, side: int = 7, classes: int = 10, seed: int = 0) -> Labelled:
    """Images of side² pixels in which a stroke of the class and a few others switch pixels on."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    strokes = torch.stack(
        [((rows * (k % 5 + 1) + columns * (k // 5 + 1)) % 13 < 4).float() for k in range(2 * classes)]
    )
    y = torch.randint(classes, (n,), generator=draw)
    on = (torch.rand(n, 2 * classes, generator=draw) < 0.15).float()
    on[torch.arange(n), y] = 1.0
    x = torch.einsum("nk,kij->nij", on, strokes) / 3 + 0.1 * torch.rand(n, side, side, generator=draw)
    return x.clamp(0, 1).flatten(1), y


def synthetic_uci(root: Path, name: str, splits: int, n: int = 200, d: int = 6) -> Path:
    """Write a regression set with so many splits in the form of the published ones; gives `root`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, d))
    x[:, d // 2 :] += x[:, : d - d // 2]
    y = x[:, 0] - np.abs(x[:, -1]) + 0.1 * rng.normal(size=n)
    files = {"data": np.column_stack([x, y]), "index_features": np.arange(d), "index_target": np.array([d])}
    for split in range(splits):
        test, train = np.split(rng.permutation(n), [n // 10])
        files |= {f"index_train_{split}": train, f"index_test_{split}": test}
    folder = root / FOLDERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        np.savetxt(folder / f"{file}.txt", content)
    return root
