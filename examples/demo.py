"""Fit and test the digits configuration, compare heads of equal size, and say where the pictures are.

python examples/demo.py    # or: make demo
"""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from brainet_pl._utils.framework import NAMESPACE
from brainet_pl.callbacks import log_figure
from brainet_pl.cli import lightning
from brainet_pl.datamodules import Digits
from brainet_pl.evaluation.report import write_report
from brainet_pl.network import MLP, Ensemble, Head, HeadSettings, Linear, Tree
from brainet_pl.network.base import HeadInputs
from brainet_pl.network.training import TrainingSettings, fit_head
from brainet_pl.structure import learn_structure
from brainet_pl.structure.draw import draw_network
from brainet_pl.tasks import Classification
from brainet_pl.uncertainty import predictive

HEADS: dict[str, HeadSettings] = {
    "linear": Linear(),
    "MLP": MLP(),
    "ensemble of 5": Ensemble(),
    "BRAINet": Tree(),
}
FOLDS, EPOCHS, PATIENCE, BATCH, RATE, PASSES = 3, 150, 30, 64, 0.001, 15  # the model's own rate
HELD = 150  # digits of a fold's training set that choose the epoch


class Quality(NamedTuple):
    """How good a trained head is on the test digits: negative log-likelihood, share of right answers."""

    nll: float
    accuracy: float


def demo() -> None:
    """Everything that a first run shows: learn, train, test, compare known with unknown digits."""
    torch.set_num_threads(1)  # of small tensors; more would wait for each other, above all on a busy machine
    warnings.filterwarnings("ignore", module=NAMESPACE.replace(".", r"\."))
    logging.getLogger(NAMESPACE).setLevel(logging.WARNING)
    print("learning a structure from the pixels of 8 digits, and training a head on it …")
    cli = lightning(["fit", "--config", "digits", "--trainer.enable_progress_bar=false"])
    trainer, model, data = cli.trainer, cli.model, cli.datamodule
    parts = trainer.test(model, datamodule=data, verbose=False)
    results = {name: value for part in parts for name, value in part.items()}
    assert model.ggt is not None
    print(f"\n{model.ggt.summary()}\n")
    print(f"{'test metric':<24}{'value':>10}")
    for name, value in results.items():
        if name.startswith("test/"):
            print(f"{name:<24}{value:>10.4f}")

    print(f"\n{'8 and 9, never seen':<24}{'AUROC':>10}{'FPR95':>10}")
    for score in ("one_minus_max_p", "entropy", "mutual_information", "energy", "generative", "combined"):
        auroc, fpr = (results[f"ood/held_out/{score}/{metric}"] for metric in ("AUROC", "FPR95"))
        print(f"{score:<24}{auroc:>10.3f}{fpr:>10.3f}")

    folder = Path(trainer.loggers[0].log_dir or ".")
    names = [f"{i // 8},{i % 8}" for i in range(64)]
    log_figure(trainer, "structure/network", draw_network(model.ggt, model.ggt.map(), names=names))
    print(f"\neach head with its defaults, at equal size (linear: a single layer), {FOLDS} times …")
    found = compare()
    log_figure(trainer, "comparison", draw_comparison(found))
    print(f"{'every digit tested once':<24}{'NLL':>10}{'accuracy':>10}")
    for name, cells in found.items():
        nll, accuracy = (statistics.fmean(cell[i] for cell in cells) for i in range(2))
        print(f"{name:<24}{nll:>10.4f}{accuracy:>10.4f}")

    print(f"\npictures: {folder / 'figures'}")
    print(f"metrics:  {folder / 'metrics.csv'} and, for W&B, runs/wandb (offline)")
    print(f"model:    {folder / 'checkpoints'}; try: brainet test --ckpt_path {folder}")
    print(f"report:   {write_report(folder)}: open it in a browser; it needs no network")


# -- heads side by side -----------------------------------------------------------------------------------------------


def compare(epochs: int = EPOCHS) -> dict[str, list[Quality]]:
    """Head → its quality on each third of the digits, trained on the others.

    So every digit is tested once: 432 of them alone are a matter of luck. The number of the third also chooses initial
    weights and batches.
    """
    data = Digits()
    data.setup("fit")
    sets = (data.train_set, data.val_set, data.test_set)
    x, y = (torch.cat(part) for part in zip(*(next(iter(DataLoader(s, len(s)))) for s in sets), strict=True))  # type: ignore[arg-type]
    folds = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).chunk(FOLDS)
    found: dict[str, list[Quality]] = {name: [] for name in HEADS}
    bar = tqdm(total=FOLDS * len(HEADS), desc="comparing heads", leave=False)
    for i, test in enumerate(folds):
        rest = torch.cat([fold for j, fold in enumerate(folds) if j != i])
        parts = [(x[rows], y[rows]) for rows in (rest[HELD:], rest[:HELD], test)]
        ggt = learn_structure(parts[0][0], progress=False)
        for name, settings in HEADS.items():
            torch.manual_seed(i)
            head = settings.build(x.shape[1], data.num_classes, ggt if settings.needs_tree else None)
            found[name].append(_fit(head, parts, epochs))
            bar.update()
    bar.close()
    return found


def _fit(head: Head, parts: Sequence[tuple[Tensor, Tensor]], epochs: int) -> Quality:
    """Train with Adam, keep the epoch with the best likelihood of the validation digits, measure on the test digits."""
    (x, y), val, test = parts
    settings = TrainingSettings(max_epochs=epochs, patience=PATIENCE, batch_size=BATCH, learning_rate=RATE)
    loss = Classification(int(y.max()) + 1).loss
    fit_head(head, HeadInputs(x, y), settings, loss, lambda: _measure(head, *val).nll)
    return _measure(head, *test)


@torch.no_grad()
def _measure(head: Head, x: Tensor, y: Tensor) -> Quality:
    values, weights = head.eval().passes(x, PASSES)
    probabilities = predictive(values.softmax(-1), weights)
    right = (probabilities.argmax(-1) == y).float().mean()
    return Quality(float(F.nll_loss(probabilities.clamp_min(1e-12).log(), y)), float(right))


def draw_comparison(found: Mapping[str, Sequence[Quality]]) -> Figure:
    """NLL of each head: a dot a fold, a line at the mean."""
    figure = Figure(figsize=(6, 2.4), layout="constrained")
    axes = figure.subplots()
    for i, (name, cells) in enumerate(list(found.items())[::-1]):
        values, color = [cell.nll for cell in cells], "#0072B2" if name == "BRAINet" else "#777777"
        mean = statistics.fmean(values)
        axes.plot(values, [i] * len(values), "o", color=color, alpha=0.5, ms=6)
        axes.plot([mean, mean], [i - 0.3, i + 0.3], color=color, lw=3)
        axes.annotate(f"{mean:.3f}", (mean, i + 0.34), ha="center", va="bottom", fontsize=9, color=color)
    axes.set_yticks(range(len(found)), list(found)[::-1])
    axes.set_ylim(-0.6, len(found) - 0.2)
    axes.set_xscale("log")
    lowest, highest = axes.get_xlim()
    ticks = [tick for tick in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if lowest <= tick <= highest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("negative log-likelihood of digits not trained on (less is better)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


if __name__ == "__main__":
    demo()
