"""Every example in a docstring of the structure learner gives the value it shows."""

import doctest
import importlib
import pkgutil

import pytest

from brainet_pl import structure

MODULES = [found.name for found in pkgutil.walk_packages(structure.__path__, "brainet_pl.structure.")]
SHOWN = {"learn": ["learn_structure", "rai"], "ggt": ["GGT.sample", "GGT.perplexity"]}
SHOWN |= {"pdag": ["cpdag"], "discretize": ["discretize"]}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", SHOWN)
def test_the_public_functions_have_examples(name):
    finder = doctest.DocTestFinder(exclude_empty=True)
    module = importlib.import_module(f"brainet_pl.structure.{name}")
    with_examples = {test.name.removeprefix(f"{module.__name__}.") for test in finder.find(module) if test.examples}
    assert set(SHOWN[name]) <= with_examples
