"""Features of the training data, before training: deterministic, un-augmented, un-shuffled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from tqdm.auto import tqdm

STREAM_ROWS = 50_000  # rows that stand for a stream of unknown length, which may never end


@dataclass
class Precomputed:
    """Features (B, d) in the place of the inputs of a batch: a backbone has seen these samples already."""

    features: Tensor

    def to(self, *args: Any, **kwargs: Any) -> Precomputed:
        """The same on another device."""
        return Precomputed(self.features.to(*args, **kwargs))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, i: Any) -> Tensor:
        return self.features[i]


class Extracted(NamedTuple):
    """Features (N, d) and targets (N, …) of the same samples, on the CPU."""

    features: Tensor
    targets: Tensor

    def sample(self, max_rows: int | None) -> Extracted:
        """At most `max_rows` of the samples: the random choice that `structure_loader` makes."""
        rows = chosen_rows(len(self.features), max_rows)
        return self if rows is None else Extracted(self.features[rows], self.targets[rows])

    def loader(self, batch_size: int, shuffle: bool) -> Callable[[], DataLoader[Any]]:
        """A function that gives a fresh loader of (`Precomputed`, targets)."""
        data = TensorDataset(self.features, self.targets)

        def load() -> DataLoader[Any]:
            last = shuffle and len(data) > batch_size
            return DataLoader(data, batch_size, shuffle, drop_last=last, collate_fn=_collate)

        return load


def _collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Precomputed, Tensor]:
    features, targets = zip(*samples, strict=True)
    return Precomputed(torch.stack(features)), torch.stack(targets)


def structure_loader(trainer: pl.Trainer, model: pl.LightningModule, max_rows: int | None = None) -> Iterable[Any]:
    """Batches of training data in a fixed order; with `max_rows`, of a random sample of that many rows.

    A datamodule may offer `structure_dataloader` (un-augmented); else the training loader is rebuilt without shuffling.
    """
    source: Any = trainer.fit_loop._data_source.instance  # not trainer.datamodule: an earlier fit may have left that
    if source is None:
        source = getattr(trainer, "datamodule", None) or model
    if hasattr(source, "structure_dataloader"):
        source = source.structure_dataloader()
    elif hasattr(source, "train_dataloader"):
        source = source.train_dataloader()
    return unshuffled(source, max_rows)


def chosen_rows(total: int, max_rows: int | None) -> Tensor | None:
    """A random choice of `max_rows` of `total` rows, in ascending order and the same each time; None is all of them."""
    if max_rows is None or max_rows >= total:
        return None
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:max_rows].sort().values


def unshuffled(loader: Any, max_rows: int | None = None) -> Iterable[Any]:
    """A loader over the same samples, un-shuffled; one over a stream keeps its order, up to a number of rows."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return bounded(loader, max_rows)
    total = len(loader.dataset)  # type: ignore[arg-type]
    rows = sorted(getattr(loader.sampler, "indices", range(total)))  # a subset sampler leaves the others out on purpose
    drawn = chosen_rows(len(rows), max_rows)
    if drawn is not None:
        rows = [rows[i] for i in drawn]
    return DataLoader(
        loader.dataset if len(rows) == total else Subset(loader.dataset, rows),
        batch_size=loader.batch_size or 256,
        shuffle=False,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        generator=torch.Generator().manual_seed(0),  # its own: looking at the data must not move the training's draws
    )


def is_sized(loader: Any) -> bool:
    """Whether a loader says how many batches it has; one that does not may never end."""
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False


def bounded(batches: Iterable[Any], max_rows: int | None = None) -> Iterable[Any]:
    """The same batches; of a stream of unknown length at most `max_rows` rows, `STREAM_ROWS` if that is None."""
    return batches if is_sized(batches) else _first_rows(batches, max_rows)


def _first_rows(stream: Iterable[Any], max_rows: int | None) -> Iterator[Any]:
    rows = 0
    for batch in stream:
        if rows >= (STREAM_ROWS if max_rows is None else max_rows):
            if max_rows is None:
                rank_zero_warn(
                    f"expected training data of known size, got a stream: its first {rows:,} rows stand for all of "
                    "it; to choose others, give max_rows where there is such a setting, or a structure_dataloader in "
                    "the datamodule"
                )
            return
        yield batch
        rows += len(inputs_of(batch))


def first_batch(trainer: pl.Trainer) -> Any:
    """The inputs of the first batch of training data."""
    for batch in structure_loader(trainer, trainer.lightning_module):
        return inputs_of(batch)
    raise ValueError("expected training data to measure the features of, got an empty loader: check the datamodule")


def extract(
    backbone: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    max_rows: int | None = None,
    progress: bool = True,
) -> Extracted:
    """Features and targets of batches (inputs, targets, …); mode and device of the backbone are put back afterwards."""
    targets: list[Tensor] = []

    def watched() -> Iterator[Any]:
        for batch in batches:
            if not isinstance(batch, list | tuple) or len(batch) < 2:
                raise ValueError(
                    f"expected batches (inputs, targets), got {type(batch).__name__}: return both from the dataset"
                )
            targets.append(torch.as_tensor(batch[1]))
            yield batch

    features = extract_features(backbone, watched(), device=device, max_rows=max_rows, progress=progress)
    return Extracted(features, torch.cat(targets)[: len(features)].cpu())


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
    like: Any = None  # the shape of a sample
    rows = 0
    try:
        with torch.no_grad():
            for batch in tqdm(batches, desc="extracting features", disable=not progress, delay=2, leave=False):
                inputs = inputs_of(batch)
                if isinstance(inputs, Tensor) and inputs.dim() and not len(inputs):
                    continue
                known = isinstance(inputs, Precomputed)
                like = inputs.shape[1:] if like is None and not known else like
                try:
                    found.append((inputs.features if known else backbone(inputs.to(target))).float().cpu())
                except RuntimeError as error:
                    if known or inputs.shape[1:] == like:
                        raise
                    raise ValueError(
                        f"expected batches whose samples have the shape {tuple(like)} of the first, got "
                        f"{tuple(inputs.shape[1:])}, at which the backbone stops ({error}): bring all inputs to one "
                        "shape"
                    ) from error
                if found[-1].shape[1] != found[0].shape[1]:
                    raise ValueError(
                        f"expected batches with the same number of features, got {found[0].shape[1]} and then "
                        f"{found[-1].shape[1]}: bring all inputs to one shape"
                    )
                rows += len(found[-1])
                if max_rows is not None and rows >= max_rows:
                    break
    finally:
        backbone.train(training).to(home)
    if not rows:
        raise ValueError("expected training data to extract features from, got no sample: check the data or its loader")
    return torch.cat(found)[:max_rows]


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch: a tensor, or features in its place."""
    inputs = batch[0] if isinstance(batch, list | tuple) else batch
    if not isinstance(inputs, Tensor | Precomputed):
        raise ValueError(
            f"expected batches (inputs, labels) of tensors, got {type(inputs).__name__} as inputs: return tensors from "
            "the loader"
        )
    return inputs
