"""`TabM` and structures that share weights: what members share, what is their own, and what they can learn."""

import pytest
import torch
from torch.nn import functional as F

from brainet_pl.network import Tree
from brainet_pl.network.base import HeadInputs
from brainet_pl.network.training import TrainingSettings, fit_head
from brainet_pl.structure import learn_structure


def rows(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return torch.randn(n, 8, generator=generator).cumsum(1) + 2 * F.one_hot(y, 8), y


def test_a_member_of_tabm_is_a_network_of_its_own(load):
    torch.manual_seed(0)
    head = load("rivals/tabm").TabM(members=3, num_params=2000).build(8, 3).eval()
    x = rows(5)[0]
    for member, outputs in enumerate(head(x)):
        y = x
        for layer in head.layers:
            weight = layer.weight * layer.s[member][:, None] * layer.r[member]
            y = F.relu(F.linear(y, weight, layer.bias[member]))
        torch.testing.assert_close(outputs, y @ head.weight[member] + head.bias[member])
    assert head.num_params == pytest.approx(2000, rel=0.05)


def test_shared_structures_are_masked_networks(load):
    torch.manual_seed(0)
    ggt = learn_structure(rows(200)[0], test="gaussian", threshold=0.1, progress=False)
    head = load("rivals/shared").Shared(2000).build(8, 3, ggt).eval()
    torch.nn.init.normal_(head.weight)
    x = rows(5)[0]
    for t, outputs in enumerate(head(x)):
        weight = torch.zeros(8, 8)
        for feature in range(8):
            for place, read in enumerate(head.reads[t, feature].tolist()):
                weight[feature, read] = head.field[head.pairs[t, feature, place]]
        y = F.relu(x @ weight.T / (1 + 1e-5) ** 0.5)  # a norm in evaluation that has seen nothing
        for layer in (head.first * head.mask[t], head.second):
            y = F.relu(y @ layer.T / (1 + 1e-5) ** 0.5)
        torch.testing.assert_close(outputs, y @ head.weight[t] + head.bias)


@pytest.mark.parametrize("name", ["tabm", "shared"])
def test_a_rival_learns(load, name):
    torch.manual_seed(0)
    x, y = rows(300)
    ggt = learn_structure(x, progress=False)
    rival = load(f"rivals/{name}")
    settings = rival.TabM(num_params=4000) if name == "tabm" else rival.Shared(Tree().build(8, 3, ggt).num_params)
    head = settings.build(8, 3, ggt)

    def loss(outputs, target):
        return F.cross_entropy(outputs.flatten(0, 1), target.repeat(len(outputs)))

    fit_head(head, HeadInputs(x, y), TrainingSettings(30, 30, 32, 0.003), loss)
    test, target = rows(200, 1)
    with torch.no_grad():
        found = head.eval().passes(test, 15).values.softmax(-1).mean(0).argmax(1)
    assert (found == target).double().mean() > 0.75
