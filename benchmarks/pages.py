"""Every table of measurements in README and docs, made from docs/results; `make results-pages` writes them.

    python benchmarks/pages.py            # write the tables into the pages
    python benchmarks/pages.py --check    # say what differs, and write nothing; the fast tests do the same

A new table: a function of the cells below, a line in `TABLES`, and its two marks in the page (`common/pages.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from common.edges import calibration_error, error_by_chance, pooled
from common.pages import Table, benchmark, filled, pages, stale
from common.store import ROOT
from common.tables import markdown, spread
from quoted import QUOTED

sys.path.append(str(Path(__file__).parent / "paper"))
Cells = Mapping[str, Any]
OURS, CONTROL = "BRAINet", "BRAINet, shuffled"
HEADS = (OURS, CONTROL, "linear", "MLP", "MC-dropout", "ensemble", "Bayes")
DATA = "--data DIR"
SHARING = f"python benchmarks/sharing.py {DATA} --seeds 2"
ATTACKS = f"python benchmarks/attacks.py {DATA}"


def plain(value: float, digits: int) -> str:
    """A number without the zero in front.

    >>> plain(0.585, 2), plain(-0.5, 1), plain(1.936, 3)
    ('.58', '-.5', '1.936')
    """
    return f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 0.9999 else f"{value:.{digits}f}"


def runs(cells: Cells, *parts: str) -> list[Any]:
    """All seeds of a cell, "task/head/0", "task/head/1", …"""
    key, found = "/".join(parts), []
    while f"{key}/{len(found)}" in cells:
        found.append(cells[f"{key}/{len(found)}"])
    return found


def bold_least(texts: Sequence[str], values: Sequence[float]) -> list[str]:
    """The text of the least value in bold."""
    return [f"**{text}**" if value == min(values) else text for text, value in zip(texts, values, strict=True)]


# -- heads with their defaults ----------------------------------------------------------------------------------------

TASKS = {  # name of the cells → that of README
    "digits": "digits",
    "MNIST 5,000": "MNIST, 5,000 images",
    "MNIST 60,000": "MNIST, 60,000 images (2 seeds)",
    "Fashion-MNIST 5,000": "Fashion-MNIST, 5,000 images",
    "stage 2, 4,000": "ResNet-20, stage 2, 4,000 images",
    "stage 3, 4,000": "ResNet-20, stage 3, 4,000 images",
    "last layer, 50,000": "ResNet-20, last layer, 50,000 images",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
}
SPLITS = ("yacht", "boston", "energy", "concrete", "wine")


def nll(cells: Cells, task: str, head: str) -> list[float]:
    """Test NLL of all seeds."""
    return [one["test"]["nll"] for one in runs(cells, task, head)]


def defaults(cells: Cells, tasks: Sequence[str], of: str) -> str:
    """NLL and error or RMSE of every head."""
    rows = []
    for task in tasks:
        means = [fmean(nll(cells, task, head)) for head in HEADS]
        texts = []
        for head, mean in zip(HEADS, means, strict=True):
            behind = fmean(one["test"].get("err", one["test"].get("rmse")) for one in runs(cells, task, head))
            texts.append(f"{mean:.4f} ({behind:.3g})")
        rows.append([task, len(nll(cells, task, OURS)), *bold_least(texts, means)])
    return markdown([of, "splits" if of == "set" else "seeds", *HEADS], rows)


def differences(cells: Cells, tasks: Sequence[str], of: str) -> str:
    """BRAINet less each other head, paired over seeds."""
    paired = benchmark("defaults").paired
    rows = [[t, *(str(paired(nll(cells, t, OURS), nll(cells, t, head))) for head in HEADS[1:])] for t in tasks]
    return markdown([of, *HEADS[1:]], rows)


BESIDE = ("linear", "logistic regression", "MLP", "MC-dropout", "ensemble", "TabM", "shuffled", "one set", "shared")


def sharing(cells: Cells, part: str = "nll", digits: int = 3, heads: Sequence[str] = BESIDE) -> str:
    """A measure of BRAINet by cell, and what others have less that; of several, as of groups that fail, their mean."""
    paired, known = benchmark("defaults").paired, benchmark("sharing").cells(Path())
    rows = []
    for cell, (_, _, chooses) in known.items():
        ours = runs(cells, cell, OURS)
        keys = [key for key in (ours[0] if ours else {}) if part in key and (part != "nll" or key == "nll")]
        if not keys:
            continue
        own = [fmean(one[key] for key in keys) for one in ours]
        row: list[Any] = [f"{cell}{' *' if chooses else ''}", len(own), f"{fmean(own):.{digits}f}"]
        for head in heads:
            found = [fmean(one[key] for key in keys) for one in runs(cells, cell, head)]
            gap = paired(found, own) if len(found) == len(own) else None
            row.append("" if gap is None else f"{gap.mean:+.{digits}f} ± {gap.error:.{digits}f}")
        rows.append(row)
    return markdown(["cell", "draws", OURS, *heads], rows)


def wins(cells: Cells) -> str:
    """How often BRAINet is ahead."""
    paired, outcome = benchmark("defaults").paired, benchmark("defaults").outcome
    rows = []
    for head in HEADS[1:]:
        found = [outcome(paired(nll(cells, t, OURS), nll(cells, t, head))) for t in TASKS]
        rows.append([head, *(found.count(kind) for kind in ("win", "tie", "loss"))])
    return markdown(["against", "wins", "ties", "losses"], rows)


# -- the battery ------------------------------------------------------------------------------------------------------

ROWS = {  # of each table, at most 2,000
    "abalone": 2000, "adult6000": 2000, "auto_imports": 201, "german": 1000, "glass": 205, "horse-colic": 300,
    "ionosphere": 351, "phoneme": 2000, "pima-indians-diabetes": 768, "sonar": 208, "winequality-white": 1994,
    "iris": 150, "wine": 178, "breast_cancer": 569, "digits": 1797, "diabetes": 442, "uci-bostonHousing": 506,
    "uci-yacht": 308, "uci-energy": 768, "uci-concrete": 1030,
}  # fmt: skip
FORMER = {  # measured before few sub-networks were averaged exactly
    "abalone", "adult6000", "german", "phoneme", "pima-indians-diabetes", "winequality-white", "breast_cancer",
    "digits",
}  # fmt: skip


def quality(cells: Cells) -> str:
    """Loss and calibration beside four peers."""
    rows = []
    for task, count in ROWS.items():
        first = runs(cells, "quality", task, OURS)[0]
        key = "log_loss" if "log_loss" in first else "rmse"
        peers = ["logistic regression" if key == "log_loss" else "ridge", "boosting", "forest", "MLP"]
        means = {name: fmean(one[key] for one in runs(cells, "quality", task, name)) for name in (OURS, *peers)}
        best = min(means[name] for name in peers)
        ours = f"{means[OURS]:,.0f}" if means[OURS] > 1000 else f"{means[OURS]:.3g}"
        told = ["", "", ""]
        if key == "log_loss":
            by = {n: fmean(one["ece"] for one in runs(cells, "quality", task, n)) for n in (OURS, *peers)}
            told = [
                f"{fmean(one[k] for one in runs(cells, 'quality', task, OURS)):.3g}" for k in ("uncalibrated", "best")
            ]
            told.append(f"{by[OURS]:.3g} / {min(by[n] for n in peers):.3g}")
        others = [f"{means[n]:,.0f}" if means[n] > 1000 else f"{means[n]:.3g}" for n in peers]
        mark = "†" if task in FORMER else ""
        shown = f"**{ours}**" if means[OURS] <= 1.05 * best else ours
        rows.append([task + mark, f"{count:,}", shown, *others, f"{means[OURS] / best:.2f}", *told])
    header = ["task", "rows", OURS, "logistic regression / ridge", "boosting", "forest", "MLP", "to the best peer"]
    return markdown([*header, "without τ", "best τ", "ECE"], rows)


STRONGEST = ("linear, tuned", "ExtraTrees", "LightGBM", "CatBoost", "RealMLP-TD", "TabM-D")


def strongest(cells: Cells) -> str:
    """Loss beside the strongest peers, over the folds that all have run, and the processor time of each."""
    rows = []
    for task in dict.fromkeys(key.split("/")[0] for key in cells):
        every = {name: runs(cells, task, name) for name in (OURS, *STRONGEST)}
        done = {name: found for name, found in every.items() if found}
        if len(done) < len(every) - 1:  # a run that was cut
            continue
        folds = min(map(len, done.values()))
        key = "log_loss" if "log_loss" in done[OURS][0] else "rmse"
        means = {name: fmean(one[key] for one in found[:folds]) for name, found in done.items()}
        seconds = {name: fmean(one["seconds"] for one in found[:folds]) for name, found in done.items()}
        texts = {}
        for name, value in means.items():
            number = f"{value:,.0f}" if value > 1000 else f"{value:.3g}"
            number = f"**{number}**" if value == min(means.values()) else number
            texts[name] = f"{number} ({seconds[name]:.1f} s)"
        ratio = means[OURS] / min(value for name, value in means.items() if name != OURS)
        rows.append([task, folds, *(texts.get(name, "") for name in every), f"{ratio:.2f}"])
    return markdown(["task", "folds", OURS, *STRONGEST, "to the best peer"], rows)


def left_out(cells: Cells) -> str:
    """A class that was not trained on."""
    names = (OURS, "energy", "entropy", "generative", "knn", "max-softmax", "k-NN", "Mahalanobis", "isolation forest")
    rows = []
    for task in ROWS:
        for key in sorted(k for k in cells if k.startswith(f"unknown/{task}/")):
            cell = cells[key]
            shares = [f"{100 * cell[f'{n} known']:.0f} / {100 * cell[f'{n} unknown']:.0f}" for n in names]
            rows.append([task, key.rsplit("/", 1)[1], *shares, f"{100 * cell['BRAINet AUROC']:.3g}"])
    return markdown(["task", "left out", *names, "AUROC"], rows)


def shifted(cells: Cells) -> str:
    """Noise, gaps and permuted columns, with and without fading."""
    kinds = {"clean": "clean", "noise 0.05": "σ = .05", "noise 0.2": "σ = .2", "noise 1": "σ = 1"}
    kinds |= {"gone 0.1": "10 % missing", "gone 0.5": "50 % missing", "permuted": "permuted"}
    parts, rows = ("accuracy", "plain ECE", "faded ECE", "unknown"), []
    for task in sorted(task for task in ROWS if f"shift/{task}" in cells):
        cell = cells[f"shift/{task}"]
        price = 100 * (cell["clean faded NLL"] / cell["clean plain NLL"] - 1)
        shares = (" / ".join(plain(cell[f"{kind} {part}"], 2) for part in parts) for kind in kinds)
        rows.append([task, f"{price:+.1f} %", *shares])
    return markdown(["task", "price", *kinds.values()], rows)


# -- the paper --------------------------------------------------------------------------------------------------------

AUROCS = {
    "one_minus_max_p": "max p",
    "entropy": "entropy",
    "mutual_information": "MI",
    "expected_entropy": "exp. entropy",
}


def unknown_rows(found: Mapping[str, list[Any]], where: str, alone: Sequence[str]) -> list[list[str]]:
    """Error, calibration and AUROC of heads; what has one pass has no mutual information."""
    rows = []
    for head, cells in found.items():
        row = [head, *(spread([c[k] for c in cells], d) for k, d in (("err", 2), ("ece", 4), ("nll", 4)))]
        for score in AUROCS:
            none = head.split(" (")[0] in alone and score in ("mutual_information", "expected_entropy")
            row.append("–" if none else spread([c[f"{where}/{score}/AUROC"] for c in cells], 1))
        rows.append(row)
    return rows


COVERED = ("coverage at 0.8", "coverage at 0.9", "unknown at 0.05", "unknown at 0.1", "unknown at 0.2", "ece")


def coverage(cells: Cells) -> str:
    """Promises of the estimators on few rows: means and standard errors over draws."""
    blocks: dict[tuple[str, int], list[Any]] = {}
    for key, cell in cells.items():
        kind, size, _ = key.split("/")
        blocks.setdefault((kind, int(size)), []).append(cell)
    rows = []
    for (kind, size), found in sorted(blocks.items()):
        values = {name: [value for cell in found for value in cell.get(name, [])] for name in COVERED}
        shown = [with_error(values[name]) for name in COVERED]
        rows.append([kind, f"{size:,}", len(values[COVERED[0]]), *shown])
    titles = ["targets", "rows", "draws", "sets or intervals at .8", "at .9", "p ≤ .05", "p ≤ .1", "p ≤ .2", "ECE"]
    return markdown(titles, rows)


def promises(cells: Cells) -> str:
    """How often a promise of risk control was broken, and what it answered."""
    rows = []
    for key, cell in sorted(cells.items()):
        if not key.startswith("risk/"):
            continue
        shares = [cell[name] for name in ("error", "limit", "answered", "silent", "broken")]
        rows.append([key.partition("/")[2], f"{cell['draws']:,}", *(f"{100 * share:.1f} %" for share in shares)])
    titles = ["task", "draws", "wrong, all answered", "promised", "answered", "no promise", "promise broken"]
    return markdown(titles, rows)


def flipped(cells: Cells) -> str:
    """AUROC of finding flipped labels: means and standard errors over draws."""
    blocks: dict[str, list[Any]] = {}
    for key, cell in sorted(cells.items()):
        kind, _, task = key.partition("/")
        if kind == "labels":
            blocks.setdefault(task.partition("/")[0], []).append(cell)
    rows = []
    for task, found in blocks.items():
        scores = [finely([cell[name] for cell in found]) for name in ("heads", "logistic regression", "tuned")]
        counts = f"{found[0]['rows']:,.0f}", f"{fmean(cell['flipped'] for cell in found):.0f}", len(found)
        rows.append([task, *counts, *scores])
    return markdown(["task", "labels", "flipped", "draws", "heads", "logistic regression", "the same, tuned"], rows)


def finely(values: Sequence[float]) -> str:
    """A mean ± its standard error, where the fourth digit tells.

    >>> finely([0.9991, 0.9993])
    '0.9992 ± 0.0001'
    """
    return f"{fmean(values):.4f} ± {stdev(values) / len(values) ** 0.5:.4f}"


def curves(cells: Cells) -> str:
    """Accuracy at first and after each round of labelling, by how labels were chosen, and what that gains."""
    rows = []
    for task in ("digits", "intents"):
        found = [cell for key, cell in sorted(cells.items()) if key.startswith(f"curve/{task}/")]
        by_chance = [fmean(cell["random"][1:]) for cell in found]
        for name in ("rank", "entropy", "random"):
            steps = zip(*[cell[name] for cell in found], strict=True)
            shown = [f"{100 * fmean(values):.1f}" for values in steps]
            mine = [fmean(cell[name][1:]) for cell in found]
            ahead = [100 * (one - other) for one, other in zip(mine, by_chance, strict=True)]
            error = stdev(ahead) / len(ahead) ** 0.5
            rows.append([task, name, *shown, "–" if name == "random" else f"{fmean(ahead):+.1f} ± {error:.1f}"])
    return markdown(["task", "chosen by", "at first", "1", "2", "3", "4", "5", "mean over random"], rows)


class Cost(NamedTuple):
    """A row of `benchmarks/costs.py`.

    Attributes:
        before: what a version of 0.3.0 before it was looked at took, of data like these, as it was written down then.
        peer: what a user would have done, or has to pay anyway.
        limit: seconds that were aimed at; None where `share` says it.
        share: of the peer's seconds, as `limit`, for all but the passes of the network.
    """

    before: str
    peer: str
    limit: float | None = None
    share: float | None = None


COSTS = {
    "swap, 1,300 photographs": Cost("266–286 s, another network", "one pass of the network", share=1.0),
    "swap, 15,000 embeddings": Cost("559 s", "linear layer", 60.0),
    "swap, 1,000 classes": Cost("", "linear layer", 300.0),
    "classifier, 1,000 × 20": Cost("14–47 s", "boosting", 5.0),
    "classifier, 4,000 × 20": Cost("14–47 s", "boosting", 15.0),
    "classifier, 100,000 × 20": Cost("over 182 s", "boosting", 120.0),
    "classifier, 600 × 2,000": Cost("128 s", "logistic regression", 30.0),
    "structure, 2,000 × 1,024": Cost("", "correlations"),
    "structure, 2,000 × 4,096": Cost("50–78 s, given 40", "correlations", 40.0),
    "rai, 500 × 109": Cost("14 s", "BOSS", share=1.0),
    "rai, 5,000 × 109": Cost("over 240 s", "BOSS", share=1.0),
    "brainet test": Cost("14 s", "imports", share=1.3),
}


def costs(cells: Cells) -> str:
    """Seconds of every door beside its peer, what was aimed at, and whether it was reached."""
    rows = []
    for name, cost in COSTS.items():
        if name not in cells:
            continue
        cell, limit, aim = cells[name], cost.limit, ""
        if cost.share is not None and cell["peer"]:
            limit = cost.share * cell["peer"]
        if limit is not None:
            aim = f"{limit:.1f}: {'reached' if cell['rest'] <= limit else 'missed'}"
        beside = f"{cost.peer} {cell['peer']:.1f}" if cell["peer"] else "–"
        nll = " / ".join(plain(cell[key], 3) for key in ("NLL", "peer NLL") if key in cell)
        memory = f"{cell['memory']:,.0f}" if "memory" in cell else ""
        numbers = [f"{cell['seconds']:.1f}", f"{cell['rest']:.1f}", beside, aim, memory, nll]
        rows.append([name, cost.before, *numbers])
    titles = ["row", "before", "seconds", "without the network", "beside", "aim", "MiB", "NLL / of the peer"]
    return markdown(titles, rows)


def with_error(values: Sequence[float]) -> str:
    """A mean ± its standard error.

    >>> with_error([0.5, 0.7])
    '.600 ± .100'
    """
    if len(values) < 2:
        return "–"
    return f"{plain(fmean(values), 3)} ± {plain(stdev(values) / len(values) ** 0.5, 3)}"


def table1(cells: Cells) -> str:
    """The paper's Table 1, beside it."""
    titles = {"linear": "linear (650 parameters)", "MLP": "MLP", "MC-dropout": "MC-dropout"}
    titles |= {"deep ensemble (5)": "deep ensemble of 5", OURS: OURS, "simultaneous": "BRAINet, simultaneous"}
    titles |= {"BRAINet + dropout": "BRAINet + dropout", CONTROL: CONTROL}
    titles |= {"BRAINet + dropout, shuffled": "BRAINet + dropout, shuffled"}
    found = {}
    for head, title in titles.items():
        of, way = (OURS, "simultaneous") if head == "simultaneous" else (head, "stochastic")
        found[title] = [one.get(way, one.get("15", next(iter(one.values())))) for one in runs(cells, of)]
    rows = unknown_rows(found, "svhn", ("linear", "MLP", "BRAINet, simultaneous"))
    paper = {"baseline": "7.7 | | | 90.4 | 90.7 | – | –", "MC-dropout": "8.2 | | | 90.7 | 90.3 | 84.7 | 90.6"}
    paper["BRAINet"] = "7.5 | | | 92.1 | 92.6 | 91.9 | 93.0"
    rows += [[f"*paper: {name}*", *(v.strip() for v in values.split("|"))] for name, values in paper.items()]
    return markdown(["head", "error %", "ECE", "NLL", *(f"AUROC {c}" for c in AUROCS.values())], rows)


