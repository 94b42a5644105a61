"""A level of a training step as a CPU does it fastest: product, batch norm and ReLU, and their gradients by hand.

Where features are many, neurons of the lowest level are too, and what a step costs there is the passes over memory that
each small operation makes. So rows are gone through in chunks that a core's own cache holds, and nothing as large as a
level is kept but its centred products and its outputs. Where features are few, a step costs as much as it has
operations, of which autograd here sees one a level. `Executor` has the same in plain operations.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brainet_pl.network.weights import BucketTensors, LevelTensors

CHUNK = 2**17  # numbers in a chunk of rows: half a megabyte in 32 bits


class Normed(NamedTuple):
    """Outputs (M, neurons, B) of a level after its norm, and the mean and variance of each of its neurons."""

    outputs: Tensor
    mean: Tensor
    var: Tensor


def run_level(
    level: LevelTensors,
    parts: Sequence[Tensor],
    blocks: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor,
    eps: float,
    relu: bool,
) -> Normed:
    """Product, batch norm over the last dimension, and ReLU where asked for, of one level while training.

    Args:
        level: where it reads.
        parts: (M, rows, B) each, or (1, rows, B) where all members read the same.
        blocks: weights (N, O, I) of each bucket.
        scale: (M·neurons,) of the norm.
        bias: the same.
        eps: what the norm adds to variances.
        relu: whether the activation is done here.
    """
    return Normed(*_Level.apply(level, eps, relu, scale, bias, len(parts), *parts, *blocks))


class _Level(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, level: LevelTensors, eps: float, relu: bool, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        scale, bias, count, *rest = tensors
        parts, blocks = rest[:count], rest[count:]
        ctx.level, ctx.eps, ctx.relu, ctx.count = level, eps, relu, count
        norm = Norm(scale, bias, eps, relu)
        gathered = _gather(level, parts)
        if level.reads_few:
            y, z, mean, var = _run_fields(level.ordered[0], blocks[0], gathered, norm)
        else:
            y = _products(level, parts, blocks, gathered)
            z, mean, var = norm.forward(y.view(scale.shape[0], -1))
            z = z.view_as(y)
        ctx.save_for_backward(scale, var, y, z, *parts, *blocks)
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return z, mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, var, y, z, *rest = ctx.saved_tensors
        level, parts, blocks = ctx.level, rest[: ctx.count], rest[ctx.count :]
        neurons, wanted = scale.shape[0], ctx.needs_input_grad[6 : 6 + ctx.count]
        flat, out, grad = y.view(neurons, -1), z.view(neurons, -1), grads[0].reshape(neurons, -1)
        bags = _Bags(level.ordered[0], blocks[0], _gather(level, parts)) if level.reads_few else None
        each = []
        for at in _chunks(flat):
            rows = [scale, var, flat, out, grad]
            rows = rows if at is None else [t[at] for t in rows]
            d_y, *of_norm = _norm_backward(rows, ctx.eps, ctx.relu)
            if bags is not None:
                bags.add(d_y[0], at)
            each.append([d_y if bags is None or any(wanted) else None, *of_norm])
        g, d_scale, d_bias = each[0] if len(each) == 1 else _joined(each)
        if bags is not None:
            d_parts, d_blocks = bags.of_parts(g, parts, level), [bags.found.view_as(blocks[0])]
        else:
            assert g is not None
            d_parts, d_blocks = _products_backward(level, parts, blocks, g.view(y.shape), wanted)
        return None, None, None, d_scale, d_bias, None, *d_parts, *d_blocks


def _joined(each: Sequence[Sequence[Tensor | None]]) -> list[Any]:
    """Gradients of all chunks as one: of rows, which nobody may want, of scale and of bias."""
    rows, scale, bias = zip(*each, strict=True)
    return [None if rows[0] is None else torch.cat(rows, dim=1), torch.cat(scale), torch.cat(bias)]


def _norm_backward(rows: Sequence[Tensor], eps: float, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (1, R, B) of centred rows, and of the scale and bias of their norm.

    `rows` are the scale and variance (R,) of neurons, and (R, B) their centred products, outputs, and the gradient of
    these.
    """
    scale, var, y, out, grad = rows
    g = torch.ops.aten.threshold_backward(grad, out, 0.0) if relu else grad
    zero, inverse = torch.zeros_like(var), torch.rsqrt(var + eps)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        g[None], y[None], scale, None, None, zero, inverse, True, eps, [True] * 3
    )
    return found


