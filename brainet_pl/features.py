"""Features of the training data, before training: deterministic, un-augmented, un-shuffled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset
from tqdm.auto import tqdm


def structure_loader(trainer: pl.Trainer, model: pl.LightningModule, max_rows: int | None = None) -> Iterable[Any]:
    """Batches of training data in a fixed order; with `max_rows`, of a random sample of that many rows.

    A datamodule may offer `structure_dataloader` (un-augmented); else the training loader is rebuilt without shuffling.
    """
    datamodule: Any = getattr(trainer, "datamodule", None)
    if datamodule is not None and hasattr(datamodule, "structure_dataloader"):
        return _fixed(datamodule.structure_dataloader(), max_rows)
    source: Any = trainer.fit_loop._data_source.instance
    if isinstance(source, pl.LightningModule | pl.LightningDataModule):
        source = source.train_dataloader()
    if source is None:
        source = datamodule.train_dataloader() if datamodule is not None else model.train_dataloader()
    return _fixed(source, max_rows)


def _fixed(loader: Any, max_rows: int | None) -> Iterable[Any]:
    """A loader over the same samples, un-shuffled; one over a stream is taken as it is."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        stream: Iterable[Any] = loader
        return stream
    total = len(loader.dataset)  # type: ignore[arg-type]
    rows = sorted(getattr(loader.sampler, "indices", range(total)))  # a subset sampler leaves the others out on purpose
    if max_rows is not None and max_rows < len(rows):
        drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:max_rows]
        rows = [rows[i] for i in drawn.sort().values]
    return DataLoader(
        loader.dataset if len(rows) == total else Subset(loader.dataset, rows),
        batch_size=loader.batch_size or 256,
        shuffle=False,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
    )


def first_batch(trainer: pl.Trainer) -> Tensor:
    """The inputs of the first batch of training data."""
    for batch in structure_loader(trainer, trainer.lightning_module):
        return _inputs(batch)
    raise ValueError("expected training data to measure the features of, got an empty loader: check the datamodule")


def extract_features(
    backbone: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    max_rows: int | None = None,
    progress: bool = True,
) -> Tensor:
    """(N, d) features on the CPU; mode and device of the backbone are put back afterwards."""
    training = backbone.training
    home = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    target = torch.device(device) if device is not None else home
    backbone.eval().to(target)
    found: list[Tensor] = []
    rows = 0
    try:
        with torch.no_grad():
            for batch in tqdm(batches, desc="extracting features", disable=not progress, delay=2, leave=False):
                found.append(backbone(_inputs(batch).to(target)).float().cpu())
                rows += len(found[-1])
                if max_rows is not None and rows >= max_rows:
                    break
    finally:
        backbone.train(training).to(home)
    if not rows:
        raise ValueError("expected training data to learn a structure from, got an empty loader: check the datamodule")
    return torch.cat(found)[:max_rows]


def _inputs(batch: Any) -> Tensor:
    inputs = batch[0] if isinstance(batch, list | tuple) else batch
    if not isinstance(inputs, Tensor):
        raise ValueError(f"expected batches (inputs, labels) of tensors, got {type(inputs).__name__} as inputs")
    return inputs
