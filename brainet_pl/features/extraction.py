"""Features of the training data, before training: deterministic, un-augmented, un-shuffled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tqdm.auto import tqdm

from brainet_pl._utils.framework import pl, rank_zero_warn
from brainet_pl._utils.lightning_private import data_given
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns, split
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import Taps
from brainet_pl.distributed.collectives import all_gather, run_or_fail_together

STREAM_ROWS = 50_000  # rows that stand for a stream of unknown length, which may never end


class Extracted(NamedTuple):
    """What a backbone gave for N samples, and their targets (N, …), on the CPU."""

    readings: BackboneOutput
    targets: Tensor

    @property
    def features(self) -> Tensor:
        """The features that the head reads, (N, d)."""
        return self.readings.features

    def sample(self, max_rows: int | None) -> Extracted:
        """At most `max_rows` of the samples: the random choice that `structure_loader` makes."""
        rows = chosen_rows(len(self.features), max_rows)
        return self if rows is None else Extracted(self.readings[rows], self.targets[rows])

    def loader(self, batch_size: int, shuffle: bool, copies: Sequence[Extracted] = ()) -> Callable[[], DataLoader[Any]]:
        """A function that gives a fresh loader of (`BackboneOutput`, targets).

        Args:
            batch_size: samples in a batch.
            shuffle: draw samples in another order each time, and leave out an incomplete last batch.
            copies: the same samples read otherwise, with augmentation; whenever a sample is met, one is drawn.
        """
        data = _Rows(copies or [self])

        def load() -> DataLoader[Any]:
            last = shuffle and len(data) > batch_size
            # By name: Lightning makes the loader anew for several processes, and can't move what has no name.
            return DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=last, collate_fn=_collate)

        return load


class _Rows(Dataset[tuple[BackboneOutput, Tensor]]):
    """Samples of `Extracted`, a batch at a time; of several copies, each sample from one that is drawn."""

    def __init__(self, copies: Sequence[Extracted]) -> None:
        self.copies = copies

    def __len__(self) -> int:
        return len(self.copies[0].targets)

    def __getitem__(self, i: Any) -> tuple[BackboneOutput, Tensor]:
        return self.copies[0].readings[i], self.copies[0].targets[i]

    def __getitems__(self, rows: list[int]) -> tuple[BackboneOutput, Tensor]:
        wanted = torch.tensor(rows)
        if len(self.copies) == 1:
            return self[wanted]
        drawn = torch.randint(len(self.copies), wanted.shape)
        parts = [(copy, wanted[drawn == i]) for i, copy in enumerate(self.copies)]
        back = drawn.argsort(stable=True).argsort()  # from copy by copy to the order that was asked for
        readings = BackboneOutput.together([copy.readings[chosen] for copy, chosen in parts])
        return readings[back], torch.cat([copy.targets[chosen] for copy, chosen in parts])[back]


class ExtractedShare(NamedTuple):
    """What one of several processes extracts: every so manieth batch, in order.

    All processes run the batches that one process would run: features, and so the order of rows that a structure is
    learned from, depend in their last bits on which samples share a batch.
    """

    readings: list[BackboneOutput]
    targets: list[Tensor]

    def together(self, taps: Taps | None = None) -> tuple[Tensor, Tensor]:
        """This share as one table (n, d) of the features of some taps, and its targets; (0, 0) if it is empty."""
        if not self.readings:
            return torch.empty(0, 0), torch.empty(0)
        return torch.cat([part.view(taps) for part in self.readings]), torch.cat(self.targets)

    def gathered(self) -> Extracted:
        """The features and targets of all processes, in the order of one; a collective."""
        shares = all_gather(self)
        most = max(len(share.readings) for share in shares)
        dealt = [(share, i) for i in range(most) for share in shares if i < len(share.readings)]
        return Extracted(
            BackboneOutput.together([share.readings[i] for share, i in dealt]),
            torch.cat([share.targets[i] for share, i in dealt]),
        )


def _collate(batch: Any) -> Any:
    return batch  # `_Rows` gives whole batches


def data_source(trainer: pl.Trainer, model: pl.LightningModule) -> Any:
    """What gives a fit its data: a datamodule, the model itself, or loaders."""
    source = data_given(trainer.fit_loop)
    return getattr(trainer, "datamodule", None) or model if source is None else source


def structure_loader(
    trainer: pl.Trainer, model: pl.LightningModule, max_rows: int | None = None, every: int = 1, first: int = 0
) -> Iterable[Any]:
    """Batches of training data in a fixed order; with `max_rows`, of a random sample of that many rows.

    With `every`, only batches `first`, `first + every`, `first + 2·every`, …: the share of one of so many processes. A
    datamodule may offer `structure_dataloader` (un-augmented); else the training loader is rebuilt without shuffling.
    """
    source = data_source(trainer, model)
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


def unshuffled(
    loader: Any, max_rows: int | None = None, every: int = 1, first: int = 0, seed: int = 0
) -> Iterable[Any]:
    """A loader over the same samples, un-shuffled; one over a stream keeps its order, up to a number of rows.

    With `every`, a loader over the batches `first`, `first + every`, …. Worker processes draw from `seed`.
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
            generator=torch.Generator().manual_seed(seed),
        )
    return DataLoader(
        loader.dataset if len(rows) == total else Subset(loader.dataset, rows),
        batch_size=size,
        shuffle=False,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        generator=torch.Generator().manual_seed(
            seed
        ),  # its own: looking at the data must not move the training's draws
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
        rows += batching.size(inputs_of(batch))


def first_batch(trainer: pl.Trainer, columns: Columns | None = None) -> Any:
    """The inputs of the first batch of training data."""
    for batch in structure_loader(trainer, trainer.lightning_module):
        return inputs_of(batch, columns)
    raise ValueError("expected training data to measure the features of, got an empty loader: check the datamodule")


def extract(
    backbone: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    max_rows: int | None = None,
    progress: bool = True,
    columns: Columns | None = None,
) -> Extracted:
    """What a backbone gives for batches, and their targets; its mode and device are put back afterwards."""
    targets: list[Tensor] = []

    def watched() -> Iterator[Any]:
        for batch in batches:
            inputs, target = pair(batch, columns)
            targets.append(torch.as_tensor(target))
            yield inputs

    total = len(batches) if is_sized(batches) else None  # type: ignore[arg-type]
    readings = read(backbone, watched(), device=device, max_rows=max_rows, progress=progress, total=total)
    return Extracted(readings, torch.cat(targets)[: len(readings)].cpu())


def extract_share(
    backbone: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    progress: bool = True,
    columns: Columns | None = None,
) -> ExtractedShare:
    """`extract` for one of several processes, whose share of the batches may be empty."""
    stream = iter(batches)
    start = list(islice(stream, 1))
    if not start:
        return ExtractedShare([], [])
    sizes: list[int] = []

    def watched() -> Iterator[Any]:
        for batch in chain(start, stream):
            sizes.append(batching.size(inputs_of(batch, columns)))
            yield batch

    found = extract(backbone, watched(), device=device, progress=progress, columns=columns)
    places = list(torch.arange(len(found.targets)).split(sizes))  # type: ignore[no-untyped-call]
    return ExtractedShare([found.readings[rows] for rows in places], [found.targets[rows] for rows in places])


def extract_features(
    backbone: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    max_rows: int | None = None,
    progress: bool = True,
) -> Tensor:
    """Extracts the features (N, d) that the head reads, on the CPU; mode and device of the backbone are put back."""
    return read(backbone, batches, device=device, max_rows=max_rows, progress=progress).features


def read(
    backbone: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    max_rows: int | None = None,
    progress: bool = True,
    total: int | None = None,
) -> BackboneOutput:
    """All that a backbone gives for inputs, on the CPU; its mode and device are put back afterwards.

    Args:
        backbone: a `FeatureExtractor`, or any module that gives features.
        batches: inputs, or batches whose inputs can be told.
        device: where the backbone runs; None is where it is.
        max_rows: samples at the most.
        progress: show a progress bar.
        total: how many batches there are, where they do not tell it themselves.
    """
    found: list[BackboneOutput] = []
    rows = 0
    with at_work(backbone, device) as there:
        parts = readings(backbone, batches, there, progress, total=total)
        for part in parts:
            found.append(part)
            rows += len(part)
            if max_rows is not None and rows >= max_rows:
                parts.close()  # and so its progress bar
                break
    if not rows:
        raise ValueError("expected training data to extract features from, got no sample: check the data or its loader")
    return BackboneOutput.together(found)[:max_rows]


@contextlib.contextmanager
def at_work(backbone: nn.Module, device: torch.device | str | None = None) -> Iterator[torch.device]:
    """A backbone in evaluation mode on its device, without gradients; mode and device are put back afterwards."""
    training = backbone.training
    home = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    there = torch.device(device) if device is not None else home
    backbone.eval().to(there)
    try:
        with torch.no_grad():
            yield there
    finally:
        backbone.train(training).to(home)


def readings(
    backbone: nn.Module,
    batches: Iterable[Any],
    device: torch.device,
    progress: bool = True,
    known: Callable[[Any], BackboneOutput | None] | None = None,
    total: int | None = None,
) -> Generator[BackboneOutput, None, None]:
    """What a backbone `at_work` gives for each batch that has samples, on the CPU.

    Args:
        backbone: a `FeatureExtractor`, or any module that gives features.
        batches: inputs, or batches whose inputs can be told.
        device: where the backbone is.
        progress: show a progress bar.
        known: what was read of some inputs before, or None for those that have to run.
        total: how many batches there are, where they do not tell it themselves.
    """
    like: Any = None  # the shape of a sample
    first: list[int] | None = None  # the numbers of features
    total = len(batches) if total is None and is_sized(batches) else total  # type: ignore[arg-type]
    bar = tqdm(batches, "extracting features", total, disable=None if progress else True, delay=2, leave=False)
    for batch, base_logits in in_step(backbone, bar):
        inputs = inputs_of(batch)
        if isinstance(inputs, Tensor) and inputs.dim() and not len(inputs):
            continue
        if not base_logits:  # for the others, who need our parts of the weights
            readings_of(backbone, batching.move(inputs, device))
            continue
        found = inputs if isinstance(inputs, BackboneOutput) else None if known is None else known(inputs)
        if found is None:
            like = batching.shape_of(inputs) if like is None else like
            try:
                found = readings_of(backbone, batching.move(inputs, device))
            except RuntimeError as error:
                if batching.shape_of(inputs) == like:
                    raise
                raise ValueError(
                    f"expected batches whose samples have the shape {like} of the first, got "
                    f"{batching.shape_of(inputs)}, at which the backbone stops ({error}): bring all inputs to one shape"
                ) from error
        part = found.map(lambda tensor: tensor.float().cpu())
        widths = [values.shape[1] for values in (part.features, *part.more.values())]
        first = widths if first is None else first
        if widths != first:
            raise ValueError(
                f"expected batches with the same number of features, got {_sizes(first)} and then {_sizes(widths)}: "
                "bring all inputs to one shape, or pool by mean or a grid"
            )
        yield part


def _sizes(widths: list[int]) -> str:
    return " and ".join(map(str, widths))


def readings_of(backbone: nn.Module, inputs: Any) -> BackboneOutput:
    """What a `FeatureExtractor` gives for a batch of inputs, or any other module that gives features (B, d)."""
    if getattr(backbone, "reads", False):
        found: BackboneOutput = backbone(inputs, more=True)
        return found
    return BackboneOutput(backbone(inputs))


def is_sharded(module: nn.Module) -> bool:
    """Whether parts of a module's weights are in other processes: then every forward pass is a collective."""
    return any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in module.modules())


