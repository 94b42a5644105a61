"""What a fit needs of its data beside the steps: features, the head built for them, scores, samples to choose by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from brainet_pl._utils.framework import Callback, CombinedLoader, TrainerFn, pl, rank_zero_info, rank_zero_warn
from brainet_pl._utils.lightning_private import average_model, train_loaders, trainer_of
from brainet_pl.backbones.batches import Columns
from brainet_pl.distributed.samples import on_rank_zero
from brainet_pl.features.extraction import Extracted, data_source, is_sharded
from brainet_pl.features.training import FeatureFolder, TrainingFeatures
from brainet_pl.lightning import steps
from brainet_pl.lightning.restoring import RestorableModule
from brainet_pl.lightning.sharding import is_model_parallel
from brainet_pl.network.base import LEAST
from brainet_pl.prediction.finite import finite_samples
from brainet_pl.scores import Score
from brainet_pl.structure import GGT


class FittedModule(RestorableModule):
    """A LightningModule that builds its head from the features of the training data, and follows its weights.

    Attributes:
        columns: the names of inputs and target, where batches have names.
        head_facts: what the head chose at the last validation, to log as `val/head/<name>`.
    """

    columns: Columns | None

    def __init__(self) -> None:
        super().__init__()
        self.forget_fit()

    def forget_fit(self) -> None:
        """Begin anew: the next fit may be one of other data."""
        self._features: TrainingFeatures | None = None
        self.head_facts: dict[str, float] = {}
        self._warned = False
        self._sampled: tuple[Extracted, Extracted | None] | None = None  # read before a validation, for the end of it
        self._expects = True  # whether it is still to be estimated what the verdict will notice

    @property
    def needs_structure(self) -> bool:
        """Whether the head waits for a tree."""
        return self.head is None and self.head_settings.needs_tree

    def set_structure(self, ggt: GGT) -> None:
        """Build the head for a learned tree, or for its MAP structure."""
        base_logits = self._base_logits_help() if self.head is None else self.predictor.has_base_logits
        self.predictor.build_head(self.head_settings, ggt.num_variables, ggt, base_logits)

    def _base_logits_help(self) -> bool:
        """Whether the removed layer says something of the training targets: its classes may be others."""
        if self.backbone.raw or trainer_of(self) is None or not self.head_settings.asks_base_logits:
            return False
        first = self.training_features.first().base_logits
        if first is None or not self.task.base_fits(first.shape[1]):
            return False
        sample = self.training_sample()
        assert sample.output.base_logits is not None
        return self.task.base_helps(sample.output.base_logits, self.task.check(sample.targets))

    @property
    def training_features(self) -> TrainingFeatures:
        """What the backbone gives for the training data of the running fit."""
        if self._features is None:
            callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
            folders = [c.feature_folder(self.trainer) for c in callbacks if isinstance(c, FeatureFolder)]
            self._features = TrainingFeatures(
                data_source(self.trainer, self),
                self.backbone,
                next((folder for folder in folders if folder is not None), None),
                columns=self.columns,
                device=None if self._shards_later else self.trainer.strategy.root_device,
                rank=self.global_rank,
                processes=self.trainer.world_size,
            )
            self._choose_layers(self._features)
        return self._features

    @property
    def _shards_later(self) -> bool:
        """Whether the backbone is still where it was made, and may be too large for the device."""
        return is_model_parallel(self.trainer) and not is_sharded(self.backbone)

    def _choose_layers(self, features: TrainingFeatures) -> None:
        """Choose the layers that the head reads, where that was asked for.

        Lightning restores a checkpoint later: the layers of one that a fit resumes from replace these.
        """
        if self.backbone.search is None:
            return
        if self.head is not None:  # it was built for the features of the last layer
            self.backbone.choose(None)
        features.choose_layers(self.task.check)
        self.save_layers()

    def restore_layers(self, stored: Any) -> None:
        """Read the layers of a checkpoint, and forget features of others."""
        before = self.backbone.taps
        super().restore_layers(stored)
        if self.backbone.taps != before:
            self._features = None

    def trace_backbone(self) -> None:
        """Let two samples find the layer to remove and the layers to read, where the backbone is; not on a GPU yet."""
        if self.trainer.state.fn == TrainerFn.FITTING and not self.backbone.raw:
            self.training_features.probe()
            self._features = None  # once it is sharded, nothing is stored

    def training_sample(self) -> Extracted:
        """What the backbone gives for a random choice of finite training samples, the same in all processes."""
        rows = steps.reach(self.trainer.num_training_batches, train_loaders(self.trainer), self.trainer.world_size)
        return finite_samples(self.training_features.sample(rows))

    def validation_sample(self) -> Extracted | None:
        """The same of validation samples, or None where a fit has none."""
        loaders = self.trainer.val_dataloaders
        flat = [] if loaders is None else CombinedLoader(loaders, "sequential").flattened
        rows = steps.reach((*self.trainer.num_val_batches, 0)[0], flat, self.trainer.world_size) if flat else 0
        return finite_samples(self.training_features.validation_sample(flat[0], rows)) if rows else None

    def prepare_head(self) -> None:
        """Build a head that waits for the number of features alone; a fit calls it once the data is there."""
        self.training_features.prepare_backbone()
        if self.head is None and not self.head_settings.needs_tree:
            width = len(self.training_features.first().features[0])
            self.predictor.build_head(self.head_settings, width, None, self._base_logits_help())

    def fit_scores(self, scores: Sequence[Score]) -> None:
        """Fit those of the scores that learn from the training features."""
        wanted = [score for score in scores if score.needs_fit]
        if wanted:
            self.predictor.fit_scores(self.training_features, wanted)
            rank_zero_info(f"fitted to the training features: {', '.join(score.describe() for score in wanted)}")

    def follow_weights(self) -> None:
        """Fit scores again where features move, and let the head choose what needs no training, on the weights of now.

        It runs before every validation of a fit, or after every epoch where there is none, so that every checkpoint
        carries the result.
        """
        if not self.backbone.frozen:
            self.fit_scores(list(self.scores))
        if self.head is None or not self.head.finalizes:
            return
        held = self.validation_sample() if self.trainer.enable_validation else None
        count = 0 if held is None else len(held.targets)
        if count < LEAST and not self._warned and self.head.needs_validation_data and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._warned = True
            rank_zero_warn(
                f"expected at least {LEAST} validation samples to choose the temperature of the posterior by, got "
                f"{count}: it is the tempered default; give more validation data, or set Tree(temperature=…)"
            )
        seen = self.training_sample()
        self._sampled = (seen, held)
        size = steps.train_size(self.trainer) if math.isfinite(self.trainer.num_training_batches) else 0
        self.head_facts = self.predictor.finalize_head(seen, held if count >= LEAST else None, size)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        for other in map(average_model, callbacks):
            if isinstance(other, FittedModule) and other.head is not None:
                for name in self.head.not_averaged:
                    other.head.get_buffer(name).copy_(self.head.get_buffer(name))

    def expect_unknown(self) -> dict[str, float]:
        """Estimate what the verdict will notice, once or whenever features have moved; gives numbers to log."""
        resumed = self.trainer.ckpt_path is not None and self.predictor.expected is not None
        if self._expects and not (resumed and self.backbone.frozen) and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._expects = not self.backbone.frozen
            seen, held = self._sampled or (self.training_sample(), self.validation_sample())
            if held is not None:
                found = on_rank_zero(self.trainer, lambda: self.predictor.expect(seen, held))
                if found is not None:
                    self.scores.expected.keep(found)
        self._sampled, found = None, self.predictor.expected
        if found is None:
            return {}
        numbers = {"noticed": found.noticed, "noticed_worst": found.worst, "permuted": found.permuted}
        return {f"verdict/{name}": value for name, value in numbers.items() if not math.isnan(value)}

    def on_fit_end(self) -> None:
        """Say which score tells unknown inputs, and how many it is expected to notice."""
        found = self.predictor.expected
        if found is not None and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            bare = found.unreliable and not any(score.needs_fit for score in self.scores)
            hint = "; give the model a score of its features, scores=['Generative'] (--model.scores '[Generative]')"
            hint = hint if bare else ""
            (rank_zero_warn if found.unreliable else rank_zero_info)(f"{found}{hint}")


class BuildHeadFirst(Callback):
    """Builds a head before callbacks that average weights copy the model."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Build heads that wait for the number of features alone; StructureLearning has built the others."""
        if stage == "fit" and isinstance(pl_module, FittedModule):
            pl_module.prepare_head()
