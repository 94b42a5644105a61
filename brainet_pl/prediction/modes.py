"""Answers in evaluation mode, whatever mode a model is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout and with the stored statistics of batch norm; afterwards all modes are as before.

    After a fit Lightning leaves a module in training mode: an answer would then draw, and move statistics for good.
    """
    modes = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode
