"""Features of data in a fixed order: what a backbone gives for loaders, in one process or shared by several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tqdm.auto import tqdm

from brainet_pl._utils.framework import pl, rank_zero_warn
from brainet_pl._utils.lightning_private import data_given
from brainet_pl._utils.texts import Texts
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns, split
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import Taps
from brainet_pl.distributed.collectives import all_gather, run_or_fail_together

Observe = Callable[[Any, Tensor], None]  # of the inputs and targets of a batch
STREAM_ROWS = 50_000  # rows that stand for a stream of unknown length, which may never end


class Extracted(NamedTuple):
    """The output of a backbone for N samples, and their targets (N, …), on the CPU."""

    output: BackboneOutput
    targets: Tensor

    @property
    def features(self) -> Tensor:
        """The features that the head reads, (N, d)."""
        return self.output.features

    def sample(self, max_rows: int | None) -> Extracted:
        """At most `max_rows` of the samples: the random choice that `structure_loader` makes."""
        rows = chosen_rows(len(self.features), max_rows)
        return self if rows is None else Extracted(self.output[rows], self.targets[rows])

    def loader(self, copies: Sequence[Extracted] = (), **settings: Any) -> Callable[[], DataLoader[Any]]:
        """A function that gives a fresh loader of (`BackboneOutput`, targets), a `DataLoader` with these settings.

        With `copies`, features of the same samples under augmentation, one is drawn each time a sample is loaded.
        """
        data = _ExtractedDataset(copies or [self])

        def load() -> DataLoader[Any]:
            # Not a lambda to collate: Lightning re-creates the loader for several processes, and must pickle it.
            return DataLoader(data, collate_fn=_collate, **settings)

        return load


class _ExtractedDataset(Dataset[tuple[BackboneOutput, Tensor]]):
    """Samples of `Extracted`, a batch at a time; with several copies, each sample comes from a random one."""

    def __init__(self, copies: Sequence[Extracted]) -> None:
        self.copies = copies

    def __len__(self) -> int:
        return len(self.copies[0].targets)

    def __getitem__(self, i: Any) -> tuple[BackboneOutput, Tensor]:
        return self.copies[0].output[i], self.copies[0].targets[i]

    def __getitems__(self, rows: list[int]) -> tuple[BackboneOutput, Tensor]:
        wanted = torch.tensor(rows)
        if len(self.copies) == 1:
            return self[wanted]
        drawn = torch.randint(len(self.copies), wanted.shape)
        parts = [(copy, wanted[drawn == i]) for i, copy in enumerate(self.copies)]
        back = drawn.argsort(stable=True).argsort()  # from copy by copy to the order of `rows`
        output = BackboneOutput.concat([copy.output[chosen] for copy, chosen in parts])
        return output[back], torch.cat([copy.targets[chosen] for copy, chosen in parts])[back]


class ExtractedShare(NamedTuple):
    """The batches that one of several processes extracts: every `world_size`-th batch, in order.

    All processes run the batches that one process would run: features, and so the order of rows that a structure is
    learned from, depend in their last bits on which samples share a batch.
    """

    outputs: list[BackboneOutput]
    targets: list[Tensor]

    def concat(self, taps: Taps | None = None) -> tuple[Tensor, Tensor]:
        """The features (n, d) of some taps in this share, and its targets; (0, 0) if it is empty."""
        if not self.outputs:
            return torch.empty(0, 0), torch.empty(0)
        return torch.cat([output.view(taps) for output in self.outputs]), torch.cat(self.targets)

    def gather(self) -> Extracted:
        """The features and targets of all processes, in the order of a single process; a collective."""
        rounds = zip_longest(*(zip(*share, strict=True) for share in all_gather(self)))
        outputs, targets = zip(*(batch for one in rounds for batch in one if batch is not None), strict=True)
        return Extracted(BackboneOutput.concat(outputs), torch.cat(targets))


def _collate(batch: Any) -> Any:
    return batch  # `_ExtractedDataset` gives whole batches


def data_source(trainer: pl.Trainer, model: pl.LightningModule) -> Any:
    """What gives a fit its data: a datamodule, the model itself, or loaders."""
    source = data_given(trainer.fit_loop)
    return getattr(trainer, "datamodule", None) or model if source is None else source


def chosen_rows(total: int, max_rows: int | None) -> Tensor | None:
    """A random choice of `max_rows` of `total` rows, in ascending order, the same in each call; None is all rows."""
    if max_rows is None or max_rows >= total:
        return None
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:max_rows].sort().values


def unshuffled(
    loader: Any, max_rows: int | None = None, every: int = 1, first: int = 0, seed: int = 0
) -> Iterable[Any]:
    """A loader over the same samples without shuffling; a stream keeps its order and ends after `max_rows`.

    With `every`, a loader over the batches `first`, `first + every`, …. Worker processes are seeded by `seed`.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        batches = bounded(loader, max_rows)
        return batches if every == 1 else islice(batches, first, None, every)
    total = len(loader.dataset)  # type: ignore[arg-type]
    rows = sorted(getattr(loader.sampler, "indices", range(total)))  # a subset sampler omits the others on purpose
    drawn = chosen_rows(len(rows), max_rows)
    if drawn is not None:
        rows = [rows[i] for i in drawn]
    size = loader.batch_size or 256
    settings: dict[str, Any] = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
    settings["generator"] = torch.Generator().manual_seed(seed)  # its own: training must draw the same numbers as ever
    if every > 1:
        starts = range(first * size, len(rows), every * size)
        return DataLoader(loader.dataset, batch_sampler=[rows[i : i + size] for i in starts], **settings)
    chosen = loader.dataset if len(rows) == total else Subset(loader.dataset, rows)
    return DataLoader(chosen, batch_size=size, shuffle=False, **settings)


