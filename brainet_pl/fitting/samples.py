"""Extracted samples by what they are used for."""

from __future__ import annotations

from typing import NamedTuple

from brainet_pl.features.extraction import Extracted
from brainet_pl.network.base import MIN_VALIDATION


class Samples(NamedTuple):
    """What one fit knows, by role.

    Attributes:
        train: samples that weights, structures and densities are fitted to.
        select: samples that choose the epoch, the dropout, the temperature of the posterior and the blend.
        calibrate: samples that probabilities, p-values and conformal sets go by.
    """

    train: Extracted
    select: Extracted | None
    calibrate: Extracted | None

    @classmethod
    def with_one_held_out_set(cls, train: Extracted, held_out: Extracted | None) -> Samples:
        """Both roles of held-out data by the same samples."""
        return cls(train, held_out, held_out)


def enough_to_choose(samples: Extracted | None) -> Extracted | None:
    """The samples, or None where they are too few to choose anything by."""
    return samples if samples is not None and len(samples.targets) >= MIN_VALIDATION else None
