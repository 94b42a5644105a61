"""Search in rising numbers, as a graph of ONNX can do it too."""

from __future__ import annotations

import torch
from torch import Tensor


def places(rising: Tensor, x: Tensor) -> Tensor:
    """Rising numbers (…, K) and values (…, B) → (…, B) how many of the numbers lie below each value; K for NaN.

    >>> places(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 2.0, 9.0]))
    tensor([0, 1, 3])
    """
    if torch.compiler.is_compiling():  # ONNX knows no search, so in a graph they are counted
        return (~(rising.unsqueeze(-2) >= x.unsqueeze(-1))).sum(dim=-1)
    return torch.searchsorted(rising, x.contiguous())
