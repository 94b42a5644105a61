"""The estimators beside the strongest peers that install: CatBoost, LightGBM, RealMLP-TD, TabM-D, tuned linear models.

    python benchmarks/strongest.py --data DIR                  # docs/results/strongest.json, hours on two cores
    python benchmarks/strongest.py --data DIR --most 400       # tables of at most 400 rows
    python benchmarks/strongest.py --data DIR --folds 1 --only BRAINet CatBoost

The tables and folds are those of battery.py. Every model runs as its authors advise without knowing the table:
defaults, and early stopping on a fifth of the training rows where it has any. `pip install catboost lightgbm pytabkit`
first; a peer that is not installed is left out and named. Finished cells are kept.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from battery import CLASSIFIERS, REGRESSORS, Task, encoded, find_tasks
from common.command import add_out, results_folder
from common.store import Store
from common.tables import table
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

FOLDS = 5
HELD = 0.2  # share of the training rows by which a peer stops
ROUNDS = 2000  # trees at the most
WAIT = 100  # trees without a gain
PACKAGES = {"CatBoost": "catboost", "LightGBM": "lightgbm", "RealMLP-TD": "pytabkit", "TabM-D": "pytabkit"}
MODELS = ("BRAINet", "linear, tuned", "ExtraTrees", "LightGBM", "CatBoost", "RealMLP-TD", "TabM-D")


def names_of_text(task: Task) -> list[str]:
    """The columns that are no numbers."""
    return [name for name in task.x if task.x[name].dtype.kind not in "fiub"]


class Stopped:
    """Boosting that stops by a part of its training rows.

    Args:
        model: CatBoost or LightGBM.
        task: of which table.
        fit: settings of its `fit`, made of the rows and targets that stop it.
    """

    def __init__(self, model: Any, task: Task, fit: Callable[[Any, Any], dict[str, Any]]) -> None:
        self.model, self.classes, self.settings = model, task.classes, fit

    def fit(self, x: Any, y: Any) -> Stopped:
        """Fit to four fifths, and stop by the rest."""
        few = self.classes and np.unique(y, return_counts=True)[1].min() < 2
        parts = train_test_split(x, y, test_size=HELD, random_state=0, stratify=y if self.classes and not few else None)
        rows, held, target, held_target = parts
        self.model.fit(rows, target, **self.settings(held, held_target))
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def catboost(task: Task, seed: int) -> Stopped:
    """CatBoost with its own way to read categories."""
    import catboost

    settings = {
        "iterations": ROUNDS,
        "random_seed": seed,
        "verbose": 0,
        "thread_count": 1,
        "allow_writing_files": False,
    }
    kind = catboost.CatBoostClassifier if task.classes else catboost.CatBoostRegressor
    model = kind(**settings, cat_features=names_of_text(task))
    return Stopped(model, task, lambda x, y: {"eval_set": (x, y), "early_stopping_rounds": WAIT})


def lightgbm(task: Task, seed: int) -> Stopped:
    """LightGBM with its own way to read categories."""
    import lightgbm

    settings = {"n_estimators": ROUNDS, "learning_rate": 0.05, "random_state": seed, "verbose": -1, "n_jobs": 1}
    model = (lightgbm.LGBMClassifier if task.classes else lightgbm.LGBMRegressor)(**settings)
    stop = lightgbm.early_stopping(WAIT, verbose=False)
    return Stopped(model, task, lambda x, y: {"eval_set": [(x, y)], "callbacks": [stop]})


def tabkit(name: str, task: Task, seed: int) -> Any:
    """RealMLP-TD or TabM-D of pytabkit, chosen and calibrated by log loss where there are classes."""
    import pytabkit

    kind = getattr(pytabkit, f"{name.replace('-', '_')}_{'Classifier' if task.classes else 'Regressor'}")
    settings: dict[str, Any] = {"random_state": seed, "n_threads": 1, "device": "cpu", "verbosity": 0}
    if task.classes:
        settings |= {"val_metric_name": "cross_entropy", "calibration_method": "ts-mix"}
    return kind(**settings)


def model_of(name: str, task: Task, seed: int) -> Any:
    """An unfitted model for a table."""
    if name in ("CatBoost", "LightGBM"):
        return (catboost if name == "CatBoost" else lightgbm)(task, seed)
    if name in PACKAGES:
        return tabkit(name, task, seed)
    if name == "ExtraTrees":
        kind = ExtraTreesClassifier if task.classes else ExtraTreesRegressor
        return encoded(kind(500, min_samples_leaf=2, random_state=seed))
    known = CLASSIFIERS if task.classes else REGRESSORS
    linear = "logistic regression" if task.classes else "ridge"
    return known[linear if name == "linear, tuned" else name](seed)


def measure(task: Task, fold: int, name: str) -> dict[str, float]:
    """Log loss or RMSE of one model on one fold, and its seconds of processor time."""
    split = StratifiedKFold if task.classes else KFold
    train, test = list(split(FOLDS, shuffle=True, random_state=0).split(task.x, task.y))[fold]
    x = task.x.copy()
    for text in names_of_text(task):
        x[text] = x[text].astype("category" if name == "LightGBM" else str)
    began = time.process_time()
    model = model_of(name, task, fold).fit(x.iloc[train], task.y[train])
    if not task.classes:
        found = np.asarray(model.predict(x.iloc[test])).ravel()
        loss = float(np.sqrt(np.mean((found - task.y[test]) ** 2)))
    else:
        loss = float(log_loss(task.y[test], model.predict_proba(x.iloc[test]), labels=list(model.classes_)))
    return {"log_loss" if task.classes else "rmse": loss, "seconds": time.process_time() - began}


def run(args: argparse.Namespace) -> None:
    """Fill the cells that are missing, small tables first, and print the table."""
    store = Store(args.out / "strongest.json", {"folds": FOLDS, "rows": 2000})
    chosen = [name for name in MODELS if name in args.only and find_spec(PACKAGES.get(name, "sklearn")) is not None]
    absent = [name for name in args.only if name not in chosen]
    if absent:
        print(f"not installed, and left out: {', '.join(absent)}")
    tasks = sorted(find_tasks(args.data, None, 2000), key=lambda task: task.x.size)
    tasks = [task for task in tasks if len(task.x) <= args.most and (not args.smoke or task.name == "iris")]
    rows = []
    for task in tasks:
        means = {}
        for name in chosen:
            found = []
            for fold in range(args.folds):
                found.append(store.cell(f"{task.name}/{name}/{fold}", lambda t=task, f=fold, n=name: measure(t, f, n)))
            means[name] = float(np.mean([next(iter(cell.values())) for cell in found]))
        rows.append([task.name, len(task.x), *means.values()])
        print(f"{task.name}: {means}", flush=True)
    table(["task", "rows", *chosen], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with tables/*.csv, uci")
    parser.add_argument("--most", type=int, default=2000, help="rows of a table at the most")
    parser.add_argument("--folds", type=int, default=FOLDS, help="folds of five that are run")
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=MODELS, help="models that are run")
    add_out(parser)
    args = parser.parse_args(argv)
    args.out = results_folder(args)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    run(args)


if __name__ == "__main__":
    main()
