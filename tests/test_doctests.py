"""Examples in docstrings give the values that stand beside them."""

import doctest
import importlib
import pkgutil
import warnings

import pytest

import brainet_pl

MODULES = [
    module.name
    for module in pkgutil.walk_packages(brainet_pl.__path__, "brainet_pl.")
    if not module.name.startswith(("brainet_pl.configs", "brainet_pl.demo"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not found.failed, name


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    examples = [t for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(examples) >= 20
