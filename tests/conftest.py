"""Shared by all tests: small data and random graphs, made here and never downloaded."""

import numpy as np
import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint


@pytest.fixture(scope="session")
def random_dag():
    """A function (seed, d, p) -> boolean (d, d) adjacency of a DAG with edge probability p."""

    def make(seed, d, p):
        rng = np.random.default_rng(seed)
        order = rng.permutation(d)
        return np.triu(rng.random((d, d)) < p, 1)[np.ix_(order, order)]

    return make


@pytest.fixture(scope="session")
def features():
    """(400, 10) continuous features with shared causes, zero-inflated like those behind a ReLU."""
    rng = np.random.default_rng(7)
    causes = rng.normal(size=(400, 4))
    mixing = rng.normal(size=(4, 10)) * (rng.random((4, 10)) < 0.5)
    return np.maximum(causes @ mixing + 0.4 * rng.normal(size=(400, 10)), 0)


@pytest.fixture(scope="session")
def quiet_trainer():
    """A function (folder, *callbacks, epochs=1, **settings) -> a Trainer on the CPU that prints and writes little."""

    def make(folder, *callbacks, epochs=1, **settings):
        defaults = {
            "max_epochs": epochs,
            "accelerator": "cpu",
            "default_root_dir": str(folder),
            "logger": False,
            "callbacks": list(callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        }
        return pl.Trainer(**defaults | settings)

    return make
