"""What people do with answers: promises over many draws of calibration data, flipped labels found, what to label next.

    python benchmarks/decisions.py --data DIR     # docs/results/decisions.json, some fifteen minutes on one core
    python benchmarks/decisions.py --smoke

Tasks: all 1,797 digits of scikit-learn (64 pixels), 1,200 photographs of clothes by an EfficientNet-Lite0 (256
principal directions of its last features), 1,200 queries of 30 intents of CLINC150 by MiniLM. Each sample is judged by
heads that were not trained on it (`find_label_issues`).

`labels`: 5 % of the labels are flipped to another class at random. AUROC of finding them by self-confidence, beside
the same score, that of cleanlab, of a logistic regression out of fold: as cleanlab is shown with, and with the
penalty and the scaling that have the best log-loss in three folds of the rows it is trained on.

`risk`: out-of-fold answers to all samples of a task are a population whose true risk is known. Calibration rows are
drawn from it with replacement, a temperature is fitted to them, and `RiskControl` promises at most 1, 2 or 5 %
wrong answers with delta 0.05. Counted are draws in which the share of wrong answers in the population is above that.
"estimator" draws from the rows that `BRAINetClassifier` held back, also of 2,000 rows of the table phoneme.

`curve`: `BRAINetClassifier` is fitted to three labels of each class. Five times, two labels for each class are added,
chosen by `rank_for_labelling`, by the entropy of its answers, or at random; the accuracy on the third of the rows that
is never labelled is kept. Digits, and 20 intents. Finished cells are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.command import add_out, results_folder
from common.store import Store
from common.unknown_features import clothing, intents
from scipy.stats import entropy
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from brainet_pl import BRAINetClassifier, rank_for_labelling, swap_layer
from brainet_pl.calibration import RiskControl, TemperatureScaling
from brainet_pl.decisions import label_quality
from brainet_pl.decisions.out_of_fold import out_of_fold

ROWS, DIRECTIONS, INTENTS = 1200, 256, 30
FLIPPED = 0.05
ERRORS = {"digits": 0.02, "intents": 0.01, "clothing": 0.05, "phoneme": 0.05}  # of the answers to each task
DELTA, DRAWS, CALIBRATION = 0.05, 500, 600
PENALTIES = {
    "logisticregression__C": [0.001, 0.01, 0.1, 1.0, 10.0],
    "standardscaler": [StandardScaler(), "passthrough"],
}
TABLE_ROWS = 2000
FIRST, ADDED, ROUNDS, FEWER_INTENTS = 3, 2, 5, 20  # labels of each class at first, and added in each round
Rows = tuple[np.ndarray, np.ndarray]


def read(task: str, data: Path, cache: Path) -> Rows:
    """Features and labels of a task."""
    if task == "digits":
        x, y = load_digits(return_X_y=True)
        return (x / 16).astype(np.float32), y
    if task == "phoneme":
        table = np.loadtxt(data / "tables" / "phoneme.csv", delimiter=",")
        table = table[np.random.default_rng(0).permutation(len(table))[:TABLE_ROWS]]
        return table[:, :-1].astype(np.float32), table[:, -1].astype(int)
    found = clothing(data, cache) if task == "clothing" else intents(data, cache, "train")
    x, y = found.last.numpy(), found.y.numpy()
    if task == "intents":
        return x[y < INTENTS], y[y < INTENTS]
    rows = np.random.default_rng(0).permutation(len(y))[:ROWS]
    return PCA(DIRECTIONS, random_state=0).fit_transform(x[rows]).astype(np.float32), y[rows]


def judged(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Out-of-fold probabilities of the heads of a swapped layer, which nothing has trained before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(x.shape[1], int(y.max()) + 1))
    pair = torch.from_numpy(x), torch.from_numpy(y).long()
    swap_layer(model, pair, "1", progress=False)
    return out_of_fold(model, pair, progress=False).probabilities


def logistic(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Out-of-fold probabilities of a logistic regression on standardised features, as cleanlab is shown with."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    return cross_val_predict(model, x, y, cv=folds, method="predict_proba")


def tuned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The same with the penalty and the scaling that are best in three folds of the rows it is trained on."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    search = GridSearchCV(model, PENALTIES, scoring="neg_log_loss", cv=StratifiedKFold(3, shuffle=True, random_state=0))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    return cross_val_predict(search, x, y, cv=folds, method="predict_proba")


def labels(x: np.ndarray, y: np.ndarray, seed: int) -> dict[str, float]:
    """AUROC of finding flipped labels."""
    draw = np.random.default_rng(seed)
    wrong = draw.random(len(y)) < FLIPPED
    given = np.where(wrong, (y + draw.integers(1, y.max() + 1, len(y))) % (y.max() + 1), y)
    found = {"rows": float(len(y)), "flipped": float(wrong.sum())}
    for name, make in (("heads", judged), ("logistic regression", logistic), ("tuned", tuned)):
        found[name] = float(roc_auc_score(wrong, -label_quality(make(x, given), given)))
    return found


def risk(probabilities: np.ndarray, y: np.ndarray, draws: int, error: float) -> dict[str, float]:
    """How often a promise is broken in a population whose answers are known."""
    final, target = torch.from_numpy(probabilities).float(), torch.from_numpy(y).long()
    broken, shares, silent = 0, [], 0
    for seed in range(draws):
        rows = torch.from_numpy(np.random.default_rng(seed).integers(0, len(y), CALIBRATION))
        answered, wrong = promised(final, target, rows, error)
        if answered is None:
            silent += 1
            shares.append(0.0)
            continue
        shares.append(float(answered.double().mean()))
        broken += float(wrong[answered].double().mean()) > error
    return {"draws": draws, "broken": broken / draws, "answered": float(np.mean(shares)), "silent": silent / draws,
            "limit": error, "error": float(wrong.double().mean())}  # fmt: skip


def promised(final: Tensor, target: Tensor, rows: Tensor, error: float) -> tuple[Tensor | None, Tensor]:
    """Which of the population are answered by the promise of some rows, or None; and which answers are wrong."""
    scaling, control = TemperatureScaling().quiet(), RiskControl()
    scaling.observe(final[rows], target[rows], {})
    scaling.finalize()
    scaled = scaling(final, {})
    control.keep(scaled[rows], target[rows])
    wrong = scaled.argmax(dim=1) != target
    try:
        control.control(error, DELTA)
    except ValueError:
        return None, wrong
    return control(scaled)["answered"], wrong


def estimator(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What the members of each fold of an estimator say of the rows that they held back."""
    model = BRAINetClassifier(random_state=0, members=3, max_epochs=60).fit(x, y)
    return out_of_fold(model).probabilities


