"""A BRAINet head in the place of a layer of any LightningModule, by a callback alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from brainet_pl._utils import checks
from brainet_pl._utils.framework import (
    Callback,
    is_averaging,
    pl,
    rank_zero_info,
    rank_zero_warn,
    watch_mixes,
)
from brainet_pl._utils.lightning_private import average_model, keep_integers
from brainet_pl._utils.parts import make_part
from brainet_pl.backbones.batches import Columns
from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.callbacks.resume import ExactResume
from brainet_pl.callbacks.structure import StructureLearning
from brainet_pl.distributed.samples import Places
from brainet_pl.features.extraction import data_source, inputs_and_target, is_sharded
from brainet_pl.features.training import TrainingFeatures, loader_of
from brainet_pl.fitting.settle import Answered
from brainet_pl.lightning.module import BRAINet
from brainet_pl.lightning.sharding import (
    broadcast_buffers,
    configure_early,
    is_model_parallel,
    load_shares_of_checkpoints,
    refuse_sharding,
    shard,
)
from brainet_pl.lightning.validation import ValidationTeacher, calibrates, teaches
from brainet_pl.network import HeadSettings
from brainet_pl.network.base import MOST_PASSES
from brainet_pl.prediction.modes import evaluation_mode
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.scores import Score, Verdict
from brainet_pl.storage.sharded import WEIGHTS, read_parts
from brainet_pl.swap.in_place import Forward, Kind, LayerInputs, build_layer, find_layer, first_inputs
from brainet_pl.swap.layer import SwappedLayer, rebuild_layers, swapped_layers, watch_state


class SwapHead(Callback):
    """Puts a BRAINet head in the place of a layer of any LightningModule, which goes on as it was written.

    When a fit is set up, the module is run on its training data up to the layer, the structure of what the layer is
    given is learned, and a head takes its place before the module makes its optimizer. The module's own code gets
    logits: while training those of one drawn sub-network for each sample, and a plain cross-entropy on them trains all
    branches (of any other loss, a step trains the drawn ones; that is said once); in evaluation the logarithm of the
    averaged, calibrated probabilities. Checkpoints rebuild the head wherever this callback is among those of the
    Trainer, and resume exactly; elsewhere `brainet_pl.restore_layers` does.

    Args:
        layer: path of the dense layer that gives the logits, such as "model.fc"; null finds it by a pass over two
            samples.
        head: settings of the head; null is `Tree()`.
        structure: how the structure is learned; null is `StructureLearning()`.
        num_classes: number of classes, where the layer does not tell.
        task: "MultiLabel" where each logit is of a label that may be there or not, whatever the others: a plain binary
            cross-entropy then trains all branches.
        scores: scores of inputs unlike the training data; null is a density of what the layer is given, an empty list
            none.
        calibration: calibrator that learns from the validations of a fit; "auto" is a temperature, and confidence that
            fades on inputs unlike the training data; null leaves probabilities as they are.
        conformal: sets of classes that hold the truth at a chosen level.
        verdict: which score decides `known`, and at which level.
        passes: number of sub-networks that a prediction averages, for heads that draw.
        forward: a function that runs the module on the inputs of a batch, `forward(module, inputs)`, where the module
            itself can't be called with them.
        columns: the names of inputs and target, where batches have names; null guesses.
    """

    def __init__(
        self,
        layer: str | None = None,
        head: HeadSettings | str | Mapping[str, Any] | None = None,
        structure: StructureLearning | None = None,
        num_classes: int | None = None,
        task: Kind = "Classification",
        scores: Sequence[Score | str | Mapping[str, Any]] | None = None,
        calibration: Calibrator | str | Mapping[str, Any] | None = "auto",
        conformal: Conformal | str | Mapping[str, Any] | None = None,
        verdict: Verdict | None = None,
        passes: int = 15,
        forward: Forward | None = None,
        columns: Columns | None = None,
    ) -> None:
        watch_mixes()
        self.layer, self.num_classes, self.forward, self.columns = layer, num_classes, forward, columns
        self.task: Kind = task
        self.head = make_part(HeadSettings, "Tree" if head is None else head, "head")
        self.structure = StructureLearning() if structure is None else structure
        self.parts: dict[str, Any] = {
            "scores": scores,
            "calibration": calibration,
            "conformal": conformal,
            "verdict": verdict,
        }
        self.passes = checks.whole("passes", passes, 1, MOST_PASSES)
        self._features: TrainingFeatures | None = None
        self._teacher: ValidationTeacher | None = None
        self._places = Places()
        self._said: set[str] = set()

    # -- set-up -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The last hook of a callback before the module makes its optimizer; the data is there."""
        if isinstance(pl_module, BRAINet):
            raise TypeError(
                "expected a LightningModule of your own, got a BRAINet, which builds its head itself: give the Trainer "
                "StructureLearning() in place of SwapHead"
            )
        refuse_sharding(trainer)
        watch_state(pl_module)  # a checkpoint is restored after this hook, and brings its own head
        self._restore_early(trainer, pl_module)
        _resume_exactly(trainer, self)
        if stage == "fit":
            self._said, self._features, self._teacher = set(), None, None
            if self._find(pl_module) is None:
                self._refuse_earlier_copies(trainer)
                with evaluation_mode(pl_module):
                    self._build(trainer, pl_module)
        found = self._find(pl_module)
        if is_model_parallel(trainer) and found is not None:
            shard(found[1].predictor, trainer.strategy.device_mesh["data_parallel"])  # type: ignore[attr-defined]

    @staticmethod
    def _restore_early(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Where modules are sharded, build the head of a checkpoint at once; its weights come later."""
        load_shares_of_checkpoints(trainer)
        if is_model_parallel(trainer) and trainer.ckpt_path is not None and not is_sharded(module):
            configure_early(trainer, module)
            rebuild_layers(module, read_parts(trainer.ckpt_path)[WEIGHTS], early=True)

    def _build(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        shards = is_model_parallel(trainer)

        def sample() -> Any:
            device = None if shards else trainer.strategy.root_device
            return first_inputs(loader_of(data_source(trainer, module)), self.columns, module.to(device).device)

        name = "" if shards and self.layer else find_layer(module, self.layer, sample, self.forward)
        if shards:  # all processes extract with a module that none of them holds
            configure_early(trainer, module)
        name = name or find_layer(module, self.layer, sample, self.forward)
        self._features = self._read(trainer, module, name, frozen=True)

        def learn(features: TrainingFeatures) -> Any:
            return self.structure.learn(trainer, features)

        given: dict[str, Any] = {"num_classes": self.num_classes, "task": self.task, "passes": self.passes}
        layer = build_layer(self._features, learn, self.head, **given, progress=self.structure.progress, **self.parts)
        self._features.release()
        rank_zero_info(f"{name}: {layer.original} → {layer.settings.describe()}, {layer.head.num_params:,} parameters")

    def _read(
        self, trainer: pl.Trainer, module: pl.LightningModule, name: str, frozen: bool = False
    ) -> TrainingFeatures:
        return TrainingFeatures(
            data_source(trainer, module),
            LayerInputs(module, name, self.forward, frozen),  # type: ignore[arg-type]
            columns=self.columns,
            device=trainer.strategy.root_device,
            rank=trainer.global_rank,
            processes=trainer.world_size,
        )

    def _find(self, module: nn.Module) -> tuple[str, SwappedLayer] | None:
        """The layer that this callback has put into a module, with its path."""
        found = {name.replace("_orig_mod.", ""): (name, layer) for name, layer in swapped_layers(module).items()}
        if self.layer is not None:
            return found.get(self.layer.replace("_orig_mod.", ""))
        return next(iter(found.values())) if len(found) == 1 else None

    def _require(self, module: nn.Module) -> tuple[str, SwappedLayer]:
        found = self._find(module)
        if found is None:
            raise ValueError(
                f"expected a {type(module).__name__} whose head was swapped by a fit, got one that was not: fit it "
                "first, or give a checkpoint of such a fit, ckpt_path=…"
            )
        return found

    def _refuse_earlier_copies(self, trainer: pl.Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks[: callbacks.index(self)]:
            if is_averaging(callback):
                raise ValueError(
                    f"expected SwapHead before {type(callback).__name__}, which copies the module when it is set up, "
                    "got it after: put SwapHead first in the list of callbacks"
                )

    # -- fit ----------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The optimizer must have the head; the tree is written and logged."""
        name, layer = self._require(pl_module)
        trained = {id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
        if trainer.optimizers and not any(id(p) in trained for p in layer.head.parameters()):
            raise ValueError(
                f"expected an optimizer that trains the new head at {name!r}, got none: make the optimizer in "
                "configure_optimizers, of parameters that are asked for there"
            )
        keep_integers(trainer)
        if layer.ggt is not None:
            self.structure.report(trainer, layer.ggt)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Features are kept as long as nothing in front of the layer moves."""
        name, layer = self._require(pl_module)
        frozen = not moves(pl_module, layer)
        if self._features is None or self._features.backbone.frozen != frozen:
            self._features = self._read(trainer, pl_module, name, frozen)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep buffers of sharded modules the same in all processes: a checkpoint may be written at any step."""
        if is_model_parallel(trainer):
            broadcast_buffers(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say once where the loss is no plain cross-entropy; one look at the device in an epoch."""
        name, layer = self._require(pl_module)
        plain, other = layer.seen.tolist()
        if other and "loss" not in self._said:
            self._said.add("loss")
            rank_zero_warn(
                f"the loss on the logits of {name!r} is no plain cross-entropy in {other:,.0f} of {plain + other:,.0f} "
                "steps: in these a sample trains the one sub-network that was drawn for it, not all branches, so that "
                "training takes more epochs"
            )
        layer.seen.zero_()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the head choose what needs no training, with the current weights; keep what the layer gives."""
        if not teaches(trainer) or self._features is None:
            return
        if trainer.world_size > 1:  # each process has trained batch norm on its own samples
            broadcast_buffers(pl_module)
        _, layer = self._require(pl_module)
        if self._teacher is None or self._teacher.predictor is not layer.predictor:
            self._teacher = ValidationTeacher(layer.predictor)
        with evaluation_mode(pl_module), torch.no_grad():
            self._teacher.before(trainer, self._features)
        self._teacher.share_choices(self._averages(trainer))
        self._teacher.share_scores(self._averages(trainer))  # fitted again, and of another size
        layer.keep = True

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Let calibration and verdict observe what the module's own step has computed."""
        _, layer = self._require(pl_module)
        if not layer.keep or not calibrates(trainer, dataloader_idx) or layer.kept is None or self._teacher is None:
            layer.kept = None
            return
        passes, predictor = layer.take_kept(), layer.predictor
        target = predictor.task.check(torch.as_tensor(inputs_and_target(batch, self.columns)[1]))
        if len(target) != len(passes.predicted):
            return
        numbers = self._places.of_batch(trainer, len(target), batch_idx, dataloader_idx)
        count = len(numbers)
        scores = {name: values[:count] for name, values in predictor.scores(passes).items()}
        kept = target[:count].to(passes.predicted.device)
        self._teacher.observe(Answered(passes.first(count), scores, kept, numbers))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn from what was observed, before a checkpoint is written."""
        _, layer = self._require(pl_module)
        if not layer.keep or self._teacher is None or self._features is None:
            return
        layer.keep, layer.kept = False, None
        with evaluation_mode(pl_module), torch.no_grad():
            numbers = self._teacher.after()
        self._teacher.share_scores(self._averages(trainer))
        pl_module.log_dict(numbers)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say which score tells unknown inputs, and how many it is expected to notice."""
        if self._teacher is not None:
            self._teacher.report(trainer)

    def _averages(self, trainer: pl.Trainer) -> list[Predictor]:
        """The predictors of the copies of the module that callbacks which average weights keep."""
        predictors = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            average = average_model(callback)
            layer = self._find(average) if isinstance(average, nn.Module) else None
            if layer is not None:
                predictors.append(layer[1].predictor)
        return predictors

    # -- the rest -----------------------------------------------------------------------------------------------------

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A module that was never fitted would be tested with its old layer."""
        self._require(pl_module)

    on_predict_start = on_test_start


def moves(model: nn.Module, layer: SwappedLayer) -> bool:
    """Whether training changes what comes before a layer: weights that train, or statistics of batch norm."""
    ours = {id(part) for part in layer.modules()}
    outside = [part for part in model.modules() if id(part) not in ours]
    return any(
        any(p.requires_grad for p in part.parameters(recurse=False))
        or (isinstance(part, _BatchNorm) and part.training and part.track_running_stats)
        for part in outside
    )


def _resume_exactly(trainer: pl.Trainer, after: Callback) -> None:
    """Have checkpoints keep the random states, unless a callback does so."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, ExactResume) for callback in callbacks):
        callbacks.insert(callbacks.index(after) + 1, ExactResume())  # Lightning sets it up next
