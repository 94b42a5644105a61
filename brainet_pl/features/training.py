"""What a backbone gives for the data of one fit: extracted once, whoever asks first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils.framework import rank_zero_info
from brainet_pl._utils.rng import isolated_rng
from brainet_pl._utils.warn import warn
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.extractor import scaled
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import Taps, View
from brainet_pl.distributed.collectives import exchange, run_or_fail_together
from brainet_pl.features import store
from brainet_pl.features.extraction import (
    Extracted,
    ExtractedShare,
    Observe,
    extract,
    extract_output,
    extract_share,
    inputs_and_target,
    inputs_of,
    is_sharded,
    is_sized,
    unshuffled,
)
from brainet_pl.features.layers import LayerChoice, choose_layers, sample_rows

SAMPLE_ROWS = 2048  # samples that stand for all, where a few tell enough
SCALE_ROWS = 10_000  # training samples that tell the scale of tapped features, where no more are read anyway


class FeatureFolder(ABC):
    """A callback that keeps features on disk."""

    @abstractmethod
    def feature_folder(self, trainer: Any) -> Path | None:
        """The folder for the features of a fit, or None where none are kept."""


class _Unscaled(NamedTuple):
    """Features as they are on disk, and the views of the backbone whose scale they told.

    Attributes:
        outputs: Of batches, or one of all samples.
        targets: Theirs.
        views: Taps → view, as of `FeatureExtractor.without_scale`.
    """

    outputs: list[BackboneOutput]
    targets: list[Tensor]
    views: dict[Taps | None, View]

    def share(self) -> ExtractedShare:
        """The batches, standardised."""
        return ExtractedShare([scaled(output, self.views) for output in self.outputs], self.targets)

    def all(self) -> Extracted:
        """The samples of the only batch, standardised."""
        return Extracted(scaled(self.outputs[0], self.views), self.targets[0])


class _Sample(NamedTuple):
    """At most so many samples of some data, kept for whoever asks again."""

    source: Any
    rows: int
    samples: Extracted


class TrainingFeatures:
    """Features and targets of the training data, un-augmented and in a fixed order.

    Features of a frozen backbone are extracted once and kept until `release`; with a `store` they come from the disk
    where they are there. Several processes share the work.

    Args:
        source: what gives the data: a datamodule or module with `structure_dataloader` or `train_dataloader`, or a
            loader.
        backbone: the feature extractor.
        store: folder in which features are kept on disk, or None. Only features of a frozen backbone are stored.
        columns: which parts of a batch are inputs and target; None guesses.
        device: where the backbone runs; None is where it is.
        observe: sees the inputs and targets of every batch that the backbone runs on; not those of stored features.
        rank: number of this process.
        processes: how many processes share the work.
    """

    def __init__(
        self,
        source: Any,
        backbone: FeatureExtractor,
        store: Path | None = None,
        *,
        columns: Columns | None = None,
        device: torch.device | None = None,
        observe: Observe | None = None,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self.observe = observe
        self.source, self.backbone, self.columns, self.device = source, backbone, columns, device
        self.rank, self.processes = rank, processes
        storable = backbone.frozen and not backbone.raw and not is_sharded(backbone)
        self.store = store if storable else None
        self._all: Extracted | None = None
        self._share: ExtractedShare | None = None
        self._samples: dict[str, _Sample] = {}
        self._unscaled: _Unscaled | None = None
        self.numbers: Tensor | None = None  # those of the samples that were not held back, in the training data
        self._mapped = False  # whether the last features were mapped from the disk

    def choose_layers(self, check: Callable[[Tensor], Tensor] | None = None, progress: bool = True) -> None:
        """Let a sample of the training data choose the layers that the backbone reads, where that was asked for.

        The first process chooses, and all read what it chose. `check` turns targets into classes or numbers.
        """
        if self.backbone.search is None:
            return
        settings: dict[str, Any] = {"device": self.device, "check": check, "progress": progress}

        def work() -> LayerChoice | None:
            if self.rank:
                return None
            loader = loader_of(self.source)
            data = getattr(loader, "dataset", None)
            rows = sample_rows(len(data) if is_sized(data) else None)  # type: ignore[arg-type]
            with isolated_rng(0):
                batches = unshuffled(loader, rows)
                return choose_layers(self.backbone, batches, rows=rows, columns=self.columns, **settings)

        choice = exchange(work)[0]
        assert choice is not None
        self.backbone.choose(*choice)
        rank_zero_info(choice.summary)

    def all(self, max_rows: int | None = None, progress: bool = True) -> Extracted:
        """Features and targets of all samples, or of a random choice of `max_rows`, the same in all processes."""
        stored = self.store is not None
        if self._all is None:
            self._gather_shares(progress)
        if self._all is not None:
            return self._all.sample(max_rows)
        most = None if stored else max_rows  # what is stored is whole, whoever wants how much of it
        samples = self._extract_all(most, progress) if self._unscaled is None else self._unscaled.all()
        if self.backbone.frozen and (most is None or len(samples.features) < most):
            self._all = samples
        return samples.sample(max_rows)

    def _gather_shares(self, progress: bool) -> None:
        """Take what all processes extracted, which have a share each, or none; what is stored they read together."""
        if self.store is not None and self.processes > 1:
            self.share(progress=progress)
        if self._share is not None:
            self._all = self._share.gather()

    def _extract_all(self, max_rows: int | None, progress: bool) -> Extracted:
        """Samples as the backbone gives them, standardised; the first ones tell the scale."""
        samples = self._extract(self._loader(max_rows), max_rows, progress)
        if not self.backbone.needs_scale:
            return samples
        return self._scale([samples.output], [samples.targets]).all()

    def share(self, max_rows: int | None = None, progress: bool = True) -> ExtractedShare:
        """What `all` gives, dealt out to the processes batch by batch: each extracts its own share."""
        if self._share is not None and max_rows is None:
            return self._share
        if max_rows is not None and self.store is not None:
            self.all(progress=progress)  # what is stored is whole
        if self._all is not None:
            output, targets = self._all.sample(max_rows)
            rows = slice(self.rank, None, self.processes)
            return ExtractedShare([output[rows]], [targets[rows]])
        if self._unscaled is not None and max_rows is None:
            mine = self._unscaled.share()
        else:
            loader = self._loader(max_rows, self.processes, self.rank)
            mine = run_or_fail_together(lambda: self._extract_share(loader, progress))
            if self.backbone.needs_scale:
                mine = self._scale(*mine, shared=True).share()
        if self.backbone.frozen and max_rows is None:
            self._share = mine
        return mine

    def sample(self, rows: int = SAMPLE_ROWS) -> Extracted:
        """A random choice of at most `rows` training samples, the same in all processes."""
        if self._all is not None:
            return self._all.sample(rows)
        return self._sample("training", self.source, rows)

    def validation_sample(self, loader: Any, rows: int) -> Extracted:
        """At most `rows` samples of a validation loader, of known size or not."""
        if is_sized(loader) and not len(loader):
            raise ValueError("expected validation samples, got an empty loader: check the validation data")
        return self._sample("validation", loader, rows)

    def _sample(self, name: str, source: Any, rows: int) -> Extracted:
        kept = self._samples.get(name)
        if kept is not None and kept.source is source and rows <= kept.rows:
            return kept.samples.sample(rows)
        settings: dict[str, Any] = {"device": self.device, "progress": False, "columns": self.columns}
        found = extract(self.backbone, batches_of(source, rows), max_rows=rows, **settings)
        if self.backbone.frozen:
            self._samples[name] = _Sample(source, rows, found)
        return found

    def of(self, loader: Any, seed: int = 0, progress: bool = True) -> Extracted:
        """Features and targets of all samples of a loader of known size, in a fixed order.

        Args:
            loader: any, also of a shuffled or augmented set.
            seed: of what transforms draw; it leaves no trace in the draws of training.
            progress: show a progress bar.
        """
        if self.processes == 1:
            return self._extract(unshuffled(loader, seed=seed), None, progress, seed)
        share = unshuffled(loader, every=self.processes, first=self.rank, seed=seed)
        return run_or_fail_together(lambda: self._extract_share(share, progress, seed)).gather()

    def targets(self) -> Tensor:
        """Gives the targets (N,) of all training samples, in a fixed order: the same in all processes."""
        if self._all is not None:
            return self._all.targets
        targets = [inputs_and_target(batch, self.columns)[1] for batch in self._loader()]
        if not targets:
            raise ValueError("expected training data to learn the scale of the target from, got an empty loader")
        return torch.cat(targets)

    def first(self) -> BackboneOutput:
        """What the backbone gives for the first two samples, run again only if nobody has asked for features yet."""
        if self._all is not None:
            return self._all.output[:2]
        if self._share is not None and self._share.outputs:
            return self._share.outputs[0][:2]
        return self.probe()

    def probe(self) -> BackboneOutput:
        """Run the backbone on the first two samples, so that it has met an input."""
        for batch in self._loader():
            inputs = inputs_of(batch, self.columns)
            if isinstance(inputs, BackboneOutput):
                return inputs[:2]
            return extract_output(self.backbone, [batching.rows(inputs, slice(0, 2))], progress=False)
        raise ValueError("expected training data to measure the features of, got an empty loader: check the datamodule")

    def prepare_backbone(self) -> None:
        """Let the backbone find the layer to remove and the scale of its taps, before an optimizer holds weights."""
        if self.backbone.needs_sample:
            self.probe()
        if self.backbone.needs_scale:  # nobody has asked for features of the training data yet
            self.all(SCALE_ROWS, progress=False)

    def hold_back(self, rows: Tensor) -> Extracted:
        """Take some of all samples, by their numbers, out of the training features; gives these."""
        found = self.all()
        kept = torch.ones(len(found.targets), dtype=torch.bool)
        kept[rows] = False
        self._all, self._samples = Extracted(found.output[kept], found.targets[kept]), {}
        self.numbers = kept.nonzero()[:, 0]
        return Extracted(found.output[rows], found.targets[rows])

    def release(self) -> None:
        """Drop all but a sample, once a fit is set up."""
        if self._all is not None and self.backbone.frozen:
            self._samples["training"] = _Sample(self.source, SAMPLE_ROWS, self._all.sample(SAMPLE_ROWS))
        self._all = self._share = None

    def _scale(self, outputs: list[BackboneOutput], targets: list[Tensor], shared: bool = False) -> _Unscaled:
        """Learn the scale of tapped features; what was read from the disk for it is kept, where it takes no memory.

        With a scale a backbone has another name in the store, where nothing is found of the training data.
        """
        views = self.backbone.without_scale()
        self.backbone.set_scale(outputs, shared=shared)
        found = _Unscaled(outputs, targets, views)
        self._unscaled = found if self._mapped else None
        return found

    def _loader(self, max_rows: int | None = None, every: int = 1, first: int = 0) -> Iterable[Any]:
        return batches_of(self.source, max_rows, every, first)

    def _from_store(self, loader: Any, progress: bool, seed: int) -> store.Entry | None:
        """What is stored of a loader's samples, extracted now where it was not; None where nothing can be stored."""
        if self.store is None:
            return None
        settings: dict[str, Any] = {"device": self.device, "progress": progress, "columns": self.columns, "seed": seed}
        try:
            found = store.extract(self.store, self.backbone, loader, **settings)
            self._mapped = found is not None
            return found
        except store.NotStored as error:
            warn(f"features are not kept on disk: {error}")
            return None

    def _extract(self, loader: Any, max_rows: int | None, progress: bool, seed: int = 0) -> Extracted:
        with isolated_rng(seed):
            entry = self._from_store(loader, progress, seed)
            if entry is not None:
                return entry.extracted
            settings: dict[str, Any] = {"device": self.device, "progress": progress, "columns": self.columns}
            return extract(self.backbone, loader, max_rows=max_rows, observe=self.observe, **settings)

    def _extract_share(self, loader: Any, progress: bool, seed: int = 0) -> ExtractedShare:
        with isolated_rng(seed):
            entry = self._from_store(loader, progress, seed)
            if entry is not None:
                parts = list(entry.parts())
                return ExtractedShare([part.output for part in parts], [part.targets for part in parts])
            return extract_share(self.backbone, loader, device=self.device, progress=progress, columns=self.columns)


def batches_of(source: Any, max_rows: int | None = None, every: int = 1, first: int = 0) -> Iterable[Any]:
    """Batches of training data in a fixed order; with `max_rows`, of a random sample of that many rows.

    With `every`, only batches `first`, `first + every`, `first + 2·every`, …: the share of one of so many processes. A
    datamodule may offer `structure_dataloader` (un-augmented); else its training loader is rebuilt without shuffling.
    """
    return unshuffled(loader_of(source), max_rows, every, first)


def loader_of(source: Any) -> Any:
    """The loader of un-augmented training data of a datamodule that offers one, else its training loader."""
    if hasattr(source, "structure_dataloader"):
        return source.structure_dataloader()
    return source.train_dataloader() if hasattr(source, "train_dataloader") else source
