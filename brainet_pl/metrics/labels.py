"""Labels of a batch are looked at once, however many metrics see them: every look makes a GPU wait."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

_last: tuple[weakref.ref[Tensor], int, int] | None = None  # the labels that were checked last, their version, classes


def out_of_range(labels: Tensor, classes: int) -> tuple[int, int] | None:
    """The least and largest of labels (B,) where they are not all from 0 to `classes` - 1; None where they are.

    One read of the device; none for labels that were checked or clamped just now.
    """
    if not labels.numel() or _is_last(labels, classes):
        return None
    low, high = torch.stack(torch.aminmax(labels)).tolist()
    if 0 <= low <= high < classes:
        _remember(labels, classes)
        return None
    return low, high


def clamped(labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Labels (B,) that are safe to count with, and a scalar that says on the device whether one of them was not."""
    safe = labels.clamp(0, classes - 1)
    _remember(safe, classes)
    return safe, (safe != labels).any()


def _remember(labels: Tensor, classes: int) -> None:
    global _last
    if not torch.compiler.is_compiling():
        _last = weakref.ref(labels), _version(labels), classes


def _is_last(labels: Tensor, classes: int) -> bool:
    if _last is None or torch.compiler.is_compiling():
        return False
    seen, version, count = _last
    return seen() is labels and version == _version(labels) and count <= classes


def _version(labels: Tensor) -> int:
    return 0 if labels.is_inference() else labels._version