FOUR = (("nll", 4), ("err", 2), ("brier", 4), ("ece", 4))


def mnist_size(cells: Cells) -> str:
    """Ensembles and BRAINets of one to three sizes."""
    lines = [("1/ensemble of 1 × 240k", "one network", "15"), ("1/ensemble, 2 members", "ensemble, 2 members", "15")]
    lines += [("1/ensemble, 5 members", "ensemble, 5 members", "15"), ("1/BRAINet", "**BRAINet**", "15")]
    lines += [("1/BRAINet", "BRAINet, simultaneous", "simultaneous"), ("1/BRAINet, shuffled", CONTROL, "15")]
    for size in (2, 3):
        lines += [(f"{size}/ensemble of {size} × 240k", f"ensemble of {size} × 240k", "15")]
        lines += [(f"{size}/BRAINet", "**BRAINet**", "15")]
    rows = []
    for key, title, way in lines:
        found = [one.get(way, next(iter(one.values()))) for one in runs(cells, key)]
        rows.append([title, key[0], *(spread([c[k] for c in found], d) for k, d in FOUR)])
    return markdown(["method", "parameters / 240k", "NLL", "error %", "Brier", "ECE"], rows)


def ablation(cells: Cells) -> str:
    """Thresholds, learned and shuffled."""
    rows = []
    for threshold in ("0", "0.01", "0.02", "0.05", "0.1", "0.2"):
        row = [f"{threshold} (ensemble)" if threshold == "0" else threshold]
        for key, digits in FOUR[:3]:
            for head in (OURS, CONTROL):
                found = [one["15"][key] for one in runs(cells, threshold, head)]
                row.append(spread(found, digits) if found else "–")
        rows.append(row)
    names = (f"{name}, {wiring}" for name in ("NLL", "error %", "Brier") for wiring in ("learned", "shuffled"))
    return markdown(["threshold", *names], rows)


