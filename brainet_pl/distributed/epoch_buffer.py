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
        columns = {name: torch.cat([batch[name] for batch in batches]) for name in batches[-1]} if batches else {}
        if processes() == 1:
            return columns
        device = next((values.device for values in columns.values()), None)
        shares = [share for share in all_gather({name: values.cpu() for name, values in columns.items()}) if share]
        return {name: torch.cat([share[name] for share in shares]).to(device) for name in (shares[0] if shares else ())}
