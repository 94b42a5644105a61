"""Conditional-independence tests: one file a test, found by name through `find_test`."""

from brainet_pl.structure.independence.base import IndependenceTest, Margins, SingleMargins, find_test, known_tests
from brainet_pl.structure.independence.cmi import ConditionalMutualInformation
from brainet_pl.structure.independence.fisher_z import FisherZ
from brainet_pl.structure.independence.g2 import GSquare
from brainet_pl.structure.independence.gaussian import PartialCorrelation
from brainet_pl.structure.independence.oracle import DSeparation

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