def structures(cells: Cells) -> str:
    """Unique structures against the size of the training set."""
    sizes = (100, 300, 1000, 3000, 10_000, 30_000, 60_000)
    row = [spread([one["log10 unique"] for one in runs(cells, str(size))], 2) for size in sizes]
    return markdown(["training images", *(f"{size:,}" for size in sizes)], [["unique structures (log10)", *row]])


def operations(cells: Cells) -> str:
    """Multiply-adds of one pass."""
    rows, mlp = [], 239_291
    for s in (2, 3):
        for order in (1, 2):
            drawn = [cells[f"s={s} order={order} threshold={t}"]["drawn"] for t in ("0.02", "0.05", "0.1", "0.2")]
            texts = [f"{value:,.0f} ({mlp / value:.1f})" for value in drawn]
            rows.append([s, order, *texts])
    return markdown(["s", "largest order", "threshold 0.02 (times fewer)", "0.05", "0.1", "0.2"], rows)


def table3(cells: Cells) -> str:
    """Calibration error beside peers, before and after a temperature."""
    titles = {
        "SGD": "SGD, the network as it is",
        "SWA": "SWA",
        "SWAG": "SWAG",
        "Laplace, last layer": "Laplace, last layer",
    }
    titles |= {n: n for n in ("linear, trained again", "MC-dropout", OURS, "BRAINet + dropout")}
    rows = []
    for name, title in titles.items():
        found = [cells[name]] if name in cells else runs(cells, name)
        row = [title]
        for key in ("ece", "nll"):
            for suffix in ("", " + temperature"):
                values = [one[suffix][key] for one in found]
                row.append(spread(values, 4) if len(values) > 1 else f"{values[0]:.4f}")
        errors = [one[""]["err"] for one in found]
        rows.append([*row, spread(errors, 2) if len(errors) > 1 else f"{errors[0]:.2f}"])
    said = "SGD 0.0255, SWA 0.0203, SWAG 0.0053, KFAC-Laplace 0.0092, BRAINet 0.0036"
    rows.append(["*paper, PreResNet-164*", said, "SWA-Temp 0.0172", "", "", ""])
    return markdown(["method", "ECE", "with temperature", "NLL", "with temperature", "error %"], rows)


