"""BRAINet inside Deep Ensembles and inside MC-dropout on nine UCI regression sets: the paper's Appendix D.

    python benchmarks/uci.py tune --data DIR           # settings, on validation rows: docs/results/uci_settings.json
    python benchmarks/uci.py run --data DIR --quick    # 5 splits of each set, about 10 minutes on 2 cores
    python benchmarks/uci.py run --data DIR            # all published splits
    python benchmarks/uci.py table                     # print what is there again
    python benchmarks/uci.py speed                     # batched members against a loop

Every finished cell is a line of docs/results/uci.jsonl, and a cell that is there is not run again. Every head of a set
has the parameters of one hidden layer of 50 neurons (protein: 100), times 5 for the ensembles. Settings come from the
training rows of the first published splits alone: each variant gets the same number of trials, with the same learning
rates, weight decays and lengths; those of BRAINet differ in the structure as well.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from structure import table
from torch import Tensor

from brainet_pl.datamodules.uci import FOLDERS, read_split, standardise
from brainet_pl.module import BRAINet
from brainet_pl.structure import learn_structure

OUT = Path(__file__).parents[1] / "docs" / "results"
MEMBERS, PASSES = 5, 50
TRIALS = 12
QUICK_SPLITS = 5

# variant → (head, hidden layers of a plain one). The last four are controls: plain networks of two layers, and
# BRAINet's own settings with the columns of its input shuffled, so that the wiring no longer fits them.
VARIANTS: dict[str, tuple[str, int]] = {
    "ensemble": ("ensemble", 1),
    "brainet_ensemble": ("brainet_ensemble", 0),
    "mc_dropout": ("mc_dropout", 1),
    "brainet_dropout": ("brainet_dropout", 0),
    "ensemble_2": ("ensemble", 2),
    "mc_dropout_2": ("mc_dropout", 2),
    "brainet_ensemble_shuffled": ("brainet_ensemble", 0),
    "brainet_dropout_shuffled": ("brainet_dropout", 0),
}
MAIN = list(VARIANTS)[:4]

# The structures that BRAINet's trials go through; plain trials differ in the other settings alone.
STRUCTURES: list[dict[str, Any]] = [
    {"test": "gaussian", "threshold": 0.0005, "max_order": 1},
    {"test": "gaussian", "threshold": 0.02, "max_order": 1},
    {"test": "cmi", "threshold": 0.05, "max_order": 1},
    {"test": "gaussian", "threshold": 0.005, "max_order": 3},
]

# Appendix D, Tables 1 and 2: mean and standard deviation of RMSE, then of NLL.
PAPER: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "concrete": {
        "ensemble": (5.46, 0.52, 2.92, 0.16),
        "brainet_ensemble": (4.17, 0.59, 2.56, 0.13),
        "mc_dropout": (4.83, 0.52, 2.92, 0.09),
        "brainet_dropout": (3.09, 0.78, 2.64, 0.12),
    },
    "boston": {
        "ensemble": (2.90, 0.71, 2.37, 0.25),
        "brainet_ensemble": (2.17, 0.56, 1.88, 0.21),
        "mc_dropout": (2.80, 0.52, 2.39, 0.15),
        "brainet_dropout": (1.90, 0.38, 2.16, 0.08),
    },
    "power": {
        "ensemble": (4.11, 0.16, 2.82, 0.03),
        "brainet_ensemble": (4.10, 0.14, 2.80, 0.03),
        "mc_dropout": (4.02, 0.18, 2.80, 0.05),
        "brainet_dropout": (4.00, 0.16, 2.79, 0.04),
    },
    "yacht": {
        "ensemble": (3.09, 1.03, 2.25, 0.39),
        "brainet_ensemble": (1.10, 0.36, 1.09, 0.14),
        "mc_dropout": (1.42, 0.48, 1.60, 0.13),
        "brainet_dropout": (0.61, 0.25, 1.38, 0.06),
    },
    "kin8nm": {
        "ensemble": (0.09, 0.00, -1.18, 0.02),
        "brainet_ensemble": (0.08, 0.00, -1.23, 0.03),
        "mc_dropout": (0.10, 0.00, -0.95, 0.03),
        "brainet_dropout": (0.08, 0.00, -1.10, 0.03),
    },
    "energy": {
        "ensemble": (0.95, 0.26, 1.16, 0.25),
        "brainet_ensemble": (0.71, 0.10, 1.02, 0.13),
        "mc_dropout": (0.88, 0.13, 1.62, 0.03),
        "brainet_dropout": (0.56, 0.08, 1.44, 0.02),
    },
    "naval": {
        "ensemble": (0.00, 0.00, -3.55, 0.06),
        "brainet_ensemble": (0.00, 0.00, -3.68, 0.05),
        "mc_dropout": (0.0018, 0.0002, -4.22, 0.01),
        "brainet_dropout": (0.0012, 0.0003, -4.35, 0.02),
    },
    "wine": {
        "ensemble": (0.64, 0.04, 0.92, 0.08),
        "brainet_ensemble": (0.59, 0.05, 0.76, 0.05),
        "mc_dropout": (0.62, 0.04, 0.93, 0.06),
        "brainet_dropout": (0.54, 0.04, 0.82, 0.05),
    },
    "protein": {
        "ensemble": (4.62, 0.17, 2.79, 0.03),
        "brainet_ensemble": (4.16, 0.15, 2.60, 0.09),
        "mc_dropout": (3.60, 0.03, 2.69, 0.01),
        "brainet_dropout": (3.46, 0.19, 2.67, 0.03),
    },
}
SETS = list(PAPER)
LARGE = ("kin8nm", "power", "naval", "protein")  # thousands of rows
Floats = NDArray[np.float64]


# -- one cell ---------------------------------------------------------------------------------------------------------


def budget(name: str, d: int) -> int:
    """Parameters of dense (w) → ReLU → dense (2) with w = 50, for protein 100, as in the published comparisons."""
    w = 100 if name == "protein" else 50
    return (d + 1) * w + (w + 1) * 2


@lru_cache(maxsize=4)
def rows_of(data: str, name: str, split: int, holdout: int | None) -> tuple[Floats, Floats, Floats, Floats]:
    """Training and evaluation rows: of the published split, or with `holdout` a fifth of its training rows held out."""
    x, y, x_test, y_test = read_split(data, name, split)
    if holdout is None:
        return x, y, x_test, y_test
    order = np.random.default_rng([split, holdout]).permutation(len(x))
    held, kept = order[: min(len(x) // 5, 2000)], order[min(len(x) // 5, 2000) :]
    return x[kept], y[kept], x[held], y[held]


def build(variant: str, name: str, x: Floats, settings: dict[str, Any]) -> BRAINet:
    """The product's own module with the head of a variant, at the budget of the set."""
    head, hidden = VARIANTS[variant]
    members = MEMBERS if "ensemble" in head else 1
    model = BRAINet(
        task="regression",
        head=head,  # type: ignore[arg-type]
        num_params=members * budget(name, x.shape[1]),
        hidden=max(1, hidden),
        members=members,
        dropout=settings["dropout"] if "dropout" in head else 0.0,
        norm=None,
        passes=PASSES,
    )
    if model.needs_structure:
        model.set_structure(learn_structure(x, progress=False, max_seconds=20, **settings["structure"]))
    else:
        model.build_head(x.shape[1])
    return model


