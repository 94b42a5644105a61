"""Run a frozen backbone once, and train the head from its features, which stay on disk for other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from brainet_pl._utils import checks
from brainet_pl._utils.framework import Callback, pl
from brainet_pl.features.extraction import is_sized
from brainet_pl.features.training import FeatureFolder
from brainet_pl.model.lightning import BRAINet


class FeatureCache(Callback, FeatureFolder):
    """Extracts the features of training and validation data at fit set-up and feeds them instead of the inputs.

    Features are kept on disk and memory-mapped: a further run with the same weights, layers, data and transforms, with
    any head, takes them from there, and so do the structure and the scores. They are checked before they are used;
    `brainet cache` lists them, and `brainet cache clear` deletes them (docs/features.md).

    Only for a frozen backbone and a datamodule; training data comes un-augmented where the datamodule offers
    `structure_dataloader`. Testing and predicting use the inputs as always.

    Args:
        folder: where features are kept; null is `features` under the Trainer's root, "" keeps them in memory alone.
        copies: train from so many copies of every training sample, each with the datamodule's own augmentation; every
            time that a sample is met, one of them is drawn. 0 trains from the sample without augmentation.
        progress: show progress bars.
    """

    def __init__(self, folder: str | None = None, copies: int = 0, progress: bool = True) -> None:
        self.folder, self.copies = folder, checks.whole("copies", copies, 0, 1000)
        self.progress = progress
        self._replaced: list[str] = []

    def feature_folder(self, trainer: pl.Trainer) -> Path | None:
        """Where features are kept on disk, or None."""
        if self.folder == "":
            return None
        return Path(trainer.default_root_dir) / "features" if self.folder is None else Path(self.folder)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put loaders of features in front of the datamodule's own."""
        if stage != "fit" or not isinstance(pl_module, BRAINet):
            return
        if not pl_module.backbone.frozen:
            raise RuntimeError(
                "expected a frozen backbone to cache features of, got one that trains: set freeze to True in Backbone"
            )
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        if datamodule is None:
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
        loaders = {
            "train_dataloader": plain.loader(size, shuffle=True, copies=copies),
            "structure_dataloader": plain.loader(size, shuffle=False),
            "val_dataloader": held.loader(size, shuffle=False),
        }
        # Attributes of the object hide the methods of its class, and deleting them brings those back.
        own = [name for name in loaders if name in vars(datamodule)]
        if own:
            raise RuntimeError(
                f"expected loaders that are methods of the datamodule, got {', '.join(own)} set on the object itself: "
                "define them in its class, or train without the cache"
            )
        for name, loader in loaders.items():
            setattr(datamodule, name, loader)
            self._replaced.append(name)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """A failed fit must not leave its features behind for the next one."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the datamodule its own loaders back."""
        for name in self._replaced:
            delattr(trainer.datamodule, name)  # type: ignore[attr-defined]
        self._replaced = []