def table2(cells: Cells) -> str:
    """A learned confidence."""
    titles = {"baseline": "baseline: MLP, max-softmax", "confidence": "confidence: MLP"}
    titles |= {n: n for n in ("BRAINet + confidence", "BRAINet + confidence, shuffled", "BRAINet, max-softmax")}
    keys = {"err": 2, "FPR95": 1, "DetErr": 1, "AUROC": 2, "AUPR_in": 2, "AUPR_out": 2}
    rows = [
        [title, *(spread([c[k] for c in runs(cells, n)], d) for k, d in keys.items())] for n, title in titles.items()
    ]
    paper = {"baseline": "5.28 43.8 12.0 93.5 94.6 91.7", "confidence": "5.63 19.5 9.2 97.0 97.4 96.5"}
    paper[OURS] = "5.65 12.4 7.6 98.0 98.2 97.9"
    rows += [[f"*paper: {name}*", *values.split()] for name, values in paper.items()]
    return markdown(["head", "error %", "FPR95", "detection error", "AUROC", "AUPR in", "AUPR out"], rows)


SCORES = {
    "max-softmax": "max-softmax",
    "energy": "energy",
    "Mahalanobis": "Mahalanobis",
    "Mahalanobis, length 1": "Mahalanobis, features of length 1",
    "k-NN (k = 50), length 1": "k-NN (50th), features of length 1",
    "generative, no edges": "generative, no edges",
    "generative, shuffled wiring": "generative, shuffled wiring",
    "generative, learned wiring": "**generative, learned wiring**",
    "generative_weighted, learned wiring": "generative, weighted by the prediction",
    "combined, learned wiring": "**combined with the energy**",
    "generative, discrete": "generative, discrete (BDeu)",
    "combined, discrete": "combined, discrete",
}


def generative(cells: Cells) -> str:
    """Scores without a head."""
    keys = [f"{where}/{what}" for where in ("svhn", "tiny") for what in ("AUROC", "FPR95")]
    rows = [[title, *(f"{cells['anchors'][name][key]:.1f}" for key in keys)] for name, title in SCORES.items()]
    return markdown(["score", "SVHN AUROC", "SVHN FPR95", "Tiny AUROC", "Tiny FPR95"], rows)


def priors(cells: Cells) -> str:
    """The weight of the prior of a class's covariances."""
    rows = []
    for weight in (10, 200, 1024, 5000, 20_000):
        one = cells[f"prior {weight}"]["generative"]
        keys = ("val log-likelihood", "svhn/AUROC", "tiny/AUROC")
        rows.append([f"{weight:,}", *(f"{one[key]:.1f}" for key in keys)])
    return markdown(["rows", "validation log-likelihood", "SVHN AUROC", "Tiny AUROC"], rows)


# -- structures, times ------------------------------------------------------------------------------------------------

ACCURACY = "python benchmarks/structure.py accuracy"
METHODS = ("rai", "causal-learn BOSS", "causal-learn GRaSP")
GES = "causal-learn GES"  # slower than the others: one sample of each cell


def _samples(cells: Cells) -> dict[tuple[str, str], dict[str, list[Any]]]:
    """(problem, rows) → method → its samples; networks first, as the benchmark has them."""
    found: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for key, cell in cells["accuracy"]["cells"].items():
        problem, rows, _, method = key.split(" | ")
        found.setdefault((problem, rows), {}).setdefault(method, []).append(cell)
    places = sorted(dict.fromkeys(problem for problem, _ in found), key=lambda problem: problem.startswith("Gaussian"))
    return dict(sorted(found.items(), key=lambda item: (places.index(item[0][0]), int(item[0][1]))))


def _finished_by_all(cells: Cells) -> dict[str, list[Any]]:
    """method → the samples of all problems that every method finishes."""
    common = [
        by for by in _samples(cells).values() if all(m in by and all("shd" in cell for cell in by[m]) for m in METHODS)
    ]
    return {method: [cell for by in common for cell in by[method]] for method in METHODS}


def _means(samples: list[Any]) -> list[str]:
    """Distance, F1 and seconds."""
    return [
        f"{fmean(cell[k] for cell in samples):{form}}"
        for k, form in (("shd", ".1f"), ("f1", ".2f"), ("seconds", ".1f"))
    ]