def is_sized(loader: Any) -> bool:
    """Whether a loader has a length; one without may never end."""
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


def extract(backbone: nn.Module, batches: Iterable[Any], *, max_rows: int | None = None, **settings: Any) -> Extracted:
    """The output of a backbone for batches, and their targets; the settings are those of `extract_share`."""
    outputs, targets = extract_share(backbone, batches, max_rows=max_rows, **settings)
    return Extracted(BackboneOutput.concat(outputs)[:max_rows], torch.cat(targets)[:max_rows])


def extract_share(
    backbone: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    max_rows: int | None = None,
    progress: bool = True,
    columns: Columns | None = None,
    observe: Observe | None = None,
) -> ExtractedShare:
    """Extracts the batches of one of several processes, which may have none, until there are `max_rows` samples.

    `observe` sees the inputs and targets of every batch before it runs. The mode and device of the backbone are
    restored afterwards.
    """
    targets: list[Tensor] = []

    def all_inputs() -> Iterator[Any]:
        for batch in batches:
            inputs, target = inputs_and_target(batch, columns)
            if not _is_empty(inputs):
                targets.append(torch.as_tensor(target).cpu())
                if observe is not None:
                    observe(inputs, targets[-1])
            yield inputs

    total = len(batches) if is_sized(batches) else None  # type: ignore[arg-type]
    with inference(backbone, device) as there:
        outputs = list(run_batches(backbone, all_inputs(), there, progress, total=total, max_rows=max_rows))
    return ExtractedShare(outputs, targets)


def extract_features(backbone: nn.Module, batches: Iterable[Any], **settings: Any) -> Tensor:
    """Extracts the features (N, d) that the head reads, on the CPU; the settings are those of `extract_output`."""
    return extract_output(backbone, batches, **settings).features


def extract_output(
    backbone: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    max_rows: int | None = None,
    progress: bool = True,
) -> BackboneOutput:
    """The whole output of a backbone for inputs, on the CPU; its mode and device are restored afterwards.

    Args:
        backbone: a `FeatureExtractor`, or any module that gives features.
        batches: inputs, or batches that contain inputs.
        device: where the backbone runs; None is where it is.
        max_rows: largest number of samples.
        progress: show a progress bar.
    """
    with inference(backbone, device) as there:
        outputs = list(run_batches(backbone, batches, there, progress, max_rows=max_rows))
    return BackboneOutput.concat(outputs)[:max_rows]


@contextlib.contextmanager
def inference(backbone: nn.Module, device: torch.device | str | None = None) -> Iterator[torch.device]:
    """Evaluation mode on a device, without gradients; mode and device of the backbone are restored afterwards."""
    training = backbone.training
    home = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    there = torch.device(device) if device is not None else home
    backbone.eval().to(there)
    try:
        with torch.no_grad():
            yield there
    finally:
        backbone.train(training).to(home)


