"""Fit scores to the training features before training, so that every checkpoint carries them."""

from __future__ import annotations

from collections.abc import Sequence

from brainet_pl._utils.framework import Callback, TrainerFn, pl, rank_zero_info
from brainet_pl.model.lightning import BRAINet
from brainet_pl.scores import Score


class ScoreFit(Callback):
    """Fits the scores of a `BRAINet`, whatever its head. A model with scores brings this callback itself.

    With a frozen backbone a score is fitted once, before training; else before every validation, because features move,
    or after every epoch where nothing is validated.

    Args:
        progress: Show progress bars.
    """

    def __init__(self, progress: bool = True) -> None:
        self.progress = progress

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fit what no checkpoint brought, and all scores where the backbone trains."""
        if isinstance(pl_module, BRAINet):
            self._fit(pl_module, pl_module.scores.unfitted if pl_module.backbone.frozen else list(pl_module.scores))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fit again where the backbone trains: a checkpoint is written after the validation that follows."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._fit_again(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fit again where nothing is validated; checkpoints are written after this hook of all other callbacks."""
        if not trainer.enable_validation:
            self._fit_again(pl_module)

    def _fit_again(self, module: pl.LightningModule) -> None:
        if isinstance(module, BRAINet) and not module.backbone.frozen:
            self._fit(module, list(module.scores))

    def _fit(self, module: BRAINet, scores: Sequence[Score]) -> None:
        wanted = [score for score in scores if score.needs_fit]
        if wanted:
            module.fit_scores(wanted, self.progress)
            rank_zero_info(f"fitted to the training features: {', '.join(score.describe() for score in wanted)}")