def close_to_the_better(cells: Cells) -> tuple[int, int]:
    """In how many cells `rai` is at most 10 % above the better of BOSS and GRaSP, and how many all three finish."""
    means = [
        [fmean(cell["shd"] for cell in by[method]) for method in METHODS]
        for by in _samples(cells).values()
        if all("shd" in cell for method in METHODS for cell in by[method])
    ]
    return sum(ours <= 1.1 * min(peers) for ours, *peers in means), len(means)


def accuracy(cells: Cells) -> str:
    """Distance to the true graph beside BOSS and GRaSP, the mean over samples; "> limit" where one ran out of time."""

    def shown(samples: list[Any]) -> str:
        if not all("shd" in cell for cell in samples):
            return f"> {max(cell.get('not finished in', 0) for cell in samples)} s"
        return "{} ({}, {} s)".format(*_means(samples))

    lines = [
        [problem, f"{int(rows):,}", *(shown(by[m]) if m in by else "" for m in (*METHODS, GES))]
        for (problem, rows), by in _samples(cells).items()
    ]
    common = _finished_by_all(cells)
    lines.append(["mean of those that rai, BOSS and GRaSP finish", "", *(shown(common[m]) for m in METHODS), ""])
    ours, ges = zip(*beside_ges(cells), strict=True)
    lines.append([f"mean of the {len(ges)} samples that GES finishes", "", shown(list(ours)), "", "", shown(list(ges))])
    return markdown(["problem", "rows", "rai", "BOSS", "GRaSP", "GES, one sample"], lines)


def beside_ges(cells: Cells) -> list[tuple[Any, Any]]:
    """What `rai` and GES have on the samples that GES finishes."""
    found = cells["accuracy"]["cells"]
    of_ges = {key.removesuffix(GES): cell for key, cell in found.items() if key.endswith(GES) and "shd" in cell}
    return [(found[f"{key}rai"], cell) for key, cell in of_ges.items()]


def accuracy_means(cells: Cells) -> str:
    """The last line of `accuracy`, for the page of those who only want the structure."""
    names = ["`rai`", "BOSS (causal-learn, with this package's counts)", "GRaSP (the same)"]
    common = _finished_by_all(cells)
    rows = [[name, *_means(common[method])] for name, method in zip(names, METHODS, strict=True)]
    return markdown(["", "SHD", "F1", "seconds"], rows)


PROBABILITIES = ("BOSS, bootstrapped", "hill climbing, bootstrapped", "partition MCMC")  # the peers


def _by_cell(cells: Cells) -> dict[str, list[Any]]:
    """The samples of each network and size."""
    by_cell: dict[str, list[Any]] = {}
    for key, cell in cells.items():
        by_cell.setdefault(key.rsplit("/", 1)[0], []).append(cell)
    return by_cell


def _precision(samples: list[Any], method: str) -> float | None:
    found = [sample[method]["ap"] for sample in samples if method in sample]
    return fmean(found) if found else None


def _gap(samples: list[Any], method: str) -> float | None:
    """The ECE of the pairs of all samples together."""
    found = [sample[method]["bins"] for sample in samples if method in sample]
    return calibration_error(pooled(found)) if found else None


def posterior_bars(cells: Cells) -> dict[str, int]:
    """In how many cells edges are ranked at least as well as by every peer, and in how many calibrated."""
    found = _by_cell(cells).values()
    peers = [[p for p in (_precision(samples, m) for m in PROBABILITIES) if p is not None] for samples in found]
    return {
        "AP": sum((_precision(one, "posterior") or 0.0) >= max(of) for one, of in zip(found, peers, strict=True)),
        "ECE": sum((_gap(samples, "posterior") or 0.0) <= 0.05 for samples in found),
    }


def posterior(cells: Cells) -> str:
    """Probabilities of edges beside peers; the pairs of all samples of a cell are binned together."""

    def shown(of: Callable[[list[Any], str], float | None], samples: list[Any], *methods: str) -> str:
        values = [of(samples, method) for method in methods]
        return " / ".join("–" if value is None else f"{value:.3f}" for value in values)

    rows = []
    for name, samples in _by_cell(cells).items():
        chance = error_by_chance(pooled(sample["posterior"]["bins"] for sample in samples))
        row = [name, len(samples), shown(_precision, samples, "posterior"), shown(_precision, samples, *PROBABILITIES)]
        row += [f"{shown(_gap, samples, 'posterior')} ({chance:.3f})", shown(_gap, samples, *PROBABILITIES)]
        ahead = fmean(sample["MAP less rai"] for sample in samples)
        seconds = fmean(sample["seconds"] for sample in samples)
        rows.append([*row, shown(_gap, samples, "tree"), f"{round(ahead, 1) + 0.0:+.1f}", f"{seconds:.1f}"])  # no -0.0
    names = "of BOSS / hill climbing / partition MCMC"
    measures = ["AP", f"AP {names}", "ECE (by chance)", f"ECE {names}", "ECE of the tree"]
    return markdown(["cell", "samples", *measures, "MAP less rai", "seconds"], rows)


def networks(cells: Cells) -> str:
    """Heads and densities of a tree with the posterior's networks, beside those of the tree as it is learned."""
    paired = benchmark("defaults").paired
    by_task: dict[str, list[Any]] = {}
    for key, cell in cells.items():
        by_task.setdefault(key.split("/")[0], []).append(cell)
    rows = []
    for task, found in by_task.items():
        of = {key: [one[key] for one in found] for key in found[0]}
        row = [task, len(found)]
        for kind, digits in (("head", 4), ("density", 2)):
            row += [f"{fmean(of[f'{kind}, {name}']):.{digits}f}" for name in ("learned", "drawn")]
            row.append(str(paired(of[f"{kind}, drawn"], of[f"{kind}, learned"])))
        rows.append([*row, f"{fmean(of['density, shuffled']):.2f}", f"{fmean(of['seconds of the posterior']):.1f}"])
    names = [f"{kind}, {name}" for kind in ("head", "density") for name in ("as learned", "of draws", "difference")]
    return markdown(["task", "seeds", *names, "density, shuffled", "seconds for draws"], rows)


def scale(cells: Cells) -> str:
    """Large tables."""
    extraction, rows = cells["scale"]["resnet20_extraction_seconds"], []
    for name, cell in cells["scale"].items():
        if isinstance(cell, dict):
            took = f"{cell['seconds']:.1f}"
            if name.startswith("ResNet"):
                took += f" ({cell['seconds'] / extraction:.2f} of ResNet-20's extraction)"
            rows.append([name, took, f"{cell['tests']:,}", f"{cell['peak_gib']:.2f}"])
    return markdown(["data, test", "seconds of processor time", "CI tests", "peak GiB so far"], rows)


def head(cells: Cells) -> str:
    """Steps, passes and memory beside an MLP of equal size."""
    ratios = ("step / MLP", "step / MLP, one a batch", "simultaneous / MLP", "15 passes / MC-dropout")
    ratios += ("memory / MLP", "operations of a sampled network")
    rows = [
        [r["features"], f"{r['parameters']:,}", r["threshold"], r["sub-networks"], *(f"{r[k]:.2f}" for k in ratios)]
        for r in cells["rows"]
    ]
    return markdown(["features", "parameters", "threshold", "sub-networks", *ratios], rows)


