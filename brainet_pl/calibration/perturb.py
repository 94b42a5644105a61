"""Perturbed copies of features whose labels are known: what harmless changes of known inputs look like."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MOST_ROWS = 1000  # validation samples that are perturbed
COLUMN_NOISE = (0.1, 0.2, 0.4)  # in deviations of each column
COMMON_NOISE = (0.05, 0.1, 0.2, 0.4)  # in the mean deviation of all columns, so that constant ones change as well
SWAPPED = 0.2  # share of values that come from another sample of the class


def perturbed_copies(features: Tensor, target: Tensor) -> Iterator[Tensor]:
    """Features (N, d) and targets (N,) → copies (N, d): first as they are, then with noise, then with values swapped.

    Values are swapped between samples of one class; for targets that are no classes there is no such copy. The copies
    of the same features are always the same.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(features.shape, generator=generator).to(features)
    deviation = features.std(dim=0)
    common = deviation.square().mean().sqrt()
    yield features
    for sigma in COLUMN_NOISE:
        yield features + sigma * deviation * noise
    for sigma in COMMON_NOISE:
        yield features + sigma * common * noise
    if not target.is_floating_point():
        yield swap_within_classes(features, target, generator)


def swap_within_classes(features: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    """Features (N, d) of which a share `SWAPPED` is taken from a random sample of the same class."""
    order = torch.randperm(len(target), generator=generator).to(target.device)
    partner = torch.empty_like(order)
    partner[target.argsort(stable=True)] = order[target[order].argsort(stable=True)]
    swapped = (torch.rand(features.shape, generator=generator) < SWAPPED).to(features.device)
    return torch.where(swapped, features[partner], features)
