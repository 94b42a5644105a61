"""What a fit needs of its data beside the steps: features, layers, the head built for them, samples to choose by."""

from __future__ import annotations

from typing import Any

from brainet_pl._utils.framework import Callback, TrainerFn, is_averaging, pl, rank_zero_info
from brainet_pl._utils.lightning_private import average_model, trainer_of
from brainet_pl.backbones.batches import Columns
from brainet_pl.features.extraction import Extracted, data_source, is_sharded
from brainet_pl.features.training import FeatureFolder, TrainingFeatures
from brainet_pl.fitting.build import base_logits_help
from brainet_pl.fitting.scores import fit_scores
from brainet_pl.lightning.restoring import RestorableModule
from brainet_pl.lightning.sharding import is_model_parallel
from brainet_pl.lightning.validation import ValidationTeacher, training_sample, validation_sample
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.storage.container import StoredBackbone
from brainet_pl.structure import GGT
from brainet_pl.tasks.classification import check_class_names


class FittedModule(RestorableModule):
    """A LightningModule that builds its head from the features of the training data.

    Attributes:
        columns: the names of inputs and target, where batches have names.
        teacher: what validations of the running fit teach; a new one for every fit.
    """

    columns: Columns | None
    teacher: ValidationTeacher

    def __init__(self) -> None:
        super().__init__()
        self._features: TrainingFeatures | None = None

    def forget_fit(self) -> None:
        """Begin anew: the next fit may be one of other data."""
        self._features = None
        self.teacher = ValidationTeacher(self.predictor)

    # -- features and layers ------------------------------------------------------------------------------------------

    @property
    def training_features(self) -> TrainingFeatures:
        """What the backbone gives for the training data of the running fit."""
        if self._features is None:
            source = data_source(self.trainer, self)
            check_class_names(getattr(source, "class_names", None), self.task)  # before minutes of extraction
            self._features = TrainingFeatures(
                source,
                self.backbone,
                self._feature_folder(),
                columns=self.columns,
                device=None if self._shards_later else self.trainer.strategy.root_device,
                rank=self.global_rank,
                processes=self.trainer.world_size,
            )
        return self._features

    def _feature_folder(self) -> Any:
        """The folder that a callback keeps features in, or None."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            folder = callback.feature_folder(self.trainer) if isinstance(callback, FeatureFolder) else None
            if folder is not None:
                return folder
        return None

    @property
    def _shards_later(self) -> bool:
        """Whether the backbone is still where it was made, and may be too large for the device."""
        return is_model_parallel(self.trainer) and not is_sharded(self.backbone)

    def choose_layers(self) -> None:
        """Choose the layers that the head reads, where that was asked for; the first step of a fit.

        Lightning restores a checkpoint later: the layers of one that a fit resumes from replace these.
        """
        if self.backbone.search is None:
            return
        if self.head is not None:  # it was built for the features of the last layer
            self.backbone.choose(None)
        self.training_features.choose_layers(self.task.check)
        self.save_layers()

    def restore_layers(self, stored: StoredBackbone) -> None:
        """Read the layers of a checkpoint, and forget features of others."""
        before = self.backbone.taps
        super().restore_layers(stored)
        if self.backbone.taps != before:
            self._features = None

    def trace_backbone(self) -> None:
        """Let two samples find the layer to remove and the layers to read, where the backbone is; not on a GPU yet."""
        if self.trainer.state.fn == TrainerFn.FITTING and not self.backbone.raw:
            self.choose_layers()
            self.training_features.probe()
            self._features = None  # once it is sharded, nothing is stored

    def training_sample(self) -> Extracted:
        """What the backbone gives for a random choice of finite training samples, the same in all processes."""
        return training_sample(self.trainer, self.training_features)

    def validation_sample(self) -> Extracted | None:
        """What the backbone gives for finite validation samples; None where a fit has none."""
        return validation_sample(self.trainer, self.training_features)

    # -- the head -----------------------------------------------------------------------------------------------------

    @property
    def needs_structure(self) -> bool:
        """Whether the head waits for a tree."""
        return self.head is None and self.head_settings.needs_tree

    def set_structure(self, ggt: GGT) -> None:
        """Build the head for a learned tree, or for its MAP structure."""
        base_logits = self._base_logits_help() if self.head is None else self.predictor.has_base_logits
        self.predictor.build_head(self.head_settings, ggt.num_variables, ggt, base_logits)

    def prepare_head(self) -> None:
        """Build a head that waits for the number of features alone; a fit calls it once the data is there."""
        self.choose_layers()
        self.training_features.prepare_backbone()
        if self.head is None and not self.head_settings.needs_tree:
            width = len(self.training_features.first().features[0])
            self.predictor.build_head(self.head_settings, width, None, self._base_logits_help())

    def _base_logits_help(self) -> bool:
        """Whether the removed layer says something of the training targets."""
        if self.backbone.raw or trainer_of(self) is None or not self.head_settings.asks_base_logits:
            return False
        if self.training_features.first().base_logits is None:
            return False
        return base_logits_help(self.task, self.training_sample())

    def fit_scores(self, all_scores: bool) -> None:
        """Fit scores to the training features: all, or those that no checkpoint brought."""
        scores = list(self.scores) if all_scores else self.scores.unfitted
        fitted = fit_scores(self.predictor, self.training_features, scores)
        if fitted:
            rank_zero_info(f"fitted to the training features: {', '.join(score.describe() for score in fitted)}")

    # -- validation data ----------------------------------------------------------------------------------------------

    def before_validation(self) -> None:
        """Let the head choose what needs no training, with the current weights.

        It runs before every validation of a fit, or after every epoch where there is none, so that every checkpoint
        carries the result.
        """
        self.teacher.before(self.trainer, self.training_features)
        self.teacher.share_choices(self._averages())
        self.teacher.share_scores(self._averages())  # fitted again where features move, and of another size

    def after_validation(self) -> None:
        """Learn from the validation data that was observed, before a checkpoint is written."""
        numbers = self.teacher.after()
        self.teacher.share_scores(self._averages())
        self.log_dict(numbers)

    def _averages(self) -> list[Predictor]:
        """The predictors of the copies that callbacks which average weights keep."""
        models = [average_model(callback) for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        return [model.predictor for model in models if isinstance(model, FittedModule)]

    def on_fit_end(self) -> None:
        """Say which score tells unknown inputs, and how many it is expected to notice."""
        self.teacher.report(self.trainer)


class BuildHeadFirst(Callback):
    """Builds a head before callbacks that average weights copy the model."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Build heads that wait for the number of features alone; StructureLearning has built the others."""
        if stage == "fit" and isinstance(pl_module, FittedModule):
            pl_module.prepare_head()


def build_head_before_averaging(callbacks: list[Callback]) -> None:
    """Put `BuildHeadFirst` before callbacks that average weights, which copy the model when they are set up."""
    averaging = [callback for callback in callbacks if is_averaging(callback)]
    if averaging:
        others = [c for c in callbacks if not is_averaging(c) and not isinstance(c, BuildHeadFirst)]
        callbacks[:] = [*others, BuildHeadFirst(), *averaging]
