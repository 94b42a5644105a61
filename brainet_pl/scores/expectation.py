"""What a verdict is expected to notice of unknown inputs, as a user reads it and as a checkpoint holds it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils.data_sized import DataSizedBuffers

HARDLY = 0.2  # share of unknown inputs up to which a verdict is not to be relied on


def least_held(level: float) -> int:
    """The least number of held-out samples by which one can be called unknown.

    >>> least_held(0.05)
    19
    """
    return math.ceil(1 / level - 1e-9) - 1


class Expectation(NamedTuple):
    """What a verdict is expected to notice; NaN where that could not be estimated.

    Attributes:
        score: the score that the verdict goes by.
        parts: the scores that it joins; nothing where it is a single one.
        level: the share of known samples that it may call unknown.
        low, high: the range in which the share of a class that was never seen and is called unknown should be.
        noticed: that share of the classes that were left out, their median.
        permuted: the share of samples with permuted features that is called unknown.
        doubt: why no class was left out, or nothing.
    """

    score: str
    parts: tuple[str, ...] = ()
    level: float = 0.05
    low: float = math.nan
    high: float = math.nan
    noticed: float = math.nan
    permuted: float = math.nan
    doubt: str = ""

    @property
    def share(self) -> float:
        """The share to judge by: of classes left out, else of permuted samples, else NaN."""
        return self.permuted if math.isnan(self.noticed) else self.noticed

    @property
    def unreliable(self) -> bool:
        """Whether hardly any unknown input is noticed."""
        return self.share <= HARDLY

    def __str__(self) -> str:
        """One sentence for a user.

        >>> str(Expectation("joint", ("energy", "generative"), low=0.4, high=0.75, noticed=0.5))
        'unknown inputs are told by joint (energy, generative); of a class left out, 40 to 75 % were noticed (5 % of \
known ones are called unknown)'
        """
        joined = f" ({', '.join(self.parts)})" if self.parts else ""
        text = f"unknown inputs are told by {self.score}{joined}"
        if math.isnan(self.share):
            return f"{text}; how many will be noticed is not known: {self.doubt or 'it was not estimated'}"
        if not math.isnan(self.noticed):
            text += f"; of a class left out, {100 * self.low:.0f} to {self.high:.0%} were noticed"
        else:
            text += f"; rows with permuted columns were noticed in {self.permuted:.0%}"
        text = f"{text} ({self.level:.0%} of known ones are called unknown)".replace("%", " %")
        text += f"; no class could be left out: {self.doubt}" if self.doubt else ""
        return f"{text}: hardly better than chance, do not rely on it here" if self.unreliable else text


class Expected(DataSizedBuffers):
    """The expectation of a model as a buffer, which travels in its checkpoints."""

    listed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.value: Expectation | None = None
        self.register_buffer("listed", torch.empty(0, dtype=torch.uint8))  # the same, as JSON

    def keep(self, value: Expectation) -> None:
        """Take an estimate in place of the one before."""
        fields = {name: field for name, field in value._asdict().items() if field == field}  # no NaN in JSON
        self.listed = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8, device=self.listed.device)
        self.value = value

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read the estimate of a checkpoint; there is none where it has none."""
        text = bytes(stored["listed"].tolist()) if "listed" in stored else b""
        self.value = None
        if text:
            fields = json.loads(text)
            self.value = Expectation(**fields | {"parts": tuple(fields["parts"])})
