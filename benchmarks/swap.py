"""The head of a frozen network, swapped: which layers are read, and which head reads them, beside what was there.

    python benchmarks/swap.py --data DIR          # docs/results/swap.json, some 90 minutes on two cores
    python benchmarks/swap.py --data DIR --quick  # two folds of clothing alone
    python benchmarks/swap.py --data DIR --unknown  # hats and shoes left out of the clothing, some 15 minutes
    python benchmarks/swap.py --smoke

Tasks: photographs of ten kinds of clothes by an EfficientNet-Lite0 of ImageNet (five folds), and CIFAR-10 by a
ResNet-20 that was trained on it (10,000 training images, three draws). Layers: the last, and those that `layers="auto"`
chooses by the training images of a fold. All heads train alike, as `swap_head(…).fit()` trains its own: with weight
decay, the better of two dropouts of features and a rate that falls, up to the epoch that validates best; all get a
temperature by the same held-out rows. "network" is the network's own logits with one, "one call" is
`swap_head(…).fit()` on the images, as a user calls it, with its verdict. With `--unknown` the network is to know eight
kinds of clothes, and hats and shoes are the unknown images. Finished cells are kept.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import add_out, results_folder
from common.data import BACKBONE, MEAN, STD
from common.measures import quality_of
from common.store import Cell, Store
from common.tables import table
from common.tasks import Sample
from common.training import shuffled
from PIL import Image
from rivals.sngp import SNGP
from rivals.vbll import VBLL
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision import transforms

from brainet_pl import network, swap_head, uncertainty
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.loading import make_backbone
from brainet_pl.backbones.taps import LayerSearch, Taps
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.features.extraction import extract
from brainet_pl.features.layers import choose_layers, sample_rows
from brainet_pl.metrics import curves
from brainet_pl.network.base import HeadInputs
from brainet_pl.network.training import TrainingSettings, fit_head
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.swap.model import DROPOUTS, SwappedModel
from brainet_pl.tasks import Classification

BATCH = 64
SIZE = 160  # pixels
HEADS: dict[str, network.HeadSettings] = {
    name: getattr(network, name)() for name in ("Linear", "MLP", "MCDropout", "Ensemble", "Laplace")
} | {"VBLL": VBLL(), "SNGP": SNGP()}
UNKNOWN = 2000  # images of an unknown set
LEFT_OUT = ("hat", "shoes")  # kinds of clothes that `--unknown` trains nothing on
CALLS = 2  # folds of a task in which `swap_head(…).fit()` itself is called
TRAINING = ("patience", "batch_size", "learning_rate", "weight_decay")
DEFAULTS: dict[str, Any] = {name: inspect.signature(SwappedModel.fit).parameters[name].default for name in TRAINING} | {
    "rate_decays": 2
}


class Labelled(Dataset[tuple[Tensor, int]]):
    """Image files with classes, read as a network takes them."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], prepare: Callable[[Image.Image], Tensor]) -> None:
        self.files, self.labels, self.prepare = files, labels, prepare

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.prepare(Image.open(self.files[index]).convert("RGB")), int(self.labels[index])


class Task(NamedTuple):
    """Images, their classes, the rows of each fold (training, validation, test), a network, and unknown images."""

    name: str
    images: Dataset[Any]
    labels: Tensor
    folds: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    network: nn.Module
    own_classes: bool
    unknown: Mapping[str, Dataset[Any]]


# -- tasks ------------------------------------------------------------------------------------------------------------