def whole_network(cells: Cells) -> str:
    """A ResNet-18 by itself, with its head swapped, and with all that `predict` says."""
    ratios = [f"{what} / network, {batch}" for batch in (1, 16) for what in ("swapped", "predict")]
    rows = [
        [r["layers"], r["features"], f"{r['network ms, 1']:.0f}", *(f"{r[key]:.2f}" for key in ratios)]
        for r in cells["networks"]
    ]
    return markdown(["layers read", "features", "network alone, ms", *ratios], rows)


def fuzz(cells: Cells) -> str:
    """Strange inputs."""
    return str(benchmark("fuzz").shown(cells["fuzz"]["targets"]))


def attacked_doors(cells: Cells) -> str:
    """Every door that writes: how many attacks ended the writer, of how many, and what was wrong or left."""
    kinds = ["SIGKILL", "SIGTERM", "SIGINT", "full disk", "read-only folder"]
    rows = []
    for name, door in sorted(cells["doors"].items()):
        counts = [f"{door['ended'].get(kind, 0)} of {door['tried'].get(kind, 0)}" for kind in kinds]
        rows.append([name, *counts, len(door["wrong"]), len(door["left"])])
    return markdown(["door", *kinds, "not whole", "files left"], rows)


# -- swapped heads -----------------------------------------------------------------------------------------


SWAPPED = {
    "BRAINet": "**BRAINet**",
    "shuffled": "BRAINet, shuffled",
    "network": "the network's own logits",
    "logistic regression": "logistic regression",
    "Linear": "linear",
    "MLP": "MLP",
    "MCDropout": "MC-dropout",
    "Ensemble": "ensemble of 5",
    "Laplace": "Laplace",
    "VBLL": "VBLL",
    "SNGP": "SNGP",
    "one call": "`swap_head(…).fit()`",
}


def swap(cells: Cells) -> str:
    """Swapped heads on photographs and on CIFAR-10."""
    columns = {(task, layers): {} for task in ("clothing", "cifar10") for layers in ("last", "auto")}
    for (task, layers), by in columns.items():
        most = len(runs(cells, task, layers, OURS))
        for head in SWAPPED:
            found = [cells[k] for i in range(most) if (k := f"{task}/{layers}/{head}/{i}") in cells]
            if found:
                by[head] = [fmean(c[k] for c in found) for k in ("nll", "err", "ece")] + [len(found), most]
    rows = []
    for head, title in SWAPPED.items():
        row = [title]
        for by in columns.values():
            full = [values[0] for values in by.values() if values[3] == values[4]]
            text = ""
            if head in by:
                loss, error, ece, done, most = by[head]
                text = f"**{loss:.3f}**" if done == most and loss == min(full) else f"{loss:.3f}"
                text += f" / {error:.1f} / {ece:.3f}" + (f" ({done} of {most})" if done < most else "")
            row.append(text)
        if any(row[1:]):
            rows.append(row)
    names = [
        f"{task}, {layers} layer{'' if layers == 'last' else 's'}"
        for task in ("clothing", "CIFAR-10")
        for layers in ("last", "chosen")
    ]
    return markdown(["head", *names], rows)


def swap_unknown(cells: Cells) -> str:
    """Clothes without hats and shoes: a new last layer beside `swap_head(…).fit()`, mean over folds."""
    rows = []
    for key, title, score in (
        ("auto/one call", "`swap_head(…).fit()`", "verdict"),
        ("last/logistic regression", "a new last layer", "one_minus_max_p"),
    ):
        found = runs(cells, "left out", key)
        row = [title, *(f"{fmean(one[k] for one in found):.{d}f}" for k, d in (("nll", 3), ("err", 1), ("ece", 3)))]
        for share in ("called unknown", "left out/called unknown"):
            row.append(f"{fmean(one[share] for one in found):.0f} %" if share in found[0] else "–")
        rows.append([*row, f"{fmean(one[f'left out/{score}'] for one in found):.1f}"])
    header = ["head", "NLL", "error %", "ECE", "clothes called unknown", "hats and shoes called unknown", "AUROC"]
    return markdown(header, rows)


# -- unknown inputs, fading, drift ------------------------------------------------------------------------------------


def leaderboard(cells: Cells) -> str:
    """All detectors on one network."""
    return str(benchmark("unknown").leaderboard(cells["test"]))


def attacked(cells: Cells, title: str) -> str:
    """Attacked images of one set."""
    return str(benchmark("attacks").table(cells, title))


def unknown_classes(cells: Cells) -> str:
    """What fits said and what was noticed."""
    return str(benchmark("unknown_classes").summary(cells))


def street_scenes(cells: Cells) -> str:
    """Heads for every pixel."""
    return str(benchmark("pixels").summary(cells))


def tempered(cells: Cells) -> str:
    """Calibration under shift at one price."""
    return str(benchmark("tempered").table(cells))


def price(cell: Cells) -> str:
    """What a method costs on clean data."""
    return f"{100 * cell['cost']:+.1f} ± {100 * cell['cost se']:.1f} %"


FADED = {  # name of the cells → what was fitted
    "digits": "scikit-learn's digits, a small network",
    "mnist": "MNIST, 5,000 images, a small network",
    "cifar10": "CIFAR-10, its ResNet-20",
    "clothing": "photographs of clothes, EfficientNet-Lite0",
    "intents": "CLINC150, sentence embeddings",
}


def fading(cells: Cells) -> str:
    """What one call says of known and unknown inputs with a temperature alone and with fading."""
    rows = []
    for name, title in FADED.items():
        cell = cells.get(f"{name}/0")
        if cell is None:
            continue
        price = 100 * (cell["faded nll"] / cell["plain nll"] - 1)
        known = f"{cell['plain nll']:.3f}, {price:+.1f} %", f"{cell['plain ece']:.3f} / {cell['faded ece']:.3f}"
        for one in sorted(key.removesuffix(" noticed") for key in cell if key.endswith(" noticed")):
            sure = " / ".join(f"{100 * cell[f'{one} {kind} sure']:.0f} %" for kind in ("plain", "faded"))
            mean = " / ".join(plain(cell[f"{one} {kind} confidence"], 2) for kind in ("plain", "faded"))
            rows.append([title, *known, one, sure, mean, f"{cell[f'{one} joint auroc']:.1f}"])
            title, known = "", ("", "")
    header = ["fitted to", "NLL of test inputs, price", "their ECE", "unknown inputs", "surer than 90 %"]
    return markdown([*header, "mean confidence", "AUROC of `joint`"], rows)


