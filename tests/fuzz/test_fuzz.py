"""Every door of the package under random inputs; `cases.py` says what is tried and what counts as a finding."""

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

_spec = importlib.util.spec_from_file_location("fuzz_cases", Path(__file__).with_name("cases.py"))
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)


SEED = int(os.environ.get("BRAINET_FUZZ_SEED") or int.from_bytes(os.urandom(4), "little"))  # of the slow test


def run(name, examples, number=None):
    """At most `examples` cases of a target: those of a seed, or the same ones every time."""
    counts = {"right": 0, "refused": 0}

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=number is None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.data())
    def test(data):
        counts[cases.outcome(cases.TARGETS[name], data.draw)] += 1

    (test if number is None else seed(number)(test))()
    return counts


FEW = [pytest.param(name, marks=[pytest.mark.integration] * (name == "exports")) for name in cases.TARGETS]


@pytest.mark.parametrize("name", FEW)
def test_a_few_cases(name):
    assert sum(run(name, 6).values()) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.TARGETS)
def test_cases_that_nobody_has_seen(name):
    print(f"other cases in every run; to repeat these: BRAINET_FUZZ_SEED={SEED}")  # pytest shows it where a test fails
    assert sum(run(name, 30, SEED).values()) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.TARGETS)
def test_many_cases(name):
    counts = run(name, 150)
    assert sum(counts.values()) >= 120
    assert min(counts.values()) >= 10  # the inputs are neither all right nor all wrong
