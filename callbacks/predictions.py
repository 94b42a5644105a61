"""Predictions to a file."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from brainet_pl import checks
from brainet_pl.callbacks.logging import run_folder
from brainet_pl.callbacks.rows import write_rows


class PredictionFile(Callback):
    """Writes what `predict_step` returns, one row a sample, to a CSV file in the run's folder.

    Args:
        file: its name, without folders; under DDP every process adds its rank. "" writes none.
    """

    def __init__(self, file: str = "predictions.csv") -> None:
        checks.file_name("file", file)
        self.file = file
        self._rows: list[dict[str, Any]] = []

    def on_predict_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget an earlier prediction."""
        self._rows = []

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the rows of a batch; a tensor (B, C) becomes C columns."""
        if not self.file or not isinstance(outputs, dict):
            return
        columns: dict[str, list[Any]] = {}
        for name, values in outputs.items():
            if isinstance(values, Tensor) and values.dim() == 2:
                columns |= {f"{name}_{c}": column.tolist() for c, column in enumerate(values.unbind(dim=1))}
            else:
                columns[name] = values.tolist()
        rows = zip(*columns.values(), strict=True)
        self._rows += [{"loader": dataloader_idx, **dict(zip(columns, row, strict=True))} for row in rows]

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        if not self._rows:
            return
        rank = f"rank{trainer.global_rank}_" if trainer.world_size > 1 else ""
        path = run_folder(trainer) / f"{rank}{self.file}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            write_rows(file, [list(self._rows[0]), *(list(row.values()) for row in self._rows)])
        rank_zero_info(f"predictions: {path}")
