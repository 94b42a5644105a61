"""Training rows that lie so far out that means and covariances would be about them alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from brainet_pl._utils.framework import rank_zero_warn

USUAL = 0.98  # share of the rows by whose distance from the middle of a column a row is judged
FAR = 20.0  # times that distance; the largest of 10,000 normal rows has 1.7, of log-normal ones 7
MOST_FAR = 0.05  # share of rows above which the columns have long tails, and no row is an error
SAMPLE = 5000  # rows that tell the middle of a column, and the usual distance from it
SHOWN = 5  # rows that a warning names


def far_rows(features: Tensor, labels: Tensor) -> Tensor:
    """Features (N, d) and labels (N,) → the numbers (K,) of the rows that statistics should be taken without.

    In one column at least they are `FAR` times as far from the median as 98 % of all rows are. No class loses half of
    its rows, and nothing is far where more than one row in twenty would be.

    >>> x = torch.arange(100.0)[:, None]
    >>> x[7] = 1e5
    >>> far_rows(x, torch.zeros(100, dtype=torch.long))
    tensor([7])
    """
    if len(features) < 3:
        return torch.empty(0, dtype=torch.long)
    few = features
    if len(features) > SAMPLE:
        chosen = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:SAMPLE]
        few = features[chosen.to(features.device)]
    middle = few.median(dim=0).values
    distance = (features - middle).abs()
    far = (distance > FAR * _usual_distance((few - middle).abs())).any(dim=1)
    if float(far.double().mean()) > MOST_FAR:
        return torch.empty(0, dtype=torch.long)
    labels = labels.long()
    of_class = torch.bincount(labels[far], minlength=int(labels.max()) + 1)
    kept = 2 * of_class < torch.bincount(labels, minlength=len(of_class))
    return (far & kept[labels]).nonzero()[:, 0].cpu()


def far_scores(columns: Sequence[Tensor]) -> Tensor:
    """Scores (N,) of the same samples → the numbers (K,) of those that lie far out under one of them.

    Low scores are usual, however low. What is not finite is no sign of an error: such a sample stays the strangest.

    >>> far_scores([torch.cat([torch.linspace(0, 1, 99), torch.tensor([500.0])])])
    tensor([99])
    """
    table = torch.stack([values.double() for values in columns], dim=1)
    table = table.masked_fill(~table.isfinite(), torch.nan)
    middle = table.nanmedian(dim=0).values
    above = torch.where(table.isnan(), middle, table).maximum(middle)
    return far_rows(above, torch.zeros(len(table), dtype=torch.long, device=table.device))


def within_quantiles(values: Tensor, share: float = 0.02) -> Tensor:
    """Values (N, d) with the lowest and the highest `share` of each column brought to the next ones."""
    ordered = values.sort(dim=0).values
    cut = min(math.ceil(share * len(values)), (len(values) - 1) // 2)
    return values.clamp(ordered[cut], ordered[len(values) - 1 - cut])


def _usual_distance(distance: Tensor) -> Tensor:
    """Distances (n, d) of rows from the middle → (d,) what 98 % of them are within.

    Of a column that is mostly one value, such as a rare category, half of the others.
    """
    n, ordered = len(distance), distance.sort(dim=0).values
    usual = ordered[max(0, int(USUAL * n) - 1)]
    same = (ordered == 0).sum(dim=0)
    others = ordered.gather(0, (same + (n - same) // 2).clamp_max(n - 1)[None])[0]
    usual = torch.where(usual > 0, usual, others)
    return torch.where(usual > 0, usual, torch.inf)


def warn_of_far_rows(numbers: Tensor, count: int) -> None:
    """Say which of `count` training rows no score was fitted to."""
    if not len(numbers):
        return
    rank_zero_warn(
        f"scores of unknown inputs were fitted without {len(numbers):,} of {count:,} training rows, "
        f"{name_rows(numbers)}: "
        f"some of their values are more than {FAR:g} times as far from the median as those of {USUAL:.0%} of the rows; "
        "correct or drop them"
    )


def name_rows(numbers: Tensor) -> str:
    """The first few numbers (K,) of rows, for a message.

    >>> name_rows(torch.tensor([7])), name_rows(torch.arange(6))
    ('row 7', 'rows 0, 1, 2, 3, 4, …')
    """
    listed = ", ".join(str(number) for number in numbers[:SHOWN].tolist())
    return f"{'row' if len(numbers) == 1 else 'rows'} {listed}{', …' if len(numbers) > SHOWN else ''}"
