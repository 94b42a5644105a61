"""What one set of passes gave for a batch: the typed thing that travels from a model to scores and calibrators."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.taps import Taps


@dataclass(frozen=True)
class Passes:
    """One prediction of a batch, before any calibration.

    Attributes:
        outputs: (T, B, O) what the head gave in each pass.
        weights: (T,) weights of the passes, or None where all count alike.
        features: (B, d) what the head reads, or what a score with layers of its own reads.
        predicted: the task's average over passes: probabilities (B, C), or mean and variance (B, 2).
        scores: name → (B,) the scores of the prediction itself, higher for a less certain sample.
        backbone_output: all that the backbone gave; None where it is the features alone.
        nan_inputs: (B,) which samples have NaN in their inputs; None where nobody looked.
    """

    outputs: Tensor
    weights: Tensor | None
    features: Tensor
    predicted: Tensor
    scores: dict[str, Tensor] = field(default_factory=dict)
    backbone_output: BackboneOutput | None = None
    nan_inputs: Tensor | None = None

    def first(self, n: int) -> Passes:
        """The passes of the first n samples of the batch."""
        scores = {name: values[:n] for name, values in self.scores.items()}
        output = None if self.backbone_output is None else self.backbone_output[:n]
        given = None if self.nan_inputs is None else self.nan_inputs[:n]
        return Passes(self.outputs[:, :n], self.weights, self.features[:n], self.predicted[:n], scores, output, given)

    def nan_rows(self, final: Tensor | None = None) -> Tensor:
        """Tells which samples (B,) have NaN in inputs or prediction, or in the calibrated prediction `final`."""
        rows = (self.predicted if final is None else final).isnan().any(dim=-1)
        return rows if self.nan_inputs is None else rows | self.nan_inputs.to(rows.device)

    def with_features_of(self, taps: Taps | None) -> Passes:
        """The same passes with the features of other layers; None is what the head reads."""
        if taps is None:
            return self
        # Never `self.backbone_output or …`: it asks for a length, which an exported graph has none of.
        output = BackboneOutput(self.features) if self.backbone_output is None else self.backbone_output
        return replace(self, features=output.view(taps))
