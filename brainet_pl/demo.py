"""`make demo`: fit and test the digits configuration, then say how well it went and where the pictures are."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch

from brainet_pl.cli import main
from brainet_pl.structure.draw import draw_network
from brainet_pl.uncertainty import mutual_information, predictive_entropy


def demo() -> None:
    """Everything that a first run shows: learn, train, test, compare known with unknown digits."""
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    print("learning a structure from the pixels of 8 digits, and training a head of 16,000 parameters on it …")
    cli = main(["fit", "--config", "digits", "--trainer.enable_progress_bar=false"])
    trainer, model, data = cli.trainer, cli.model, cli.datamodule
    (results,) = trainer.test(model, datamodule=data, verbose=False)
    assert model.ggt is not None
    print(f"\n{model.ggt.summary()}\n")
    print(f"{'test metric':<24}{'value':>10}")
    for name, value in results.items():
        print(f"{name:<24}{value:>10.4f}")

    print(f"\n{'mean over':<24}{'entropy':>10}{'mutual information':>22}")
    for name, loader in {
        "known digits": data.test_dataloader(),
        "8 and 9, never seen": data.ood_dataloaders()["held_out"],
    }.items():
        with torch.no_grad():
            probs = torch.cat([model.predictions(x)[0] for x, _ in loader], dim=1)
        print(f"{name:<24}{predictive_entropy(probs).mean():>10.3f}{mutual_information(probs).mean():>22.4f}")

    folder = Path(trainer.loggers[0].log_dir or ".")
    names = [f"{i // 8},{i % 8}" for i in range(64)]
    draw_network(model.ggt, model.ggt.map(), names=names).savefig(folder / "figures" / "network.png", dpi=150)
    print(f"\npictures: {folder / 'figures'}")
    print(f"metrics:  {folder / 'metrics.csv'} and, for W&B, runs/wandb (offline)")
    print(f"model:    {folder / 'checkpoints'}; try: brainet test --ckpt_path {folder / 'checkpoints' / 'last.ckpt'}")


if __name__ == "__main__":
    demo()
