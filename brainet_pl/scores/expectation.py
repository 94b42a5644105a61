"""What a verdict is expected to notice of unknown inputs, as a user reads it and as a checkpoint holds it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils.data_sized import DataSizedBuffers


class Expectation(NamedTuple):
    """What a verdict is expected to notice; NaN where that could not be estimated.

    Attributes:
        score: the score that the verdict goes by.
        parts: the scores that it joins; nothing where it is a single one.
        level: the share of known samples that it may call unknown.
        noticed: the share of a left-out class that is called unknown, the mean over classes.
        error: its standard error.
        worst: that share of the class that is noticed least.
        worst_class: the number of this class, or -1.
        permuted: the share of samples with permuted features that is called unknown.
        doubt: why `noticed` was not estimated, or nothing.
    """

    score: str
    parts: tuple[str, ...] = ()
    level: float = 0.05
    noticed: float = math.nan
    error: float = math.nan
    worst: float = math.nan
    worst_class: int = -1
    permuted: float = math.nan
    doubt: str = ""

    @property
    def share(self) -> float:
        """The share to judge by: of left-out classes, else of permuted samples, else NaN."""
        return self.permuted if math.isnan(self.noticed) else self.noticed

    @property
    def unreliable(self) -> bool:
        """Whether unknown inputs are noticed hardly more often than known ones are called unknown."""
        error = 0.0 if math.isnan(self.error) else self.error
        return self.share < 2 * self.level + error

    def __str__(self) -> str:
        """One sentence for a user.

        >>> str(Expectation("joint", ("energy", "generative"), noticed=0.63, error=0.05))
        'unknown inputs are told by joint (energy, generative); of a class left out, 63 % were noticed (5 % of known \
ones are called unknown)'
        """
        joined = f" ({', '.join(self.parts)})" if self.parts else ""
        text = f"unknown inputs are told by {self.score}{joined}"
        if math.isnan(self.share):
            return f"{text}; how many will be noticed is not known: {self.doubt or 'it was not estimated'}"
        found = [f"rows with permuted columns were noticed in {self.permuted:.0%}"]
        if not math.isnan(self.noticed):
            found = [f"of a class left out, {self.noticed:.0%} were noticed"]
        text = f"{text}; {found[0]} ({self.level:.0%} of known ones are called unknown)".replace("%", " %")
        text += f"; no class could be left out: {self.doubt}" if self.doubt else ""
        return f"{text}: hardly better than chance, do not rely on it here" if self.unreliable else text


class Expected(DataSizedBuffers):
    """The expectation of a model as buffers, which travel in its checkpoints."""

    may_be_missing: ClassVar[bool] = True
    numbers: Tensor
    listed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._value: Expectation | None = None
        # noticed, error, worst, worst_class, permuted; -1 is NaN, so that equal states compare as equal
        self.register_buffer("numbers", torch.empty(0))
        self.register_buffer("listed", torch.empty(0, dtype=torch.uint8))  # the rest, as JSON

    @property
    def value(self) -> Expectation | None:
        """What was estimated, or None."""
        return self._value

    def keep(self, value: Expectation) -> None:
        """Take an estimate in place of the one before."""
        numbers = [value.noticed, value.error, value.worst, float(value.worst_class), value.permuted]
        text = json.dumps({"score": value.score, "parts": value.parts, "level": value.level, "doubt": value.doubt})
        self.numbers = torch.tensor(numbers, device=self.numbers.device).nan_to_num(nan=-1.0)
        self.listed = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.numbers.device)
        self._value = value

    def before_load(self, stored: Mapping[str, Tensor]) -> None:
        """Read the estimate of a checkpoint; there is none where it has none."""
        if not len(stored.get("listed", ())):
            self._value, self.numbers, self.listed = None, self.numbers[:0], self.listed[:0]
            return
        numbers = stored["numbers"].tolist()
        noticed, error, worst, worst_class, permuted = (math.nan if number < 0 else number for number in numbers)
        rest = json.loads(bytes(stored["listed"].tolist()).decode())
        rest["parts"] = tuple(rest["parts"])
        worst_class = -1 if math.isnan(worst_class) else int(worst_class)
        self._value = Expectation(
            noticed=noticed, error=error, worst=worst, worst_class=worst_class, permuted=permuted, **rest
        )