def in_step(backbone: nn.Module, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Gives (batch, True) for every batch; of a sharded backbone also (batch, False) while other processes have more.

    The processes that share a backbone must run it equally often, or those that do it once more wait for ever.
    """
    stream = iter(batches)
    if not is_sharded(backbone):
        for batch in stream:
            yield batch, True
        return
    last = None
    while True:
        more = run_or_fail_together(lambda: list(islice(stream, 1)))
        left = all_gather(bool(more))
        if not any(left):
            return
        last = more[0] if more else last
        if any(all_gather(last is None)):
            raise ValueError(
                f"expected a batch for each of the {len(left)} processes that share the backbone, got fewer batches: "
                "lower the batch size, or the number of processes"
            )
        yield last, bool(more)


def inputs_of(batch: Any, columns: Columns | None = None) -> Any:
    """The inputs of a batch: a tensor, a dictionary of tensors, or features in their place."""
    inputs = split(batch, columns).inputs
    if not isinstance(inputs, Tensor | BackboneOutput | Mapping):
        raise ValueError(
            f"expected batches (inputs, labels) of tensors, got {type(inputs).__name__} as inputs: return tensors from "
            "the loader"
        )
    return inputs


def pair(batch: Any, columns: Columns | None = None) -> tuple[Any, Any]:
    """The inputs and the target of a batch that must have both."""
    inputs, target = inputs_of(batch, columns), split(batch, columns).target
    if target is None:
        named = batching.as_mapping(batch, columns or Columns())
        got = type(batch).__name__ if named is None else f"parts {', '.join(named)}"
        raise ValueError(
            f"expected batches (inputs, targets), got {got}: return both from the dataset, or name the target, "
            "columns=Columns(target=…)"
        )
    return inputs, target
