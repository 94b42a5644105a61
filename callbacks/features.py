"""Run a frozen backbone once, and train the head from its features, which stay on disk for other runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from brainet_pl._utils import checks
from brainet_pl._utils.framework import Callback, pl
from brainet_pl._utils.lightning_private import loader_source, set_loader_source
from brainet_pl.features.extraction import data_source, is_sized
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

    Only for a frozen backbone and a datamodule; training data comes un-augmented where the datamodule offers
    `structure_dataloader`. Testing and predicting use the inputs as always.

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
        if stage != "fit" or not isinstance(pl_module, BRAINet):
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
        validation = datamodule.val_dataloader()
        if not isinstance(validation, DataLoader):
            raise RuntimeError(
                f"expected one validation DataLoader to cache features of, got {type(validation).__name__}: return a "
                "single loader from val_dataloader, or train without the cache"
            )
        train_loader = datamodule.train_dataloader()
        if not (is_sized(train_loader) and is_sized(validation)):
            raise RuntimeError(
                "expected data of known size to cache features of, got a stream, which may not fit into memory: train "
                "without the cache, or give the dataset a length"
            )
        size = train_loader.batch_size
        plain = pl_module.training_features.all(progress=self.progress)
        copies = [pl_module.training_features.of(train_loader, i + 1, self.progress) for i in range(self.copies)]
        held = pl_module.training_features.of(validation, progress=self.progress)
        loaders: list[tuple[Any, Callable[[], DataLoader[Any]]]] = [
            (trainer.fit_loop, plain.loader(size, shuffle=True, copies=copies)),
            (trainer.fit_loop.epoch_loop.val_loop, held.loader(size, shuffle=False)),
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
