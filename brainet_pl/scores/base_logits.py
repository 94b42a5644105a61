"""Scores of the network that a backbone was: what its own classification layer makes of inputs, beside the new head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from brainet_pl import uncertainty
from brainet_pl.scores.base import Score
from brainet_pl.tasks.passes import Passes


class Own(Score):
    """Scores of the original network: its energy (Liu et al. 2020), `own_energy`, and `own_one_minus_max_p`.

    Its own logits come with the same pass that gives the features, whatever layers and head the model has, and however
    many classes the network was trained for.
    """

    units: ClassVar[Mapping[str, str]] = {"own_energy": "", "own_one_minus_max_p": ""}
    needs_fit: ClassVar[bool] = False
    joins = "never"

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """`own_energy` and `own_one_minus_max_p`, each (B,)."""
        base_logits = None if passes.backbone_output is None else passes.backbone_output.base_logits
        if base_logits is None:
            raise ValueError(
                "expected the logits of the network's own classification layer for the score Own, got a backbone "
                "without one: give a model with its classification layer (head_layer=None finds it), or leave Own out"
            )
        logits = base_logits.float().unsqueeze(0)  # one pass
        return {
            "own_energy": uncertainty.energy(logits),
            "own_one_minus_max_p": uncertainty.one_minus_max_p(logits.softmax(dim=-1)),
        }
