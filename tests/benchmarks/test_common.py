"""The shared parts of benchmarks/paper: controls, resumable results, the training loop, measures."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from brainet_pl.baselines import MLPHead
from brainet_pl.head import BRAINetHead
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

from brainet_pl.structure import learn_structure

FOLDER = Path(__file__).parents[1] / "benchmarks" / "paper"


@pytest.fixture(scope="module")
def load():
    """A function that imports a file of benchmarks/paper, as running it would."""
    sys.path.insert(0, str(FOLDER))

    def get(name):
        spec = importlib.util.spec_from_file_location(f"paper_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"paper_{name}"] = module
        spec.loader.exec_module(module)
        return module

    yield get
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def common(load):
    return load("common")


@pytest.fixture(scope="module")
def blobs():
    """Three classes of ten dependent features, and points far from all."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 900)
    x = rng.normal(size=(900, 10)).cumsum(1) * 0.3 + 4 * np.eye(3)[y] @ rng.normal(size=(3, 10))
    far = rng.normal(size=(300, 10)) * 6
    return torch.tensor(x).float(), torch.tensor(y), torch.tensor(far).float()


def test_the_control_has_the_same_shape_and_other_variables(common, blobs):
    tree = learn_structure(blobs[0], test="gaussian", threshold=0.05, s=3, max_order=2, progress=False)
    control = common.shuffled(tree, seed=1)
    assert control.num_subnetworks == tree.num_subnetworks
    assert [len(n.variables) for n in control.nodes] == [len(n.variables) for n in tree.nodes]
    assert control.score(control.map()) == tree.score(tree.map())
    for leaf in control.leaves(control.map()):
        assert all(set(parents).isdisjoint({x}) for x, parents in zip(leaf.variables, leaf.parents, strict=True))
    assert sorted(v for leaf in control.leaves(control.map()) for v in leaf.variables) == list(range(10))
    assert not np.array_equal(control.dag(control.map()), tree.dag(tree.map()))
    sizes = [BRAINetHead(t, 3, width=2.0).num_params for t in (tree, control)]
    assert sizes[0] == sizes[1]


def test_results_resume_and_forget_other_settings(common, tmp_path, capsys):
    path, calls = tmp_path / "cells.json", []

    def make():
        calls.append(1)
        return {"nll": 0.5}

    common.Store(path, {"epochs": 3}).cell("a/0", make)
    assert common.Store(path, {"epochs": 3}).cell("a/0", make) == {"nll": 0.5}
    assert len(calls) == 1
    common.Store(path, {"epochs": 4}).cell("a/0", make)
    assert len(calls) == 2
    assert "starting anew" in capsys.readouterr().out


def test_loop_and_measures(common, blobs):
    x, y, far = blobs
    torch.manual_seed(0)
    head = common.train(MLPHead(10, 3, 800, 1, 0.2), x, y, epochs=30, loss=F.cross_entropy, lr=0.01, decay=True)
    known, unknown = common.outputs_of(head, x, 7), common.outputs_of(head, far, 7)
    assert known.shape == (7, 900, 3)
    assert common.quality(known, y)["err"] < 5
    entropy = [torch.special.entr(v.softmax(-1).mean(0)).sum(1).numpy() for v in (known, unknown)]
    expected = 100 * roc_auc_score(np.r_[np.zeros(900), np.ones(300)], np.concatenate(entropy))
    assert common.separation(known, {"far": unknown})["far/entropy/AUROC"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    "name", ["table1", "table2", "table3", "mnist", "structures", "operations", "latent", "generative"]
)
def test_every_experiment_says_how_to_run_it(load, name):
    assert f"benchmarks/paper/{name}.py" in load(name).__doc__