def curve(x: np.ndarray, y: np.ndarray, seed: int) -> dict[str, list[float]]:
    """Accuracy on rows that are never labelled, at first and after each round, by how the next labels are chosen."""
    pool_x, test_x, pool_y, test_y = train_test_split(x, y, test_size=1 / 3, stratify=y, random_state=seed)
    shuffled = np.random.default_rng(seed).permutation(len(pool_y))
    first = np.concatenate([shuffled[pool_y[shuffled] == label][:FIRST] for label in range(y.max() + 1)])
    found: dict[str, list[float]] = {}
    for name, choose in CHOICES.items():
        known, found[name] = first, []
        for step in range(ROUNDS + 1):
            model = BRAINetClassifier(random_state=seed, members=2, max_epochs=60).fit(pool_x[known], pool_y[known])
            found[name].append(float((model.predict(test_x) == test_y).mean()))
            others = np.setdiff1d(np.arange(len(pool_y)), known)
            chosen = choose(model, pool_x[others], ADDED * (int(y.max()) + 1), 100 * seed + step)
            known = np.concatenate([known, others[chosen]])
    return found


def by_rank(model: BRAINetClassifier, x: np.ndarray, k: int, _: int) -> np.ndarray:
    """What the library would label next."""
    return rank_for_labelling(model, x, k)


def by_entropy(model: BRAINetClassifier, x: np.ndarray, k: int, _: int) -> np.ndarray:
    """The rows whose answers have the largest entropy."""
    return entropy(model.predict_proba(x), axis=1).argsort()[::-1][:k]


def by_chance(_: BRAINetClassifier, x: np.ndarray, k: int, seed: int) -> np.ndarray:
    """Any rows."""
    return np.random.default_rng(seed).permutation(len(x))[:k]


CHOICES = {"rank": by_rank, "entropy": by_entropy, "random": by_chance}


def main(argv: Sequence[str] | None = None) -> None:
    """Fill the cells that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--cache", type=Path, help="folder for extracted features; DIR/cache if not given")
    parser.add_argument("--seeds", type=int, default=3)
    add_out(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    seeds = 1 if args.smoke else args.seeds
    settings: dict[str, Any] = {"delta": DELTA, "calibration": CALIBRATION, "flipped": FLIPPED}
    store = Store(results_folder(args) / "decisions.json", settings | ({"smoke": True} if args.smoke else {}))
    for task in ["digits"] if args.smoke else list(ERRORS):
        x, y = read(task, args.data, args.cache or (args.data / "cache" if args.data else Path()))
        if args.smoke:
            x, y = x[:200], y[:200]
        for key, make in cells_of(task, x, y, seeds, 5 if args.smoke else DRAWS).items():
            print(key, store.cell(key, make), flush=True)


def cells_of(task: str, x: np.ndarray, y: np.ndarray, seeds: int, draws: int) -> dict[str, Callable[[], Any]]:
    """What is measured of a task, by the names of cells."""
    found: dict[str, Callable[[], Any]] = {}
    if task in ("digits", "phoneme"):
        found[f"risk/{task}, estimator"] = lambda: risk(estimator(x, y.astype(int)), y, draws, ERRORS[task])
    if task == "phoneme":
        return found
    found[f"risk/{task}"] = lambda: risk(judged(x, y), y, draws, ERRORS[task])
    few = y < FEWER_INTENTS
    for seed in range(seeds):
        found[f"labels/{task}/{seed}"] = partial(labels, x, y, seed)
        if task != "clothing":
            found[f"curve/{task}/{seed}"] = partial(curve, x[few], y[few], seed)
    return found


if __name__ == "__main__":
    main()
