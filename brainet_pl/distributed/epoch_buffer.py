"""What is observed in an epoch: named columns with a row for each sample, put together over all processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from brainet_pl.distributed.collectives import all_gather, processes


class EpochBuffer:
    """Columns that are appended batch by batch, and collected from all processes once, when the epoch ends.

    Values are kept as they come, NaN included: whoever collects them decides what NaN means.

    >>> buffer = EpochBuffer()
    >>> for label in (0, 1):
    ...     buffer.append({"label": torch.tensor([label])})
    >>> buffer.collect(), buffer.collect()
    ({'label': tensor([0, 1])}, {})
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Tensor]] = []

    def append(self, columns: Mapping[str, Tensor]) -> None:
        """Add the columns (B, …) of a batch; all batches of an epoch have the same ones."""
        self._batches.append({name: values.detach() for name, values in columns.items()})

    def reset(self) -> None:
        """Forget all batches of the epoch."""
        self._batches = []

    def collect(self) -> dict[str, Tensor]:
        """Name → (N, …) of all processes, by rank, and reset; nothing where no process saw a batch. A collective."""
        batches, self._batches = self._batches, []
        columns = _join(batches)
        if processes() == 1:
            return columns
        device = next((values.device for values in columns.values()), None)
        shares = all_gather({name: values.cpu() for name, values in columns.items()})
        everything = _join([share for share in shares if share])
        return {name: values.to(device) for name, values in everything.items()}


def _join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Columns behind each other, by name; {} of no parts."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