def fit(model: BRAINet, x: Tensor, y: Tensor, settings: dict[str, Any], batch: int) -> None:
    """AdamW, one cycle of the learning rate, batches of shuffled rows."""
    assert model.head is not None
    model.task.prepare(y)
    model.train()
    members = getattr(model.head, "members", 1)
    optimizer = torch.optim.AdamW(
        model.head.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"], fused=True
    )
    steps = settings["steps"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings["lr"], total_steps=steps + 1, pct_start=0.1)
    per_epoch = len(x) // batch
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(x))
        rows = order[step % per_epoch * batch :][:batch]
        loss = model.task.loss(model.head(x[rows]), y[rows]) * members  # the sum: members do not share a step size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def cell(
    data: str, name: str, variant: str, split: int, settings: dict[str, Any], holdout: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Train and evaluate once; metrics are in the units of the target."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="expected .* parameters within 2 %")
    start = time.perf_counter()
    x, y, x_eval, y_eval = rows_of(data, name, split, holdout)
    torch.manual_seed(1000 * seed + split)
    model = build(variant, name, x, settings)
    inputs, eval_inputs = standardise(x, x_eval)
    if variant.endswith("shuffled"):
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(split))
        inputs, eval_inputs = inputs[:, order], eval_inputs[:, order]
    target, eval_target = (torch.tensor(v, dtype=torch.float32) for v in (y, y_eval))
    batch = {"protein": 256}.get(name, 128 if name in LARGE else 32)
    fit(model, inputs, target, settings, batch)
    metrics = model.task.metrics("")
    with torch.no_grad():
        for rows in torch.arange(len(eval_inputs)).split(1000):
            metrics.update(model(eval_inputs[rows]), eval_target[rows])
    found = {k: float(v) for k, v in metrics.compute().items()}
    assert model.head is not None
    return {
        "set": name,
        "variant": variant,
        "split": split,
        "seconds": round(time.perf_counter() - start, 2),
        "parameters": sum(p.numel() for p in model.head.parameters()),
        "depth": model.head.ggt.depth if hasattr(model.head, "ggt") else VARIANTS[variant][1],
        **found,
    }


