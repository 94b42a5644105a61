"""Benchmarks are scripts, not a package: here they are imported as running them would."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def load():
    """A function (name, as in "paper/table1") -> the module of that script."""
    found = {}
    before = list(sys.path)
    sys.path[:0] = [str(FOLDER), str(FOLDER / "paper")]

    def get(name):
        if name not in found:
            key = f"benchmark_{name.replace('/', '_')}"
            spec = importlib.util.spec_from_file_location(key, FOLDER / f"{name}.py")
            found[name] = sys.modules[key] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found[name])
        return found[name]

    yield get
    sys.path[:] = before


@pytest.fixture(autouse=True)
def threads():
    """A smoke run takes one thread; the next test has as many as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
