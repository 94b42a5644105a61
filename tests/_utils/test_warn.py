"""Warnings name the user's line, whatever libraries stand between it and the place where something was noticed."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import BRAINet, BRAINetClassifier
from brainet_pl.network import Linear
from brainet_pl.structure import learn_structure

ROOT = Path(__file__).parents[2]


def said_here(record, text):
    (found,) = [one for one in record if text in str(one.message)]
    return found.filename == __file__


def test_a_call_of_the_library():
    with pytest.warns(UserWarning, match="expected more rows than columns") as record:
        learn_structure(np.random.default_rng(0).normal(size=(8, 12)), progress=False)
    assert said_here(record, "expected more rows than columns")


def test_a_hook_that_lightning_calls(tmp_path, quiet_trainer):
    data = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(2, (40,))), batch_size=8)
    model = BRAINet(2, head=Linear(), calibration="TemperatureScaling")
    with pytest.warns(UserWarning, match="no validation data to learn from") as record:
        quiet_trainer(tmp_path).fit(model, data)
    assert said_here(record, "no validation data to learn from")


def test_an_estimator():
    x = np.random.default_rng(0).normal(size=(12, 3))
    with pytest.warns(UserWarning, match="not calibrated") as record:
        BRAINetClassifier(max_epochs=1).fit(x, x[:, 0] > 0)
    assert said_here(record, "not calibrated")


SCRIPT = """
from brainet_pl.structure import learn_structure
import numpy as np

for _ in range(3):
    learn_structure(np.random.default_rng(0).normal(size=(8, 12)), progress=False)
"""


def test_a_script_sees_its_own_line_once(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "mine.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("expected more rows than columns") == 1
    assert "mine.py:6: UserWarning: expected more rows than columns" in done.stderr
    assert "brainet_pl" not in done.stderr


def test_an_error_where_a_user_asks_for_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="expected more rows"):
            learn_structure(np.random.default_rng(0).normal(size=(8, 12)), progress=False)
