"""Samples of one data set that are in the training data and held out, whatever their numbers are held in."""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, SubsetRandomSampler, TensorDataset

from brainet_pl.swap.data import refuse_same_samples


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array], ids=["list", "tensor", "array"])
@pytest.mark.parametrize("place", ["data", "sampler", "batch sampler"])
def test_numbers_of_samples_may_be_of_any_kind(kind, place):
    """Elements of a tensor are equal, but are no equal members of a set; a sampler may hold one as well."""
    data = TensorDataset(torch.rand(400, 6), torch.arange(400) % 3)

    def part(first, last):
        numbers = kind(list(range(first, last)))
        if place == "data":
            return DataLoader(Subset(data, numbers))
        sampler = SubsetRandomSampler(numbers)
        if place == "sampler":
            return DataLoader(data, sampler=sampler)
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 32, drop_last=False))

    refuse_same_samples(part(0, 300), part(300, 400))
    with pytest.raises(ValueError, match="got 50 of 150 that are"):
        refuse_same_samples(part(0, 300), part(250, 400))


class Halves:
    """A batch sampler that says nothing of what it chooses."""

    def __iter__(self):
        yield from ([0, 1], [2, 3])


def test_lists_are_samplers_and_numbers_may_count_from_the_end():
    data = TensorDataset(torch.rand(40, 6), torch.arange(40) % 3)
    few, others = DataLoader(data, sampler=list(range(10))), DataLoader(data, batch_sampler=[[10, 11], [12]])
    refuse_same_samples(few, others)
    refuse_same_samples(few, DataLoader(data, batch_sampler=Halves()))  # the content of its batches is compared later
    with pytest.raises(ValueError, match="got 2 of 3 that are"):
        refuse_same_samples(DataLoader(Subset(data, [-29, -28])), others)
