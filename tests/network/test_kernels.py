"""What a CPU does in its own way in a training step, beside torch's plain operations: values, gradients, statistics."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from brainet_pl.network.kernels import Place, bags, batch_norm, place

DOUBLE = torch.float64


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_batch_norm_is_torch_s(shift):
    torch.manual_seed(0)
    y, scale, bias = (
        torch.randn(1, 5, 9, dtype=DOUBLE) + shift,
        torch.rand(5, dtype=DOUBLE),
        torch.randn(5, dtype=DOUBLE),
    )
    weight = torch.randn(1, 5, 9, dtype=DOUBLE)
    found = []
    for norm in (batch_norm, lambda y, m, v, s, b, momentum, eps: F.batch_norm(y, m, v, s, b, True, momentum, eps)):
        mean, var = torch.zeros(5, dtype=DOUBLE), torch.ones(5, dtype=DOUBLE)
        inputs = leaves(y, scale, bias)
        out = norm(inputs[0], mean, var, *inputs[1:], 0.1, 1e-5)
        found.append([out, mean, var, *torch.autograd.grad((out * weight).sum(), inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_statistics_far_from_zero_keep_their_digits():
    y = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0)) + 1e3  # squares alone would leave nothing
    mean, var = torch.zeros(3), torch.zeros(3)
    batch_norm(y, mean, var, torch.ones(3), torch.zeros(3), 1.0, 1e-5)
    torch.testing.assert_close(var, y[0].double().var(dim=1).float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("of_rows", [False, True])
def test_bags_are_products_with_what_each_reads(of_rows):
    torch.manual_seed(0)
    weight, rows = torch.randn(6, 3, dtype=DOUBLE), torch.randn(8, 4, dtype=DOUBLE)
    reads = torch.stack([torch.randperm(8)[:3] for _ in range(6)])
    inputs = leaves(weight, rows) if of_rows else [*leaves(weight), rows]
    wanted = inputs if of_rows else inputs[:1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = bags(*inputs, reads)
        mine = torch.autograd.grad(ours.square().sum(), wanted)
    theirs = torch.einsum("gi,gib->gb", inputs[0], inputs[1][reads])
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(mine, torch.autograd.grad(theirs.square().sum(), wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("members", [1, 3])
def test_weights_are_placed_where_they_stand(members):
    """Buckets of one flat vector: as it lies, in places of their own, of numbers that do not follow each other."""
    torch.manual_seed(0)
    layout = [([0, 1], [0, 1], 2), ([2, 3], [4, 1], 6), ([4, 6], [0, 2], 3), ([5], [1], 2)]
    places = []
    for numbers, positions, size in layout:
        source = torch.full((size,), 7)
        source[positions] = torch.tensor(numbers)
        follow = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        whole = follow and positions == list(range(size))
        first = numbers[0] if follow else None
        places.append(Place(source, torch.tensor(positions), torch.tensor(numbers), first, whole))
    flat = torch.randn(members, 7, requires_grad=True)
    expected = []
    for numbers, positions, size in layout:
        block = torch.zeros(members, size).index_copy(1, torch.tensor(positions), flat[:, numbers])
        expected.append(block)
    found = place(flat, places)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    weights = [torch.randn(members, size) for _, _, size in layout]
    gradients = []
    for blocks in (found, expected):
        total = sum((block * weight).sum() for block, weight in zip(blocks, weights, strict=True))
        gradients += torch.autograd.grad(total, flat)
    torch.testing.assert_close(*gradients)
