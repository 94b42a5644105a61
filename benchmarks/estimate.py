"""How good is it still: accuracy that is estimated without labels, on changed inputs whose labels are known.

Beside `estimate_accuracy` with held-out samples stands the plain mean of the largest probabilities, as CBPE takes it.
Both see calibrated probabilities (`TemperatureScaling`) and fading ones (`DensityScaling`) of one model each. Inputs
are digits with noise, out of focus and darker, and CIFAR-10's test images with the fifteen usual corruptions,
severities 2 and 4, as features of the public ResNet-20.

    python benchmarks/estimate.py --data DIR
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common.command import arguments, parse
from common.data import BACKBONE, MEAN, STD
from common.store import Store
from common.tables import table
from drift import spoiled
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl._utils.framework import pl
from brainet_pl.backbones.loading import Backbone
from brainet_pl.calibration import DensityScaling, TemperatureScaling
from brainet_pl.datamodules.corruptions import FIFTEEN, corrupt_image
from brainet_pl.lightning.module import BRAINet
from brainet_pl.monitoring import estimate_accuracy
from brainet_pl.network import MLP
from brainet_pl.scores import Mahalanobis

Part = tuple[Tensor, Tensor]  # features (N, d) and labels (N,)
CALIBRATIONS: dict[str, Callable[[], TemperatureScaling | DensityScaling]] = {
    "plain": TemperatureScaling,
    "fading": DensityScaling,
}
COLUMNS = ("truth", "CBPE", "estimate", "low", "high", "covers")


def fitted(train: Part, val: Part, calibration: str, epochs: int) -> BRAINet:
    """A model of features, with one of the calibrations."""
    pl.seed_everything(0, verbose=False)
    made = CALIBRATIONS[calibration]()
    model = BRAINet(int(train[1].max()) + 1, head=MLP(), scores=[Mahalanobis()], calibration=made, lr=0.003)
    loaders = [DataLoader(TensorDataset(*part), 128, shuffle=i == 0) for i, part in enumerate((train, val))]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **quiet).fit(model, *loaders)
    return model.eval()


def answers(model: BRAINet, part: Part) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The largest probability (N,) of each input, and whether its class was right."""
    with torch.no_grad():
        found = model.predict_step(part[0], 0)
    sure = found["probabilities"].double().amax(dim=1).clamp(0, 1)
    return sure.numpy(), (found["class"] == part[1]).numpy()


def judged(model: BRAINet, held: Part, part: Part) -> dict[str, float]:
    """One line: the true accuracy, both estimates, and whether the interval holds the truth."""
    sure, right = answers(model, part)
    found = estimate_accuracy(sure, *answers(model, held))
    truth = float(right.mean())
    numbers = (
        truth,
        float(sure.mean()),
        found.accuracy,
        found.low,
        found.high,
        float(found.low <= truth <= found.high),
    )
    return dict(zip(COLUMNS, numbers, strict=True))


def digits() -> tuple[Part, Part, Part, dict[str, Part]]:
    """Training, validation, held-out and changed digits; pixels are the features."""
    images, y = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1) / 16.0
    order = np.random.default_rng(0).permutation(len(y))
    train, val, held, test = (order[a:b] for a, b in ((0, 600), (600, 900), (900, 1200), (1200, None)))

    def part(x: NDArray[np.float64], rows: NDArray[np.int64]) -> Part:
        return torch.tensor(x.reshape(len(x), -1), dtype=torch.float32), torch.from_numpy(y[rows])

    changed = {"unchanged": part(images[test], test)}
    for noise, blur, light in ((0.1, 0.4, 0.8), (0.2, 0.6, 0.6), (0.4, 0.9, 0.4)):
        level = {"noise": noise, "blur": blur, "dark": light}
        for name, x in spoiled(images[test], noise, blur, light).items():
            changed[f"{name} {level[name]:g}"] = part(x, test)
    return part(images[train], train), part(images[val], val), part(images[held], held), changed


def cifar(data: Path, count: int) -> tuple[Part, Part, Part, dict[str, Part]]:
    """Training, validation, held-out and changed images, as features."""
    body = Backbone("cifar_resnet20", str(data / BACKBONE), layers=None).build().eval()
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)

    def part(x: Tensor, y: Tensor) -> Part:
        with torch.no_grad():
            return torch.cat([body((some / 255 - mean) / std) for some in x.split(250)]), y

    def read(name: str, start: int, end: int) -> tuple[Tensor, Tensor]:
        with np.load(data / f"{name}.npz") as arrays:
            x, y = arrays["x"][start:end], arrays["y"][start:end].astype(np.int64)
        return torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)

    test = read("cifar10_test", 2000, 2000 + count)
    changed = {"unchanged": part(*test)}
    for name in FIFTEEN:
        for severity in (2, 4):
            x = torch.stack([corrupt_image(image, name, severity, i) for i, image in enumerate(test[0])])
            changed[f"{name} {severity}"] = part(x, test[1])
    train, val, held = (read(*place) for place in (("cifar10_train", 0, 4000), ("cifar10_test", 0, 1000),
                                                   ("cifar10_test", 1000, 2000)))  # fmt: skip
    return part(*train), part(*val), part(*held), changed


def main(argv: list[str] | None = None) -> None:
    """Measure all sets, and say how far each estimate is off on average."""
    parser = arguments(__doc__, epochs=20)
    parser.add_argument("--count", type=int, default=400, help="images of every changed set")
    args = parse(parser, argv)
    torch.set_num_threads(1)
    store = Store(args.out / "estimate.json", {"epochs": args.epochs, "count": args.count})
    sets: dict[str, Callable[[], tuple[Part, Part, Part, dict[str, Part]]]] = {"digits": digits}
    if args.data is not None:
        sets["CIFAR-10"] = lambda: cifar(args.data, args.count)
    for name, read in sets.items():
        if not all(f"{name}, {calibration}" in store.content["cells"] for calibration in CALIBRATIONS):
            train, val, held, changed = read()
            for calibration in CALIBRATIONS:
                model = fitted(train, val, calibration, args.epochs)
                lines = {label: judged(model, held, part) for label, part in changed.items()}
                store.cell(f"{name}, {calibration}", lambda lines=lines: lines)
        for calibration in CALIBRATIONS:
            lines = store.content["cells"][f"{name}, {calibration}"]
            print()
            table([f"{name}, {calibration}", *COLUMNS], [[line, *cells.values()] for line, cells in lines.items()])
            shifted = [cells for line, cells in lines.items() if line != "unchanged"]
            for label in ("CBPE", "estimate"):
                off = np.array([cells[label] - cells["truth"] for cells in shifted])
                print(
                    f"{label}: off by {np.abs(off).mean():.1%} on average, too high on {(off > 0).mean():.0%} of sets"
                )
            print(
                f"the interval holds the truth on {np.mean([cells['covers'] for cells in shifted]):.0%} of changed sets"
            )


if __name__ == "__main__":
    main()
