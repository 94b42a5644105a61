"""Features of the training data, before training: deterministic, un-augmented, un-shuffled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from tqdm.auto import tqdm

from brainet_pl.together import agree, everyones

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
            # By name: Lightning makes the loader anew for several processes, and can't move what has no name.
            return DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=last, collate_fn=_collate)

        return load


class ExtractedShare(NamedTuple):
    """What one of several processes extracts: every so manieth batch, in order; batches are (n_i, d) and (n_i, …).

    All processes run the batches that one process would run: features, and so the order of rows that a structure is
    learned from, depend in their last bits on which samples share a batch.
    """

    features: list[Tensor]
    targets: list[Tensor]

    @property
    def together(self) -> Extracted:
        """This share as one table; (0, 0) if there is nothing in it."""
        if not self.features:
            return Extracted(torch.empty(0, 0), torch.empty(0))
        return Extracted(torch.cat(self.features), torch.cat(self.targets))

    def gathered(self) -> Extracted:
        """The features and targets of all processes, in the order of one; a collective."""
        shares = everyones(self)
        most = max(len(share.features) for share in shares)
        dealt = [(share, i) for i in range(most) for share in shares if i < len(share.features)]
        return Extracted(
            torch.cat([share.features[i] for share, i in dealt]), torch.cat([share.targets[i] for share, i in dealt])
        )


def _collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Precomputed, Tensor]:
    features, targets = zip(*samples, strict=True)
    return Precomputed(torch.stack(features)), torch.stack(targets)


def structure_loader(
    trainer: pl.Trainer, model: pl.LightningModule, max_rows: int | None = None, every: int = 1, first: int = 0
) -> Iterable[Any]:
    """Batches of training data in a fixed order; with `max_rows`, of a random sample of that many rows.

    With `every`, only batches `first`, `first + every`, `first + 2·every`, …: the share of one of so many processes. A
    datamodule may offer `structure_dataloader` (un-augmented); else the training loader is rebuilt without shuffling.
    """
    source: Any = trainer.fit_loop._data_source.instance  # not trainer.datamodule: an earlier fit may have left that
    if source is None:
        source = getattr(trainer, "datamodule", None) or model
    if hasattr(source, "structure_dataloader"):
        source = source.structure_dataloader()
    elif hasattr(source, "train_dataloader"):
        source = source.train_dataloader()
    return unshuffled(source, max_rows, every, first)


def chosen_rows(total: int, max_rows: int | None) -> Tensor | None:
    """A random choice of `max_rows` of `total` rows, in ascending order and the same each time; None is all of them."""
    if max_rows is None or max_rows >= total:
        return None
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:max_rows].sort().values


def unshuffled(loader: Any, max_rows: int | None = None, every: int = 1, first: int = 0) -> Iterable[Any]:
    """A loader over the same samples, un-shuffled; one over a stream keeps its order, up to a number of rows.

    With `every`, a loader over the batches `first`, `first + every`, ….
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        batches = bounded(loader, max_rows)
        return batches if every == 1 else islice(batches, first, None, every)
    total = len(loader.dataset)  # type: ignore[arg-type]
    rows = sorted(getattr(loader.sampler, "indices", range(total)))  # a subset sampler leaves the others out on purpose
    drawn = chosen_rows(len(rows), max_rows)
    if drawn is not None:
        rows = [rows[i] for i in drawn]
    size = loader.batch_size or 256
    if every > 1:
        starts = range(first * size, len(rows), every * size)
        return DataLoader(
            loader.dataset,
            batch_sampler=[rows[i : i + size] for i in starts],
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            generator=torch.Generator().manual_seed(0),
        )
    return DataLoader(
        loader.dataset if len(rows) == total else Subset(loader.dataset, rows),
        batch_size=size,
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


def extract_share(
    backbone: nn.Module, batches: Iterable[Any], *, device: torch.device | str | None = None, progress: bool = True
) -> ExtractedShare:
    """`extract` for one of several processes, whose share of the batches may be empty."""
    stream = iter(batches)
    start = list(islice(stream, 1))
    if not start:
        return ExtractedShare([], [])
    sizes: list[int] = []

    def watched() -> Iterator[Any]:
        for batch in chain(start, stream):
            sizes.append(len(inputs_of(batch)))
            yield batch

    found = extract(backbone, watched(), device=device, progress=progress)
    return ExtractedShare(list(found.features.split(sizes)), list(found.targets.split(sizes)))  # type: ignore[no-untyped-call]


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
            bar = tqdm(batches, desc="extracting features", disable=not progress, delay=2, leave=False)
            for batch, own in in_step(backbone, bar):
                inputs = inputs_of(batch)
                if isinstance(inputs, Tensor) and inputs.dim() and not len(inputs):
                    continue
                if not own:  # for the others, who need our parts of the weights
                    backbone(inputs.to(target))
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


def is_sharded(module: nn.Module) -> bool:
    """Whether parts of a module's weights are in other processes: then every forward pass is a collective."""
    return any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in module.modules())


def in_step(backbone: nn.Module, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """(batch, True) for every batch; of a sharded backbone also (batch, False) while other processes have more.

    The processes that share a backbone must run it equally often, or those that do it once more wait for ever.
    """
    stream = iter(batches)
    if not is_sharded(backbone):
        for batch in stream:
            yield batch, True
        return
    last = None
    while True:
        more = agree(lambda: list(islice(stream, 1)))
        left = everyones(bool(more))
        if not any(left):
            return
        last = more[0] if more else last
        if any(everyones(last is None)):
            raise ValueError(
                f"expected a batch for each of the {len(left)} processes that share the backbone, got fewer batches: "
                "lower the batch size, or the number of processes"
            )
        yield last, bool(more)


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch: a tensor, or features in its place."""
    inputs = batch[0] if isinstance(batch, list | tuple) else batch
    if not isinstance(inputs, Tensor | Precomputed):
        raise ValueError(
            f"expected batches (inputs, labels) of tensors, got {type(inputs).__name__} as inputs: return tensors from "
            "the loader"
        )
    return inputs
