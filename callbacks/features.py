"""Run a frozen backbone once, and train the head from memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl.features import extract_features
from brainet_pl.module import BRAINet


class FeatureCache(Callback):
    """Extracts the features of training and validation data at fit set-up and feeds them instead of the inputs.

    Only for a frozen backbone and a datamodule; training data comes un-augmented where the datamodule offers
    `structure_dataloader`. Testing and predicting use the inputs as always.
    """

    def __init__(self, progress: bool = True) -> None:
        self.progress = progress
        self._originals: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the datamodule's loaders by loaders of features."""
        if stage != "fit" or not isinstance(pl_module, BRAINet):
            return
        if not pl_module.backbone.frozen:
            raise RuntimeError(
                "expected a frozen backbone to cache features of, got one that trains: freeze_backbone=True"
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
        size = datamodule.train_dataloader().batch_size
        fixed = getattr(datamodule, "structure_dataloader", datamodule.train_dataloader)()
        train = self._features(pl_module, trainer, fixed)
        loaders = {
            "train_dataloader": _loader(train, size, shuffle=True),
            "structure_dataloader": _loader(train, size, shuffle=False),
            "val_dataloader": _loader(self._features(pl_module, trainer, validation), size, shuffle=False),
        }
        for name, loader in loaders.items():
            self._originals[name] = getattr(datamodule, name, None)
            setattr(datamodule, name, loader)
        pl_module.features_given = True

    def _features(self, module: BRAINet, trainer: pl.Trainer, loader: Any) -> TensorDataset:
        labels: list[Tensor] = []

        def watched() -> Any:
            for batch in loader:
                labels.append(batch[1])
                yield batch

        device = trainer.strategy.root_device
        features = extract_features(module.backbone, watched(), device=device, progress=self.progress)
        return TensorDataset(features, torch.cat(labels))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """A failed fit must not leave its features behind for the next one."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the datamodule back."""
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        for name, original in self._originals.items():
            delattr(datamodule, name) if original is None else setattr(datamodule, name, original)
        self._originals = {}
        if isinstance(pl_module, BRAINet):
            pl_module.features_given = False


def _loader(data: TensorDataset, batch_size: int, shuffle: bool) -> Callable[[], DataLoader[Any]]:
    """A function that gives a fresh loader of cached features."""

    def load() -> DataLoader[Any]:
        return DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=shuffle and len(data) > batch_size)

    return load
