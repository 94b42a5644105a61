"""Several processes in one run: the place of each sample in its set, and work that the first process does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from brainet_pl._utils.framework import CombinedLoader, pl, rank_zero_warn
from brainet_pl.distributed.collectives import all_gather, keep_alive

T = TypeVar("T")

__all__ = ["Places", "Share", "active_loaders", "all_gather", "first_asks", "on_rank_zero", "share_of"]


# -- samples ----------------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """Which samples of a loader this process gets: those at the places rank, rank + processes, rank + 2·processes, ….

    Attributes:
        processes: The number of processes that share the samples of the loader.
        rank: The rank of this process among them.
        total: The number of samples that they share; None where the loader does not say.
    """

    processes: int
    rank: int
    total: int | None


def active_loaders(trainer: pl.Trainer) -> Any:
    """The loaders of the running validation, test or prediction, as the user named or listed them."""
    if trainer.predicting:
        return trainer.predict_dataloaders
    return trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders


def share_of(trainer: pl.Trainer, loader: Any) -> Share:
    """How the processes share a loader, if it has a `DistributedSampler`; others may give a sample to several."""
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None  # None: a batch is one item of the data
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return Share(sampler.num_replicas, sampler.rank, len(sampler.dataset))  # type: ignore[arg-type]
    return Share(trainer.world_size, trainer.global_rank, None)


class Places:
    """Numbers samples by their place in the order of their loader, with the same result for one process and for many.

    `DistributedSampler` gives samples to the processes in turn, and repeats the first ones until all processes have
    equally many. These copies are left out, so that each sample counts once.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._warned = False

    def of_batch(self, trainer: pl.Trainer, size: int, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """The numbers (K,) of the first K samples of a batch of this size; the others are copies and must not count.

        To be called once for each batch of the loader, in their order.
        """
        self._seen = self._seen if batch_idx else 0
        loader = CombinedLoader(active_loaders(trainer), "sequential").flattened[dataloader_idx]
        processes, rank, total = share_of(trainer, loader)
        numbers = (self._seen + torch.arange(size)) * processes + rank
        self._seen += size
        if total is None and trainer.world_size > 1 and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"expected a DataLoader with a DistributedSampler, which shares samples out to {trainer.world_size} "
                f"processes, got a {type(loader).__name__} without: every process counts all that its loader gives, so "
                "a sample that two of them get counts twice; give a DataLoader over a data set of known size"
            )
        return numbers if total is None else numbers[numbers < total]


# -- work -------------------------------------------------------------------------------------------------------------


def on_rank_zero(trainer: pl.Trainer, work: Callable[[], T]) -> T:
    """Run `work` in the first process and return its result in all; its error is raised in all of them too.

    A collective, so all processes must call it; `work` itself must not contain one. It may take longer than the timeout
    of the process group, and if a process dies meanwhile, the others notice at once.
    """
    return first_asks(trainer, lambda ask: work(), lambda request: None)


def first_asks(trainer: pl.Trainer, work: Callable[[Callable[[Any], Any]], T], serve: Callable[[Any], Any]) -> T:
    """`on_rank_zero` for work that needs the others: `ask(request)` runs `serve(request)` in all processes."""
    if trainer.world_size == 1:
        return work(serve)
    return keep_alive(work, serve, trainer.is_global_zero, trainer.strategy.broadcast)
