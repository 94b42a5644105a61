"""What to label next: against a loop, without near-duplicates, in whatever order samples come, behind several doors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from brainet_pl import BRAINetClassifier, rank_for_labelling, swap_head, swap_layer
from brainet_pl.decisions.ranking import POOL, choose_diverse, doubt


def slow(doubts, features, k):
    """The same by loops over samples."""
    mean = features.astype(float).mean(0)
    unit = [(row - mean) / np.linalg.norm(row - mean) for row in features.astype(float)]
    pool = sorted(range(len(doubts)), key=lambda i: -doubts[i])[: POOL * k]
    chosen = [pool[0]]
    while len(chosen) < k:
        nearest = {i: min(1 - unit[i] @ unit[j] for j in chosen) for i in pool}
        left = [i for i in pool if nearest[i] > 1e-3]
        if not left:
            break
        chosen.append(max(left, key=lambda i: doubts[i] * nearest[i]))
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_against_loops(seed):
    draw = np.random.default_rng(seed)
    doubts, features = draw.random(80), draw.normal(size=(80, 4)).astype(np.float32)
    assert choose_diverse(doubts, features, 8).tolist() == slow(doubts, features, 8)


@given(st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_the_order_of_samples_does_not_matter_and_no_duplicate_is_chosen(seed, k):
    draw = np.random.default_rng(seed)
    doubts, features = draw.random(40), draw.normal(size=(40, 5)).astype(np.float32)
    order = draw.permutation(40)
    chosen = choose_diverse(doubts, features, k)
    assert chosen.tolist() == order[choose_diverse(doubts[order], features[order], k)].tolist()
    twice = choose_diverse(np.tile(doubts, 2), np.tile(features, (2, 1)), k)
    assert len(set(twice % 40)) == len(twice)
    assert chosen[0] == doubts.argmax()


def test_doubt_is_largest_where_classes_are_level_and_networks_disagree():
    probabilities = np.array([[0.5, 0.5, 0], [0.5, 0.5, 0], [0.98, 0.01, 0.01], [np.nan] * 3])
    found = doubt(probabilities, np.array([0.3, 0.1, 0.0, np.nan]))
    assert found[0] > found[1] > found[2]
    assert np.isfinite(found).all()


def test_behind_doors():
    """Samples between two classes come first; those far inside one come last."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(300) % 2
    x = torch.randn(300, 5, generator=draw)
    x[:, 0] += 6 * y - 3
    between = torch.randn(20, 5, generator=draw) * torch.tensor([0.1, 1, 1, 1, 1])
    inside = torch.randn(200, 5, generator=draw) + torch.tensor([5.0, 0, 0, 0, 0])
    unlabelled = torch.cat([inside, between, between])  # each of those between is there twice
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    layer = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    swap_layer(layer, (x, y), "2", progress=False)
    swapped = swap_head(body, (x, y), layers=None, progress=False).fit(max_epochs=20, progress=False)
    estimator = BRAINetClassifier(random_state=0, members=2, max_epochs=30).fit(x.numpy(), y.numpy())
    for model in (swapped, layer, estimator):
        chosen = rank_for_labelling(model, unlabelled.numpy(), 6)
        assert len(set((chosen - 200) % 20)) == 6
        if model is not layer:  # which was not trained
            assert (chosen >= 200).mean() > 0.6
    assert len(rank_for_labelling(estimator, unlabelled[200:].numpy(), 100)) == 20  # the others are the same again
    with pytest.raises(ValueError, match="k"):
        rank_for_labelling(estimator, unlabelled, 0)
