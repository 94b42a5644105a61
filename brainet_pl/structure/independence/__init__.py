"""Conditional-independence tests, found by name through `find_test`."""

from brainet_pl.structure.independence.base import IndependenceTest, Margins, SingleMargins, find_test, known_tests
from brainet_pl.structure.independence.counts import ConditionalMutualInformation, GSquare
from brainet_pl.structure.independence.oracle import DSeparation
from brainet_pl.structure.independence.partial import FisherZ, PartialCorrelation

__all__ = [
    "ConditionalMutualInformation",
    "DSeparation",
    "FisherZ",
    "GSquare",
    "IndependenceTest",
    "Margins",
    "PartialCorrelation",
    "SingleMargins",
    "find_test",
    "known_tests",
]
