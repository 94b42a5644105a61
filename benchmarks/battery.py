"""Do the promises hold on data that nobody tuned? Quality, calibration, unknown rows, shift and fading, beside peers.

    python benchmarks/battery.py --data DIR                 # docs/results/battery.json, about two hours on two cores
    python benchmarks/battery.py --data DIR --quick         # fewer rows and folds, some ten minutes
    python benchmarks/battery.py --data DIR --tasks FOLDER  # every table, array and folder of images of your own too
    python benchmarks/battery.py --smoke

Tasks are found: DIR/tables/*.csv and FOLDER/*.csv (no header, the target in the last column, '?' is missing),
FOLDER/*.npz (x, y), DIR/uci, DIR/clothing and FOLDER/*/<class>/* (images, as features of a frozen backbone: the
EfficientNet-Lite0 of DIR, or --backbone), and scikit-learn's own sets. `BRAINetClassifier` and `BRAINetRegressor` run
with their defaults, nothing is set for a task. Finished cells are kept, and a run that was cut goes on from there.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torchvision
from common.command import add_out, results_folder
from common.store import Store
from common.tables import table
from numpy.typing import NDArray
from PIL import Image
from sklearn import datasets
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from sklearn.neighbors import NearestNeighbors
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn
from torchvision import transforms
from tqdm import tqdm

from brainet_pl import BRAINetClassifier, BRAINetRegressor
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.calibration import DensityScaling, TemperatureScaling
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.scores.reference import p_values

SKLEARN = ("iris", "wine", "breast_cancer", "digits", "diabetes")
LEVEL = 0.05  # of the verdict
NOISES = (0.05, 0.2, 1.0)  # deviations of the noise, in those of a column
GONE = (0.1, 0.5)  # share of values that are missing
WIDE = 600  # columns above which a task is cut to two folds, and boosting is left out: it would take hours
COST = 0.01  # the price of fading that is promised
SINGLE = ("energy", "entropy", "generative", "knn")  # scores of the model that a verdict could go by alone
IMAGES = (".jpg", ".jpeg", ".png")
MOST_LEFT_OUT = 3  # classes that are left out, one at a time
FEW_TARGETS = 20  # different numbers up to which a column of numbers is taken for classes


class Task(NamedTuple):
    """A table: columns X, targets y, and whether y are classes."""

    name: str
    x: pd.DataFrame
    y: NDArray[Any]
    classes: bool


# -- tasks ------------------------------------------------------------------------------------------------------------


def find_tasks(
    data: Path | None, folder: Path | None, most: int, read_images: Callable[[Path], Task] | None = None
) -> Iterator[Task]:
    """Every task that can be found, with at most so many rows."""
    files = [] if data is None else sorted((data / "tables").glob("*.csv"))
    files += [] if folder is None else sorted([*folder.glob("*.csv"), *folder.glob("*.npz")])
    for path in files:
        yield shortened(read(path), most)
    for name in SKLEARN:
        found = getattr(datasets, f"load_{name}")()
        frame = pd.DataFrame(found.data, columns=[f"c{i}" for i in range(found.data.shape[1])])
        yield shortened(Task(name, frame, found.target, name != "diabetes"), most)
    for path in [] if data is None else sorted((data / "uci").glob("*/data.txt")):
        yield shortened(read_uci(path.parent), most)
    images = [] if data is None else [data / "clothing"]
    images += [] if folder is None else sorted(path for path in folder.glob("[!.]*") if path.is_dir())
    for path in (path for path in images if read_images is not None and any(find_images(path))):
        assert read_images is not None
        yield shortened(read_images(path), most)


def read_uci(folder: Path) -> Task:
    """A set of UCI in the form of its published splits; numbers only."""
    data = np.loadtxt(folder / "data.txt", ndmin=2)
    inputs, target = (np.loadtxt(folder / f"index_{part}.txt", ndmin=1).astype(int) for part in ("features", "target"))
    frame = pd.DataFrame(data[:, inputs], columns=[f"c{i}" for i in range(len(inputs))])
    return Task(f"uci-{folder.name}", frame, data[:, target[0]], False)


def find_images(folder: Path) -> Iterator[tuple[Path, str]]:
    """Images of a folder of classes, or of one with train, validation and test, each with its class."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in IMAGES:
            yield path, path.parent.name