def honest(cells: Cells) -> str:
    """CIFAR-10, corrupted and unknown images."""
    names = {"network": "the network", "temperature scaling": "temperature scaling"}
    names |= {"MC-dropout, temperature scaling": "MC-dropout head, temperature"}
    names |= {"ensemble of 5 heads, temperature scaling": "ensemble of 5 heads, temperature"}
    wirings = {"shuffled": "shuffled wiring", "no edges": "no edges", "full covariance": "full covariance"}
    last = {"learned": "alone, learned", "shuffled": "shuffled", "no edges": "no edges"}
    last |= {"full covariance": "full covariance", "k-NN": "k-NN"}
    for cost in ("0.01", "0.04"):
        names[f"stages, learned, {cost}"] = f"**brainet_pl, `cost={cost}`**"
        names |= {f"stages, {key}, {cost}": f"… {title}" for key, title in wirings.items()}
        names |= {
            f"last layer, {key}, {cost}": f"… last layer {title}" if key == "learned" else f"… last layer, {title}"
            for key, title in last.items()
        }
    rows = []
    for name, title in names.items():
        c = cells["cifar"][name]
        of = name == "temperature scaling"
        ratio = [
            "1" if of else f"{plain(c[f'{k} ece ratio'], 3)} ± {plain(c[f'{k} ece ratio se'], 3)}"
            for k in ("shifted", "worst")
        ]
        sure = " / ".join(plain(c[f"{n} confidence"], 2) for n in ("svhn", "tiny"))
        row = [title, "–" if of else price(c), plain(c["ece"], 3), plain(c["shifted ece"], 3), *ratio]
        rows.append(
            [*row, f"{c['shifted nll']:.2f}", sure, " / ".join(f"{c[f'{n} auroc']:.1f}" for n in ("svhn", "tiny"))]
        )
    header = [
        "predictions",
        "clean NLL",
        "clean ECE",
        "corrupted ECE",
        "of temperature's",
        "severity 5, of temperature's",
    ]
    return markdown([*header, "corrupted NLL", "confidence SVHN / TinyImageNet", "AUROC by max p"], rows)


def honest_pixels(cells: Cells) -> str:
    """Digits and MNIST, turned and unknown."""
    names = {"network": "the head", "temperature scaling": "temperature scaling"}
    names |= {"pixels, learned, 0.01": "brainet_pl, `cost=0.01`", "pixels, shuffled, 0.01": "… shuffled wiring"}
    names |= {"pixels, no edges, 0.01": "… no edges", "pixels, k-NN, 0.01": "… k-NN"}
    names |= {"pixels, learned, 0.04": "brainet_pl, `cost=0.04`", "pixels, k-NN, 0.04": "… k-NN"}
    rows = []
    for data, title in {"digits": "digits", "mnist": "MNIST"}.items():
        for name, said in names.items():
            c = cells[data][name]
            sets = [key.removesuffix(" auroc") for key in c if key.endswith(" auroc")]
            row = [title, said, "–" if name == "temperature scaling" else price(c), plain(c["ece"], 3)]
            row += [plain(c["shifted ece"], 3), f"{c['shifted nll']:.2f}"]
            row += [
                " / ".join(plain(c[f"{n} confidence"], 2) for n in sets),
                " / ".join(f"{c[f'{n} auroc']:.1f}" for n in sets),
            ]
            rows.append(row)
    header = ["data", "predictions", "clean NLL", "clean ECE", "turned ECE", "turned NLL", "confidence on the unknown"]
    return markdown([*header, "AUROC by max p"], rows)


CHANGES = ("new classes", "new classes, 20 %", "new classes, gradually", "noise", "noise, gradually", "blur", "dark")
CHANGES += ("class prior", "class prior, gradually")


POINTED = {"streets": "clothes in street scenes", "digits": "letters in digits", "objects": "numbers in CIFAR-10"}
RANKED = {"relief": "relief", "part": "part of the score", "distance": "distance from the mean", "forest": "forest"}


def explained_places(cells: Cells) -> str:
    """AUROC of pixels in % and pointing of each way to say where an image is strange."""
    header = ["way"]
    rows: dict[str, list[str]] = {}
    for task, title in POINTED.items():
        header += [f"{title}: pixels", "pointing"]
        for way, found in cells[f"places/{task}"].items():
            rows.setdefault(way, [way]).append(f"{100 * fmean(found['pixels']):.1f}")
            rows[way].append(with_error(found["hits"]))
    order = ["learned", "shuffled", "no edges", "nearest cells", "energy gradient", "parts of the pooled score"]
    return markdown(header, [rows[way] for way in order])


def explained_columns(cells: Cells) -> str:
    """How many of the changed rows have the changed column first, of those that the change made strange."""
    cells = {key: cell for key, cell in cells.items() if key.startswith("columns/")}
    rows = []
    for kind in ("far", "another row's"):
        for name, cell in cells.items():
            found = cell[kind]
            rows.append(
                [kind, name.removeprefix("columns/"), *(f"{found[way]:.0f}" for way in ("detectable", *RANKED))]
            )
        total = [f"{sum(cell[kind][way] for cell in cells.values()):.0f}" for way in ("detectable", *RANKED)]
        rows.append([f"**{kind}**", "all", *total])
    return markdown(["change", "table", "rows", *RANKED.values()], rows)


def drift(cells: Cells) -> str:
    """Delay of the drift alarm beside the best peer, on pools whose monitor was measured."""

    def short(delay: float) -> str:
        return f"{delay:.1f}" if delay < 20 else f"{delay:.0f}"

    header, rows = ["mean delay, in inputs"], [[change] for change in CHANGES]
    for pool in ("digits", "CIFAR-10"):
        if f"{pool}, monitor" not in cells:
            continue
        header += [f"{pool}: monitor", "at 5 %", "best peer"]
        ours = cells[f"{pool}, monitor"]
        peers = {
            name: found
            for key, cell in cells.items()
            if key.startswith(f"{pool}, ") and key.split(", ")[1] in ("KS", "CVM", "MMD", "LSDD")
            for name, found in cell.items()
        }
        for row, change in zip(rows, CHANGES, strict=True):
            best = min(peers, key=lambda name: peers[name][change])
            equal = ours["monitor, equal rate"][change]
            shown = f"**{short(equal)}**" if equal <= peers[best][change] else short(equal)
            row += [short(ours["monitor"][change]), shown, f"{short(peers[best][change])} ({best})"]
    return markdown(header, rows)


def estimated(cells: Cells) -> str:
    """Accuracy without labels: how far off on changed inputs, and how often the interval holds the truth."""
    rows = []
    for name, sets in cells.items():
        changed = [found for key, found in sets.items() if key != "unchanged"]
        off = [fmean(abs(found[way] - found["truth"]) for found in changed) for way in ("CBPE", "estimate")]
        holds = f"{100 * fmean(found['covers'] for found in changed):.0f} %"
        same = 100 * abs(sets["unchanged"]["estimate"] - sets["unchanged"]["truth"])
        rows.append([name, f"{same:.1f}", *(f"{100 * value:.1f}" for value in off), holds])
    header = ["inputs, probabilities", "unchanged: estimate off by", "changed: confidence off by", "estimate off by"]
    return markdown([*header, "interval holds the truth"], sorted(rows))


SERVED = ("bare backbone, 1 at a time", "exported folder, 1 at a time", "bare backbone, 64 at a time")
SERVED += ("exported folder, 64 at a time", "drift alarm, 64 at a time", "drift alarm, 256 at a time")
SERVED += ("served, 1 clients", "served, 8 clients")


