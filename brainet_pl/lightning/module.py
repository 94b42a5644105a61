"""The LightningModule: Lightning's hooks around a `Predictor`, and the metrics of its steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from brainet_pl._utils import checks
from brainet_pl._utils.framework import (
    Callback,
    LRSchedulerCallable,
    OptimizerCallable,
    TrainerFn,
    pl,
    rank_zero_warn,
    refuse_mix,
    watch_mixes,
)
from brainet_pl._utils.lightning_private import (
    compiler_context,
    data_given,
    finds_learning_rate,
    keep_integers,
    set_hparams,
    trainer_of,
)
from brainet_pl._utils.parts import make_part
from brainet_pl.backbones import Backbone
from brainet_pl.backbones import batches as batching
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.loading import find_preset
from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.distributed.samples import Places, active_loaders
from brainet_pl.evaluation.record import SampleBatch
from brainet_pl.evaluation.sets import EvaluatesAllSets, test_sets
from brainet_pl.explain import Explanation
from brainet_pl.explain.road import explain_batch
from brainet_pl.features.extraction import data_source, inputs_and_target, inputs_of
from brainet_pl.fitting.settle import Answered
from brainet_pl.lightning import sharding, steps
from brainet_pl.lightning.building import make_backbone, make_task, scores_or_density, settings_of
from brainet_pl.lightning.fitted import FittedModule, build_head_before_averaging
from brainet_pl.lightning.steps import EvaluatedBatch
from brainet_pl.lightning.validation import calibrates, selects, teaches
from brainet_pl.metrics.measures import Measure, PassDisagreement, collect
from brainet_pl.network import HeadSettings
from brainet_pl.prediction.defaults import AUTO_CALIBRATION
from brainet_pl.prediction.finite import BufferCopy, LossGuard, OnNaN
from brainet_pl.prediction.inputs import InputReader
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.prediction import Prediction
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import Score, Verdict
from brainet_pl.serving.images import ImageSteps
from brainet_pl.storage import runs
from brainet_pl.storage.wandb import set_wandb_run_metadata
from brainet_pl.tasks import Task
from brainet_pl.tasks.classification import check_class_names

if not TYPE_CHECKING:  # what the command line offers: with modules in it, help would list every one there is
    BackboneLike = Backbone | str | None
    HeadLike = HeadSettings | None
    TaskLike = Task | None
    CalibratorLike = Calibrator | Literal["auto"] | None
    ConformalLike = Conformal | None
    ScoresLike = list[Score] | Literal["all"] | None
    MeasuresLike = list[Measure] | None
else:
    BackboneLike = Backbone | nn.Module | str | Mapping[str, Any] | None
    HeadLike = HeadSettings | str | Mapping[str, Any] | None
    TaskLike = Task | str | Mapping[str, Any] | None
    CalibratorLike = Calibrator | str | Mapping[str, Any] | None
    ConformalLike = Conformal | str | Mapping[str, Any] | None
    ScoresLike = Sequence[Score | str | Mapping[str, Any]] | str | None
    MeasuresLike = Sequence[Measure] | None

TRAINED = ("cls/Acc", "cal/ECE", "reg/RMSE", "cal/QCE")  # measures of training passes: sums, however long an epoch

_standard_callbacks: list[Callable[[], Callback]] = []


def register_standard_callbacks(callbacks: Sequence[Callable[[], Callback]]) -> None:
    """Let every run of a `BRAINet` have these callbacks, in this order, where the user has not given one of the class.

    `brainet_pl.callbacks` calls it: callbacks know the model, and the model does not know them.
    """
    _standard_callbacks[:] = callbacks


class BRAINet(FittedModule):
    """A model whose head is a BRAINet, or one of the heads it is compared with.

    Wherever a part is asked for (head, task, score, calibrator), Python also takes its name or its dictionary form.

    >>> model = BRAINet(num_classes=8, head="MLP", scores=["KNN"], calibration="TemperatureScaling")
    >>> [type(part).__name__ for part in (model.task, model.calibration)]
    ['Classification', 'TemperatureScaling']

    Args:
        num_classes: Number of classes; short for the task `Classification(num_classes)`.
        backbone: The feature extractor: settings of one (`Backbone`), a module, a name, or null for raw features.
        head: Settings of the head; null is `Tree()`, a BRAINet sized by the number of features.
        task: `Classification` or `Regression` with their settings; null is a classification of `num_classes`.
        scores: Further scores of inputs unlike the training data: `Generative`, `Stages`, `KNN`, `Mahalanobis`, `Own`,
            `ViM` …; null is a density where features do not move, `Stages` of a convolutional backbone and `Generative`
            of others: of a backbone that trains it would read all training data again in every epoch. "all" is every
            one that the model can have, and an empty list has none.
        calibration: The calibrator fitted on validation data, such as `TemperatureScaling`; "auto" is for classes a
            temperature, and confidence that fades by a density among `scores` (`Generative`, `Stages`), and none for
            numbers; null predicts as it is.
        verdict: Which score decides `known_p` and `known` of a prediction, and at which level; null is `Verdict()`, at
            most 5 % of known inputs called unknown.
        conformal: Sets of classes or intervals of numbers that hold the truth at a chosen level, `Conformal`; null has
            none.
        risk: The share of answers that may be wrong, such as 0.02: predictions then say which are `answered`, by
            validation data and with a certainty of 95 %; null answers all, and `risk_control` promises later.
        metrics: Further metrics beside those of the task.
        columns: The names of inputs and target, where batches have names; null guesses.
        passes: Number of sub-networks that a prediction averages, for heads that draw.
        lr: Learning rate of the head.
        optimizer: A function that takes parameter groups; null is Adam.
        lr_scheduler: A function that takes the optimizer; stepped every epoch.
        on_nan: What a training step does whose loss is not finite, before it changes a weight: "stop" ends the fit with
            an error that names the first such tensor, "skip" leaves the batch out and warns (one process only).

    Attributes:
        predictor: the road from an input to an answer: backbone, head, task, scores, calibration, conformal, verdict.
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
        calibration: CalibratorLike = "auto",
        verdict: Verdict | None = None,
        conformal: ConformalLike = None,
        risk: float | None = None,
        metrics: MeasuresLike = None,
        columns: Columns | None = None,
        passes: int = 15,
        lr: float = 1e-3,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        on_nan: OnNaN = "stop",
    ) -> None:
        super().__init__()
        watch_mixes()
        self.head_settings = make_part(HeadSettings, "Tree" if head is None else head, "head")
        made = make_task(task, num_classes)
        chosen = make_backbone(backbone)
        extractor = chosen.build()
        self.predictor = Predictor(
            extractor,
            made,
            num_passes=passes,
            scores=scores_or_density(scores, extractor, calibration),
            calibration=calibration,
            conformal=conformal,
            verdict=verdict,
            risk=risk,
        )
        self.calibrates_by_default = isinstance(calibration, str) and calibration == AUTO_CALIBRATION
        self.forget_fit()
        self.columns = Columns(**columns) if isinstance(columns, Mapping) else columns
        self.lr, self._backbone_lr = checks.above_zero("lr", lr), chosen.lr
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self.guard = LossGuard(on_nan)
        self.class_names: tuple[str, ...] | None = None
        self.preset = find_preset(chosen.model, chosen.weights)
        self._random_backbone = chosen.is_random
        self._places = Places()
        self._compiled_methods: dict[str, Any] = {}
        self._shifts: dict[int, dict[str, int]] = {}  # test loader → sizes of the shifts that it holds
        self._has_unknown_sets = False
        set_hparams(self, settings_of(self, chosen))

        def collected(prefix: str) -> MetricCollection:
            return collect([*made.measures(), *copy.deepcopy(list(metrics or ()))], prefix, made.group)

        self.train_metrics = collect([m for m in made.measures() if m.key in TRAINED], "train/", made.group)
        self.train_metrics.persistent(True)  # a fit that resumes in the middle of an epoch counts all of it
        self.val_metrics, self.test_metrics = collected("val/"), collected("test/")
        self.scaled_metrics = None if self.calibration is None else collected("test/scaled/")
        self.base_metrics = collected("test/own/")  # of the layer that was removed, where it has this task
        self.pass_metrics = collect([PassDisagreement()], "test/", made.group)
        self.conformal_metrics = None
        if self.conformal is not None:
            self.conformal_metrics = collect(self.conformal.measures(made), "test/", made.group)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[pl.Callback]:
        """The callbacks that every run has; this is the first hook of a run, which may be one of other data."""
        set_wandb_run_metadata(self.trainer, type(self.head_settings).__name__, type(self.task).__name__)
        runs.keep_rows(self.trainer)
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        for thing in (data_given(self.trainer.fit_loop), *callbacks):  # it may be a datamodule of the other kind
            refuse_mix(thing)
        build_head_before_averaging(callbacks)
        self.forget_fit()
        given = tuple(type(callback) for callback in callbacks)
        return [kind() for kind in _standard_callbacks if not any(issubclass(c, kind) for c in given)]  # type: ignore[arg-type]

    def setup(self, stage: str) -> None:
        """Build other heads from the data's shape, after the structure callback and before the optimizer.

        A checkpoint is restored after this hook, so a missing BRAINet head is no error yet.
        """
        self._narrow_compiler()
        sharding.refuse_sharding(self.trainer)
        self.shard_early()
        if stage != "fit":
            return
        self.guard.check_processes(self.trainer.world_size)
        names = getattr(data_source(self.trainer, self), "class_names", None)
        self.class_names = check_class_names(names, self.task) or self.class_names
        if self.calibration is not None and not self.trainer.enable_validation:
            steps.missing_validation(self.calibration, self.calibrates_by_default)
        self.prepare_head()
        if self.task.needs_targets:
            self.task.prepare(self.training_features.targets())

    def configure_model(self) -> None:
        """Shard backbone and head where the strategy does (FSDP2); the head is known by now, or never."""
        trainer = trainer_of(self)
        if trainer is None or not sharding.is_model_parallel(trainer):
            return
        if self.head is None:
            raise RuntimeError(
                "expected the head before the model is sharded, got none: Lightning tells of a checkpoint too late; "
                "say it before, trainer.ckpt_path = path, and call fit, test or predict without ckpt_path"
            )
        sharding.shard(self.predictor, self.device_mesh["data_parallel"])  # type: ignore[index]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep buffers of sharded models the same in all processes: a checkpoint may be written at any step."""
        if sharding.is_model_parallel(self.trainer):
            sharding.broadcast_trained_buffers(self.predictor)

    def on_fit_start(self) -> None:
        """Fit scores that no checkpoint brought, and end the set-up."""
        if self._random_backbone:
            rank_zero_warn(
                "expected weights of the frozen backbone, got none: its features are those of a random network; give "
                "--model.backbone.weights FILE, or DEFAULT for the published ones of torchvision and timm, or train "
                "it by --model.backbone.freeze false"
            )
        if self.backbone.frozen or self.backbone.base_layer is not None:  # they are meant to stay in evaluation
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training")
        keep_integers(self.trainer)
        self.fit_scores(all_scores=not self.backbone.frozen)
        self.teacher.share_scores(self._averages())  # fitted, and of another size
        self.training_features.release()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the head from the checkpoint before its weights, and those of the backbone, are loaded."""
        super().on_load_checkpoint(checkpoint)
        self._random_backbone = False

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, x: Any = None, **named: Tensor) -> Tensor:
        """Inputs → the logarithm of calibrated probabilities (B, C): `softmax` of it is what `predict_step` says.

        Of a regression: mean and variance (B, 2). Inputs are a tensor, a dictionary of tensors, or tensors by the names
        that the backbone takes. The answer is given in evaluation mode, whatever mode the model is in.
        """
        return torch.as_tensor(self.predictor(named if x is None else x))

    @torch.no_grad()
    def predict(self, x: Any, passes: int | None = None) -> Prediction:
        """Inputs → all that is said of each, without a Trainer; what `predict_step` says of a batch.

        Args:
            x: a tensor or an array, (B, …) or one sample; a dictionary of tensors; a dataset or a loader, with or
                without labels; a table of numbers. Images as Pillow has them, paths of images, pixels of 8 bits, or
                lists of these are prepared as the weights of the backbone expect, where they say so. All are predicted
                batch by batch.
            passes: sub-networks that a prediction averages; None is the model's own number.
        """
        return Prediction.concat([self.predictor.predict(batch, passes) for batch in self._batches(x)])

    @torch.no_grad()
    def explain(self, x: Any, passes: int | None = None) -> Explanation:
        """Inputs as `predict` takes them → why they look known or unknown, in words, maps and resembling samples.

        Args:
            x: images or rows, as for `predict`.
            passes: sub-networks that a prediction averages; None is the model's own number.
        """
        return Explanation.concat([explain_batch(self.predictor, batch, passes) for batch in self._batches(x)])

    def _batches(self, x: Any) -> Iterator[Any]:
        """Inputs of any form as batches, where the model is."""
        images = None if self.preset is None else ImageSteps(**self.preset.to_dict())
        reader = InputReader(self.backbone.input_signature, images, self.columns, self.backbone.takes_texts)
        for batch in reader.batches(x):
            yield batching.move(batch, self.device)

    def _compiled(self, name: str) -> Any:
        """A method of the predictor, compiled where the user has compiled the model."""
        self.predictor.require_head(self.head_settings)
        context = compiler_context(self)
        if context is None:
            return getattr(self.predictor, name)
        if name not in self._compiled_methods:
            self._compiled_methods[name] = context["dynamo_ctx"](getattr(self.predictor, name))
        return self._compiled_methods[name]

    def _narrow_compiler(self) -> None:
        """Leave steps as they are: Lightning compiles them whole, and checks, metrics and logs break their graphs.

        What computes, the loss of a batch and the passes of one, is compiled in their place.
        """
        self._compiled_methods = {}
        if compiler_context(self) is not None:  # steps that a user has put in their place stay
            for name in ("training_step", "validation_step", "test_step", "predict_step"):
                self.__dict__.pop(name, None)

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """One step of the head, and of the backbone where it is not frozen; None for a batch that is skipped."""
        x, target = inputs_and_target(batch, self.columns)
        if steps.is_left_over(self.trainer, self.predictor, x, batch_idx):
            return steps.nothing_learned(self.trainer, self)
        y, wrong = self.task.check_later(target)
        before = BufferCopy(self.predictor)  # batch norm takes in what it is given before the loss is known
        loss, outputs = self._compiled("loss_and_outputs")(x, y)
        penalty = self.predictor.require_head().penalty()
        if penalty is not None:
            loss = loss + penalty / steps.train_size(self.trainer)
        fine = loss.isfinite() if wrong is None else loss.isfinite() & ~wrong
        if not bool(fine):  # the one look at the device in a step
            before.check_target(self.task, target)
            if not finds_learning_rate(self.trainer):
                self.guard.handle(self.predictor, before, x, outputs, loss, self.current_epoch, batch_idx)
                return None
        rows = len(y)  # Lightning would guess it, and warn where features take the place of inputs
        self.log("train/loss", loss, prog_bar=True, batch_size=rows)
        with torch.no_grad():
            outputs = outputs.detach()
            predicted = self.task.predictive(outputs if outputs.dim() == 3 else outputs.unsqueeze(0), None)
        self._update(self.train_metrics, predicted, y)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("train/lr", rate, on_step=False, on_epoch=True, batch_size=rows)
        return torch.as_tensor(loss)

    def on_train_start(self) -> None:
        """A validation without a sample would be left out, and whatever waits for its metrics with it."""
        steps.refuse_empty("validation", self.trainer.val_dataloaders)

    def teardown(self, stage: str) -> None:
        """Of a loader without a batch Lightning calls no other hook."""
        names = {"validate": "validation", "test": "test", "predict": "prediction"}
        if stage in names:
            steps.refuse_empty(names[stage], active_loaders(self.trainer))

    def on_train_epoch_start(self) -> None:
        """A checkpoint from the end of an epoch holds that epoch's sums."""
        self.train_metrics.reset()

    def on_train_epoch_end(self) -> None:
        """Where nothing is validated, let the head choose here: checkpoints are written after this hook."""
        self.guard.report(self.current_epoch, self.trainer.num_training_batches)
        if not self.trainer.enable_validation:
            self.before_validation()

    def on_validation_start(self) -> None:
        """Choose by the data of a fit; a validation alone checks that labels mean the classes that were trained."""
        if self.trainer.world_size > 1:  # each process has trained batch norm on its own samples
            sharding.broadcast_trained_buffers(self.predictor)
        if teaches(self.trainer):
            self.before_validation()
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            steps.check_labels(self.class_names, self.trainer.validate_loop)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Metrics of the averaged prediction on the first set; in a fit, calibration and verdict learn from the second.

        A single set does both.
        """
        learns = self._learns and calibrates(self.trainer, dataloader_idx)
        if not (learns or selects(dataloader_idx)):
            return
        seen = self._evaluate(batch, batch_idx, dataloader_idx, scored=learns)
        assert seen.target is not None
        if selects(dataloader_idx):
            self._update(self.val_metrics, seen.passes.predicted, seen.target)
        if learns:
            self.teacher.observe(Answered(seen.passes, seen.scores, seen.target, seen.numbers))

    def on_validation_epoch_end(self) -> None:
        """Learn from what was observed of the validation data, before a checkpoint is written."""
        if self._learns:
            self.after_validation()

    @property
    def _learns(self) -> bool:
        """Whether a validation teaches: one of a search for the learning rate comes before scores are fitted."""
        return teaches(self.trainer) and not self.scores.unfitted

    def on_test_start(self) -> None:
        """Labels must mean the classes that were trained. Say aloud where further sets are run for nothing."""
        steps.check_labels(self.class_names, self.trainer.test_loop)
        sets = test_sets(self.trainer)
        self._shifts = steps.shift_parts(self.trainer, sets)
        self._has_unknown_sets = bool({"near", "far"} & set(sets.values()))
        if self.calibration is not None and not self.predictor.calibrates and not self.calibrates_by_default:
            rank_zero_warn(
                f"{type(self.calibration).__name__} changes nothing, because it has learned nothing from validation "
                "data: no metrics test/scaled/… are logged; fit the model with a val_dataloader, or leave calibration "
                "out"
            )
        _, *others = sets
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        if others and not any(isinstance(callback, EvaluatesAllSets) for callback in callbacks):
            rank_zero_warn(
                f"not evaluated: {', '.join(others)}; metrics are those of the first test loader alone: add the "
                "callback brainet_pl.callbacks.Evaluation, which compares the other sets with it"
            )

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> SampleBatch:  # type: ignore[override]
        """Metrics on the known set, the first; of all sets, what the record of the test keeps."""
        if dataloader_idx in self._shifts:  # sums, and scores where a calibrator or unknown sets want them
            scored = self.calibration is not None or self._has_unknown_sets
            seen = self._evaluate(batch, batch_idx, dataloader_idx, scored=scored)
            sums = steps.shift_sums(self.predictor, seen, self._shifts[dataloader_idx])
            return SampleBatch(seen.scores, numbers=seen.numbers, shifts=sums)
        seen = self._evaluate(batch, batch_idx, dataloader_idx, labelled=dataloader_idx == 0)
        if seen.target is not None:
            seen = self._measure(seen, seen.target)
        return steps.sample_batch(self.predictor, seen, with_shifts=bool(self._shifts))

    def _measure(self, seen: EvaluatedBatch, target: Tensor) -> EvaluatedBatch:
        """Update the metrics of the known test set; the same with what a user gets of the prediction."""
        passes = seen.passes
        self._update(self.test_metrics, passes.predicted, target)
        base = steps.base_prediction(self.predictor, passes)
        if base is not None:
            self._update(self.base_metrics, base, target)
        differ = self.task.disagreement(passes.outputs, passes.weights) if len(passes.outputs) > 1 else None
        if differ is not None:
            self._update(self.pass_metrics, differ, target)
        final = self.predictor.calibrated(passes, seen.scores)
        if self.scaled_metrics is not None and self.predictor.calibrates:
            self._update(self.scaled_metrics, final, target)
        if self.conformal is None or self.conformal_metrics is None:
            return seen._replace(final=final)
        sets = self.conformal(final)
        self._update(self.conformal_metrics, self.conformal.measured(sets), target)
        return seen._replace(final=final, conformal=sets)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Prediction:
        """The prediction and every measure of uncertainty, from one set of passes; always in evaluation mode."""
        with evaluation_mode(self):
            return self.predictor.describe(self._compiled("passes")(inputs_of(batch, self.columns)))

    def _evaluate(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0, labelled: bool = True, scored: bool = True
    ) -> EvaluatedBatch:
        """Run a batch of validation or test data; whoever counts, counts only what this gives.

        Samples that `DistributedSampler` repeats are run with the rest, so that no part of the model meets an empty
        batch, and then left out.
        """
        x, target = inputs_and_target(batch, self.columns) if labelled else (inputs_of(batch, self.columns), None)
        target = None if target is None else self.task.check(target)
        passes = self._compiled("passes")(x)
        scores = self.predictor.all_scores(passes) if scored else {}
        numbers = self._places.of_batch(self.trainer, len(passes.predicted), batch_idx, dataloader_idx)
        n = len(numbers)
        if n == len(passes.predicted):  # the very tensors: labels that were checked are known again
            return EvaluatedBatch(numbers, passes, scores, target)
        kept = {name: values[:n] for name, values in scores.items()}
        return EvaluatedBatch(numbers, passes.first(n), kept, None if target is None else target[:n])

    def _update(self, metrics: MetricCollection, predicted: Tensor, target: Tensor) -> None:
        metrics.update(predicted, target)
        self.log_dict(metrics, on_step=False, on_epoch=True, add_dataloader_idx=False, batch_size=len(target))

    def configure_optimizers(self) -> Any:
        """Adam with a fixed rate (the paper) unless told otherwise; the backbone in a group of its own."""
        head = self.predictor.require_head(self.head_settings)
        groups: list[dict[str, Any]] = [{"params": list(head.parameters()), "lr": self.lr}]
        if not self.backbone.frozen:
            rate = self.lr / 10 if self._backbone_lr is None else self._backbone_lr
            groups.append({"params": self.backbone.trainable_parameters(), "lr": rate})
        optimizer = torch.optim.Adam(groups) if self._optimizer is None else self._optimizer(groups)
        if self._lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._lr_scheduler(optimizer)}