# -- settings ---------------------------------------------------------------------------------------------------------


def trial(name: str, number: int) -> dict[str, Any]:
    """The settings of a trial, the same for all variants; each variant reads those that concern it.

    3 weight decays × 4 pairs of learning rate and length, dropout rates in turn; a structure goes with each pair.
    """
    decay, pair = number % 3, number // 3
    if name in LARGE:
        lr, steps = [(0.01, 4000), (0.02, 4000), (0.02, 2000), (0.005, 4000)][pair]
    else:
        lr, steps = [(0.01, 2500), (0.02, 1000), (0.01, 1000), (0.005, 2500)][pair]
    return {
        "lr": lr,
        "steps": steps,
        "weight_decay": [0.0, 0.01, 0.1][decay] if name in LARGE else [0.03, 0.3, 1.0][decay],
        "dropout": [0.01, 0.05, 0.1][(decay + pair) % 3],
        "structure": STRUCTURES[pair],
    }


def tune_one(data: str, name: str, variant: str) -> dict[str, Any]:
    """The trial with the lowest validation NLL, a mean over held-out parts of training rows (two of small sets)."""
    results = []
    for number in range(TRIALS):
        holdouts = [(0, 0)] if name in LARGE else [(0, 0), (1, 0)]
        cells = [cell(data, name, variant, split, trial(name, number), holdout) for split, holdout in holdouts]
        results.append(statistics.fmean(c["reg/NLL"] for c in cells))
    usable = [r if math.isfinite(r) else math.inf for r in results]
    best = int(np.argmin(usable))
    return {"trial": best, "validation NLL": results, "settings": trial(name, best)}


def tune(data: str, names: Iterable[str], variants: Iterable[str], workers: int) -> None:
    """Choose settings for what has none yet."""
    path = OUT / "uci_settings.json"
    chosen = json.loads(path.read_text()) if path.exists() else {}
    todo = [(n, v) for n in names for v in variants if v not in chosen.get(n, {}) and not v.endswith("shuffled")]
    with ProcessPoolExecutor(workers) as pool:
        futures = {(n, v): pool.submit(tune_one, data, n, v) for n, v in todo}
        for (n, v), future in futures.items():
            chosen.setdefault(n, {})[v] = future.result()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(chosen, indent=1))
            found = chosen[n][v]
            print(n, v, found["settings"], f"{found['validation NLL'][found['trial']]:.3f}", flush=True)


# -- test -------------------------------------------------------------------------------------------------------------


def finished() -> list[dict[str, Any]]:
    """All cells so far."""
    path = OUT / "uci.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(data: str, names: list[str], variants: list[str], splits: int, workers: int) -> None:
    """Test cells that are not there yet, split by split, so that an interrupted run has something of every set."""
    chosen = json.loads((OUT / "uci_settings.json").read_text())
    done = {(c["set"], c["variant"], c["split"]) for c in finished()}
    todo = [
        (name, variant, split)
        for split in range(splits)
        for name in names
        for variant in variants
        if split < (5 if name == "protein" else 20) and (name, variant, split) not in done
    ]
    start = time.perf_counter()
    with ProcessPoolExecutor(workers) as pool, (OUT / "uci.jsonl").open("a") as file:
        futures = [
            pool.submit(cell, data, n, v, s, chosen[n][v.removesuffix("_shuffled")]["settings"]) for n, v, s in todo
        ]
        for i, future in enumerate(futures):
            file.write(json.dumps(future.result()) + "\n")
            file.flush()
            if (i + 1) % 20 == 0:
                print(f"{i + 1} of {len(todo)} cells, {time.perf_counter() - start:.0f} s", flush=True)