def run_batches(
    backbone: nn.Module,
    batches: Iterable[Any],
    device: torch.device,
    progress: bool = True,
    known: Callable[[Any], BackboneOutput | None] | None = None,  # gives the output for inputs that need not run
    total: int | None = None,  # number of batches, if `batches` has no length
    max_rows: int | None = None,  # number of samples after which no further batch runs
) -> Iterator[BackboneOutput]:
    """Yields the output of a backbone for each batch that has samples, on the CPU; call it within `inference`."""
    rows = 0
    first: list[int] | None = None  # the numbers of features
    total = len(batches) if total is None and is_sized(batches) else total  # type: ignore[arg-type]
    bar = tqdm(batches, "extracting features", total, disable=None if progress else True, delay=2, leave=False)
    for batch, ours in in_lockstep(backbone, bar):
        inputs = inputs_of(batch)
        if _is_empty(inputs):
            continue
        if not ours:  # another process needs our part of the weights
            run_backbone(backbone, batching.move(inputs, device))
            continue
        output = _known_output(inputs, known)
        if output is None:
            output = run_backbone(backbone, batching.move(inputs, device))
        part = output.map(lambda tensor: tensor.float().cpu())
        first = _check_widths(part, first)
        yield part
        rows += len(part)
        if max_rows is not None and rows >= max_rows:
            bar.close()
            return


def _known_output(inputs: Any, known: Callable[[Any], BackboneOutput | None] | None) -> BackboneOutput | None:
    """The output for inputs that need not run: those that are features already, and those that are `known`."""
    if isinstance(inputs, BackboneOutput):
        return inputs
    return None if known is None else known(inputs)


def _check_widths(output: BackboneOutput, first: list[int] | None) -> list[int]:
    """The numbers of features of an output, which must be those of the first one."""
    widths = [values.shape[1] for values in (output.features, *output.more.values())]
    if first is not None and widths != first:
        before, now = (" and ".join(map(str, sizes)) for sizes in (first, widths))
        raise ValueError(
            f"expected batches with the same number of features, got {before} and then {now}: "
            "bring all inputs to one shape, or pool by mean or a grid"
        )
    return widths


def _is_empty(inputs: Any) -> bool:
    return isinstance(inputs, Tensor) and inputs.dim() > 0 and not len(inputs)


def run_backbone(backbone: nn.Module, inputs: Any) -> BackboneOutput:
    """The output of a `FeatureExtractor` for a batch of inputs, or of any other module that gives features (B, d)."""
    output = backbone(inputs, more=True) if getattr(backbone, "supports_more", False) else backbone(inputs)
    return output if isinstance(output, BackboneOutput) else BackboneOutput(output)


def is_sharded(module: nn.Module) -> bool:
    """Whether parts of a module's weights are in other processes: then every forward pass is a collective."""
    return any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in module.modules())


def in_lockstep(backbone: nn.Module, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yields (batch, True) for every batch, and for a sharded backbone (batch, False) while other processes have more.

    The processes that share a backbone must run it equally often, or those that run it once more wait for ever.
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
    """The inputs of a batch: a tensor, a dictionary of tensors, texts, or features in their place."""
    inputs = split(batch, columns).inputs
    if not isinstance(inputs, Tensor | BackboneOutput | Mapping | Texts):
        raise ValueError(
            f"expected batches (inputs, labels) of tensors, got {type(inputs).__name__} as inputs: return tensors from "
            "the loader"
        )
    return inputs


def inputs_and_target(batch: Any, columns: Columns | None = None) -> tuple[Any, Any]:
    """The inputs and the target of a batch; an error if it has no target."""
    inputs, target = inputs_of(batch, columns), split(batch, columns).target
    if target is None:
        named = batching.as_mapping(batch, columns or Columns())
        got = type(batch).__name__ if named is None else f"parts {', '.join(named)}"
        raise ValueError(
            f"expected batches (inputs, targets), got {got}: return both from the dataset, or name the target, "
            "columns=Columns(target=…)"
        )
    return inputs, target
