"""What a backbone gives for the samples of a batch: the typed thing that travels from it to heads and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from brainet_pl.backbones.taps import Taps


@dataclass(frozen=True)
class BackboneOutput:
    """What a backbone gave for the samples of a batch, in the place of the inputs: it has seen these samples already.

    Attributes:
        features: (B, d) what the head reads.
        more: what scores read that have taps of their own, each (B, d').
        base_logits: (B, C') the logits of the model's own classification layer, or None where none was removed.
    """

    features: Tensor
    more: Mapping[Taps, Tensor] = field(default_factory=dict)
    base_logits: Tensor | None = None

    def view(self, taps: Taps | None) -> Tensor:
        """Gives the features of some taps, (B, d); None asks for what the head reads."""
        if taps is None or taps in self.more:
            return self.features if taps is None else self.more[taps]
        raise ValueError(
            f"expected features of {taps}, got {'; '.join(map(str, self.more)) or 'those of the head alone'}: extract "
            "them with a model that has the score"
        )

    def map(self, function: Any) -> BackboneOutput:
        """The same with every tensor changed alike."""
        more = {taps: function(features) for taps, features in self.more.items()}
        return BackboneOutput(
            function(self.features), more, None if self.base_logits is None else function(self.base_logits)
        )

    def to(self, *args: Any, **kwargs: Any) -> BackboneOutput:
        """The same on another device."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, which: Any) -> BackboneOutput:
        """Some of the samples."""
        return self.map(lambda tensor: tensor[which])

    @staticmethod
    def together(parts: Sequence[BackboneOutput]) -> BackboneOutput:
        """Several batches as one; there must be at least one."""
        first = parts[0]
        logits = [part.base_logits for part in parts if part.base_logits is not None]
        more = {taps: torch.cat([part.more[taps] for part in parts]) for taps in first.more}
        return BackboneOutput(torch.cat([part.features for part in parts]), more, torch.cat(logits) if logits else None)