def image_features(folder: Path, load: Callable[[], nn.Module], size: int, kept: Path) -> Task:
    """What a frozen network gives for the images of a folder of classes; kept in a file."""
    if not kept.is_file():
        network = load()
        prepare = transforms.Compose(
            [
                transforms.Resize(size),
                transforms.CenterCrop(size),
                transforms.ToTensor(),
                transforms.Normalize([0.5] * 3, [0.5] * 3),
            ]
        )
        found, names = [], []
        network.eval()
        files = list(find_images(folder))
        for start in tqdm(range(0, len(files), 32), desc=folder.name):
            batch = files[start : start + 32]
            images = torch.stack([prepare(Image.open(path).convert("RGB")) for path, _ in batch])
            with torch.no_grad():
                found.append(network(images).flatten(1).half())
            names += [name for _, name in batch]
        np.savez(kept, x=torch.cat(found).numpy(), y=np.array(names))
    content = np.load(kept)
    frame = pd.DataFrame(content["x"].astype(np.float32), columns=[f"c{i}" for i in range(content["x"].shape[1])])
    return Task(folder.name, frame, content["y"], True)


def load_backbone(name: str, data: Path | None) -> nn.Module:
    """A frozen network that gives features: the EfficientNet-Lite0 of the data folder, or one of torchvision's."""
    if name != "efficientnet-lite0":
        return FeatureExtractor(torchvision.models.get_model(name, weights="DEFAULT"))
    from efficientnet_lite_pytorch import EfficientNet

    assert data is not None
    network = EfficientNet.from_name(name)
    network.load_state_dict(torch.load(data / "efficientnet_lite0.pth", weights_only=True))
    network._dropout, network._fc = nn.Identity(), nn.Identity()
    return network


def read(path: Path) -> Task:
    """A file as a task; a number is missing as the median, a category as one of its own."""
    if path.suffix == ".npz":
        content = np.load(path)
        x, y = content["x"].reshape(len(content["x"]), -1), content["y"]
        return Task(path.stem, pd.DataFrame(x, columns=[f"c{i}" for i in range(x.shape[1])]), y, y.dtype.kind in "iub")
    frame = pd.read_csv(path, header=None, na_values="?")
    frame = frame[frame.iloc[:, -1].notna()].reset_index(drop=True)
    x, y = frame.iloc[:, :-1].copy(), frame.iloc[:, -1].to_numpy()
    x.columns = [f"c{i}" for i in range(x.shape[1])]
    for name in x:
        column = x[name]
        numbers = column.dtype.kind in "fiu"
        x[name] = column.fillna(column.median()) if numbers else column.fillna("missing").astype(str)
    classes = y.dtype.kind not in "f" and (y.dtype.kind not in "iu" or len(np.unique(y)) <= FEW_TARGETS)
    return Task(path.stem, x, y.astype(str) if classes else y.astype(float), classes)


def shortened(task: Task, most: int) -> Task:
    """At most so many rows, and classes of at least ten of them."""
    keep = np.random.default_rng(0).permutation(len(task.x))[:most]
    if task.classes:
        names, counts = np.unique(task.y[keep], return_counts=True)
        keep = keep[np.isin(task.y[keep], names[counts >= 10])]
    return task._replace(x=task.x.iloc[keep].reset_index(drop=True), y=task.y[keep])


# -- models -----------------------------------------------------------------------------------------------------------


def encoded(model: Any) -> Any:
    """A model of scikit-learn behind one-hot categories and standardised numbers."""
    numbers, texts = make_column_selector(dtype_include="number"), make_column_selector(dtype_exclude="number")
    columns = make_column_transformer(
        (StandardScaler(), numbers), (OneHotEncoder(handle_unknown="ignore", sparse_output=False), texts)
    )
    return make_pipeline(columns, model)


CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "BRAINet": lambda seed: BRAINetClassifier(random_state=seed),
    "logistic regression": lambda seed: encoded(
        LogisticRegressionCV(Cs=6, cv=3, max_iter=2000, scoring="neg_log_loss")
    ),
    "boosting": lambda seed: encoded(HistGradientBoostingClassifier(random_state=seed)),
    "forest": lambda seed: encoded(RandomForestClassifier(300, min_samples_leaf=2, random_state=seed)),
    "MLP": lambda seed: encoded(
        MLPClassifier(hidden_layer_sizes=(64,), early_stopping=True, max_iter=500, random_state=seed)
    ),
}
REGRESSORS: dict[str, Callable[[int], Any]] = {
    "BRAINet": lambda seed: BRAINetRegressor(random_state=seed),
    "ridge": lambda seed: encoded(RidgeCV(np.logspace(-3, 3, 13))),
    "boosting": lambda seed: encoded(HistGradientBoostingRegressor(random_state=seed)),
    "forest": lambda seed: encoded(RandomForestRegressor(300, min_samples_leaf=2, random_state=seed)),
    "MLP": lambda seed: encoded(
        MLPRegressor(hidden_layer_sizes=(64,), early_stopping=True, max_iter=500, random_state=seed)
    ),
}


# -- promises ---------------------------------------------------------------------------------------------------------


def quality(task: Task, fold: int, folds: int, name: str) -> dict[str, float]:
    """One model on one fold: log loss and error of classes, RMSE of numbers; of BRAINet what its temperature did."""
    split = StratifiedKFold if task.classes else KFold
    train, test = list(split(folds, shuffle=True, random_state=0).split(task.x, task.y))[fold]
    model = (CLASSIFIERS if task.classes else REGRESSORS)[name](fold).fit(task.x.iloc[train], task.y[train])
    rows, y = task.x.iloc[test], task.y[test]
    if not task.classes:
        return {"rmse": float(np.sqrt(np.mean((model.predict(rows) - y) ** 2)))}
    probs = model.predict_proba(rows)
    known = list(model.classes_)
    cell = {
        "log_loss": log_loss(y, probs, labels=known),
        "error": float(np.mean(model.predict(rows) != y)),
        "ece": calibration_error(probs, np.searchsorted(known, y)),
    }
    if name == "BRAINet":
        with torch.no_grad():
            plain = model.network_.passes(model.encoded_rows(rows)).predicted
        target = torch.tensor([known.index(label) for label in y])
        best = scale(plain, fit_temperature(plain, target, prior=None))
        cell |= {"uncalibrated": log_loss(y, plain.numpy(), labels=known), "best": log_loss(y, best, labels=known)}
    return cell


def calibration_error(probs: NDArray[Any], labels: NDArray[Any], bins: int = 15) -> float:
    """The expected calibration error of probabilities (N, C), in bins of equal width."""
    sure, right = probs.max(1), probs.argmax(1) == labels
    place = np.minimum((sure * bins).astype(int), bins - 1)
    return float(sum(abs((sure[place == b] - right[place == b]).sum()) for b in range(bins)) / len(labels))


def scores_of(model: BRAINetClassifier, rows: pd.DataFrame) -> dict[str, NDArray[Any]]:
    """The p-value of every single score of the model for rows."""
    network = model.network_
    with torch.no_grad():
        found = network.all_scores(network.passes(model.encoded_rows(rows)))
    return {name: p_values(found[name], network.scores.reference[name]).numpy() for name in SINGLE}


def unknown(task: Task, left_out: Any) -> dict[str, float]:
    """A class is left out: which share of its rows, and of known ones, is called unknown at 5 %."""
    inside = task.y != left_out
    x, y, strange = task.x[inside].reset_index(drop=True), task.y[inside], task.x[~inside]
    train, test = train_test_split(np.arange(len(x)), test_size=0.25, random_state=0, stratify=y)
    model = BRAINetClassifier(random_state=0).fit(x.iloc[train], y[train])
    cell = {"held": float(len(test))}

    def judge(name: str, known: NDArray[Any], other: NDArray[Any]) -> None:
        labels = np.r_[np.zeros(len(known)), np.ones(len(other))]
        cell[f"{name} known"] = float(np.mean(known <= LEVEL))
        cell[f"{name} unknown"] = float(np.mean(other <= LEVEL))
        cell[f"{name} AUROC"] = float(roc_auc_score(labels, -np.r_[known, other]))

    judge("BRAINet", model.known_p(x.iloc[test]), model.known_p(strange))
    known, other = scores_of(model, x.iloc[test]), scores_of(model, strange)
    for name in SINGLE:
        judge(name, known[name], other[name])
    for name, known_p in cross_fitted_detectors(x.iloc[train], y[train]).items():
        judge(name, known_p(x.iloc[test]), known_p(strange))
    return cell


