"""The shared parts of the benchmarks: controls, results, tables, timing, the training loop, measures, data."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from brainet_pl.datamodules.uci import read_split
from brainet_pl.network import BRAINetHead, MLPHead
from brainet_pl.structure import learn_structure


@pytest.fixture(scope="module")
def blobs():
    """Three classes of ten dependent features, and points far from all."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 900)
    x = rng.normal(size=(900, 10)).cumsum(1) * 0.3 + 4 * np.eye(3)[y] @ rng.normal(size=(3, 10))
    far = rng.normal(size=(300, 10)) * 6
    return torch.tensor(x).float(), torch.tensor(y), torch.tensor(far).float()


def test_the_control_has_the_same_shape_and_other_variables(load, blobs):
    tree = learn_structure(blobs[0], test="gaussian", threshold=0.05, s=3, max_order=2, progress=False)
    control = load("common/training").shuffled(tree, seed=1)
    assert control.num_subnetworks == tree.num_subnetworks
    assert [len(n.variables) for n in control.nodes] == [len(n.variables) for n in tree.nodes]
    assert control.score(control.map()) == tree.score(tree.map())
    for leaf in control.leaves(control.map()):
        assert all(set(parents).isdisjoint({x}) for x, parents in zip(leaf.variables, leaf.parents, strict=True))
    assert sorted(v for leaf in control.leaves(control.map()) for v in leaf.variables) == list(range(10))
    assert not np.array_equal(control.dag(control.map()), tree.dag(tree.map()))
    sizes = [BRAINetHead(t, 3, width=2.0).num_params for t in (tree, control)]
    assert sizes[0] == sizes[1]


def test_results_resume_and_forget_other_settings(load, tmp_path, capsys):
    store = load("common/store")
    path, calls = tmp_path / "cells.json", []

    def make():
        calls.append(1)
        return {"nll": 0.5}

    store.Store(path, {"epochs": 3}).cell("a/0", make)
    assert store.Store(path, {"epochs": 3}).cell("a/0", make) == {"nll": 0.5}
    assert len(calls) == 1
    store.Store(path, {"epochs": 4}).cell("a/0", make)
    assert len(calls) == 2
    assert "starting anew" in capsys.readouterr().out


def test_tables_are_markdown(load, capsys):
    tables = load("common/tables")
    tables.table(["a", "b"], [["x", 0.12345], [1, "12.0"]])
    assert capsys.readouterr().out == "\n| a | b |\n|---|---|\n| x | 0.123 |\n| 1 | 12.0 |\n"
    assert tables.spread([1.0, 2.0, 3.0]) == "2.00 ± 1.00"
    assert tables.spread([1.23456], digits=4) == "1.2346 ± 0.0000"


def test_a_race_is_run_in_turns_with_all_threads(load):
    torch.set_num_threads(2)
    turns, threads = [], set()

    def call(name, size):
        turns.append(name)
        threads.add(torch.get_num_threads())
        torch.ones(size).sum()

    calls = {"short": lambda: call("short", 10), "long": lambda: call("long", 10_000_000)}
    found = load("common/timing").race(calls, 0.05, number=3)
    assert turns[:10] == ["short"] * 5 + ["long"] * 5  # two calls of each turn are not counted
    assert threads == {2}
    assert len(found["short"].times) == len(found["long"].times) == len(turns) // 10
    assert 0 < found["short"].median < found["long"].median
    assert len(load("common/timing").race(calls, 0.0)["short"].times) == 1


def test_loop_and_measures(load, blobs):
    training, measures = load("common/training"), load("common/measures")
    x, y, far = blobs
    torch.manual_seed(0)
    head = training.train(MLPHead(10, 3, 800, 1, 0.2), x, y, epochs=30, lr=0.01, decay=True)
    known, unknown = training.outputs_of(head, x, 7), training.outputs_of(head, far, 7)
    assert known.shape == (7, 900, 3)
    assert measures.quality(known, y)["err"] < 5
    entropy = [torch.special.entr(v.softmax(-1).mean(0)).sum(1).numpy() for v in (known, unknown)]
    expected = 100 * roc_auc_score(np.r_[np.zeros(900), np.ones(300)], np.concatenate(entropy))
    assert measures.separation(known, {"far": unknown})["far/entropy/AUROC"] == pytest.approx(expected, abs=1e-3)


def test_synthetic_data_has_the_shape_of_the_real(load, tmp_path):
    data = load("common/data")
    found = data.cifar_features(None)
    assert {part[0].shape[1] for part in (found.train, found.plain, found.val, found.test)} == {64}
    assert set(found.ood) == {"svhn", "tiny"}
    assert data.last_layer(None)(found.test[0]).shape == (len(found.test[1]), 10)
    (x, y), _ = data.mnist_pixels(None)
    assert x.shape == (len(y), 49)
    assert 0 <= x.min() <= x.max() <= 1
    split = read_split(data.synthetic_uci(tmp_path, "wine", 2), "wine", 1)
    assert split.x_train.shape == (180, 6)
    assert split.y_test.shape == (20,)


@pytest.mark.parametrize(
    "name", ["table1", "table2", "table3", "mnist", "structures", "operations", "latent", "generative"]
)
def test_every_experiment_says_how_to_run_it(load, name):
    assert f"benchmarks/paper/{name}.py" in load(f"paper/{name}").__doc__


def test_an_experiment_without_data_says_what_to_do(load, capsys):
    with pytest.raises(SystemExit):
        load("paper/table2").main([])
    assert "give --data DIR, or try --smoke" in capsys.readouterr().err


def test_prices_between_two_settings_are_interpolated(load):
    tempered = load("tempered")
    points = [tempered.Point(1, 0.0, 0, 0.2, 0, 1), tempered.Point(2, 0.02, 0, 0.1, 0, 1)]
    assert tempered.at_budget(points, 0.005).ece == pytest.approx(0.175)
    assert tempered.at_budget(points, 0.05) == points[1]  # no setting is beyond
    assert tempered.at_budget(points, -0.01) == points[0]


def test_weights_of_density_aware_calibration_are_the_best(load):
    """No small step within the bounds has a lower squared error, and the constant may be negative."""
    tempered = load("tempered")
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(4, (800,), generator=draw)
    strange = 1 + torch.rand(800, 1, generator=draw)
    logits = 4 * torch.nn.functional.one_hot(y, 4) + 6 * (strange - 1) * torch.randn(800, 4, generator=draw)
    w = tempered.dac_weights(strange, logits, y)

    def loss(w):
        t = (strange.double() @ w[:-1] + w[-1]).clamp_min(1e-20)
        return float(((logits.double() / t[:, None]).softmax(1) - torch.nn.functional.one_hot(y, 4)).square().mean())

    assert w[0] > 0 > w[1]
    for step in torch.eye(2).double():
        assert all(loss(w) <= loss(w + sign * 1e-2 * step) + 1e-9 for sign in (-1, 1))