def show() -> None:
    """Tables of RMSE and NLL, mean ± standard deviation over splits, beside the paper's; then who wins."""
    cells = finished()
    for plain, ours, deep in (
        ("ensemble", "brainet_ensemble", "ensemble_2"),
        ("mc_dropout", "brainet_dropout", "mc_dropout_2"),
    ):
        for metric, at in (("reg/NLL", 2), ("reg/RMSE", 0)):
            rows, tally = [], {}
            for name in SETS:
                found = {v: _by_split(cells, name, v, metric) for v in (plain, ours, deep, f"{ours}_shuffled")}
                if not found[plain] or not found[ours]:
                    continue
                digits = 4 if name == "naval" and at == 0 else 3 if name in ("kin8nm", "naval") else 2
                row: list[Any] = [name, len(found[ours])]
                row += [_mean_std(list(found[v].values()), digits) for v in (plain, ours)]
                row += [f"{PAPER[name][v][at]:.{digits}f} ± {PAPER[name][v][at + 1]:.{digits}f}" for v in (plain, ours)]
                for other in (plain, deep, f"{ours}_shuffled"):
                    row.append(_verdict(found[ours], found[other], digits, tally.setdefault(other, [])))
                rows.append(row)
            header = ["set", "splits", plain, ours, f"paper: {plain}", f"paper: {ours}"]
            header += [f"{ours} - {other}" for other in (plain, "two layers", "shuffled")]
            print(f"\n{metric.removeprefix('reg/')}, {plain} family")
            table(header, rows)
            for other, verdicts in tally.items():
                counts = {word: sum(v == word for v in verdicts) for word in ("better", "equal", "worse")}
                if sum(counts.values()):
                    print(f"{ours} against {other}: {', '.join(f'{n} {word}' for word, n in counts.items())}")


def _by_split(cells: list[dict[str, Any]], name: str, variant: str, metric: str) -> dict[int, float]:
    return {c["split"]: c[metric] for c in cells if c["set"] == name and c["variant"] == variant}


def _mean_std(values: list[float], digits: int) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {spread:.{digits}f}"


def _verdict(ours: dict[int, float], other: dict[int, float], digits: int, tally: list[str]) -> str:
    """Mean difference over common splits ± its standard error; equal within one standard error."""
    common = sorted(set(ours) & set(other))
    if len(common) < 2:
        return ""
    gaps = [ours[s] - other[s] for s in common]
    mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    tally.append("better" if mean < -error else "equal" if mean <= error else "worse")
    return f"{mean:+.{digits}f} ± {error:.{digits}f} {tally[-1]}"


# -- speed ------------------------------------------------------------------------------------------------------------


def speed(seconds: float) -> None:
    """A training step of M batched members against M heads one after the other, plain and on a learned structure."""
    from head import race

    from brainet_pl.ensemble import EnsembleHead, stacked_tree

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="expected .* parameters within 2 %")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 8))
    x[:, 4:] += x[:, :4]
    trees = {"one hidden layer": stacked_tree(8, 1), "learned": learn_structure(x, test="gaussian", progress=False)}
    rows = []
    for label, ggt in trees.items():
        for members in (5, 20):
            for batch in (32, 256):
                inputs = torch.tensor(x[:batch], dtype=torch.float32)
                heads = [EnsembleHead(ggt, 2, 600, 1, norm=None) for _ in range(members)]
                calls = {
                    "batched": _step([EnsembleHead(ggt, 2, 600 * members, members, norm=None)], inputs),
                    "loop": _step(heads, inputs),
                }
                took = race(calls, seconds)
                rows.append([label, members, batch, 1e3 * took["batched"], took["loop"] / took["batched"]])
    table(["structure", "members", "batch", "batched step, ms", "loop / batched"], rows)
    names = ("structure", "members", "batch", "batched ms", "ratio")
    (OUT / "uci_speed.json").write_text(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1))


def _step(heads: list[Any], x: Tensor) -> Callable[[], None]:
    optimizers = [torch.optim.Adam(head.parameters(), fused=True) for head in heads]

    def step() -> None:
        for head, optimizer in zip(heads, optimizers, strict=True):
            optimizer.zero_grad()
            head(x).square().mean().backward()
            optimizer.step()

    return step


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tune", "run", "table", "speed"])
    parser.add_argument("--data", help="folder with the folders of the nine sets")
    parser.add_argument("--sets", nargs="+", choices=list(FOLDERS), default=SETS)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=MAIN)
    parser.add_argument("--quick", action="store_true", help=f"only the first {QUICK_SPLITS} splits")
    parser.add_argument("--splits", type=int, default=20, help="at most so many splits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each race of `speed`")
    args = parser.parse_args()
    if args.part in ("tune", "run") and args.data is None:
        parser.error(f"{args.part} needs --data DIR")
    if args.part == "tune":
        tune(args.data, args.sets, args.variants, args.workers)
    elif args.part == "run":
        run(args.data, args.sets, args.variants, QUICK_SPLITS if args.quick else args.splits, args.workers)
        show()
    elif args.part == "table":
        show()
    else:
        speed(args.seconds)


if __name__ == "__main__":
    main()
