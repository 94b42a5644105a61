"""What a step costs on paper: operations, bytes and kernels, and the seconds that a machine needs for them at least."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from brainet_pl.network import BRAINetHead

BAGS = (torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only)
READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero")  # the host waits for these


class Machine(NamedTuple):
    """One device, as its data sheet has it.

    Attributes:
        flops: floating-point operations a second, of matrix products at the precision that is used.
        bandwidth: bytes a second of its memory.
        launch: seconds between two kernels that the host starts one after another.
        link: bytes a second that a device sends to others.
    """

    flops: float
    bandwidth: float
    launch: float
    link: float


A100 = Machine(flops=156e12, bandwidth=1.55e12, launch=5e-6, link=300e9)  # TF32, 40 GB, NVLink in one direction


class Work(NamedTuple):
    """What a call does: operations, bytes that kernels read and write, kernels, and reads by the host."""

    flops: float
    bytes: float
    kernels: int
    reads: int

    def seconds(self, machine: Machine, graph: bool = False) -> float:
        """The least time: operations, memory and launches overlap, so the slowest counts; a CUDA graph is one launch.

        >>> Work(156e9, 1.55e9, 100, 0).seconds(A100), Work(0, 0, 1000, 0).seconds(A100)
        (0.001, 0.005)
        """
        launches = 1 if graph else self.kernels
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth, launches * machine.launch)


class _Kernels(TorchDispatchMode):
    """Counts operations that compute: all but views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels, self.reads = 0.0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        name, schema = func.name().split(".")[0], func._schema
        self.reads += name in READS
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not view and not name.startswith(("aten::empty", "aten::_local_scalar")):
            self.kernels += 1
            tensors = [t for t in tree_leaves((args, given, out)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


def count(call: Callable[[], Any]) -> Work:
    """Run a call, on any device, "meta" too, and count what it does."""

    def bag(rows: Any, reads: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * math.prod(reads) * int(rows[1])

    with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(BAGS, bag)) as flops, _Kernels() as kernels:
        call()
    return Work(flops.get_total_flops(), kernels.bytes, kernels.kernels, kernels.reads)


def tree_flops(head: BRAINetHead, draws: int | None = None) -> int:
    """Operations of a pass over one sample: 2 · (Σ columns · weights of a level + branches · rows · outputs + d · C).

    A level is computed once for each of its columns (`share_draws`); `draws` are those of a training step, and None is
    the average over all sub-networks, which computes each level once.
    """
    columns = [1] * len(head.layers.ordered) if draws is None else [v.columns for v in head.layers.versions(draws)]
    levels = [sum(block.numel() for block in blocks) for blocks in head.layers._assemble()]
    inner = sum(c * w for c, w in zip(columns, levels, strict=True))
    output = head.output.weight.numel() * (columns[-1] if columns else 1)
    skip = 0 if head.skip is None else head.skip.weight.numel()
    return 2 * (inner + output + skip)


def dense_flops(sizes: list[int]) -> int:
    """Operations of a pass over one sample through dense layers of these sizes, inputs first.

    >>> dense_flops([64, 100, 10])
    14800
    """
    return 2 * sum(a * b for a, b in pairwise(sizes))


def all_reduce_seconds(parameters: int, devices: int, machine: Machine, width: int = 4) -> float:
    """Least time to sum gradients in a ring: 2 · (n − 1) / n of their bytes leave each device.

    >>> all_reduce_seconds(75_000_000_000, 2, A100)
    1.0
    """
    return 2 * (devices - 1) / devices * parameters * width / machine.link