def _chunks(rows: Tensor) -> Sequence[slice | None]:
    """Slices of rows (R, B), each of about `CHUNK` numbers; None stands for all."""
    count, batch = rows.shape
    if count * batch <= CHUNK:
        return (None,)
    step = max(1, CHUNK // batch)
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


class Norm(NamedTuple):
    """Batch norm of rows (R, B) over B, and ReLU where asked for, while training."""

    scale: Tensor
    bias: Tensor
    eps: float
    relu: bool

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normed rows, and the mean and variance of each; y is centred in place."""
        chunks = _chunks(y)
        if len(chunks) == 1:
            return self.run(y)
        out, each = torch.empty_like(y), []
        for at in chunks:
            out[at], mean, var = self.run(y[at], at)
            each.append((mean, var))
        means, variances = zip(*each, strict=True)
        return out, torch.cat(means), torch.cat(variances)

    def run(self, y: Tensor, at: slice | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`forward` of a few rows, those of the neurons `at`."""
        scale, bias = (self.scale, self.bias) if at is None else (self.scale[at], self.bias[at])
        mean = y.mean(dim=1)
        y.sub_(mean.unsqueeze(1))
        var = torch.linalg.vector_norm(y, dim=1).square_().div_(y.shape[1])
        zero = torch.zeros_like(mean)
        out = F.batch_norm(y[None], zero, var, scale, bias, False, 0.0, self.eps)[0]
        return out.relu_() if self.relu else out, mean, var


# -- products ---------------------------------------------------------------------------------------------------------


def _gather(level: LevelTensors, parts: Sequence[Tensor]) -> Tensor | None:
    """All rows (M, R, B) that buckets without a slice choose from; the row of zeros is behind them."""
    chosen = [parts[i] for i in level.gathered]
    if not chosen:
        return None
    if level.zeros:
        chosen.append(chosen[0].new_zeros(len(chosen[0]), 1, chosen[0].shape[2]))
    members = max(len(part) for part in chosen)
    return chosen[0] if len(chosen) == 1 else torch.cat([part.expand(members, -1, -1) for part in chosen], dim=1)


def _rows_of(bucket: BucketTensors, parts: Sequence[Tensor], gathered: Tensor | None, width: int) -> Tensor:
    """The rows (N, I, B) of the blocks of a bucket, or (1, I, B) of all."""
    if bucket.slice is None:
        assert gathered is not None
        rows = gathered.index_select(1, bucket.rows)
    else:
        part, first, count = bucket.slice
        rows = parts[part].narrow(1, first, count)
    return rows.reshape(-1, width, rows.shape[2])


def _products(
    level: LevelTensors, parts: Sequence[Tensor], blocks: Sequence[Tensor], gathered: Tensor | None
) -> Tensor:
    """The level before its norm, (M, neurons, B)."""
    outputs = []
    for bucket, weight in zip(level.ordered, blocks, strict=True):
        rows = _rows_of(bucket, parts, gathered, weight.shape[2])
        y = torch.mm(weight.flatten(0, 1), rows[0]) if rows.shape[0] == 1 else torch.bmm(weight, rows)
        outputs.append(y.view(level.members, -1, y.shape[-1]))
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return together if level.in_order else together.index_select(1, level.arrange)


def _products_backward(
    level: LevelTensors, parts: Sequence[Tensor], blocks: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients of the parts that are wanted, and of all blocks, for that of the level before its norm."""
    sizes = [weight.shape[0] * weight.shape[1] // level.members for weight in blocks]
    if not level.in_order:
        grad = grad.new_zeros(len(grad), sum(sizes), grad.shape[2]).index_copy_(1, level.arrange, grad)
    gathered = _gather(level, parts)
    into = _PartGrads(level, parts, gathered, wanted)
    d_blocks = []
    for bucket, weight, part in zip(level.ordered, blocks, grad.split(sizes, dim=1), strict=True):  # type: ignore[no-untyped-call]
        rows = _rows_of(bucket, parts, gathered, weight.shape[2])
        if rows.shape[0] == 1:
            flat = part.reshape(-1, part.shape[2])
            d_blocks.append(torch.mm(flat, rows[0].t()).view_as(weight))
        else:
            each = part.reshape(len(weight), weight.shape[1], -1)
            d_blocks.append(torch.bmm(each, rows.transpose(1, 2)))
        if into.wants(bucket):
            if rows.shape[0] == 1:
                d_rows = torch.mm(weight.flatten(0, 1).t(), flat).unsqueeze(0)
            else:
                d_rows = torch.bmm(weight.transpose(1, 2), each)
            into.add(bucket, d_rows)
    return into.found(), d_blocks


class _PartGrads:
    """Gradients of the parts that a level reads, which its buckets add to."""

    def __init__(
        self, level: LevelTensors, parts: Sequence[Tensor], gathered: Tensor | None, wanted: Sequence[bool]
    ) -> None:
        self.level, self.parts, self.wanted = level, parts, wanted
        self.grads: list[Tensor | None] = [None] * len(parts)
        self.of_gathered: Tensor | None = None
        if gathered is not None and any(wanted[i] for i in level.gathered):
            self.of_gathered = torch.zeros_like(gathered)

    def wants(self, bucket: BucketTensors) -> bool:
        """Whether somebody wants the gradient of what a bucket reads."""
        return self.of_gathered is not None if bucket.slice is None else self.wanted[bucket.slice.part]

    def add(self, bucket: BucketTensors, d_rows: Tensor) -> None:
        """Take in the gradient (N, I, B) of the rows of a bucket."""
        batch = d_rows.shape[2]
        if bucket.slice is None:
            assert self.of_gathered is not None
            self.of_gathered.index_add_(1, bucket.rows, d_rows.reshape(len(self.of_gathered), -1, batch))
            return
        number, first, count = bucket.slice
        part = self.parts[number]
        d_rows = d_rows.reshape(-1, count, batch)
        self._add(number, first, d_rows if len(d_rows) == len(part) else d_rows.sum(dim=0, keepdim=True))

    def _add(self, number: int, first: int, grad: Tensor) -> None:
        """Add the gradient of some rows of a part, from row `first` on."""
        part, before = self.parts[number], self.grads[number]
        if before is None and grad.shape == part.shape:
            self.grads[number] = grad
            return
        whole = torch.zeros_like(part) if before is None else before
        whole.narrow(1, first, grad.shape[1]).add_(grad)
        self.grads[number] = whole

    def found(self) -> list[Tensor | None]:
        """The gradient of each part, None where nobody wants it."""
        first = 0
        for i in self.level.gathered if self.of_gathered is not None else ():
            assert self.of_gathered is not None
            part = self.parts[i]
            grad = self.of_gathered.narrow(1, first, part.shape[1])
            self._add(i, 0, grad if len(grad) == len(part) else grad.sum(dim=0, keepdim=True))
            first += part.shape[1]
        return [grad if wanted else None for grad, wanted in zip(self.grads, self.wanted, strict=True)]


# -- fields: neurons that read few rows each --------------------------------------------------------------------------


def _run_fields(
    bucket: BucketTensors, weight: Tensor, gathered: Tensor | None, norm: Norm
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centred products and outputs (1, neurons, B) of neurons that read few rows, their means and variances."""
    assert gathered is not None
    rows, flat = gathered[0], weight.squeeze(1)
    reads = bucket.rows.view(flat.shape)
    y = rows.new_empty(flat.shape[0], rows.shape[1])
    chunks = _chunks(y)
    if len(chunks) == 1:
        y = F.embedding_bag(reads, rows, per_sample_weights=flat, mode="sum")
        z, mean, var = norm.run(y)
        return y[None], z[None], mean, var
    z, each = torch.empty_like(y), []
    for at in chunks:
        y[at] = F.embedding_bag(reads[at], rows, per_sample_weights=flat[at], mode="sum")
        z[at], mean, var = norm.run(y[at], at)
        each.append((mean, var))
    means, variances = zip(*each, strict=True)
    return y[None], z[None], torch.cat(means), torch.cat(variances)


class _Bags:
    """Gradients of the weights of neurons that read few rows: a sampled matrix product, chunk by chunk."""

    def __init__(self, bucket: BucketTensors, weight: Tensor, gathered: Tensor | None) -> None:
        assert gathered is not None
        self.weight, self.rows = weight.squeeze(1), gathered[0].contiguous()
        self.reads = bucket.rows.view(self.weight.shape)
        self.found = torch.empty_like(self.weight)

    def add(self, grad: Tensor, at: slice | None) -> None:
        """Take in the gradient (n, B) of the neurons of a chunk."""
        reads = self.reads if at is None else self.reads[at]
        starts = torch.arange(0, reads.numel() + 1, reads.shape[1])
        pattern = _sparse(starts, reads.flatten(), grad.new_zeros(reads.numel()), (len(reads), len(self.rows)))
        sums = torch.sparse.sampled_addmm(pattern, grad, self.rows.t(), beta=0.0)
        self.found[slice(None) if at is None else at] = sums.values().view(reads.shape)

    def of_parts(self, grad: Tensor | None, parts: Sequence[Tensor], level: LevelTensors) -> list[Tensor | None]:
        """Gradients of the parts, for that of all neurons (1, n, B)."""
        found: list[Tensor | None] = [None] * len(parts)
        if grad is None:
            return found
        rows = torch.zeros_like(self.rows)
        for place in range(self.reads.shape[1]):
            rows.index_add_(0, self.reads[:, place], grad[0] * self.weight[:, place : place + 1])
        first = 0
        for i in level.gathered:
            found[i] = rows.narrow(0, first, parts[i].shape[1]).unsqueeze(0)
            first += parts[i].shape[1]
        return found


def _sparse(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse matrix by rows, without the warning that torch gives for the first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)
