"""A backbone and a head: from inputs to the outputs of all passes, and to the loss of a training step."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl.backbones import FeatureExtractor
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.features.extraction import Extracted, run_backbone
from brainet_pl.network import Head, HeadSettings
from brainet_pl.network.base import MOST_PASSES, HeadInputs, Outputs, ResidualHead, need_tree, run_head, train_head
from brainet_pl.prediction.blend import Blend
from brainet_pl.prediction.finite import nan_rows
from brainet_pl.structure import GGT
from brainet_pl.tasks import Task
from brainet_pl.tasks.passes import Passes


class BackboneAndHead(nn.Module):
    """Maps inputs to the outputs of several passes; what a user is told of them is up to `Predictor`.

    Args:
        backbone: the feature extractor.
        task: what the outputs of the head mean.
        num_passes: how often a head that draws is run for a prediction.

    Attributes:
        head: maps features to outputs; None where its shape is not known yet, see `build_head`.
        in_features: number of features that the head reads; None before it is built.
        has_base_logits: whether there were logits of a removed layer to add to when the head was built.
        blend: how much the removed layer and the new head count.
    """

    def __init__(self, backbone: FeatureExtractor, task: Task, num_passes: int = 15) -> None:
        super().__init__()
        self.task, self.backbone = task, backbone
        self.num_passes = checks.whole("passes", num_passes, 1, MOST_PASSES)
        self.in_features: int | None = None
        self.has_base_logits = False
        self.blend = Blend()
        self.head: Head | None = None

    def build_head(
        self, settings: HeadSettings, in_features: int, ggt: GGT | None = None, has_base_logits: bool = False
    ) -> None:
        """Build the head for a number of features, wired by a learned tree where it needs one."""
        self.in_features, self.has_base_logits = in_features, has_base_logits
        head = settings.resolve_skip(has_base_logits).build(in_features, self.task.out_features, ggt)
        self.head = head.to(device_of(self))

    @property
    def ggt(self) -> GGT | None:
        """The learned tree, once there is one; of the heads on a MAP structure, that structure."""
        return None if self.head is None else self.head.ggt

    def require_head(self, settings: HeadSettings | None = None) -> Head:
        """The head, or an error that says how to get one."""
        if self.head is None and settings is not None:
            need_tree(None, settings)
        if self.head is None:
            raise ValueError(
                "expected a model with a head, got one that was never fitted: fit it, or load a checkpoint"
            )
        return self.head

    # -- training -----------------------------------------------------------------------------------------------------

    def loss(self, x: Any, target: Tensor) -> Tensor:
        """Inputs (B, …) and targets (B,) → the mean loss of all sub-networks that a training step draws.

        Of `Bayes`, without its penalty: add `head.penalty()` divided by the number of training samples.
        """
        return self.loss_and_outputs(x, self.task.check(target))[0]

    def loss_and_outputs(self, x: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and checked targets (B, …) → the task's loss and the head's outputs, (B, O) or (M, B, O)."""
        head, readings = self.require_head(), self.read(x)
        outputs = train_head(head, readings.features, self.base_outputs(readings))
        return self.task.loss(outputs, target), outputs

    def read(self, x: Any) -> BackboneOutput:
        """Inputs → features (B, d), and logits (B, C) of the removed layer where they count; features stay."""
        if isinstance(x, BackboneOutput):
            return x
        return run_backbone(self.backbone, x) if self.needs_base_logits else BackboneOutput(self.backbone(x))

    @property
    def needs_base_logits(self) -> bool:
        """Whether a prediction takes the logits of the layer that was removed."""
        return self.adds_base_logits or self.blend.active

    @property
    def adds_base_logits(self) -> bool:
        """Whether the head adds to the logits of the layer that was removed."""
        return isinstance(self.head, ResidualHead) and self.head.adds_base_logits

    def base_outputs(self, readings: BackboneOutput) -> Tensor | None:
        """The outputs (B, O) of the layer that was removed, where the head adds to them."""
        if not self.adds_base_logits or readings.base_logits is None:
            return None
        return self.task.base_outputs(readings.base_logits)

    def head_inputs(self, sample: Extracted) -> HeadInputs:
        """Extracted samples as a head takes them, where the head is."""
        device = device_of(self)
        base = self.base_outputs(sample.output.to(device))
        return HeadInputs(sample.features.to(device), self.task.check(sample.targets).to(device), base)

    # -- passes -------------------------------------------------------------------------------------------------------

    def passes(self, x: Any, count: int | None = None) -> Passes:
        """Inputs → outputs of all passes and what follows from them. The backbone runs once; only the head T times."""
        readings = x if isinstance(x, BackboneOutput) else run_backbone(self.backbone, x)
        count = self.num_passes if count is None else count
        outputs, weights = self.head_outputs(readings, count)
        predicted, scores = self.task.predictive(outputs, weights), self.task.scores(outputs, weights)
        return Passes(outputs, weights, readings.features, predicted, scores, readings, nan_rows(x, predicted.shape[0]))

    def head_outputs(self, readings: BackboneOutput, count: int) -> Outputs:
        """What a backbone gave → outputs (T, B, O) of passes, to which `blend` adds the logits of other layers.

        Where the head counts for nothing, they are these logits alone.
        """
        if self.blend.is_head_alone:
            return run_head(self.require_head(), readings.features, count, self.base_outputs(readings))
        others, weight = self._other_outputs(readings), self.blend.weights.head
        if not weight:
            return Outputs(others.unsqueeze(0))
        values, weights = run_head(self.require_head(), readings.features, count, self.base_outputs(readings))
        return Outputs(weight * values + others, weights)

    def _other_outputs(self, readings: BackboneOutput) -> Tensor:
        """The weighted outputs (B, O) of all that `blend` adds to the head."""
        base, _, linear = self.blend.weights
        parts: list[Tensor] = []
        if base:
            if readings.base_logits is None:
                raise ValueError(
                    "expected the logits of the network's own layer beside its features, got features alone: give "
                    "inputs"
                )
            parts.append(base * self.task.base_outputs(readings.base_logits))
        if linear:
            parts.append(linear * self.task.base_outputs(self.blend.linear(readings.features)))
        return torch.stack(parts).sum(dim=0)

    @property
    def averages_one(self) -> bool:
        """Whether all passes give the same, so that they never disagree: mutual information says nothing then."""
        return self.head is not None and (self.head.averages_one or not self.blend.weights.head)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights or buffers are; the CPU where it has none."""
    for tensor in chain(module.parameters(), module.buffers()):
        return tensor.device
    return torch.device("cpu")
