"""What a CPU does in its own way in a training step, beside torch's plain operations: values, gradients, statistics."""

import copy
import warnings

import pytest
import torch
from torch import nn

from brainet_pl.network import Ensemble, Tree, executor, step
from brainet_pl.network.kernels import Place, place
from brainet_pl.structure import learn_structure

DOUBLE = torch.float64


@pytest.fixture(params=[10**9, 24], ids=["whole", "in chunks"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(step, "CHUNK", request.param)


def both_ways(monkeypatch, head, x, weight):
    """Outputs, gradients and kept statistics of a training pass by hand and by plain operations."""
    found = []
    for by_hand in (True, False):
        monkeypatch.setattr(executor, "has_kernels", lambda x, by_hand=by_hand: by_hand)
        one, inputs = copy.deepcopy(head).train(), x.clone().requires_grad_()
        torch.manual_seed(1)
        outputs = one(inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (outputs * weight[: len(outputs)]).sum().backward()
        found.append([outputs, inputs.grad, *(p.grad for p in one.parameters()), *one.buffers()])
    return found


@pytest.mark.parametrize("settings", [{}, {"fields": None}, {"activation": "gelu"}, {"draws": 1}, {"dropout": 0.2}])
@pytest.mark.parametrize(("features", "inner"), [(7, 1), (90, 1), (12, 2)])
def test_a_level_by_hand_is_one_in_plain_operations(chunk, monkeypatch, features, inner, settings):
    """Dense fields, sparse ones, alternatives below the root: values, gradients of weights and inputs, statistics."""
    torch.manual_seed(0)
    rows = torch.randn(60, features).cumsum(1)
    ggt = learn_structure(rows, s=(2, inner), test="gaussian", threshold=0.3, progress=False)
    head = Tree(**settings).build(features, 3, ggt).double()
    nn.init.normal_(head.output.weight)  # which starts at zero, where no gradient passes
    x, weight = rows[:9].double() + 3, torch.randn(8, 9, 3, dtype=DOUBLE)
    for ours, theirs in zip(*both_ways(monkeypatch, head, x, weight), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("apart", [False, True])
def test_members_by_hand_are_members_in_plain_operations(chunk, monkeypatch, apart):
    torch.manual_seed(0)
    head = Ensemble(members=3, num_params=600).build(5, 3).double()
    x = torch.randn(3, 9, 5, dtype=DOUBLE) if apart else torch.randn(9, 5, dtype=DOUBLE)
    for ours, theirs in zip(*both_ways(monkeypatch, head, x, torch.randn(3, 9, 3, dtype=DOUBLE)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_statistics_far_from_zero_keep_their_digits():
    y = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) + 1e3  # squares alone would leave nothing
    exact = y.double().var(dim=1, correction=0).float()
    _, _, var = step.Norm(torch.ones(3), torch.zeros(3), 1e-5, True).run(y)
    torch.testing.assert_close(var, exact, rtol=1e-3, atol=0)


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
