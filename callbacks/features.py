"""Run a frozen backbone once, and train the head from memory."""

from __future__ import annotations

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
        train = datamodule.train_dataloader()
        fixed = getattr(datamodule, "structure_dataloader", datamodule.train_dataloader)()
        loaders = {"train_dataloader": (fixed, True, train.batch_size)}
        loaders["val_dataloader"] = (datamodule.val_dataloader(), False, train.batch_size)
        for name, (loader, shuffle, size) in loaders.items():
            data = self._features(pl_module, trainer, loader)
            self._originals[name] = getattr(datamodule, name)
            setattr(datamodule, name, _Loader(data, size, shuffle))
        if hasattr(datamodule, "structure_dataloader"):
            self._originals["structure_dataloader"] = datamodule.structure_dataloader
            datamodule.structure_dataloader = _Loader(datamodule.train_dataloader.data, 4096, False)
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

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the datamodule back."""
        for name, original in self._originals.items():
            setattr(trainer.datamodule, name, original)  # type: ignore[attr-defined]
        self._originals = {}
        if isinstance(pl_module, BRAINet):
            pl_module.features_given = False


class _Loader:
    """A callable that gives a fresh loader of cached features."""

    def __init__(self, data: TensorDataset, batch_size: int, shuffle: bool) -> None:
        self.data, self.batch_size, self.shuffle = data, batch_size, shuffle

    def __call__(self) -> DataLoader[Any]:
        return DataLoader(self.data, self.batch_size, shuffle=self.shuffle, drop_last=self.shuffle)
