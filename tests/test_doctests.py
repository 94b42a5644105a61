"""Docstrings of public names: sentences, and examples that give the values that stand beside them."""

import doctest
import importlib
import inspect
import pkgutil
import re
import warnings

import pytest

import brainet_pl

MODULES = [
    module.name
    for module in pkgutil.walk_packages(brainet_pl.__path__, "brainet_pl.")
    if not module.name.startswith(("brainet_pl.configs", "brainet_pl.demo"))
]


TRAINS = "brainet_pl.sklearn.estimators"  # whole models


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.integration) if name == TRAINS else name for name in MODULES]
)
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


def public():
    """Every class, function, method and property that has no underscore, by its name."""
    for name in MODULES:
        if name.rpartition(".")[2].startswith("_"):
            continue
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            if key.startswith("_") or getattr(value, "__module__", None) != name:
                continue
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{name}.{key}", value
            for inner, member in vars(value).items() if inspect.isclass(value) else ():
                member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if not inner.startswith("_") and inspect.isfunction(member) and member.__name__ != "<lambda>":
                    yield f"{name}.{key}.{inner}", member


def test_public_names_are_described_in_sentences():
    """A summary begins with a word, not with a shape, has four words or more, and ends; mere shapes say nothing."""
    seen, poor = 0, []
    for name, value in public():
        seen += 1
        summary = inspect.cleandoc(value.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        words = re.findall(r"[^\W\d_]{2,}", summary)
        if len(words) < 4 or summary.startswith("(") or summary[-1] not in ".:!?":
            poor.append((name, summary))
    assert seen > 1000
    assert not poor, "\n".join(map(str, poor))
