"""Run a frozen backbone once, and train the head from its features, which stay on disk for other runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from brainet_pl._utils import checks
from brainet_pl._utils.framework import Callback, pl, rank_zero_warn
from brainet_pl._utils.lightning_private import loader_source, set_loader_source
from brainet_pl.features.extraction import Extracted, data_source, is_sized
from brainet_pl.features.training import FeatureFolder
from brainet_pl.lightning.module import BRAINet


@dataclass
class _FeatureSource:
    """Replaces Lightning's `_DataLoaderSource` of a datamodule in a loop, and gives loaders of features."""

    dataloader: Callable[[], DataLoader[Any]]
    instance: pl.LightningDataModule
    name: str

    def is_defined(self) -> bool:
        """Whether the datamodule has the method `name`."""
        return True

    is_module = is_defined


class FeatureCache(Callback, FeatureFolder):
    """Extracts the features of training and validation data at fit set-up and feeds them instead of the inputs.

    Features are kept on disk and memory-mapped: a further run with the same weights, layers, data and transforms, with
    any head, takes them from there, and so do the structure and the scores. They are checked before they are used;
    `brainet cache` lists them, and `brainet cache clear` deletes them (docs/howto/features.md).

    Only for a `BRAINet` with a frozen backbone, and a datamodule; training data comes un-augmented where the datamodule
    offers `structure_dataloader`, in the order and the choice of the sampler or batch sampler of its training loader.
    Testing and predicting use the inputs as always.

    Args:
        folder: where features are kept; null is `features` under the Trainer's root, "" keeps them in memory alone.
        copies: train from this many copies of every training sample, each with the datamodule's own augmentation; each
            time a sample is loaded, one copy is drawn. 0 trains from the sample without augmentation.
        progress: show progress bars.
    """

    def __init__(self, folder: str | None = None, copies: int = 0, progress: bool = True) -> None:
        self.folder, self.copies = folder, checks.whole("copies", copies, 0, 1000)
        self.progress = progress
        self._replaced: list[tuple[Any, Any]] = []  # loops of the Trainer, and the sources of their loaders

    def feature_folder(self, trainer: pl.Trainer) -> Path | None:
        """Where features are kept on disk, or None."""
        if self.folder == "":
            return None
        return Path(trainer.default_root_dir) / "features" if self.folder is None else Path(self.folder)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the loops of the fit take their loaders from the cache."""
        if stage != "fit":
            return
        if not isinstance(pl_module, BRAINet):
            rank_zero_warn(
                f"expected a BRAINet to cache features of, got {type(pl_module).__name__}: every step runs all of it, "
                "with SwapHead too, and no features are kept; leave FeatureCache out"
            )
            return
        if not pl_module.backbone.frozen:
            raise RuntimeError(
                "expected a frozen backbone to cache features of, got one that trains: set freeze to True in Backbone"
            )
        datamodule = data_source(trainer, pl_module)
        if not isinstance(datamodule, pl.LightningDataModule):
            raise RuntimeError(
                "expected a datamodule to cache features of, got plain loaders: wrap them in a datamodule"
            )
        training = _checked("training", datamodule.train_dataloader())
        validation = _checked("validation", datamodule.val_dataloader())
        pl_module.choose_layers()  # before any features are kept
        features = pl_module.training_features
        plain = features.all(progress=self.progress)
        copies = [features.of(training, i + 1, self.progress) for i in range(self.copies)]
        held = features.of(validation, progress=self.progress)
        loaders: list[tuple[Any, Callable[[], DataLoader[Any]]]] = [
            (trainer.fit_loop, plain.loader(copies, **_order(training, plain, shuffled=True))),
            (trainer.fit_loop.epoch_loop.val_loop, held.loader(**_order(validation, held, shuffled=False))),
        ]
        for loop, load in loaders:
            source = loader_source(loop)
            self._replaced.append((loop, source))
            set_loader_source(loop, _FeatureSource(load, datamodule, source.name))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """A failed fit must not leave its features behind for the next one."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the loops their own sources back."""
        for loop, source in self._replaced:
            set_loader_source(loop, source)
        self._replaced = []


def _checked(kind: str, loader: Any) -> DataLoader[Any]:
    """A loader of known size whose batches can be made again of features."""
    if not isinstance(loader, DataLoader):
        raise RuntimeError(
            f"expected one {kind} DataLoader to cache features of, got {type(loader).__name__}: return a single loader "
            "from the datamodule, or train without the cache"
        )
    if not is_sized(loader):
        raise RuntimeError(
            "expected data of known size to cache features of, got a stream, which may not fit into memory: train "
            "without the cache, or give the dataset a length"
        )
    if not len(loader):
        raise ValueError(f"expected {kind} samples, got an empty loader: check the {kind} data")
    if loader.batch_sampler is None:
        raise RuntimeError(
            f"expected a {kind} DataLoader that makes batches of samples, got one with batch_size=None, whose dataset "
            "makes them: give it a batch_size, or train without the cache"
        )
    return loader


def _order(loader: DataLoader[Any], found: Extracted, shuffled: bool) -> dict[str, Any]:
    """Settings that make a loader of features choose and order samples as the loader of inputs does."""
    own_batches, sampler = loader.batch_size is None, loader.sampler
    plain = sampler is None or type(sampler) in (SequentialSampler, SubsetRandomSampler) or _only_shuffles(sampler)
    if plain and not own_batches:
        size = loader.batch_size or 1
        return {"batch_size": size, "shuffle": shuffled, "drop_last": shuffled and len(found.targets) > size}
    # Both give numbers of samples, which must mean the same in the features.
    if len(found.targets) != len(loader.dataset):  # type: ignore[arg-type]
        chosen = type(loader.batch_sampler if own_batches else sampler).__name__
        raise RuntimeError(
            f"expected features of all {len(loader.dataset):,} samples that {chosen} chooses from, got "  # type: ignore[arg-type]
            f"{len(found.targets):,}: let structure_dataloader give the samples of train_dataloader in the same order, "
            "or train without the cache"
        )
    if own_batches:
        return {"batch_sampler": loader.batch_sampler}
    return {"batch_size": loader.batch_size, "sampler": sampler, "drop_last": loader.drop_last}


def _only_shuffles(sampler: Any) -> bool:
    """Whether a sampler gives every sample once, in random order."""
    if type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
