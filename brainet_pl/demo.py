"""`make demo`: fit and test the digits configuration, then say how well it went and where the pictures are."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

from brainet_pl.callbacks import log_figure
from brainet_pl.cli import lightning
from brainet_pl.evaluation.report import write_report
from brainet_pl.framework import NAMESPACE
from brainet_pl.structure.draw import draw_network


def demo() -> None:
    """Everything that a first run shows: learn, train, test, compare known with unknown digits."""
    warnings.filterwarnings("ignore", module=NAMESPACE.replace(".", r"\."))
    logging.getLogger(NAMESPACE).setLevel(logging.WARNING)
    print("learning a structure from the pixels of 8 digits, and training a head of 16,000 parameters on it …")
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
    for score in ("max_softmax", "entropy", "mutual_information", "energy", "generative", "combined"):
        auroc, fpr = (results[f"ood/held_out/{score}/{metric}"] for metric in ("AUROC", "FPR95"))
        print(f"{score:<24}{auroc:>10.3f}{fpr:>10.3f}")

    folder = Path(trainer.loggers[0].log_dir or ".")
    names = [f"{i // 8},{i % 8}" for i in range(64)]
    log_figure(trainer, "structure/network", draw_network(model.ggt, model.ggt.map(), names=names))
    print(f"\npictures: {folder / 'figures'}")
    print(f"metrics:  {folder / 'metrics.csv'} and, for W&B, runs/wandb (offline)")
    print(f"model:    {folder / 'checkpoints'}; try: brainet test --ckpt_path {folder / 'checkpoints' / 'last.ckpt'}")
    print(f"report:   {write_report(folder)}: open it in a browser; it needs no network")


if __name__ == "__main__":
    demo()
