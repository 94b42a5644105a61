"""Several scores in one, without a look at unknown data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from brainet_pl._utils import checks
from brainet_pl.scores.base import JoinedScore, check_name
from brainet_pl.scores.reference import Surprise, fit_surprise
from brainet_pl.tasks.passes import Passes

FOLDS = 20  # parts of the validation data, each judged by the others


class Combined(JoinedScore):
    """The sum of the surprises of several scores: Fisher's way to make one test of many.

    `joint` is Σ_i -log u_i, u_i the share of validation samples at least as strange as the input under score i, with an
    exponential tail beyond the strangest tenth. Scores in any units can be added that way, and what only one of them
    finds strange still counts. How likely such a sum is, though scores depend on each other, is what `known_p` tells.

    Args:
        of: Names of the scores that are added; null takes the first score of every other part in `scores` that joins
            (see `Score.joins`), and the energy where there is one.
        name: Suffix of its score, `_<name>`, where a model has more than one Combined; null for the only one.
    """

    units: ClassVar[Mapping[str, str]] = {"joint": "nats"}
    listed: Tensor
    knots: Tensor
    heights: Tensor
    slopes: Tensor

    def __init__(self, of: Sequence[str] | None = None, name: str | None = None) -> None:
        super().__init__()
        if of is not None and not (checks.are_texts(of) and len(of)):
            raise ValueError(
                f"expected of to be a list of names of scores, got {checks.shown(of)}: write ['generative', 'energy'], "
                "or leave it out"
            )
        self.of, self.name = None if of is None else list(of), check_name(name)
        self.names: list[str] = []  # what is added, once there are validation data
        self.register_buffer("listed", torch.empty(0, dtype=torch.uint8))  # the same, as JSON
        for buffer in ("knots", "heights", "slopes"):
            self.register_buffer(buffer, torch.empty(0))

    @property
    def ready(self) -> bool:
        """Whether it has seen validation data."""
        return len(self.names) > 0

    @property
    def joined_names(self) -> list[str]:
        """The scores that are added."""
        return list(self.default_names if self.of is None else self.of)

    def finalize(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Learn the surprise of every score from all scores (N,) of validation data; gives their `joint`."""
        names = self.joined_names
        missing = [name for name in names if name not in columns]
        if missing or not names:
            raise ValueError(
                f"expected scores of the model for Combined, got {', '.join(missing) or 'none'}: it has "
                f"{', '.join(columns)}; name some of these in of, or add parts to scores"
            )
        parts = zip(*(fit_surprise(columns[name]) for name in names), strict=True)
        device = self.fitted.device
        self.knots, self.heights, self.slopes = (torch.stack(part).to(device) for part in parts)
        self.names = names
        self.listed = torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8).to(device)
        return {"joint": cross_fitted([columns[name] for name in names])}

    def forward(self, passes: Passes) -> dict[str, Tensor]:
        """One set of passes with all other scores → `joint` (B,)."""
        return self.combine(passes.scores)

    def combine(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All other scores (B,) → `joint` (B,); NaN where one of them is."""
        if not self.names:  # no validation data has come yet
            return {}
        joint = torch.stack(list(self.parts(scores).values())).sum(dim=0)
        unknown = torch.stack([scores[name].isnan() for name in self.names]).any(dim=0)
        return {"joint": joint.masked_fill(unknown, torch.nan)}

    def parts(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All other scores (B,) → the surprise (B,) of each that is added."""
        fitted = zip(self.names, self.knots, self.heights, self.slopes, strict=True)
        return {name: Surprise(*one)(scores[name]) for name, *one in fitted}

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read the names of the scores that are added."""
        super().before_load(stored)
        listed = stored.get("listed", self.listed[:0])
        self.names = json.loads(bytes(listed.tolist()).decode()) if len(listed) else []


def cross_fitted(columns: Sequence[Tensor]) -> Tensor:
    """Scores (N,) of validation data → their joint surprise (N,), each by the surprises of the other samples.

    A sample among those that a surprise is learned from is never stranger than all of them; compared with such samples,
    new ones would be called unknown too often.
    """
    n = len(columns[0])
    fold = torch.arange(n, device=columns[0].device) % FOLDS
    joint = torch.zeros(n, device=columns[0].device)
    for values in columns:
        for k in range(min(n, FOLDS)):
            inside, outside = values[fold == k], values[fold != k]
            known = outside if int(outside.isfinite().sum()) > 1 else values  # too few to leave one out
            joint[fold == k] += fit_surprise(known)(inside)
    return joint.masked_fill(torch.stack([values.isnan() for values in columns]).any(dim=0), torch.nan)
