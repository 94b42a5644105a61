"""Which rows may choose what: the rows that vouch for a member choose nothing about it."""

import numpy as np
import pytest
import torch

import brainet_pl.sklearn.training as training
from brainet_pl.network import Tree
from brainet_pl.network.stack import HeadStack
from brainet_pl.network.training import TrainingSettings
from brainet_pl.sklearn.estimators import BRAINetClassifier
from brainet_pl.sklearn.folds import roles_of
from brainet_pl.sklearn.training import Fold, Rows, of_the_others, train_folds
from brainet_pl.structure import learn_structure
from brainet_pl.tasks import Classification

FOLDS = 3


def trained(monkeypatch, told):
    """Members of three folds, fitted to chance; `told` changes what validations say."""
    real = training._Validation.__call__
    monkeypatch.setattr(training._Validation, "__call__", lambda self, *given: told(*real(self, *given)))
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(90, 4)), dtype=torch.float32)
    tree = learn_structure(x, s=2, progress=False)
    torch.manual_seed(0)
    heads = [Tree(num_params=2000).build(4, 2, tree) for _ in range(FOLDS)]
    held = torch.arange(90).view(FOLDS, 30)
    folds = [Fold(torch.cat([held[j] for j in range(FOLDS) if j != k]), held[k], held[k]) for k in range(FOLDS)]
    rows = Rows(x, torch.tensor(rng.integers(0, 2, 90)), None)
    train_folds(HeadStack(heads), Classification(2), rows, folds, TrainingSettings(30, 6, 16, 1e-2), passes=8)
    return heads


def test_the_rows_of_a_fold_have_no_say_in_its_epoch(monkeypatch):
    """Whatever they say, its members are the same to the last bit; those of the others are not."""
    noise = torch.Generator().manual_seed(1)

    def other(losses, weights):
        return torch.cat([30 * torch.rand(1, generator=noise), losses[1:]]), weights

    with monkeypatch.context() as patched:
        plain = trained(patched, lambda losses, weights: (losses, weights))
    told = trained(monkeypatch, other)
    same = [torch.equal(a.layers.weight, b.layers.weight) for a, b in zip(plain, told, strict=True)]
    assert same[0]
    assert not all(same[1:])


def test_means_of_the_others_by_hand():
    losses, weights = torch.tensor([3.0, torch.inf, 8.0]), torch.tensor([1.0, 2.0, 4.0])
    torch.testing.assert_close(of_the_others(losses, weights), torch.tensor([torch.inf, 11 / 5, torch.inf]))
    torch.testing.assert_close(of_the_others(losses[:1], weights[2:]), torch.tensor([0.75]))


def test_rows_of_an_only_member_have_one_role_each():
    y = np.repeat([0, 1, 2], [600, 300, 100])
    (roles,) = roles_of(len(y), y, None, members=1, fraction=0.15, seed=0)
    assert sorted(np.concatenate(roles).tolist()) == list(range(len(y)))
    for part, size in zip(roles, (850, 75, 75), strict=True):
        assert len(part) == size
        np.testing.assert_allclose(np.bincount(y[part]) / size, [0.6, 0.3, 0.1], atol=0.01)


@pytest.mark.integration
def test_rows_held_back_are_predicted_as_new_rows_are():
    """Of labels by chance: else a set made for 80 % holds 70 %, of 60 rows. Chosen by themselves they gained .08."""
    gaps = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(560, 5)), rng.integers(0, 3, 560)
        settings = {"s": 1, "learning_rate": 0.02, "num_params": 4000, "max_epochs": 40}
        network = BRAINetClassifier(random_state=seed, **settings).fit(x[:60], y[:60]).network_
        predicted, target = network.held_out()
        new, labels = torch.tensor(x[60:]), torch.tensor(y[60:])
        of_new = []
        for number in range(network.head.folds):
            with network.fold(number):
                of_new.append(nll(network.final_rows(new), labels))
        gaps.append(nll(predicted, target) - np.mean(of_new))
    assert abs(np.mean(gaps)) < 0.04


def nll(probs, labels):
    return float(-probs[torch.arange(len(labels)), labels].log().mean())
