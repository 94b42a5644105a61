"""The LightningModule: a backbone, a head whose wiring is learned before fitting, one shared step, honest metrics."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from brainet_pl._utils import checks
from brainet_pl._utils.framework import (
    CombinedLoader,
    LRSchedulerCallable,
    OptimizerCallable,
    TrainerFn,
    is_averaging,
    pl,
    rank_zero_warn,
    refuse_mix,
    watch_mixes,
)
from brainet_pl._utils.parts import arguments, make_part, primitive
from brainet_pl._utils.rng import isolated_rng
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns, Sample
from brainet_pl.backbones.extractor import Backbone, check_stored_backbone
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.presets import Preset, find_preset
from brainet_pl.backbones.removal import HeadLayer
from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.checkpoints.format import FORMAT, STORED, Checkpoint, add_digests, check_callback_states, unpack
from brainet_pl.distributed.collectives import run_or_fail_together
from brainet_pl.distributed.samples import Places
from brainet_pl.evaluation.record import SampleBatch
from brainet_pl.features import store as feature_store
from brainet_pl.features.extraction import (
    Extracted,
    ExtractedShare,
    data_source,
    extract,
    extract_share,
    first_batch,
    inputs_of,
    is_sharded,
    pair,
    read,
    readings_of,
    structure_loader,
    unshuffled,
)
from brainet_pl.metrics.measures import Measure, PassDisagreement, collect
from brainet_pl.metrics.shift import ShiftSums, parts_of, split_by_part
from brainet_pl.network import Head, HeadSettings
from brainet_pl.network.base import MOST_PASSES, ResidualHead, Rows, need_tree, run_head, train_head
from brainet_pl.scores import Score, ScoreContext, ScoreSet, Verdict
from brainet_pl.structure import GGT
from brainet_pl.tasks import Classification, Task
from brainet_pl.tasks.classification import check_class_names, same_classes
from brainet_pl.tasks.passes import Passes

if not TYPE_CHECKING:  # what the command line offers: with modules in it, help would list every one there is
    BackboneLike = Backbone | str | None
    HeadLike = HeadSettings | None
    TaskLike = Task | None
    CalibratorLike = Calibrator | None
    ConformalLike = Conformal | None
    ScoresLike = list[Score] | None
    MeasuresLike = list[Measure] | None
else:
    BackboneLike = Backbone | nn.Module | str | Mapping[str, Any] | None
    HeadLike = HeadSettings | str | Mapping[str, Any] | None
    TaskLike = Task | str | Mapping[str, Any] | None
    CalibratorLike = Calibrator | str | Mapping[str, Any] | None
    ConformalLike = Conformal | str | Mapping[str, Any] | None
    ScoresLike = Sequence[Score | str | Mapping[str, Any]] | None
    MeasuresLike = Sequence[Measure] | None

SAMPLE_ROWS = 2048  # training or validation samples that stand for all, where a few tell enough
TRAINED = ("cls/Acc", "cal/ECE", "reg/RMSE", "cal/QCE")  # measures of training passes: sums, however long an epoch
SCALE_ROWS = 10_000  # training samples that tell the scale of tapped features, where no more are read anyway


class Seen(NamedTuple):
    """What a model made of the K samples of a batch that count.

    Attributes:
        numbers: (K,) the place of each sample in its set; K is 0 where a process was given nothing but copies.
        passes: of these samples.
        scores: name → (K,) of these samples.
        target: (K,) their targets, or None where there are none.
    """

    numbers: Tensor
    passes: Passes
    scores: dict[str, Tensor]
    target: Tensor | None


class BRAINet(pl.LightningModule):
    """A model whose head is a BRAINet, or one of the heads it is compared with.

    Wherever a part is asked for (head, task, score, calibrator), Python also takes its name or its dictionary form.

    >>> model = BRAINet(num_classes=8, head="MLP", scores=["KNN"], calibration="TemperatureScaling")
    >>> [type(part).__name__ for part in (model.task, model.calibration)]
    ['Classification', 'TemperatureScaling']

    Args:
        num_classes: number of classes; short for the task `Classification(num_classes)`.
        backbone: a feature extractor: settings of one (`Backbone`), a module, a name, or null for raw features.
        head: settings of the head; null is `Tree()`, a BRAINet sized by the number of features.
        task: `Classification` or `Regression`, with their settings; null is a classification of `num_classes`.
        scores: further scores of inputs unlike the training data: `Generative`, `Stages`, `KNN`, `Mahalanobis`, `Own`.
        calibration: a calibrator fitted on validation data, such as `TemperatureScaling`; null predicts as it is.
        verdict: how `known_p` and `known` of a prediction are found: by which score, at which level; null is
            `Verdict()`, at most 5 % of known inputs called unknown.
        conformal: sets of classes or intervals of numbers that hold the truth at a chosen level, `Conformal`; null has
            none.
        metrics: further metrics beside those of the task.
        columns: which parts of a batch are the inputs and the target, where batches have names; null guesses.
        passes: how often a head that draws is run for a prediction.
        lr: learning rate of the head.
        optimizer: takes parameter groups; null is Adam.
        lr_scheduler: takes the optimizer; stepped every epoch.

    Attributes:
        class_names: the names of the classes in the order of their numbers, once a fit has met a datamodule that has
            `class_names`, or a checkpoint of such a fit was loaded; None where nobody named them.
        preset: how the weights of the backbone expect their images, where it is one of torchvision or timm.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        backbone: BackboneLike = None,
        head: HeadLike = None,
        task: TaskLike = None,
        scores: ScoresLike = None,
        calibration: CalibratorLike = None,
        verdict: Verdict | None = None,
        conformal: ConformalLike = None,
        metrics: MeasuresLike = None,
        columns: Columns | None = None,
        passes: int = 15,
        lr: float = 1e-3,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        watch_mixes()
        self.head_settings = make_part(HeadSettings, "Tree" if head is None else head, "head")
        self.task = _make_task(task, num_classes)
        chosen = _make_backbone(backbone)
        self.backbone, self._backbone_lr = chosen.build(), chosen.lr
        self.columns = Columns(**columns) if isinstance(columns, Mapping) else columns
        self.scores = ScoreSet([make_part(Score, score, "scores") for score in scores or ()], self.task.units)
        self.calibration = None if calibration is None else make_part(Calibrator, calibration, "calibration")
        if self.calibration is not None:
            self.calibration.check(self.task)
            self.calibration.bring(self.scores, None if self.backbone.raw else self.backbone.model)
        self._tap_scores()
        self.verdict = Verdict(**verdict) if isinstance(verdict, Mapping) else verdict or Verdict()
        self.verdict.choose([], list(self.scores.units))
        self.conformal = None if conformal is None else make_part(Conformal, conformal, "conformal")
        if self.conformal is not None:
            self.conformal.check(self.task)
        self.passes, self.lr = checks.whole("passes", passes, 1, MOST_PASSES), checks.above_zero("lr", lr)
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self.head: Head | None = None
        self.class_names: tuple[str, ...] | None = None
        self.preset = find_preset(chosen.model, chosen.weights)
        self._in_features: int | None = None
        self._has_base_logits = False  # whether there were base logits to add to when the head was built
        self._kept: Extracted | None = None  # training features, while a fit is set up
        self._kept_share: ExtractedShare | None = None  # the same, where processes have a share each
        self._samples: dict[str, Extracted] = {}  # of the data of a fit, where the backbone is frozen
        self._places = Places()
        self._regions: dict[str, Any] = {}  # methods that are compiled
        self._shifts: dict[int, dict[str, int]] = {}  # test loader → sizes of the shifts that it holds
        extra = list(metrics or ())
        self.train_metrics = collect([m for m in self.task.measures() if m.key in TRAINED], "train/", self.task.group)
        self.train_metrics.persistent(True)  # a fit that goes on in the middle of an epoch counts all of it
        self.val_metrics = self._collect("val/", extra)
        self.test_metrics = self._collect("test/", extra)
        self.scaled_metrics = None if self.calibration is None else self._collect("test/scaled/", extra)
        self.base_metrics = self._collect("test/own/", extra)  # of the network's own layer, where it has this task
        self.pass_metrics = collect([PassDisagreement()], "test/", self.task.group)
        self.conformal_metrics = None
        if self.conformal is not None:
            self.conformal_metrics = collect(self.conformal.measures(self.task), "test/", self.task.group)
        self._keep_settings(chosen)

    def _tap_scores(self) -> None:
        """Let the backbone read what scores want of other layers."""
        for score in self.scores:
            if score.taps is not None:
                self.backbone.add_view(score.taps)

    def _collect(self, prefix: str, extra: list[Measure]) -> MetricCollection:
        return collect([*self.task.measures(), *copy.deepcopy(extra)], prefix, self.task.group)

    def _keep_settings(self, backbone: Backbone) -> None:
        """Everything that makes this model again, as primitives, for loggers and checkpoints.

        A backbone given as a module and metrics given as objects can't be written down; nor are weights that a
        checkpoint holds asked for in their file again.
        """
        named = None if isinstance(backbone.model, nn.Module) else vars(backbone) | {"weights": None}
        settings = {
            "backbone": named,
            "head": self.head_settings,
            "task": self.task,
            "scores": list(self.scores),
            "calibration": self.calibration,
            "verdict": vars(self.verdict),
            "conformal": self.conformal,
            "columns": None if self.columns is None else vars(self.columns),
            "passes": self.passes,
            "lr": self.lr,
        }
        # Not save_hyperparameters: under the command line it would store class paths that a loader then imports.
        self._set_hparams(primitive(settings))
        self._hparams_initial = copy.deepcopy(self._hparams)

    # -- head ---------------------------------------------------------------------------------------------------------

    @property
    def ggt(self) -> GGT | None:
        """The learned tree, once there is one; of the heads on a MAP structure, that structure."""
        return None if self.head is None else self.head.ggt

    @property
    def needs_structure(self) -> bool:
        """Whether the head waits for a tree."""
        return self.head is None and self.head_settings.needs_tree

    def set_structure(self, ggt: GGT) -> None:
        """Build the head for a learned tree, or for its MAP structure."""
        self._build_head(ggt.num_variables, ggt, None if self.head is None else self._has_base_logits)

    def _build_head(self, in_features: int, ggt: GGT | None = None, base_logits: bool | None = None) -> None:
        self._in_features = in_features
        self._has_base_logits = self._base_helps() if base_logits is None else base_logits
        settings = self.head_settings.resolve_skip(self._has_base_logits)
        self.head = settings.build(in_features, self.task.out_features, ggt).to(self.device)

    def _base_helps(self) -> bool:
        """Whether the network's own outputs say something of the training targets: its classes may be others."""
        if self.backbone.raw or self._trainer is None or not self.head_settings.asks_base_logits:
            return False
        seen = self._seen()
        if seen.base_logits is None or not self.task.base_fits(seen.base_logits.shape[1]):
            return False
        found = self.training_sample()
        assert found.readings.base_logits is not None
        return self.task.base_helps(found.readings.base_logits, self.task.check(found.targets))

    def _seen(self) -> BackboneOutput:
        """What the backbone gave for some of the training data, run again only if nobody has looked yet."""
        if self._kept is not None:
            return self._kept.readings[:2]
        if self._kept_share is not None and self._kept_share.readings:
            return self._kept_share.readings[0][:2]
        return self._few()

    def training_sample(self) -> Extracted:
        """What the backbone gives for a random choice of training samples, the same in all processes.

        Of a frozen backbone it is kept while a fit lasts.
        """
        if self._kept is not None:
            return self._kept.sample(SAMPLE_ROWS)
        loader = self.trainer.fit_loop._combined_loader
        rows = _reach(self.trainer.num_training_batches, None if loader is None else loader.flattened)
        return self._sample("training", lambda: structure_loader(self.trainer, self, rows), rows)

    def validation_sample(self) -> Extracted | None:
        """The same of validation samples, or None where a fit has none."""
        loaders = CombinedLoader(self.trainer.val_dataloaders or [], "sequential").flattened
        if not loaders:
            return None
        rows = _reach((*self.trainer.num_val_batches, 0)[0], loaders)
        return self._sample("validation", lambda: unshuffled(loaders[0], rows), rows) if rows else None

    def _sample(self, name: str, load: Callable[[], Iterable[Any]], rows: int) -> Extracted:
        if name not in self._samples:
            device = self.trainer.strategy.root_device
            found = extract(self.backbone, load(), device=device, max_rows=rows, progress=False, columns=self.columns)
            if not self.backbone.frozen:
                return found
            self._samples[name] = found
        return self._samples[name]

    def rows_of(self, sample: Extracted) -> Rows:
        """A sample as a head takes it, where the model is."""
        base_logits = self.base_outputs(sample.readings.to(self.device))
        return Rows(sample.features.to(self.device), self.task.check(sample.targets).to(self.device), base_logits)

    def setup(self, stage: str) -> None:
        """Runs after the structure callback and before the optimizer: other heads are built from the data's shape.

        A checkpoint is restored after this hook, so a missing BRAINet head is no error yet.
        """
        self._narrow_compiler()
        refuse_sharding(self.trainer)
        if stage != "fit":
            return
        names = getattr(data_source(self.trainer, self), "class_names", None)
        self.class_names = check_class_names(names, self.task) or self.class_names
        if self.calibration is not None and self.calibration.needs_validation and not self.trainer.enable_validation:
            raise ValueError(
                f"expected validation data for {type(self.calibration).__name__}, got none: give the datamodule a "
                "val_dataloader, or the fit val_dataloaders, and a limit_val_batches above 0; or leave calibration out"
            )
        self.prepare_head()
        if self.task.needs_targets:
            self.task.prepare(self._all_targets())

    def prepare_head(self) -> None:
        """Build a head that waits for the number of features alone; a fit calls it once the data is there."""
        self._meet_data()
        if self.head is None and not self.head_settings.needs_tree:
            self._build_head(len(self._few().features[0]))

    def _meet_data(self) -> None:
        """Let the backbone find the layer to remove before an optimizer or a wrapper of processes holds its weights."""
        if self.backbone.waits:
            self._few()
        if self.backbone.unscaled:  # nobody has asked for features of the training data yet
            self.training_features(SCALE_ROWS, progress=False)

    def _few(self) -> BackboneOutput:
        """What the backbone gives for the first two samples of the training data."""
        inputs = first_batch(self.trainer, self.columns)
        if isinstance(inputs, BackboneOutput):
            return inputs[:2]
        return read(self.backbone, [batching.rows(inputs, slice(0, 2))], progress=False)

    def _all_targets(self) -> Tensor:
        """(N,) targets of the training data, in a fixed order: the same in all processes."""
        if self._kept is not None:
            return self._kept.targets
        targets = [pair(batch, self.columns)[1] for batch in structure_loader(self.trainer, self)]
        if not targets:
            raise ValueError("expected training data to learn the scale of the target from, got an empty loader")
        return torch.cat(targets)

    def training_features(self, max_rows: int | None = None, progress: bool = True) -> Extracted:
        """Features and targets of the training data, un-augmented and in a fixed order; at most a sample of `max_rows`.

        While a fit is set up, features of a frozen backbone are extracted once, whoever asks first; with the callback
        `FeatureCache` they come from the disk where they are there.
        """
        stored = self._store() is not None
        if stored and self.trainer.world_size > 1 and self._kept is None:
            self.training_share(progress=progress)
        if self._kept is None and self._kept_share is not None:
            self._kept = self._kept_share.gathered()  # all processes have a share, or none
        if self._kept is not None:
            return self._kept.sample(max_rows)
        most = None if stored else max_rows  # what is stored is whole, whoever wants how much of it
        found = self._extract(structure_loader(self.trainer, self, most), most, progress)
        if self.backbone.unscaled:
            found = Extracted(self.backbone.set_scale([found.readings])[0], found.targets)
        if self.backbone.frozen and (most is None or len(found.features) < most):
            self._kept = found
        return found.sample(max_rows)

    def training_share(self, max_rows: int | None = None, progress: bool = True) -> ExtractedShare:
        """What `training_features` gives, dealt out to the processes batch by batch: each extracts its own share.

        While a fit is set up, features of a frozen backbone are extracted once, whoever asks first.
        """
        if self._kept_share is not None and max_rows is None:
            return self._kept_share
        if max_rows is not None and self._store() is not None:
            self.training_features(progress=progress)  # all of them: what is stored is whole
        if self._kept is not None:
            readings, targets = self._kept.sample(max_rows)
            mine = slice(self.global_rank, None, self.trainer.world_size)
            return ExtractedShare([readings[mine]], [targets[mine]])
        loader = structure_loader(self.trainer, self, max_rows, self.trainer.world_size, self.global_rank)
        found = run_or_fail_together(lambda: self._extract_share(loader, progress))
        if self.backbone.unscaled:
            found = found._replace(readings=self.backbone.set_scale(found.readings, shared=True))
        if self.backbone.frozen and max_rows is None:
            self._kept_share = found
        return found

    def features_of(self, loader: Any, seed: int = 0, progress: bool = True) -> Extracted:
        """Features and targets of all samples of a loader of known size, in a fixed order; processes share the work.

        Args:
            loader: any, also of a shuffled or augmented set.
            seed: of what transforms draw; it leaves no trace in the draws of training.
            progress: show a progress bar.
        """
        processes, rank = self.trainer.world_size, self.global_rank
        if processes == 1:
            return self._extract(unshuffled(loader, seed=seed), None, progress, seed)
        share = unshuffled(loader, every=processes, first=rank, seed=seed)
        return run_or_fail_together(lambda: self._extract_share(share, progress, seed)).gathered()

    def _store(self) -> Path | None:
        """The folder in which a callback keeps features of the frozen backbone on disk."""
        if not self.backbone.frozen or self.backbone.raw or is_sharded(self.backbone):
            return None
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        asked = [callback.feature_folder(self.trainer) for callback in callbacks if hasattr(callback, "feature_folder")]
        return next((Path(folder) for folder in asked if folder is not None), None)

    def _from_store(self, loader: Any, progress: bool, seed: int) -> feature_store.Entry | None:
        """What is stored of a loader's samples, extracted now where it was not; None where nothing can be stored."""
        store = self._store()
        if store is None:
            return None
        device = self.trainer.strategy.root_device
        settings: dict[str, Any] = {"device": device, "progress": progress, "columns": self.columns, "seed": seed}
        try:
            return feature_store.extract(store, self.backbone, loader, **settings)
        except feature_store.NotStored as error:
            warnings.warn(f"features are not kept on disk: {error}", stacklevel=2)
            return None

    def _extract(self, loader: Any, max_rows: int | None, progress: bool, seed: int = 0) -> Extracted:
        device = self.trainer.strategy.root_device
        with isolated_rng(seed):
            entry = self._from_store(loader, progress, seed)
            if entry is not None:
                return entry.extracted
            return extract(
                self.backbone, loader, device=device, max_rows=max_rows, progress=progress, columns=self.columns
            )

    def _extract_share(self, loader: Any, progress: bool, seed: int = 0) -> ExtractedShare:
        device = self.trainer.strategy.root_device
        with isolated_rng(seed):
            entry = self._from_store(loader, progress, seed)
            if entry is not None:
                parts = list(entry.parts())
                return ExtractedShare([part.readings for part in parts], [part.targets for part in parts])
            return extract_share(self.backbone, loader, device=device, progress=progress, columns=self.columns)

    def forget_features(self) -> None:
        """Drop the features that `training_features` kept; called when the set-up of a fit is over."""
        self._kept = self._kept_share = None

    def fit_scores(self, scores: Sequence[Score], progress: bool = True) -> None:
        """Fit scores to the training features; several processes share the samples and the work."""
        share = self.training_share(progress=progress) if self.trainer.world_size > 1 else None
        found = self.training_features(progress=progress) if share is None else None
        labels, classes = self.task.classes(share.together()[1] if share is not None else found.targets)  # type: ignore[union-attr]
        if any(score.taps is not None and not self.backbone.widths(score.taps) for score in scores):
            self._few()  # features came from a store, and the backbone has not met an input yet
        for score in scores:
            widths, scaled = self.backbone.widths(score.taps), self.backbone.scales(score.taps)
            score.set_context(ScoreContext(classes, self.backbone.raw, self.ggt, widths, scaled))
            if found is not None:
                score.learn(found.readings.view(score.taps), labels)
                continue
            assert share is not None
            if score.sums:
                score.learn_share(share.together(score.taps)[0], labels)
            else:
                score.learn_alone(share._replace(targets=list(labels.split([len(part) for part in share.targets]))))  # type: ignore[no-untyped-call]

    def on_fit_start(self) -> None:
        """The set-up is over."""
        if self.backbone.frozen or self.backbone.base_layer is not None:  # they are meant to stay in evaluation
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training")
        if self._kept is not None and self.backbone.frozen:
            self._samples["training"] = self._kept.sample(SAMPLE_ROWS)
        self.forget_features()

    def configure_callbacks(self) -> list[pl.Callback]:
        """The callbacks that settle the head, fit scores, say what won, and make a resumed fit repeat another.

        This is the first hook of a run, which may be one of other data.
        """
        from brainet_pl.callbacks.baseline import BaselineComparison
        from brainet_pl.callbacks.resume import ExactResume
        from brainet_pl.callbacks.scores import ScoreFit
        from brainet_pl.callbacks.settle import HeadSettling
        from brainet_pl.callbacks.structure import BuildHeadBeforeAveraging
        from brainet_pl.callbacks.tracking import Tracking, set_wandb_run_metadata

        set_wandb_run_metadata(self.trainer, type(self.head_settings).__name__, type(self.task).__name__)
        there: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        for thing in (self.trainer.fit_loop._data_source.instance, *there):  # it may be a datamodule of the other kind
            refuse_mix(thing)
        averaging = [callback for callback in there if is_averaging(callback)]
        if averaging:  # they copy the model when they are set up
            before = [c for c in there if c not in averaging and not isinstance(c, BuildHeadBeforeAveraging)]
            there[:] = [*before, BuildHeadBeforeAveraging(), *averaging]
        self.forget_features()  # a fit that failed while it was set up leaves them
        self._samples = {}
        wanted: list[type[pl.Callback]] = [ScoreFit] if any(score.needs_fit for score in self.scores) else []
        wanted += [
            HeadSettling,
            BaselineComparison,
            Tracking,
            ExactResume,
        ]  # the last knows the random states after the others' hooks
        return [kind() for kind in wanted if not any(isinstance(callback, kind) for callback in there)]

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = None, hparams_file: Any = None, strict: bool | None = None,
        weights_only: bool = True, **kwargs: Any,
    ) -> BRAINet:  # fmt: skip
        """The model of a checkpoint file, its structure included; tensors and primitives alone are read from the file.

        Args:
            checkpoint_path: a file; a URL is refused.
            map_location: as in `torch.load`.
            hparams_file: as in Lightning.
            strict: whether all weights must be there.
            weights_only: False would run whatever code a pickle holds, so it is refused.
            **kwargs: arguments of `BRAINet` to use instead of the stored ones.
        """
        checkpoint = Checkpoint.read(checkpoint_path)  # refuses another format before its settings are tried
        if "backbone" not in kwargs:
            check_stored_backbone(checkpoint.hparams.get("backbone"))
        if not weights_only:
            raise ValueError(
                "expected weights_only=True, got False: a checkpoint of BRAINet holds no code, and runs none"
            )
        unknown = sorted(set(kwargs) - {argument.name for argument in arguments(cls)})
        if unknown:  # Lightning would drop them without a word
            raise ValueError(
                f"expected arguments of BRAINet, got {', '.join(unknown)}: settings of a part are changed on the part, "
                "such as model.head.inference, or by giving the part"
            )
        load = super().load_from_checkpoint
        try:
            return load(checkpoint_path, map_location, hparams_file, strict, weights_only=True, **kwargs)
        except RuntimeError as error:
            if "state_dict" not in str(error):
                raise
            raise ValueError(
                f"expected weights that fit the settings in {checkpoint_path}, got others ({error}): the file was "
                "changed, or the arguments given are not those it was trained with"
            ) from error

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what rebuilds the head, as JSON-able primitives only."""
        ggt = None if self.ggt is None else self.ggt.to_dict()
        backbone = None if self.backbone.raw else type(self.backbone.model).__name__
        removed = None if self.backbone.removed is None else self.backbone.removed._asdict()
        stored: dict[str, Any] = {"format": FORMAT, "in_features": self._in_features, "ggt": ggt, "backbone": backbone}
        stored["removed"], stored["class_names"] = removed, self.class_names
        stored["base_logits"] = self._has_base_logits
        takes = self.backbone.takes  # what `brainet export` makes an example of
        stored["takes"] = None if takes is None else {name: sample._asdict() for name, sample in takes.items()}
        stored["preset"] = None if self.preset is None else self.preset.to_dict()
        checkpoint[STORED] = primitive(stored)
        add_digests(checkpoint)  # Lightning calls this last: all parts are there

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the head from the checkpoint before its weights are loaded; the checkpoint's own tree wins."""
        stored = unpack(checkpoint)
        if self._trainer is not None:
            check_callback_states(checkpoint.get("callbacks"), self.trainer)
        if stored["backbone"] is not None and self.backbone.raw:
            raise ValueError(
                f"expected a backbone of the class {stored['backbone']}, got none: it was given as a module, which a "
                "checkpoint can't rebuild; give it again, BRAINet.load_from_checkpoint(path, backbone=module)"
            )
        if self.backbone.waits and stored.get("removed") is not None:
            self.backbone.remove(HeadLayer(**stored["removed"]))
        if stored.get("takes") is not None:
            self.backbone.takes = {k: Sample(tuple(v["shape"]), v["dtype"]) for k, v in stored["takes"].items()}
        ggt = None if stored["ggt"] is None else GGT.from_dict(stored["ggt"])
        same = self.head is not None and (self._in_features, self._has_base_logits) == (
            stored["in_features"],
            stored["base_logits"],
        )
        if ggt is not None and (self.ggt is None or self.ggt.fingerprint != ggt.fingerprint):
            same = False
        if stored["in_features"] is not None and not same:
            self._build_head(int(stored["in_features"]), ggt, stored["base_logits"])
        named = check_class_names(stored.get("class_names"), self.task)  # older files have none
        if self._trainer is not None and self.class_names and named:  # a fit that goes on has met its data
            same_classes(named, self.class_names)
        self.class_names = named or self.class_names
        self.preset = Preset.from_dict(stored.get("preset")) or self.preset  # names of weights are not in the file
        for score in checkpoint.get("hyper_parameters", {}).get("scores") or ():
            if not isinstance(score, Mapping):  # given to load_from_checkpoint, and so among ours
                continue
            made = make_part(Score, score, "scores")
            if made.key not in self.scores:  # fitted there, so it can be used here
                self.scores.add(made.to(self.device))
        self._tap_scores()

    # -- forward ------------------------------------------------------------------------------------------------------

    def extract(self, x: Any) -> Tensor:
        """Inputs (B, …) → features (B, d); features pass as they are where the cache gives them."""
        return x.features if isinstance(x, BackboneOutput) else torch.as_tensor(self.backbone(x))

    def forward(self, x: Any = None, **named: Tensor) -> Tensor:
        """Inputs → the calibrated mean over passes: class probabilities (B, C), or mean and variance (B, 2).

        Inputs are a tensor, a dictionary of tensors, or tensors by the names that the backbone takes.
        """
        passes = self.passes_of(named if x is None else x)
        return self.final(passes, self.scores(passes) if self.calibration is not None else {})

    def passes_of(self, x: Any) -> Passes:
        """Inputs → outputs of all passes and what follows from them. The backbone runs once; only the head T times."""
        readings = x if isinstance(x, BackboneOutput) else readings_of(self.backbone, x)
        features = readings.features
        outputs, weights = run_head(self._require_head(), features, self.passes, self.base_outputs(readings))
        predicted, scores = self.task.predictive(outputs, weights), self.task.scores(outputs, weights)
        return Passes(outputs, weights, features, predicted, scores, readings)

    def base_outputs(self, readings: BackboneOutput) -> Tensor | None:
        """The network's own outputs (B, O) where the head adds to them."""
        adds = isinstance(self.head, ResidualHead) and self.head.adds_base_logits
        return self.task.base_outputs(readings.base_logits) if adds and readings.base_logits is not None else None

    def final(self, passes: Passes, scores: Mapping[str, Tensor]) -> Tensor:
        """What a user gets of the averaged prediction: the same, or calibrated."""
        return passes.predicted if self.calibration is None else self.calibration(passes.predicted, scores)

    def _require_head(self) -> Head:
        if self.head is None:
            need_tree(None, self.head_settings)
        assert self.head is not None
        return self.head

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of the head, and of the backbone where it is not frozen."""
        x, y = self._unpack(batch)
        loss, outputs = self._compiled("batch_loss")(x, y)
        penalty = self._require_head().penalty()
        if penalty is not None:
            loss = loss + penalty / self._train_size()
        self.log("train/loss", loss, prog_bar=True)
        self._log_training(outputs.detach(), y)
        return torch.as_tensor(loss)

    def batch_loss(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and checked targets (B, …) → the task's loss and the head's outputs, (B, O) or (M, B, O)."""
        head = self._require_head()
        if isinstance(head, ResidualHead) and head.adds_base_logits:
            readings = x if isinstance(x, BackboneOutput) else readings_of(self.backbone, x)
        else:
            readings = BackboneOutput(self.extract(x))
        outputs = train_head(head, readings.features, self.base_outputs(readings))
        return self.task.loss(outputs, y), outputs

    def _compiled(self, name: str) -> Any:
        """A method, compiled where the user has compiled the model."""
        context = self._compiler_ctx
        if context is None:
            return getattr(self, name)
        if name not in self._regions:
            self._regions[name] = context["dynamo_ctx"](getattr(self, name))
        return self._regions[name]

    def _narrow_compiler(self) -> None:
        """Leave steps as they are: Lightning compiles them whole, and checks, metrics and logs break their graphs.

        What computes, the loss of a batch and the passes of one, is compiled in their place.
        """
        self._regions = {}
        if self._compiler_ctx is None:  # steps that a user has put in their place stay
            return
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            self.__dict__.pop(name, None)

    def on_train_epoch_start(self) -> None:
        """A checkpoint from the end of an epoch holds that epoch's sums."""
        self.train_metrics.reset()

    def _log_training(self, outputs: Tensor, target: Tensor) -> None:
        """Metrics of an epoch's training passes, (B, O) or (M, B, O), and the learning rate of the head."""
        with torch.no_grad():
            predicted = self.task.predictive(outputs if outputs.dim() == 3 else outputs.unsqueeze(0), None)
        self._update(self.train_metrics, predicted, target)
        self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Metrics of the averaged prediction."""
        seen = self._look(batch, batch_idx, scored=self._finalizes)
        assert seen.target is not None
        self._update(self.val_metrics, seen.passes.predicted, seen.target)
        if self._finalizes:
            self.scores.observe(seen.passes, seen.scores)
            if self.calibration is not None:
                self.calibration.observe(seen.passes.predicted, seen.target, seen.scores)
            if self.conformal is not None:
                numbers = None if self.calibration is None else seen.numbers
                self.conformal.observe(seen.passes.predicted, seen.target, seen.scores, numbers)

    def _look(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0, labelled: bool = True, scored: bool = True
    ) -> Seen:
        """Run a batch of validation or test data; whoever counts, counts only what this gives.

        Samples that `DistributedSampler` repeats are run with the rest, so that no part of the model meets an empty
        batch, and then left out.
        """
        x, target = self._unpack(batch) if labelled else (inputs_of(batch, self.columns), None)
        passes = self._compiled("passes_of")(x)
        scores = self.scores(passes) if scored else {}
        numbers = self._places.of_batch(self.trainer, len(passes.predicted), batch_idx, dataloader_idx)
        n = len(numbers)
        few = {name: values[:n] for name, values in scores.items()}
        return Seen(numbers, passes.first(n), few, None if target is None else target[:n])

    @property
    def _finalizes(self) -> bool:
        """Only a fit's own validation may settle calibrators and scores.

        The sanity check sees a network that has not trained, and `trainer.validate` may be given any data, test data
        included.
        """
        return self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking

    def _share_references(self) -> None:
        """Callbacks that average weights go through the buffers of two models side by side: both need the same ones."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            average = getattr(callback, "_average_model", None)
            other = getattr(average, "module", average)
            if isinstance(other, BRAINet):
                other.scores = copy.deepcopy(self.scores)

    def on_validation_epoch_end(self) -> None:
        """Settle what watched the validation data, before a checkpoint is written."""
        if not self._finalizes:
            return
        self.scores.finalize()
        self._share_references()
        if self.calibration is not None:
            self.log_dict({f"val/cal/{name}": value for name, value in self.calibration.finalize().items()})
        if self.conformal is not None:  # after calibration: it is about what a user gets
            found = self.conformal.finalize(self.calibration)
            self.log_dict({f"val/conformal/{name}": value for name, value in found.items()})

    def on_validation_start(self) -> None:
        """Labels must mean the classes that were trained."""
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            self._check_labels(self.trainer.validate_loop)

    def _check_labels(self, loop: Any) -> None:
        names = getattr(loop._data_source.instance, "class_names", None)
        if names and self.class_names:
            same_classes(self.class_names, tuple(names))

    def on_test_start(self) -> None:
        """Labels must mean the classes that were trained. Say aloud where further sets are run for nothing."""
        self._check_labels(self.trainer.test_loop)
        from brainet_pl.callbacks.evaluation import Evaluation
        from brainet_pl.callbacks.sets import test_sets

        sets = test_sets(self.trainer)
        loaders = CombinedLoader(self.trainer.test_dataloaders, "sequential").flattened
        self._shifts = {
            i: parts_of(name, getattr(loader, "dataset", None))
            for i, (loader, (name, role)) in enumerate(zip(loaders, sets.items(), strict=True))
            if role == "shift"
        }
        if not any(isinstance(callback, Evaluation) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            _, *others = sets
            if others:
                rank_zero_warn(
                    f"not evaluated: {', '.join(others)}; metrics are those of the first test loader alone: add the "
                    "callback brainet_pl.callbacks.Evaluation, which compares the other sets with it"
                )

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> SampleBatch:  # type: ignore[override]
        """Metrics on the known set, the first; of all sets, what the record of the test keeps."""
        if dataloader_idx in self._shifts:
            return self._shifted_step(batch, batch_idx, dataloader_idx)
        seen = self._look(batch, batch_idx, dataloader_idx, labelled=dataloader_idx == 0)
        passes, scores, target = seen.passes, seen.scores, seen.target
        answers = {}
        if target is not None:
            answers = self.task.answers(passes.predicted, target)
            self._update(self.test_metrics, passes.predicted, target)
            base_logits = self._base_predicted(passes)
            if base_logits is not None:
                self._update(self.base_metrics, base_logits, target)
            differ = self.task.disagreement(passes.outputs, passes.weights) if len(passes.outputs) > 1 else None
            if differ is not None:
                self._update(self.pass_metrics, differ, target)
            final = self.final(passes, scores)
            if self.scaled_metrics is not None:
                self._update(self.scaled_metrics, final, target)
                answers |= {"calibrated": self.task.answers(final, target).get("confidence", final[:, -1])}
            if self.conformal is not None and self.conformal_metrics is not None:
                found = self.conformal(final)
                self._update(self.conformal_metrics, self.conformal.measured(found), target)
                answers |= self.conformal.answers(found, target)
        trace = self.task.trace(passes.outputs, passes.weights, target)
        shifts = self._shift_sums(seen, {"clean": sys.maxsize}) if target is not None and self._shifts else {}
        known_p, count = self.judge(scores).get("known_p"), len(passes.outputs)
        return SampleBatch(scores, answers, trace, count, seen.numbers, shifts, known_p, self.verdict.level)

    def _shifted_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> SampleBatch:
        """A batch of a shifted set: sums alone, and scores only where a calibrator may want them."""
        seen = self._look(batch, batch_idx, dataloader_idx, scored=self.calibration is not None)
        shifts = self._shift_sums(seen, self._shifts[dataloader_idx])
        return SampleBatch({}, numbers=seen.numbers, shifts=shifts)

    def _shift_sums(self, seen: Seen, parts: Mapping[str, int]) -> dict[str, ShiftSums]:
        assert seen.target is not None
        predicted = seen.passes.predicted
        final = None if self.calibration is None else self.final(seen.passes, seen.scores)
        found = {}
        for name, chosen in split_by_part(seen.numbers, parts):
            rows = chosen.to(predicted.device)
            sums = self.task.sums(predicted[rows], seen.target[rows])
            if sums is not None:
                scaled = None if final is None else self.task.sums(final[rows], seen.target[rows])
                found[name] = ShiftSums(sums, scaled)
        return found

    def _base_predicted(self, passes: Passes) -> Tensor | None:
        """What the network predicts without the new head; None where it can't, or is no longer what it was."""
        base_logits = None if passes.readings is None else passes.readings.base_logits
        return self.task.base_predicted(base_logits) if base_logits is not None and self.backbone.frozen else None

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """The prediction and every measure of uncertainty, from one set of passes."""
        passes = self._compiled("passes_of")(inputs_of(batch, self.columns))
        scores = self.scores(passes)
        final = self.final(passes, scores)
        found = self.task.predict(passes, final)
        if self.conformal is not None:
            found |= self.conformal(final)
        found |= self.judge(scores)
        return found | {name: values for name, values in scores.items() if name not in found}  # `std` is calibrated

    def judge(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scores (B,) → the verdict, `known_p` and `known`, as `ScoreSet.judge` gives it."""
        return self.scores.judge(
            scores, self.verdict, None if self.calibration is None else self.calibration.score_name
        )

    def _update(self, metrics: MetricCollection, predicted: Tensor, target: Tensor) -> None:
        metrics.update(predicted, target)
        self.log_dict(metrics, on_step=False, on_epoch=True, add_dataloader_idx=False)

    def _unpack(self, batch: Any) -> tuple[Any, Tensor]:
        x, y = pair(batch, self.columns)
        return x, self.task.check(y)

    def _train_size(self) -> int:
        batches = float(self.trainer.num_training_batches)
        if batches == float("inf"):
            raise ValueError(
                "expected training data of known size for Bayes by backprop, got a stream without a length: set "
                "limit_train_batches in the Trainer, or give the dataset a length"
            )
        size = getattr(self.trainer.train_dataloader, "batch_size", None) or 1
        return max(1, int(batches * size * self.trainer.world_size))

    # -- optimizer ----------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Adam with a fixed rate (the paper) unless told otherwise; the backbone in a group of its own."""
        groups: list[dict[str, Any]] = [{"params": list(self._require_head().parameters()), "lr": self.lr}]
        if not self.backbone.frozen:
            rate = self.lr / 10 if self._backbone_lr is None else self._backbone_lr
            groups.append({"params": self.backbone.trained(), "lr": rate})
        optimizer = torch.optim.Adam(groups) if self._optimizer is None else self._optimizer(groups)
        if self._lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._lr_scheduler(optimizer)}


def _reach(batches: float, loaders: Sequence[Any] | None) -> int:
    """How many samples to look at: `SAMPLE_ROWS`, or the fewer that the batches of a short run hold."""
    size = getattr(loaders[0], "batch_size", None) if loaders else None
    return SAMPLE_ROWS if size is None else int(min(SAMPLE_ROWS, batches * size))


def refuse_sharding(trainer: pl.Trainer) -> None:
    """Strategies that restore checkpoints after sharding would need the head before its shape is known."""
    name = type(trainer.strategy).__name__
    if name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        raise RuntimeError(
            f"expected a strategy that loads checkpoints before sharding (auto, ddp), got {name}: a head whose shape "
            "is learned can't be sharded yet"
        )


def _make_task(task: Any, num_classes: int | None) -> Task:
    if task is None:
        if num_classes is None:
            raise ValueError("expected num_classes for classification, got none: set it, or task='Regression'")
        return Classification(num_classes)
    if isinstance(task, str) and task == "Classification" and num_classes is not None:
        return Classification(num_classes)
    made = make_part(Task, task, "task")
    if num_classes is not None and getattr(made, "num_classes", None) != num_classes:
        raise ValueError(
            f"expected num_classes or a task that has them, got num_classes={num_classes} and {made.describe()}: leave "
            "num_classes out"
        )
    return made


def _make_backbone(backbone: Any) -> Backbone:
    if isinstance(backbone, Backbone):
        return backbone
    if isinstance(backbone, Mapping):
        return Backbone(**backbone)
    return Backbone(backbone)
