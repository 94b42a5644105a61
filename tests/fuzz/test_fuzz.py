"""Every door of the package under random inputs; `cases.py` says what is tried and what counts as a finding."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

_spec = importlib.util.spec_from_file_location("fuzz_cases", Path(__file__).with_name("cases.py"))
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)


def run(name, examples):
    """At most `examples` cases of a target, the same ones every time."""
    counts = {"right": 0, "refused": 0}

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.data())
    def test(data):
        counts[cases.outcome(cases.TARGETS[name], data.draw)] += 1

    test()
    return counts


@pytest.mark.parametrize("name", cases.TARGETS)
def test_a_few_cases(name):
    assert sum(run(name, 6).values()) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.TARGETS)
def test_many_cases(name):
    counts = run(name, 150)
    assert sum(counts.values()) >= 120
    assert min(counts.values()) >= 10  # the inputs are neither all right nor all wrong