def serve(cells: Cells) -> str:
    """Time of calls and requests, and the processor time of an image."""
    keys = ("median, ms", "p99, ms", "images/s", "processor, ms")
    rows = [[line, *(f"{cells[line][key]:.3g}" for key in keys[:2])] for line in SERVED]
    for row, line in zip(rows, SERVED, strict=True):
        row += [f"{cells[line]['images/s']:,.0f}", f"{cells[line]['processor, ms']:.3g}"]
    return markdown(["a ResNet-20 for 32 pixels", *keys[:3], "processor time of an image, ms"], rows)


# -- which table is where ---------------------------------------------------------------------------------------------

DEFAULTS = f"python benchmarks/defaults.py {DATA} --final"
PAPER = "python benchmarks/paper"
TABLES = {
    "defaults": Table("defaults.json", DEFAULTS, partial(defaults, tasks=list(TASKS), of="task")),
    "defaults differences": Table("defaults.json", DEFAULTS, partial(differences, tasks=list(TASKS), of="task")),
    "defaults wins": Table("defaults.json", DEFAULTS, wins),
    "sharing": Table("sharing.json", SHARING, sharing),
    "sharing groups": Table("sharing.json", SHARING, partial(sharing, part="without")),
    "sharing entropy": Table("sharing.json", SHARING, partial(sharing, part="predictive_entropy", digits=1)),
    "sharing MI": Table(
        "sharing.json", SHARING, partial(sharing, part="mutual_information", digits=1, heads=BESIDE[3:])
    ),
    "splits": Table("defaults_splits.json", f"{DEFAULTS} --splits", partial(defaults, tasks=SPLITS, of="set")),
    "splits differences": Table(
        "defaults_splits.json", f"{DEFAULTS} --splits", partial(differences, tasks=SPLITS, of="set")
    ),
    "battery quality": Table("battery.json", f"python benchmarks/battery.py {DATA}", quality, "quality/"),
    "battery strongest": Table(
        "strongest.json", f"python benchmarks/strongest.py {DATA} --folds 1 --most 210", strongest
    ),
    "battery unknown": Table("battery.json", f"python benchmarks/battery.py {DATA}", left_out, "unknown/"),
    "battery shift": Table("battery.json", f"python benchmarks/battery.py {DATA}", shifted, "shift/"),
    "promises": Table("decisions.json", f"python benchmarks/decisions.py {DATA}", promises, "risk/"),
    "flipped labels": Table("decisions.json", f"python benchmarks/decisions.py {DATA}", flipped, "labels/"),
    "rounds of labelling": Table("decisions.json", f"python benchmarks/decisions.py {DATA}", curves, "curve/"),
    "costs": Table("costs.json", f"python benchmarks/costs.py {DATA}", costs),
    "coverage": Table("coverage.json", "python benchmarks/coverage.py", coverage),
    "table1": Table("table1.json", f"{PAPER}/table1.py {DATA}", table1),
    "mnist size": Table("mnist_size_5000.json", f"{PAPER}/mnist.py size {DATA}", mnist_size),
    "mnist ablation": Table("mnist_ablation_5000.json", f"{PAPER}/mnist.py ablation {DATA} --seeds 3", ablation),
    "structures": Table("structures.json", f"{PAPER}/structures.py {DATA}", structures),
    "operations": Table("operations.json", f"{PAPER}/operations.py {DATA}", operations),
    "table3": Table("table3.json", f"{PAPER}/table3.py {DATA}", table3),
    "table2": Table("table2.json", f"{PAPER}/table2.py {DATA} --seeds 3", table2),
    "generative": Table("generative.json", f"{PAPER}/generative.py {DATA}", generative),
    "priors": Table("generative.json", f"{PAPER}/generative.py {DATA}", priors, "prior"),
    "accuracy": Table("structure.json", f"{ACCURACY} {DATA} --seeds 3 --limit 60", accuracy, "accuracy"),
    "accuracy means": Table(
        "structure.json",
        f"python benchmarks/structure.py accuracy {DATA} --seeds 3 --limit 60",
        accuracy_means,
        "accuracy",
    ),
    "posterior": Table(
        "structure_posterior.json", f"python benchmarks/structure.py posterior {DATA} --seeds 6", posterior
    ),
    "networks": Table("networks.json", f"python benchmarks/networks.py {DATA}", networks),
    "scale": Table("structure.json", f"python benchmarks/structure.py scale {DATA}", scale, "scale"),
    "head": Table("head.json", "python benchmarks/head.py", head),
    "whole_network": Table("head.json", "python benchmarks/head.py", whole_network),
    "doors": Table("reliability.json", "python benchmarks/reliability.py doors", attacked_doors, "doors"),
    "fuzz": Table("reliability.json", "python benchmarks/reliability.py fuzz --cases 100", fuzz, "fuzz"),
    "swap": Table("swap.json", f"python benchmarks/swap.py {DATA}", swap, ("clothing/", "cifar10/")),
    "swap unknown": Table("swap.json", f"python benchmarks/swap.py {DATA} --unknown", swap_unknown, "left out/"),
    "unknown classes": Table("unknown_classes.json", f"python benchmarks/unknown_classes.py {DATA}", unknown_classes),
    "leaderboard": Table("unknown.json", f"python benchmarks/unknown.py {DATA} --final", leaderboard, "test"),
    "attacks mnist": Table("attacks.json", ATTACKS, partial(attacked, title="MNIST"), "MNIST"),
    "attacks cifar": Table("attacks.json", ATTACKS, partial(attacked, title="CIFAR-10"), "CIFAR-10"),
    "pixels": Table("pixels.json", f"python benchmarks/pixels.py {DATA}", street_scenes),
    "tempered": Table("tempered.json", f"python benchmarks/tempered.py {DATA}", tempered),
    "serve": Table("serve.json", f"python benchmarks/serve.py {DATA} --requests 200", serve),
    "explain places": Table("explain.json", f"python benchmarks/explain.py {DATA}", explained_places, "places/"),
    "explain columns": Table("explain.json", f"python benchmarks/explain.py {DATA}", explained_columns, "columns/"),
    "drift": Table("drift.json", f"python benchmarks/drift.py {DATA}", drift),
    "estimate": Table("estimate.json", f"python benchmarks/estimate.py {DATA}", estimated),
    "fading": Table("fading.json", f"python benchmarks/fading.py {DATA}", fading),
    "honest": Table("honest.json", f"python benchmarks/honest.py {DATA} --final", honest, "cifar"),
    "honest pixels": Table("honest.json", f"python benchmarks/honest.py {DATA} --final", honest_pixels),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a page differs")
    args = parser.parse_args(argv)
    differs = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(page, TABLES)
        if new != text:
            differs.append(str(page.relative_to(ROOT)))
            if not args.check:
                page.write_text(new, encoding="utf-8")
    wrong = [said for said in map(stale, QUOTED) if said]
    for line in [f"{page}: {'differs from its results' if args.check else 'written'}" for page in differs] + wrong:
        print(line)
    return int(bool(wrong or (args.check and differs)))


if __name__ == "__main__":
    sys.exit(main())
