"""The output of a backbone for a batch, which heads and scores read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from brainet_pl.backbones.taps import Taps


@dataclass(frozen=True)
class BackboneOutput:
    """The output of a backbone for a batch; in place of inputs, it says that the backbone has run already.

    Attributes:
        features: (B, d) what the head reads.
        more: what scores with taps of their own read, each (B, d').
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
        """Apply a function to every tensor."""
        more = {taps: function(features) for taps, features in self.more.items()}
        return BackboneOutput(
            function(self.features), more, None if self.base_logits is None else function(self.base_logits)
        )

    def to(self, *args: Any, **kwargs: Any) -> BackboneOutput:
        """Move every tensor, as `Tensor.to` does."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, which: Any) -> BackboneOutput:
        """Some of the samples."""
        return self.map(lambda tensor: tensor[which])

    @staticmethod
    def concat(parts: Sequence[BackboneOutput]) -> BackboneOutput:
        """Several batches as one."""
        if not sum(map(len, parts)):
            raise ValueError(
                "expected training data to extract features from, got no sample: check the data or its loader"
            )
        logits = [part.base_logits for part in parts if part.base_logits is not None]
        more = {taps: torch.cat([part.more[taps] for part in parts]) for taps in parts[0].more}
        return BackboneOutput(torch.cat([part.features for part in parts]), more, torch.cat(logits) if logits else None)
