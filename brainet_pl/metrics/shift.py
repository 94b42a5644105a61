"""How predictions hold when inputs change: the same measures for each corruption and severity.

A loader whose name is `shift/<corruption>/<severity>` holds labelled samples after a shift. The loader `shift` holds
many such sets, one behind the other: what Lightning gives back of a test grows with loaders × metrics, and dozens of
loaders would be more than it can send from one process to another. Of each shift only sums are kept.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brainet_pl._utils.precision import measurable
from brainet_pl.metrics.curves import calibration_error, calibration_sums
from brainet_pl.metrics.losses import gaussian_nll

LOADER = "shift"  # the loader of many shifts; its data set says which, in the attribute `parts`
PREFIX = "shift/"
Sums = dict[str, Tensor]  # float64 sums over samples on the CPU; those of two batches, or two processes, simply add


class ShiftSums(NamedTuple):
    """Sums over samples of the averaged prediction, and of the calibrated one; None where nothing is calibrated."""

    predicted: Sums
    final: Sums | None


class Shift(NamedTuple):
    """A corruption and its severity, from 1 on; the clean test set is "clean", 0."""

    corruption: str
    severity: int


class ShiftResult(NamedTuple):
    """What was measured after one shift."""

    corruption: str  # its name; "clean" is the test set itself
    severity: int  # from 1 on; 0 of the test set
    samples: int  # how many
    predicted: dict[str, float]  # measure → value of the averaged prediction: Acc, NLL, Brier and ECE, or RMSE and NLL
    final: dict[str, float] | None  # the same after calibration; None where there is none


def shift_name(corruption: str, severity: int) -> str:
    """The name of the loader: `shift/fog/3`."""
    return f"{PREFIX}{corruption}/{severity}"


def is_shift(loader: str) -> bool:
    """Whether a loader of that name holds shifted samples."""
    return loader == LOADER or parse_shift(loader) is not None


def parts_of(loader: str, data: Any) -> dict[str, int]:
    """Name → size of each shift that a loader of that name holds, in their order; the last may have no end."""
    if loader != LOADER:
        return {loader: sys.maxsize}
    parts = getattr(data, "parts", None)
    if not isinstance(parts, Mapping) or not parts or any(parse_shift(str(name)) is None for name in parts):
        raise ValueError(
            f"expected a data set with `parts`, sizes by name ({PREFIX}<corruption>/<severity>), in the loader "
            f"{LOADER!r}, got {type(data).__name__}: take Shifts of a datamodule, or name a loader for each shift"
        )
    return {str(name): int(size) for name, size in parts.items()}


def split_by_part(numbers: Tensor, parts: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Places of samples (B,) in a loader → each shift that has some of them, and which (B,) they are."""
    ends = torch.tensor(list(parts.values()), dtype=torch.float64).cumsum(0)
    place = torch.bucketize(numbers.double().cpu(), ends, right=True)
    for i in sorted(set(place.tolist())):
        yield list(parts)[i], place == i


def parse_shift(name: str) -> Shift | None:
    """The shift that a loader's name says, or None where it is another set."""
    if not name.startswith(PREFIX):
        return None
    corruption, _, severity = name.removeprefix(PREFIX).rpartition("/")
    if not corruption or not severity.isdecimal() or int(severity) < 1:
        raise ValueError(
            f"expected loaders of shifts to be called {PREFIX}<corruption>/<severity>, with a severity from 1 on, got "
            f"{name!r}: rename it"
        )
    return Shift(corruption, int(severity))


def class_sums(probs: Tensor, target: Tensor) -> Sums:
    """Probabilities (B, C) and labels (B,) → what `measures_of` needs of them."""
    probs, target = measurable(probs).double(), measurable(target)
    confidence, label = probs.max(dim=1)
    hit = ((label == target) & ~confidence.isnan()).double()
    own = probs.gather(1, target.long()[:, None]).squeeze(1)
    found = {
        "samples": torch.tensor(float(len(target)), dtype=torch.float64),
        "Acc": hit.sum(),
        "NLL": -own.clamp(torch.finfo(torch.float32).tiny, 1.0).log().sum(),
        "Brier": ((probs**2).sum(dim=1) - 2 * own + 1).sum(),
        "bins": calibration_sums(confidence.float(), hit.float()),
    }
    return {name: value.cpu() for name, value in found.items()}


def number_sums(predicted: Tensor, target: Tensor) -> Sums:
    """Means and variances (B, 2) and targets (B,) → what `measures_of` needs of them."""
    predicted, target = measurable(predicted), measurable(target)
    mean, variance = predicted.double().unbind(dim=1)
    found = {
        "samples": torch.tensor(float(len(target)), dtype=torch.float64),
        "squares": ((mean - target) ** 2).sum(),
        "NLL": gaussian_nll(mean, variance, target.double()).sum(),
    }
    return {name: value.cpu() for name, value in found.items()}


def add_sums(one: ShiftSums | None, other: ShiftSums | None) -> ShiftSums | None:
    """Of two batches, or two processes, either of which may have seen nothing."""
    if one is None or other is None:
        return one or other

    def both(a: Sums, b: Sums) -> Sums:
        return {name: value + b[name] for name, value in a.items()}

    final = None if one.final is None or other.final is None else both(one.final, other.final)
    return ShiftSums(both(one.predicted, other.predicted), final)


def measures_of(sums: Sums) -> dict[str, float]:
    """Sums → Acc, NLL, Brier and ECE of classes, RMSE and NLL of numbers.

    >>> found = measures_of(class_sums(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])))
    >>> {name: round(value, 3) for name, value in found.items()}
    {'Acc': 0.5, 'NLL': 1.204, 'Brier': 0.82, 'ECE': 0.4}
    """
    n = float(sums["samples"])
    found: dict[str, float] = {name: float(sums[name]) / n for name in ("Acc", "NLL", "Brier") if name in sums}
    if "bins" in sums:
        found["ECE"] = float(calibration_error(sums["bins"]))
    if "squares" in sums:
        found = {"RMSE": math.sqrt(float(sums["squares"]) / n)} | found
    return found


def means(shifts: Sequence[ShiftResult], severity: int | None = None) -> dict[str, dict[str, float]]:
    """ "predicted" and, where there is one, "final" → measure → mean over shifts, of one severity or of all.

    The test set itself is left out.
    """
    chosen = [s for s in shifts if s.severity and severity in (None, s.severity)]
    found = {}
    for which in ("predicted", "final"):
        values: list[Mapping[str, float]] = [part for s in chosen if (part := getattr(s, which)) is not None]
        if values:
            found[which] = {name: sum(part[name] for part in values) / len(values) for name in values[0]}
    return found
