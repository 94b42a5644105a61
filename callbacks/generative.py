"""Fit the generative score to the training features before training, so that every checkpoint carries it."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn

from brainet_pl.features import extract_features, structure_loader
from brainet_pl.generative import GenerativeScore, Kind
from brainet_pl.module import BRAINet
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.structure.learn import TestName
from brainet_pl.tasks import Classification


class GenerativeFit(Callback):
    """Adds the scores `generative`, `generative_weighted` and `combined` to a `BRAINet`, whatever its head.

    With a frozen backbone it is fitted once, before training; else before every validation, because features move, or
    after every epoch where nothing is validated. A regression gets `generative` alone; `combined` needs a validation.

    Args:
        kind, normalize, prior, bins, max_parents: as in `GenerativeScore`; `normalize` None is True behind a backbone.
        threshold: of the tree that is learned for the density, in nats; a density wants more edges than a network of
            dense layers. It is raised to 6/N for N samples, where noise alone would make edges. None takes the tree of
            the head.
        s, max_order, seed: of that tree, as in `learn_structure`.
        progress: show progress bars.
    """

    def __init__(
        self,
        kind: Kind = "gaussian",
        threshold: float | None = 0.02,
        s: int = 2,
        max_order: int = 1,
        seed: int = 0,
        normalize: bool | None = None,
        prior: float | None = None,
        bins: int = 8,
        max_parents: int | None = None,
        progress: bool = True,
    ) -> None:
        self.kind, self.normalize, self.progress = kind, normalize, progress
        self.density: dict[str, Any] = {"kind": kind, "prior": prior, "bins": bins, "max_parents": max_parents}
        self.threshold = threshold
        self.structure: dict[str, Any] = {"s": s, "max_order": max_order, "seed": seed}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fit, unless a checkpoint brought a fitted score for features that do not move."""
        if isinstance(pl_module, BRAINet) and (pl_module.generative is None or not pl_module.backbone.frozen):
            self._fit(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fit again where the backbone trains: a checkpoint is written after the validation that follows."""
        moving = isinstance(pl_module, BRAINet) and not pl_module.backbone.frozen
        if moving and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._fit(trainer, pl_module)  # type: ignore[arg-type]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The same where nothing is validated; checkpoints are written after this hook of all other callbacks."""
        moving = isinstance(pl_module, BRAINet) and not pl_module.backbone.frozen
        if moving and not trainer.enable_validation:
            self._fit(trainer, pl_module)  # type: ignore[arg-type]

    def _fit(self, trainer: pl.Trainer, module: BRAINet) -> None:
        labels: list[Tensor] = []

        def watched() -> Any:
            for batch in structure_loader(trainer, module):
                labels.append(batch[1])
                yield batch

        backbone = nn.Identity() if module.features_given else module.backbone
        # Every process reads all the data and so finds the same score: there is nothing to send.
        features = extract_features(backbone, watched(), device=module.device, progress=self.progress)
        task = module.task
        if isinstance(task, Classification):
            classes, target = task.num_classes, task.check(torch.cat(labels))
        else:
            classes, target = 1, torch.zeros(len(features), dtype=torch.long)
        normalize = not module.backbone.raw if self.normalize is None else self.normalize
        score = GenerativeScore(self._tree(features, module), classes, normalize=normalize, **self.density)
        module.generative = score.fit(features, target.cpu(), self.progress).to(module.device)
        rank_zero_info(
            f"generative score: {len(score.families.variable)} families in {score.ggt.num_subnetworks} networks"
        )

    def _tree(self, features: Tensor, module: BRAINet) -> GGT:
        if self.threshold is not None:
            test: TestName = "gaussian" if self.kind == "gaussian" else "cmi"
            # N independent pairs have a mutual information of about 1/(2N) nats; one in two thousand exceeds 6/N.
            threshold = max(self.threshold, 6.0 / len(features))
            return learn_structure(
                features, test=test, threshold=threshold, bins=4, progress=self.progress, **self.structure
            )
        if module.ggt is None:
            raise RuntimeError(
                f"expected a learned tree to take for the generative score, got head {module.head_name!r}: give "
                "GenerativeFit a threshold, so that it learns its own"
            )
        return module.ggt
