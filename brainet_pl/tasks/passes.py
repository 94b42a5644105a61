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
        features: (B, d) what the head read, and scores without layers of their own.
        predicted: the task's average over passes: probabilities (B, C), or mean and variance (B, 2).
        scores: name → (B,) the scores of the prediction itself, higher for a less certain sample.
        readings: all that the backbone gave; None where it is the features alone.
    """

    outputs: Tensor
    weights: Tensor | None
    features: Tensor
    predicted: Tensor
    scores: dict[str, Tensor] = field(default_factory=dict)
    readings: BackboneOutput | None = None

    def first(self, n: int) -> Passes:
        """The same of the first n samples of the batch."""
        scores = {name: values[:n] for name, values in self.scores.items()}
        readings = None if self.readings is None else self.readings[:n]
        return Passes(self.outputs[:, :n], self.weights, self.features[:n], self.predicted[:n], scores, readings)

    def seen_by(self, taps: Taps | None) -> Passes:
        """The same for who reads other layers: `features` are theirs."""
        if taps is None:
            return self
        # Never `self.readings or …`: it asks for a length, which an exported graph has none of.
        readings = BackboneOutput(self.features) if self.readings is None else self.readings
        return replace(self, features=readings.view(taps))
