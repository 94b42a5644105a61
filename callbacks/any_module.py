"""What a test of any LightningModule that gives logits leaves in the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from brainet_pl._utils.framework import pl, rank_zero_info
from brainet_pl._utils.precision import wide
from brainet_pl.backbones import FeatureExtractor, batches
from brainet_pl.backbones.batches import Columns
from brainet_pl.backbones.removal import logits_of
from brainet_pl.evaluation.record import SampleBatch
from brainet_pl.features.extraction import inputs_and_target, inputs_of, is_sharded, unshuffled
from brainet_pl.lightning import steps
from brainet_pl.lightning.module import BRAINet
from brainet_pl.lightning.steps import EvaluatedBatch
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.swap.data import input_batches
from brainet_pl.swap.in_place import Forward, run_model
from brainet_pl.swap.layer import SwappedLayer, swapped_layers
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes

RECIPE = "give them by a function, Evaluation(logits=lambda module, inputs: …)"


def predictor_of(module: nn.Module) -> Predictor | None:
    """The predictor of a BRAINet, or of a module with one swapped head; None for any other."""
    if isinstance(module, BRAINet):
        return module.predictor
    layer = swapped_layer(module)
    return None if layer is None else layer.predictor


def swapped_layer(module: nn.Module) -> SwappedLayer | None:
    """The one swapped head of a module; None where there are none, or several, of which a function must choose."""
    layers = list(swapped_layers(module).values())
    return layers[0] if len(layers) == 1 else None


class ModuleTest:
    """Evaluates batches of a test of one module.

    Args:
        module: any LightningModule.
        logits: gives the logits (B, C) of inputs; None is what a swapped head has given in `test_step`, or else the
            module's `forward` or `predict_step`.
        columns: the names of inputs and target, where batches have names.

    Attributes:
        metrics: of the known set, once it has been met; empty for a BRAINet, which has its own.
    """

    def __init__(self, module: pl.LightningModule, logits: Forward | None, columns: Columns | None) -> None:
        self.module, self.logits, self.columns = module, logits, columns
        self._inputs = None if columns is None else Columns(columns.inputs)  # unknown inputs have no target
        self.metrics: dict[str, MetricCollection] = {}
        self._layer = None if isinstance(module, BRAINet) else swapped_layer(module)
        self._predictor = predictor_of(module)
        self._are_probabilities: bool | None = None
        self.keep(self._layer is not None)

    def keep(self, on: bool) -> None:
        """Have the swapped head keep what it gives, or no longer."""
        if self._layer is not None:
            self._layer.keep, self._layer.kept = on, None

    def inputs(self, batch: Any) -> Any:
        """The inputs of a batch, which may have no target."""
        return inputs_of(batch, self._inputs)

    def tested(self, batch: Any, numbers: Tensor, known: bool) -> EvaluatedBatch:
        """A batch that `test_step` has just run, of which samples `numbers` (K,) count; `known` has a target."""
        inputs, target = inputs_and_target(batch, self.columns) if known else (self.inputs(batch), None)
        passes = self._kept(batches.size(inputs)) or self.run(batch)
        predictor = self._predictor_for(passes)
        n = len(numbers)
        passes = passes.first(n)
        scores = predictor.scores(passes)
        if target is None:
            return EvaluatedBatch(numbers, passes, scores, None)
        target = predictor.task.check(torch.as_tensor(target)[:n].to(passes.predicted.device))
        if not self.metrics:
            self.metrics = steps.test_metrics(predictor.task)
        return steps.measure(predictor, passes, scores, numbers, target, self.metrics)

    def unknown(self, data: Any, trainer: pl.Trainer) -> Iterator[EvaluatedBatch]:
        """The batches of further inputs; several processes share them."""
        alone, first = is_sharded(self.module), 0  # a sharded module is run by all processes together
        for i, batch in enumerate(unshuffled(input_batches(data, None))):
            size = batches.size(self.inputs(batch))
            if alone or i % trainer.world_size == trainer.global_rank:
                batch = trainer.precision_plugin.convert_input(batch)
                passes = self.run(trainer.strategy.batch_to_device(batch, self.module.device))
                scores = self._predictor_for(passes).scores(passes)
                yield EvaluatedBatch(torch.arange(first, first + size), passes, scores, None)
            first += size

    def sample(self, seen: EvaluatedBatch) -> SampleBatch:
        """What the record keeps of a batch."""
        return steps.sample_batch(self._predictor_for(seen.passes), seen, with_shifts=False)

    @torch.no_grad()
    def run(self, batch: Any) -> Passes:
        """Run the module on a batch."""
        inputs = self.inputs(batch)
        if isinstance(self.module, BRAINet):
            return self.module.predictor.passes(inputs)
        if self._layer is not None:
            self._layer.keep = True
        output = self._output(batch, inputs)
        kept = self._kept(batches.size(inputs))
        return self._passes(output, batches.size(inputs)) if kept is None else kept

    def _output(self, batch: Any, inputs: Any) -> Any:
        if self.logits is not None:
            return self.logits(self.module, inputs)
        try:
            return run_model(self.module, inputs)
        except ValueError as error:
            if not isinstance(error.__cause__, NotImplementedError):
                raise
        if type(self.module).predict_step is not pl.LightningModule.predict_step:
            return self.module.predict_step(batch, 0)
        raise ValueError(
            f"expected {type(self.module).__name__} to have a forward, got one that has none: define it, or {RECIPE}"
        )

    def _kept(self, size: int) -> Passes | None:
        kept = None if self._layer is None or self._layer.kept is None else self._layer.take_kept()
        return kept if kept is not None and len(kept.predicted) == size else None

    def _passes(self, output: Any, size: int) -> Passes:
        logits = logits_of(output)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != size or logits.shape[1] < 2:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"expected logits (B, C) of at least two classes from {type(self.module).__name__}, got {got} for a "
                f"batch of {size}: {RECIPE}, or return a brainet_pl.evaluation.record.SampleBatch from test_step"
            )
        logits = wide(logits)
        if self._are_probabilities is None:
            self._are_probabilities = bool((logits >= 0).all() & ((logits.sum(dim=1) - 1).abs() < 1e-3).all())
            if self._are_probabilities:
                rank_zero_info(f"{type(self.module).__name__} gives probabilities: they are taken as such")
        if self._are_probabilities:
            logits = logits.clamp_min(torch.finfo(torch.float32).tiny).log()
        task, outputs = self._predictor_of_logits(logits.shape[1]).task, logits.unsqueeze(0)
        scores = task.scores(outputs, None)
        return Passes(outputs, None, logits, task.predictive(outputs, None), scores)

    def _predictor_of_logits(self, classes: int) -> Predictor:
        if self._predictor is None:
            self._predictor = Predictor(FeatureExtractor(nn.Identity()), Classification(classes))
        return self._predictor

    def _predictor_for(self, passes: Passes) -> Predictor:
        return self._predictor_of_logits(passes.outputs.shape[2])


def computed(metrics: Mapping[str, MetricCollection]) -> dict[str, Tensor]:
    """The values of metrics that have seen something; a collective."""
    values: dict[str, Tensor] = {}
    for collection in metrics.values():
        if all(metric.update_called for metric in collection.values()):
            values |= collection.compute()
    return values