def cross_fitted_detectors(x: pd.DataFrame, y: NDArray[Any]) -> dict[str, Callable[[pd.DataFrame], NDArray[Any]]]:
    """p-values of each detector: fitted to all rows, and compared with rows that it was not fitted to."""
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(x, y)
    held: dict[str, list[NDArray[Any]]] = {}
    for fit, rest in folds:
        for name, score in detectors(x.iloc[fit], y[fit]).items():
            held.setdefault(name, []).append(score(x.iloc[rest]))
    found = {}
    for name, score in detectors(x, y).items():
        reference = np.sort(np.concatenate(held[name]))

        def known_p(rows: pd.DataFrame, score: Any = score, reference: Any = reference) -> NDArray[Any]:
            below = np.searchsorted(reference, score(rows))
            return (1 + len(reference) - below) / (len(reference) + 1)

        found[name] = known_p
    return found


def detectors(x: pd.DataFrame, y: NDArray[Any]) -> dict[str, Callable[[pd.DataFrame], NDArray[Any]]]:
    """Scores that are higher for stranger rows, fitted to known ones."""
    prepare = encoded("passthrough").fit(x)
    rows = np.asarray(prepare.transform(x), dtype=float)
    classifier = CLASSIFIERS["logistic regression"](0).fit(x, y)
    near = NearestNeighbors(n_neighbors=5).fit(rows)
    forest = IsolationForest(random_state=0).fit(rows)
    center, inverse = rows.mean(0), np.linalg.pinv(np.cov(rows.T) + 1e-3 * np.eye(rows.shape[1]))

    def mahalanobis(frame: pd.DataFrame) -> NDArray[Any]:
        away = prepare.transform(frame) - center
        return np.einsum("ni,ij,nj->n", away, inverse, away)

    return {
        "max-softmax": lambda frame: 1 - classifier.predict_proba(frame).max(1),
        "k-NN": lambda frame: near.kneighbors(prepare.transform(frame))[0].mean(1),
        "Mahalanobis": mahalanobis,
        "isolation forest": lambda frame: -forest.score_samples(prepare.transform(frame)),
    }


def shifted(rows: pd.DataFrame, spread: pd.Series) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows as they are, with noise, with gaps, and with every column permuted."""
    draw = np.random.default_rng(0)
    yield "clean", rows
    numbers = list(spread.index)
    for severity in NOISES:
        changed = rows.copy()
        noise = severity * spread.to_numpy() * draw.normal(size=(len(rows), len(numbers)))
        changed[numbers] = changed[numbers].astype(float) + noise
        yield f"noise {severity:g}", changed
    for share in GONE:
        changed = rows.copy()
        changed[numbers] = changed[numbers].astype(float).mask(draw.random((len(rows), len(numbers))) < share)
        yield f"gone {share:g}", changed
    yield "permuted", rows.apply(lambda column: column.sample(frac=1, random_state=draw.integers(2**31)).to_numpy())


def shift(task: Task) -> dict[str, float]:
    """Rows of other kinds: accuracy, calibration error, log loss, share called unknown; with fading and without."""
    train, test = train_test_split(np.arange(len(task.x)), test_size=0.25, random_state=0, stratify=task.y)
    train, held = train_test_split(train, test_size=0.25, random_state=0, stratify=task.y[train])
    model = BRAINetClassifier(random_state=0).fit(task.x.iloc[train], task.y[train])
    network, known = model.network_, list(model.classes_)
    fading = DensityScaling(cost=COST, score="generative")
    with torch.no_grad():
        passes = network.passes(model.encoded_rows(task.x.iloc[held]))
        labels = torch.tensor(np.searchsorted(known, task.y[held]))
        fading.fit(passes.predicted, labels, network.scores(passes)["generative"])
        base = TemperatureScaling()
        base.fit(passes.predicted, labels)
    spread = task.x.iloc[train].select_dtypes("number").std()
    labels = np.searchsorted(known, task.y[test])
    cell: dict[str, float] = {"kappa": float(fading.kappa), "rows": float(len(test))}
    for name, rows in shifted(task.x.iloc[test], spread):
        with torch.no_grad():
            passes = network.passes(model.encoded_rows(rows))
            faded = fading(passes.predicted, network.scores(passes)).numpy()
            probs = base(passes.predicted, {}).numpy()
        cell[f"{name} accuracy"] = float((probs.argmax(1) == labels).mean())
        cell[f"{name} unknown"] = float(np.mean(model.known_p(rows) <= LEVEL))
        for kind, found in (("plain", probs), ("faded", faded)):
            cell[f"{name} {kind} ECE"] = calibration_error(found, labels)
            cell[f"{name} {kind} NLL"] = log_loss(labels, found, labels=range(len(known)))
    return cell


# -- the page ---------------------------------------------------------------------------------------------------------


def mean(cells: Sequence[dict[str, float]], key: str) -> float:
    """The mean over folds."""
    return float(np.mean([cell[key] for cell in cells]))


def run(args: argparse.Namespace) -> None:
    """Fill the cells that are missing, and print the page."""
    folds, most = (2, 400) if args.quick or args.smoke else (5, 2000)
    store = Store(args.out / "battery.json", {"folds": folds, "rows": most, "level": LEVEL, "cost": COST})

    def read_images(folder: Path) -> Task:
        folder_kept = (args.tasks or args.data) / ".features"
        folder_kept.mkdir(exist_ok=True)
        kept = folder_kept / f"{folder.name}_{args.backbone}_{args.size}.npz"
        return image_features(folder, lambda: load_backbone(args.backbone, args.data), args.size, kept)

    images = read_images if args.images else None
    tasks = list(find_tasks(args.data, args.tasks, most, images))
    tasks = [task for task in tasks if task.name in ("iris", "diabetes")] if args.smoke else tasks
    show_quality(store, tasks, folds)
    show_unknown(store, [task for task in tasks if task.classes and len(np.unique(task.y)) > 2])
    show_shift(store, [task for task in tasks if task.classes and len(task.x.select_dtypes("number").columns)])


def show_quality(store: Store, tasks: Sequence[Task], folds: int) -> None:
    """Quality and calibration of all tasks."""
    rows: list[list[Any]] = []
    ratios: dict[str, list[float]] = {"best": [], "logistic regression, at most 600 rows": []}
    worse = []
    for task in tasks:
        wide = task.x.shape[1] > WIDE
        models = [name for name in (CLASSIFIERS if task.classes else REGRESSORS) if not wide or name != "boosting"]
        key = "log_loss" if task.classes else "rmse"
        cells = {
            name: [
                store.cell(f"quality/{task.name}/{name}/{i}", lambda t=task, i=i, n=name: quality(t, i, folds, n))
                for i in range(min(folds, 2) if wide else folds)
            ]
            for name in models
        }
        means = {name: mean(found, key) for name, found in cells.items()}
        peer = min(value for name, value in means.items() if name != "BRAINet")
        ratios["best"].append(means["BRAINet"] / peer)
        if task.classes and len(task.x) <= 600:
            ratios["logistic regression, at most 600 rows"].append(means["BRAINet"] / means["logistic regression"])
        told: list[Any] = ["", "", "", ""]
        if task.classes:
            told = [mean(cells["BRAINet"], part) for part in ("uncalibrated", "best", "ece")]
            told.append(min(mean(found, "ece") for name, found in cells.items() if name != "BRAINet"))
            lost = [cell["log_loss"] - cell["uncalibrated"] for cell in cells["BRAINet"]]
            if np.mean(lost) > 2 * np.std(lost, ddof=1) / len(lost) ** 0.5:
                worse.append(task.name)
        values = [means.get(name, "") for name in (CLASSIFIERS if task.classes else REGRESSORS)]
        rows.append([task.name, len(task.x), *values, means["BRAINet"] / peer, *told])
        print(f"{task.name}: {means['BRAINet']:.4g}, best peer {peer:.4g}", flush=True)
    names = ["BRAINet", "logistic regression / ridge", "boosting", "forest", "MLP", "to best peer"]
    print("\nLog loss of classes, RMSE of numbers, means over folds:")
    table(["task", "rows", *names, "without τ", "best τ", "ECE", "best peer's ECE"], rows)
    close = sum(ratio <= 1.05 for ratio in ratios["best"])
    print(f"\nwithin 5 % of the best peer: {close} of {len(rows)}; worst ratio {max(ratios['best']):.2f}; ", end="")
    small = ratios["logistic regression, at most 600 rows"]
    if small:
        print(
            f"geometric mean to logistic regression, up to 600 rows: {math.exp(np.mean(np.log(small))):.3f}", end="; "
        )
    print(f"worse calibrated by two standard errors: {', '.join(worse) or 'none'}")


def show_unknown(store: Store, tasks: Sequence[Task]) -> None:
    """Classes that were left out."""
    rows: list[list[Any]] = []
    names = ("BRAINet", *SINGLE, "max-softmax", "k-NN", "Mahalanobis", "isolation forest")
    held, alarms = 0, 0
    for task in tasks:
        for left_out in np.unique(task.y)[: 1 if task.x.shape[1] > WIDE else MOST_LEFT_OUT]:
            if (task.y != left_out).sum() < 80:
                continue
            cell = store.cell(f"unknown/{task.name}/{left_out}", lambda t=task, c=left_out: unknown(t, c))
            shares = [f"{100 * cell[f'{n} known']:.0f} / {100 * cell[f'{n} unknown']:.0f}" for n in names]
            rows.append([task.name, str(left_out), *shares, 100 * cell["BRAINet AUROC"]])
            held += max(cell[f"{n} unknown"] for n in SINGLE) - 0.1 <= cell["BRAINet unknown"]
            error = 2 * (LEVEL * (1 - LEVEL) / cell["held"]) ** 0.5
            alarms += cell["BRAINet known"] <= LEVEL + error
    print("\nCalled unknown at 5 %, known rows / rows of the class left out, in %:")
    table(["task", "left out", *names, "AUROC"], rows)
    print(f"\nat most ten points below the best single score: {held} of {len(rows)}; ", end="")
    print(f"known rows called unknown within 5 % and two binomial errors: {alarms} of {len(rows)}")


def show_shift(store: Store, tasks: Sequence[Task]) -> None:
    """Noise, gaps, permuted columns, and what fading does."""
    rows, faded = [], []
    kinds = ["clean", *(f"noise {s:g}" for s in NOISES), *(f"gone {s:g}" for s in GONE), "permuted"]
    harmless, held, paid = 0, 0, 0
    for task in (task for task in tasks if task.x.shape[1] <= WIDE):
        cell = store.cell(f"shift/{task.name}", lambda t=task: shift(t))
        parts = ("accuracy", "plain ECE", "unknown")
        rows.append([task.name, *(" / ".join(f"{cell[f'{k} {p}']:.2f}" for p in parts) for k in kinds)])
        numbers = [" / ".join(f"{cell[f'{k} {how} ECE']:.2f}" for how in ("plain", "faded")) for k in kinds]
        price = cell["clean faded NLL"] / cell["clean plain NLL"] - 1
        faded.append([task.name, f"{cell['kappa']:.2f}", f"{100 * price:+.1f} %", *numbers])
        paid += price <= COST + 0.0005
        for kind in (k for k in kinds[1:-1] if cell[f"{k} accuracy"] >= cell["clean accuracy"] - 0.01):
            harmless += 1
            flagged = cell[f"{kind} unknown"] <= 3 * max(cell["clean unknown"], 1 / cell["rows"])
            held += flagged and cell[f"{kind} faded ECE"] <= cell["clean plain ECE"] + 0.05
    print("\nShift: accuracy / calibration error / share called unknown:")
    table(["task", *kinds], rows)
    print("\nFading (DensityScaling): rate, price in NLL on clean rows, calibration error without / with it:")
    table(["task", "κ", "price", *kinds], faded)
    print(f"\nprice within {COST:.0%}: {paid} of {len(faded)}; harmless shifts that stay so: {held} of {harmless}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with tables/*.csv, uci, clothing")
    parser.add_argument("--tasks", type=Path, help="a folder with further *.csv, *.npz, images")
    parser.add_argument(
        "--backbone", default="efficientnet-lite0", help="frozen network for images; else torchvision's"
    )
    parser.add_argument("--size", type=int, default=160, help="pixels of an image's side")
    parser.add_argument("--no-images", dest="images", action="store_false", help="leave out folders of images")
    parser.add_argument("--quick", action="store_true", help="400 rows and two folds")
    add_out(parser)
    args = parser.parse_args(argv)
    args.out = results_folder(args)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    run(args)


if __name__ == "__main__":
    main()
