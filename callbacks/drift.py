"""An alarm while predicting, when inputs are no longer like the validation data of the fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl._utils.framework import Callback, is_wandb, pl, rank_zero_info, rank_zero_warn
from brainet_pl.callbacks.logging import log_chart
from brainet_pl.distributed.samples import all_gather
from brainet_pl.features.extraction import inputs_of, run_backbone
from brainet_pl.monitoring import DriftMonitor, DriftState
from brainet_pl.monitoring.chart import drift_chart, summary
from brainet_pl.monitoring.signals import half_for_the_first, signals_of
from brainet_pl.scores import Generative


class DriftAlarm(Callback):
    """Watches what `predict_step` returns, in the order of the batches, and warns when inputs have changed.

    While inputs are like the validation data of the fit, the probability of ever warning is at most `alpha`, see
    `brainet_pl.monitoring.DriftMonitor`. It watches the score behind the verdict and the doubt of the prediction, whose
    values on validation data the model carries. With the warning come the features that moved, where the model has a
    `Generative` score, and an alert where W&B logs. At the end the evidence is drawn, as `figures/drift.png`.

    Args:
        alpha: the probability of a false alarm.
        horizon: inputs in which a change is expected; None watches without end.
    """

    def __init__(self, alpha: float = 0.05, horizon: int | None = None) -> None:
        DriftMonitor(1, alpha=alpha, horizon=horizon)  # refuses what means nothing
        self.alpha, self.horizon = alpha, checks.whole_or_none("horizon", horizon, 1, "None watches without end")
        self.monitor: DriftMonitor | None = None
        self.state: DriftState | None = None
        self._paths: list[Any] = []
        self._p_values: list[Mapping[str, Any]] = []

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the scores of the validation data as the reference; a prediction goes on where the last one ended."""
        if self.monitor is not None:
            return
        model: Any = pl_module
        reference = model.scores.reference
        known = {name: reference[name].double().cpu().numpy() for name in reference.names}
        if not known:
            rank_zero_warn(
                "inputs are not watched for a change: expected scores of validation data in the model, got none"
            )
            return
        held = signals_of(known)
        weights = half_for_the_first(held)
        self.monitor = DriftMonitor(held, alpha=self.alpha, horizon=self.horizon, weights=weights)

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the monitor the batches of all processes."""
        if self.monitor is None or not isinstance(outputs, Mapping) or self.monitor.names[0] not in outputs:
            return
        mine = {name: outputs[name].double().cpu().numpy() for name in self.monitor.names}
        shares = all_gather(mine)
        before = self.state is not None and self.state.alarm
        self.state = self.monitor.update({name: np.concatenate([share[name] for share in shares]) for name in mine})
        self._paths.append(self.state.path)
        self._p_values.append(self.state.p_values)
        if self.state.alarm and not before:
            self._warn(trainer, pl_module, batch, outputs)

    def _warn(self, trainer: pl.Trainer, module: Any, batch: Any, outputs: Mapping[str, Tensor]) -> None:
        assert self.state is not None
        moved = self.moved(module, batch, outputs)
        said = summary(self.state, self.alpha) + (f"; moved most: {'; '.join(moved)}" if moved else "")
        rank_zero_warn(said)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if is_wandb(logger):
                    logger.experiment.alert(title="inputs have changed", text=said, level="WARN")

    def moved(self, module: Any, batch: Any, outputs: Mapping[str, Tensor]) -> list[str]:
        """The features that moved most in a batch, in words; nothing without a `Generative` score."""
        score = next((one for one in module.scores if isinstance(one, Generative) and one.density is not None), None)
        if score is None:
            return []
        with torch.no_grad():
            features = run_backbone(module.predictor.backbone, inputs_of(batch, module.columns)).view(score.taps)
        classes = outputs.get("class", torch.zeros(len(features), dtype=torch.long, device=features.device))
        return [str(one) for one in score.moved(features, classes)]

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what was found, and draw it."""
        if self.state is None or not self._paths:
            return
        rank_zero_info(summary(self.state, self.alpha))
        p_values = {name: np.concatenate([p[name] for p in self._p_values]) for name in self.state.p_values}
        log_chart(trainer, drift_chart(self.state, np.concatenate(self._paths), p_values, self.alpha))
