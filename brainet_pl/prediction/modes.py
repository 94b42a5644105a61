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
    in_training = [part for part in model.modules() if part.training]
    try:
        for part in in_training:
            part.training = False
        yield
    finally:
        for part in in_training:
            part.training = True
