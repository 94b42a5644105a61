"""Do the promises hold on tables that nobody tuned? Quality, calibration, unknown rows and noise, beside strong peers.

    python benchmarks/battery.py --data DIR                 # docs/results/battery.json, about 20 minutes on two cores
    python benchmarks/battery.py --data DIR --quick         # fewer rows and folds, a few minutes
    python benchmarks/battery.py --data DIR --tasks FOLDER  # every *.csv and *.npz of a folder of your own too
    python benchmarks/battery.py --smoke

Tasks are found: DIR/tables/*.csv and FOLDER/*.csv (no header, the target in the last column, '?' is missing),
FOLDER/*.npz (x, y), and scikit-learn's own sets. `BRAINetClassifier` and `BRAINetRegressor` run with their defaults,
nothing is set for a task. Finished cells are kept, and a run that was cut goes on from there.
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
from common.command import add_out, results_folder
from common.store import Store
from common.tables import table
from numpy.typing import NDArray
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

from brainet_pl import BRAINetClassifier, BRAINetRegressor
from brainet_pl.calibration.temperature import fit_temperature, scale

SKLEARN = ("iris", "wine", "breast_cancer", "digits", "diabetes")
LEVEL = 0.05  # of the verdict
NOISES = (0.05, 0.2, 1.0)  # deviations of the noise, in those of a column
MOST_LEFT_OUT = 3  # classes that are left out, one at a time
LOSS = "neg_log_loss"
FEW_TARGETS = 20  # different numbers up to which a column of numbers is taken for classes


class Task(NamedTuple):
    """A table: columns X, targets y, and whether y are classes."""

    name: str
    x: pd.DataFrame
    y: NDArray[Any]
    classes: bool


# -- tasks ------------------------------------------------------------------------------------------------------------


def find_tasks(data: Path | None, folder: Path | None, most: int) -> Iterator[Task]:
    """Every table that can be found, with at most so many rows."""
    files = [] if data is None else sorted((data / "tables").glob("*.csv"))
    files += [] if folder is None else sorted([*folder.glob("*.csv"), *folder.glob("*.npz")])
    for path in files:
        yield shortened(read(path), most)
    for name in SKLEARN:
        found = getattr(datasets, f"load_{name}")()
        frame = pd.DataFrame(found.data, columns=[f"c{i}" for i in range(found.data.shape[1])])
        yield shortened(Task(name, frame, found.target, name != "diabetes"), most)


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
    cell = {"log_loss": log_loss(y, probs, labels=known), "error": float(np.mean(model.predict(rows) != y))}
    if name == "BRAINet":
        with torch.no_grad():
            plain = model.network_.passes(model._rows(rows)).predicted
        target = torch.tensor([known.index(label) for label in y])
        best = scale(plain, fit_temperature(plain, target, prior=None))
        cell |= {"uncalibrated": log_loss(y, plain.numpy(), labels=known), "best": log_loss(y, best, labels=known)}
    return cell


def unknown(task: Task, left_out: Any) -> dict[str, float]:
    """A class is left out: which share of its rows, and of known ones, is called unknown at 5 %."""
    inside = task.y != left_out
    x, y, strange = task.x[inside].reset_index(drop=True), task.y[inside], task.x[~inside]
    train, test = train_test_split(np.arange(len(x)), test_size=0.25, random_state=0, stratify=y)
    model = BRAINetClassifier(random_state=0).fit(x.iloc[train], y[train])
    cell = {}

    def judge(name: str, known_p: Callable[[pd.DataFrame], NDArray[Any]]) -> None:
        known, other = known_p(x.iloc[test]), known_p(strange)
        labels = np.r_[np.zeros(len(known)), np.ones(len(other))]
        cell[f"{name} known"] = float(np.mean(known <= LEVEL))
        cell[f"{name} unknown"] = float(np.mean(other <= LEVEL))
        cell[f"{name} AUROC"] = float(roc_auc_score(labels, -np.r_[known, other]))

    judge("BRAINet", model.known_p)
    fit, held = train_test_split(train, test_size=0.15, random_state=0, stratify=y[train])
    for name, score in detectors(x.iloc[fit], y[fit]).items():
        reference = np.sort(score(x.iloc[held]))

        def known_p(rows: pd.DataFrame, score: Any = score, reference: Any = reference) -> NDArray[Any]:
            below = np.searchsorted(reference, score(rows))
            return (1 + len(reference) - below) / (len(reference) + 1)

        judge(name, known_p)
    return cell


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


def noise(task: Task) -> dict[str, float]:
    """Noise on every column of numbers: accuracy, calibration error, log loss and share called unknown, by severity."""
    train, test = train_test_split(np.arange(len(task.x)), test_size=0.25, random_state=0, stratify=task.y)
    model = BRAINetClassifier(random_state=0).fit(task.x.iloc[train], task.y[train])
    numbers = task.x.select_dtypes("number").columns
    spread = task.x.iloc[train][numbers].std()
    cell, draw = {}, np.random.default_rng(0)
    for severity in (0.0, *NOISES):
        rows, y = task.x.iloc[test].copy(), task.y[test]
        rows[numbers] = rows[numbers] + severity * spread.to_numpy() * draw.normal(size=(len(rows), len(numbers)))
        probs = model.predict_proba(rows)
        right = model.classes_[probs.argmax(1)] == y
        cell |= {
            f"{severity:g} accuracy": float(right.mean()),
            f"{severity:g} gap": float(probs.max(1).mean() - right.mean()),
            f"{severity:g} log_loss": log_loss(y, probs, labels=list(model.classes_)),
            f"{severity:g} unknown": float(np.mean(model.known_p(rows) <= LEVEL)),
        }
    return cell


# -- the page ---------------------------------------------------------------------------------------------------------


def mean(cells: Sequence[dict[str, float]], key: str) -> float:
    """The mean over folds."""
    return float(np.mean([cell[key] for cell in cells]))


def run(args: argparse.Namespace) -> None:
    """Fill the cells that are missing, and print the page."""
    folds, most = (2, 400) if args.quick or args.smoke else (5, 2000)
    store = Store(args.out / "battery.json", {"folds": folds, "rows": most, "level": LEVEL})
    tasks = list(find_tasks(args.data, args.tasks, most))
    tasks = [task for task in tasks if task.name in ("iris", "diabetes")] if args.smoke else tasks
    rows: list[list[Any]] = []
    ratios: dict[str, list[float]] = {"best": [], "logistic regression": []}
    for task in tasks:
        models = list(CLASSIFIERS if task.classes else REGRESSORS)
        key = "log_loss" if task.classes else "rmse"
        cells = {
            name: [
                store.cell(f"quality/{task.name}/{name}/{i}", lambda t=task, i=i, n=name: quality(t, i, folds, n))
                for i in range(folds)
            ]
            for name in models
        }
        means = {name: mean(found, key) for name, found in cells.items()}
        peer = min(value for name, value in means.items() if name != "BRAINet")
        ratios["best"].append(means["BRAINet"] / peer)
        if task.classes:
            ratios["logistic regression"].append(means["BRAINet"] / means["logistic regression"])
        told = [mean(cells["BRAINet"], part) for part in ("uncalibrated", "best")] if task.classes else ["", ""]
        rows.append([task.name, len(task.x), *means.values(), *told])
        print(f"{task.name}: {means['BRAINet']:.4g}, best peer {peer:.4g}", flush=True)
    head = [
        "task",
        "rows",
        "BRAINet",
        "logistic regression / ridge",
        "boosting",
        "forest",
        "MLP",
        "without τ",
        "best τ",
    ]
    print("\nLog loss of classes, RMSE of numbers, means over folds:")
    table(head, rows)
    close = sum(ratio <= 1.05 for ratio in ratios["best"])
    print(f"\nwithin 5 % of the best peer: {close} of {len(rows)}; worst ratio {max(ratios['best']):.2f}; ", end="")
    print(f"geometric mean to logistic regression {math.exp(np.mean(np.log(ratios['logistic regression']))):.3f}")
    rows = []
    for task in (task for task in tasks if task.classes and len(np.unique(task.y)) > 2):
        for left_out in np.unique(task.y)[:MOST_LEFT_OUT]:
            if (task.y != left_out).sum() < 80:
                continue
            cell = store.cell(f"unknown/{task.name}/{left_out}", lambda t=task, c=left_out: unknown(t, c))
            names = ("BRAINet", "max-softmax", "k-NN", "Mahalanobis", "isolation forest")
            shares = [f"{100 * cell[f'{n} known']:.0f} / {100 * cell[f'{n} unknown']:.0f}" for n in names]
            rows.append([task.name, str(left_out), *shares, 100 * cell["BRAINet AUROC"]])
    print("\nCalled unknown at 5 %, known rows / rows of the class left out, in %:")
    table(["task", "left out", "BRAINet", "max-softmax", "k-NN", "Mahalanobis", "isolation forest", "AUROC"], rows)
    rows = []
    for task in (task for task in tasks if task.classes and len(task.x.select_dtypes("number").columns)):
        cell = store.cell(f"noise/{task.name}", lambda t=task: noise(t))
        parts = ("accuracy", "gap", "unknown")
        rows.append([task.name, *(" / ".join(f"{cell[f'{s:g} {p}']:.2f}" for p in parts) for s in (0.0, *NOISES))])
    print("\nNoise: accuracy / confidence less accuracy / share called unknown:")
    table(["task", "none", *(f"σ = {s:g}" for s in NOISES)], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with tables/*.csv")
    parser.add_argument("--tasks", type=Path, help="a folder with further *.csv and *.npz")
    parser.add_argument("--quick", action="store_true", help="400 rows and two folds")
    add_out(parser)
    args = parser.parse_args(argv)
    args.out = results_folder(args)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    run(args)


if __name__ == "__main__":
    main()