def clothing(data: Path, folds: int, left_out: Sequence[str] = ()) -> Task:
    """Photographs of clothes, and a network that never saw them; kinds that are left out are the unknown images."""
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(data / "efficientnet_lite0.pth", weights_only=True))
    every = sorted((data / "clothing").glob("*/*/*.jpg"))
    files = [path for path in every if path.parent.name not in left_out]
    others = [path for path in every if path.parent.name in left_out]
    names = sorted({path.parent.name for path in files})
    labels = [names.index(path.parent.name) for path in files]
    prepare = transforms.Compose(
        [
            transforms.Resize(SIZE),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    parts = []
    for rest, test in StratifiedKFold(5, shuffle=True, random_state=0).split(labels, labels):
        train, val = train_test_split(rest, test_size=0.15, random_state=0, stratify=np.array(labels)[rest])
        parts.append((train, val, test))
    unknown = {"left out": Labelled(others, [0] * len(others), prepare)} if left_out else {}
    name, images = ("left out" if left_out else "clothing"), Labelled(files, labels, prepare)
    return Task(name, images, torch.tensor(labels), parts[:folds], model.eval(), False, unknown)


def cifar(data: Path, draws: int, images: int = 10_000, tested: int = 5000) -> Task:
    """CIFAR-10, and a network that was trained on it; its training images are the first rows, test images the last."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def read(name: str, most: int) -> tuple[Tensor, Tensor]:
        with np.load(data / f"{name}.npz") as content:
            x = torch.tensor(content["x"][:most]).permute(0, 3, 1, 2).float() / 255
            return (x - mean) / std, torch.tensor(content["y"][:most])

    model = make_backbone("cifar_resnet20", str(data / BACKBONE))
    assert model is not None
    train, test = read("cifar10_train", images), read("cifar10_test", tested)
    labels = torch.cat([train[1], test[1]])
    rows = []
    for seed in range(draws):
        order = np.random.default_rng(seed).permutation(tested)  # rows that no network has seen, to validate by
        val, final = images + order[: tested // 5], images + order[tested // 5 :]
        rows.append((np.arange(images), val, final))
    unknown = {name: TensorDataset(*read(name, UNKNOWN)) for name in ("svhn_test10k", "tinyimagenet32")}
    return Task("cifar10", TensorDataset(torch.cat([train[0], test[0]]), labels), labels, rows, model, True, unknown)


def synthetic() -> Task:
    """Small images of two classes, and a network of random weights."""
    torch.manual_seed(0)
    y = torch.arange(300) % 2
    x = torch.randn(300, 3, 8, 8) + y[:, None, None, None]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    rows = np.arange(300)
    return Task(
        "synthetic",
        TensorDataset(x, y),
        y,
        [(rows[:180], rows[180:240], rows[240:])],
        model.eval(),
        True,
        {"noise": TensorDataset(4 * torch.randn(60, 3, 8, 8), torch.zeros(60))},
    )


# -- features ---------------------------------------------------------------------------------------------------------


class Features(NamedTuple):
    """What a fold reads: features and own logits of all images, features of unknown ones, and how they were chosen."""

    x: Tensor
    own: Tensor | None
    unknown: dict[str, Tensor]
    chosen: str


def read_features(task: Task, taps: Taps | None, chosen: str, kept: Path) -> Features:
    """The features of all images at some layers; kept in a file."""
    if not kept.is_file():
        extractor = FeatureExtractor(copy.deepcopy(task.network), head_layer=None, taps=taps)

        def run(images: Dataset[Any]) -> Any:
            return extract(extractor, DataLoader(images, BATCH)).output

        every = run(task.images)
        unknown = {name: run(images).features.half() for name, images in task.unknown.items()}
        logits = every.base_logits if task.own_classes else None
        torch.save({"x": every.features.half(), "own": logits, "unknown": unknown}, kept)
    found = torch.load(kept, weights_only=True)
    return Features(found["x"].float(), found["own"], {k: v.float() for k, v in found["unknown"].items()}, chosen)


def choose(task: Task, fold: int) -> tuple[Taps | None, str]:
    """The layers that `layers="auto"` takes by the training images of a fold."""
    rows = np.random.default_rng(fold).permutation(task.folds[fold][0])
    extractor = FeatureExtractor(copy.deepcopy(task.network), head_layer=None, search=LayerSearch())
    batches = DataLoader(Subset(task.images, rows.tolist()), BATCH)
    found = choose_layers(extractor, batches, rows=sample_rows(len(rows)))
    return found.taps, found.summary


# -- heads ------------------------------------------------------------------------------------------------------------


def standard(features: Features, labels: Tensor, rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Sample:
    """Features standardised by the training rows."""
    train, val, test = (torch.as_tensor(part) for part in rows)
    mean, std = features.x[train].mean(0), features.x[train].std(0).clamp_min(1e-6)
    parts = [((features.x[part] - mean) / std, labels[part]) for part in (train, val, test)]
    return Sample(parts[0], parts[1], parts[2], Classification(int(labels.max()) + 1))


def measure(val: Tensor, test: Tensor, sample: Sample) -> Cell:
    """Quality of probabilities (N, C) after a temperature that was found on the validation rows."""
    tau = fit_temperature(val, sample.val[1])
    return quality_of(scale(test, tau), sample.test[1]) | {"tau": float(tau)}


def regression(sample: Sample, unknown: Mapping[str, Tensor] | None = None) -> Cell:
    """Logistic regression, its strength chosen by three-fold cross-validation of the training rows."""
    x, y = sample.train
    model = LogisticRegressionCV(Cs=5, cv=3, max_iter=300, scoring="neg_log_loss").fit(x.numpy(), y.numpy())
    val, test = (torch.tensor(model.predict_proba(part[0].numpy())) for part in (sample.val, sample.test))
    cell = measure(val, test, sample)
    for name, rows in (unknown or {}).items():
        least = torch.tensor(model.predict_proba(rows.numpy())).amax(dim=1)
        cell[f"{name}/one_minus_max_p"] = 100 * curves.roc_area(1 - test.amax(dim=1), 1 - least)
    return cell


def fit(
    settings: network.HeadSettings, sample: Sample, ggt: GGT | None, unknown: dict[str, Tensor], epochs: int
) -> Cell:
    """Train a head; what it says of test images, and how far unknown ones are from them by entropy and disagreement."""

    def validate() -> float:
        found = head.passes(sample.val[0], 15)
        return float(sample.task.nll(sample.task.predictive(*found), sample.val[1]).mean())

    tried = []
    for rate in DROPOUTS:
        torch.manual_seed(0)
        head = settings.build(sample.in_features, sample.task.out_features, ggt)
        training = TrainingSettings(max_epochs=epochs, input_dropout=rate, **DEFAULTS)
        taken = fit_head(head, HeadInputs(*sample.train), training, sample.task.loss, validate)
        with torch.no_grad():
            tried.append((validate(), taken, rate, head.eval()))
    _, taken, rate, head = min(tried, key=lambda one: one[0])
    if head.finalizes:

        def nll(outputs: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
            return sample.task.nll(sample.task.predictive(outputs, weights), target)  # type: ignore[return-value]

        head.finalize(HeadInputs(*sample.train), HeadInputs(*sample.val), nll, 15)

    @torch.no_grad()
    def run(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        head.eval()
        torch.manual_seed(0)
        found = [head.passes(part, 15) for part in x.split(1000)]  # type: ignore[no-untyped-call]
        probs = torch.cat([one.values for one in found], dim=1).softmax(-1)
        weights = found[0].weights
        scores = {
            "entropy": uncertainty.predictive_entropy(probs, weights),
            "MI": uncertainty.mutual_information(probs, weights),
        }
        return uncertainty.predictive(probs, weights), scores

    test, known = run(sample.test[0])
    cell = measure(run(sample.val[0])[0], test, sample) | {
        "epochs": taken,
        "dropped": rate,
        "parameters": head.num_params,
    }
    for name, x in unknown.items():
        for score, values in run(x)[1].items():
            cell[f"{name}/{score}"] = 100 * curves.separation(known[score], values)["AUROC"]
    return cell


def one_call(task: Task, fold: int) -> Cell:
    """`swap_head(…).fit()` on the images of a fold: quality, and the shares that it calls unknown."""
    train, val, test = (Subset(task.images, part.tolist()) for part in task.folds[fold])
    model = swap_head(copy.deepcopy(task.network), train, held=val, progress=False).fit(progress=False)

    def run(images: Dataset[Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            found = [model.predict(batch[0]) for batch in DataLoader(images, BATCH)]
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}

    known = run(test)
    scores = [name for name in model.scores.units if name in known]
    cell = quality_of(known["probabilities"], task.labels[task.folds[fold][2]])
    cell["called unknown"] = 100 * float((known["known_p"] <= 0.05).double().mean())
    cell["blend"] = model.blend.weights.head if model.blend.active else math.inf
    cell["expected"] = 100 * model.expected_noticed
    for name, images in task.unknown.items():
        found = run(images)
        p = found["known_p"]
        cell[f"{name}/called unknown"] = 100 * float((p <= 0.05).double().mean())
        cell[f"{name}/verdict"] = 100 * curves.separation(-known["known_p"], -p)["AUROC"]
        for score in scores:
            cell[f"{name}/{score}"] = 100 * curves.roc_area(known[score], found[score])
    return cell


# -- the run ----------------------------------------------------------------------------------------------------------


def run_fold(store: Store, task: Task, fold: int, cache: Path, epochs: int) -> None:
    """All heads on both kinds of layers of one fold."""
    chosen = store.cell(f"{task.name}/choice/{fold}", lambda: _plain(*choose(task, fold)))
    taps = None if chosen["layers"] is None else Taps(tuple(chosen["layers"]), tuple(chosen["pools"]))
    print(f"{task.name}, fold {fold}: {chosen['summary']}", flush=True)
    for layers in ("last", "auto"):
        read = "last" if layers == "last" or taps is None else str(taps).replace(" ", "")
        name = f"{task.name}_{read}.pt"  # folds that choose the same layers share their features
        features = read_features(task, taps if layers == "auto" else None, chosen["summary"], cache / name)
        sample = standard(features, task.labels, task.folds[fold])
        train = torch.as_tensor(task.folds[fold][0])
        mean, std = features.x[train].mean(0), features.x[train].std(0).clamp_min(1e-6)
        unknown = {name: (x - mean) / std for name, x in features.unknown.items()}

        def cell(head: str, make: Callable[[], Cell], layers: str = layers) -> None:
            found = store.cell(f"{task.name}/{layers}/{head}/{fold}", make)
            print(f"{task.name}, fold {fold}, {layers}, {head}: {found['nll']:.4f} / {found['err']:.1f} %", flush=True)

        if features.own is not None and layers == "last":
            probs = features.own.softmax(-1)
            rows = [torch.as_tensor(part) for part in task.folds[fold]]
            cell("network", lambda p=probs, r=rows, s=sample: measure(p[r[1]], p[r[2]], s))  # type: ignore[misc]
        cell("logistic regression", lambda s=sample: regression(s))  # type: ignore[misc]
        for head, settings in HEADS.items():
            cell(head, lambda c=settings, s=sample, u=unknown: fit(c, s, None, u, epochs))  # type: ignore[misc]
        keys = [f"{task.name}/{layers}/{head}/{fold}" for head in ("BRAINet", "shuffled")]
        ggt = None if all(key in store.content["cells"] for key in keys) else learn_structure(sample.train[0].numpy())
        cell("BRAINet", lambda g=ggt, s=sample, u=unknown: fit(network.Tree(), s, g, u, epochs))  # type: ignore[misc]
        if layers == "auto" and fold < CALLS:
            cell("one call", lambda: one_call(task, fold))
        wrong = None if ggt is None else shuffled(ggt)
        cell("shuffled", lambda g=wrong, s=sample, u=unknown: fit(network.Tree(), s, g, u, epochs))  # type: ignore[misc]


def run_left_out(store: Store, task: Task, cache: Path) -> None:
    """A new last layer, and `swap_head(…).fit()`: known clothes, and kinds that neither was trained on."""
    for fold, rows in enumerate(task.folds):
        features = read_features(task, None, "the last", cache / f"{task.name.replace(' ', '_')}_last.pt")
        train = features.x[torch.as_tensor(rows[0])]
        mean, std = train.mean(0), train.std(0).clamp_min(1e-6)
        unknown = {name: (x - mean) / std for name, x in features.unknown.items()}
        sample = standard(features, task.labels, rows)
        made = {
            "last/logistic regression": lambda s=sample, u=unknown: regression(s, u),  # type: ignore[misc]
            "auto/one call": lambda f=fold: one_call(task, f),
        }
        for head, make in made.items():
            print(f"{task.name}, fold {fold}, {head}: {store.cell(f'{task.name}/{head}/{fold}', make)}", flush=True)


def _plain(taps: Taps | None, summary: str) -> dict[str, Any]:
    layers, pools = (None, None) if taps is None else (list(taps.layers), list(taps.pools))
    return {"layers": layers, "pools": pools, "summary": summary}


def show(store: Store, task: Task) -> None:
    """The table of a task: means over folds, and the paired difference to BRAINet."""
    cells = store.content["cells"]
    heads = ["network", "logistic regression", *HEADS, "BRAINet", "shuffled", "one call"]
    columns = sorted({k for key, c in cells.items() if key.startswith(f"{task.name}/l") for k in c if "/" in k})
    for layers in ("last", "auto"):
        rows = []
        base = [cells[f"{task.name}/{layers}/BRAINet/{i}"]["nll"] for i in range(len(task.folds))]
        for head in heads:
            found = [cells.get(f"{task.name}/{layers}/{head}/{i}") for i in range(len(task.folds))]
            found = [one for one in found if one is not None]  # the call itself is made in some folds alone
            if not found:
                continue
            less = np.array([c["nll"] for c in found]) - base[: len(found)]
            error = less.std(ddof=1) / len(less) ** 0.5 if len(less) > 1 else float("nan")
            values = [np.mean([c[k] for c in found]) for k in ("nll", "err", "ece")]
            more = [np.mean([c[k] for c in found]) if k in found[0] else "" for k in columns]
            rows.append([head, *values, f"{less.mean():+.4f} ± {error:.4f}", *more])
        print(f"\n{task.name}, {layers} layers:")
        table(["head", "NLL", "error %", "ECE", "NLL less BRAINet's", *columns], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with clothing, efficientnet_lite0.pth and CIFAR-10")
    parser.add_argument("--cache", type=Path, help="folder for features; DIR/cache if not given")
    parser.add_argument("--quick", action="store_true", help="two folds of clothing alone")
    parser.add_argument("--unknown", action="store_true", help="clothing alone, hats and shoes left out, three folds")
    parser.add_argument("--folds", type=int, default=5, help="folds of clothing; of CIFAR-10, draws up to 3")
    add_out(parser)
    args = parser.parse_args(argv)
    args.out = results_folder(args)
    if args.smoke:
        tasks, cache, epochs = [synthetic()], args.out, 2
    else:
        cache, epochs = args.cache or args.data / "cache", 100
        tasks = [clothing(args.data, 2 if args.quick else args.folds)]
        tasks += [] if args.quick else [cifar(args.data, min(args.folds, 3))]
    cache.mkdir(parents=True, exist_ok=True)
    store = Store(args.out / "swap.json", {"size": SIZE, "epochs": epochs})
    if args.unknown:
        left_out = tasks[0] if args.smoke else clothing(args.data, min(args.folds, 3), LEFT_OUT)
        run_left_out(store, left_out, cache)
        return
    for task in tasks:
        for fold in range(len(task.folds)):
            run_fold(store, task, fold, cache, epochs)
        show(store, task)


if __name__ == "__main__":
    main()
