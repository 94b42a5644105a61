"""Threads of torch: small products are faster on one."""

from __future__ import annotations

import os
from types import TracebackType

SMALL = 300_000  # parameters of a head up to which one thread is enough


class limit_threads:
    """Let torch use so many threads inside a `with` block; where OMP_NUM_THREADS is set, that stands.

    Args:
        count: number of threads.
        always: also where OMP_NUM_THREADS is set.
    """

    def __init__(self, count: int, always: bool = False) -> None:
        self.count, self.always = count, always
        self.before: int | None = None

    def __enter__(self) -> None:
        import torch

        if self.always or "OMP_NUM_THREADS" not in os.environ:
            self.before = torch.get_num_threads()
            torch.set_num_threads(self.count)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        if self.before is not None:
            torch.set_num_threads(self.before)
            self.before = None
