"""Samples of one data set that are in the training data and held out, whatever their numbers are held in."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from brainet_pl.swap.data import refuse_same_samples


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array], ids=["list", "tensor", "array"])
@pytest.mark.parametrize("sampler", [False, True])
def test_numbers_of_samples_may_be_of_any_kind(kind, sampler):
    """Elements of a tensor are equal, but are no equal members of a set; a sampler may hold one as well."""
    data = TensorDataset(torch.rand(400, 6), torch.arange(400) % 3)

    def part(first, last):
        numbers = kind(list(range(first, last)))
        return DataLoader(data, sampler=SubsetRandomSampler(numbers)) if sampler else DataLoader(Subset(data, numbers))

    refuse_same_samples(part(0, 300), part(300, 400))
    with pytest.raises(ValueError, match="got 50 of 150 that are"):
        refuse_same_samples(part(0, 300), part(250, 400))
