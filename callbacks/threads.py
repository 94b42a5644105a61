"""How many threads a fit on a CPU uses."""

from __future__ import annotations

from typing import Literal

from brainet_pl._utils import checks
from brainet_pl._utils.framework import Callback, pl
from brainet_pl._utils.threads import SMALL, limit_threads
from brainet_pl.features.training import FeatureFolder
from brainet_pl.lightning.module import BRAINet


class Threads(Callback):
    """Trains small heads on one thread: their products are so small that threads wait for each other.

    On two busy cores a head of 16,000 parameters trains forty times slower with two threads than with one. A `BRAINet`
    brings this callback itself. It does nothing where OMP_NUM_THREADS is set, on a GPU, for large heads, and where the
    backbone runs in every step.

    Args:
        count: Number of threads of a fit; "auto" is 1 for small heads and torch's own number for all else, null leaves
            torch as it is.
    """

    def __init__(self, count: int | Literal["auto"] | None = "auto") -> None:
        self.count = count if count is None or count == "auto" else checks.whole("count", count, 1)
        self._limit: limit_threads | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Features of a cached backbone are extracted by now, with all threads."""
        if trainer.strategy.root_device.type != "cpu" or not isinstance(pl_module, BRAINet):
            return
        count = self.count
        if count == "auto":
            runs = not pl_module.backbone.raw and not _trains_on_features(trainer)
            head = pl_module.head
            count = 1 if head is not None and head.num_params <= SMALL and not runs else None
        if count is not None:
            self._limit = limit_threads(count, always=self.count != "auto")
            self._limit.__enter__()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give torch its threads back."""
        if self._limit is not None:
            self._limit.__exit__(None, None, None)
            self._limit = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give torch its threads back after a failure too."""
        self.on_fit_end(trainer, pl_module)


def _trains_on_features(trainer: pl.Trainer) -> bool:
    """Whether a callback feeds features of the backbone in place of inputs."""
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, FeatureFolder) for callback in callbacks)
