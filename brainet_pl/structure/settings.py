"""Settings of `learn_structure` and `rai`: their checks, and the choice of a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl._utils.warn import warn
from brainet_pl.structure.data import PreparedData, are_categories
from brainet_pl.structure.discretize import BINS, check_bins
from brainet_pl.structure.independence import IndependenceTest, find_test
from brainet_pl.structure.score import Score, find_score

Bootstrap = Literal["half", "paper"]
# As a test: the one that belongs to the data. As a threshold: the one that splits the data best.
AUTO: Literal["auto"] = "auto"
SAMPLES = (4, 1)  # of the root, and of the nodes below it
MOST_SAMPLES = 1000  # samples of a node; a tree of more would not fit anywhere


@dataclass
class StructureSettings:
    """Settings of `learn_structure`, checked; what only the data can tell is checked later.

    Args:
        s: Number of samples, and so of branches, at every node, as in the paper; or a list of those of the root, of the
            nodes below it, and so on, the last for all that are deeper. (4, 1) is four whole structures, 1 a single
            one.
        max_order: Size of the largest condition set; the tree has at most `max_order + 1` levels. None: no limit.
        test: Name of a test, or a subclass of `IndependenceTest`. "cmi" and "gaussian" compare (conditional) mutual
            information in nats with `threshold`; "g2" and "fisher_z" are significance tests at level `threshold`. The
            first of each pair is discrete. "auto" is "g2" for a table of categories, "gaussian" for any other.
        threshold: Threshold of the test, in its unit. "auto" is the one, of a grid, at which the variables fall apart
            into the sets of largest modularity (see `structure.threshold`); it needs no labels. A significance test has
            its own level instead. None is the test's own: 0.02 nats for "cmi", 0.05 nats for "gaussian", the level 0.01
            for "g2" and for "fisher_z", where it falls with the number of pairs: 2 / d(d - 1) for more than 14
            variables. 0 nats keep every edge: the tree becomes an ensemble of s branches a level over all variables.
        bootstrap: "half" draws half of the rows for each sample, believes a v-structure only if its ends compete, and
            with a significance test lets the score choose among the parents that a leaf could have. "paper" is
            Algorithm 1 to the letter: rows are drawn with replacement, and nothing is checked again. Repeated rows look
            like dependence to a test, so its structures have many edges too many.
        bins: Number of levels of a continuous column in the discrete tests and scores, from 2 to 256.
        score: "bdeu" (discrete), "bge" (Gaussian), "bic" (in the form of the test's kind), or a subclass of `Score`;
            None is the one that belongs to the test.
        ess: Equivalent sample size of BDeu, weight of the prior of BGe.
        seed: Seed of the random samples of rows.
        max_rows: Learn from a random sample of at most this many rows. None: from all.
        max_tests: Number of tests after which what is open becomes a leaf, with a warning. None: no limit.
        max_seconds: Time after which what is open becomes a leaf, with a warning. None: no limit.
    """

    s: int | Sequence[int] = SAMPLES
    max_order: int | None = 1
    test: str | type[IndependenceTest] = AUTO
    threshold: float | Literal["auto"] | None = AUTO
    bootstrap: Bootstrap = "half"
    bins: int = BINS
    score: str | type[Score] | None = None
    ess: float = 1.0
    seed: int = 0
    max_rows: int | None = None
    max_tests: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        chosen = find_test("gaussian" if self.test == AUTO else self.test)  # which "auto" is, is known with the data
        chosen.check_threshold(self.given_threshold)
        if self.test != AUTO:
            find_score(chosen.default_score if self.score is None else self.score, chosen.kind)
        hint = "half is the better one, paper is Algorithm 1 to the letter"
        checks.one_of("bootstrap", self.bootstrap, get_args(Bootstrap), hint)
        check_samples(self.s)
        self.max_order, self.bins = check_order(self.max_order), check_bins(self.bins)
        hint = "it is the weight of the score's prior; 1 is common"
        self.ess = checks.number("ess", self.ess, 1e-12, hint=hint)
        self.seed = checks.whole("seed", self.seed, 0, hint="any number from 0 on will do")
        self.max_rows = check_rows(self.max_rows)
        self.max_tests, self.max_seconds = check_limits(self.max_tests, self.max_seconds)

    @property
    def samples(self) -> tuple[int, ...]:
        """The number of samples of the nodes of each level, from the root down."""
        return check_samples(self.s)

    @property
    def as_in_paper(self) -> bool:
        """Whether Algorithm 1 is followed to the letter."""
        return self.bootstrap == "paper"

    @property
    def given_threshold(self) -> float | None:
        """The threshold, where one was given; any word but "auto" is for the test to refuse."""
        searched = isinstance(self.threshold, str) and self.threshold == AUTO
        return None if searched else self.threshold  # type: ignore[return-value]


def check_samples(s: Any) -> tuple[int, ...]:
    """The samples of the nodes of each level, from a number for all or a list.

    >>> check_samples(2), check_samples([4, 1])
    ((2,), (4, 1))
    """
    hint = "it is the number of samples of a node; 1 gives a single structure"
    if not isinstance(s, Sequence) or isinstance(s, str):
        return (checks.whole("s", s, 1, MOST_SAMPLES, hint=hint),)
    if not s:
        raise ValueError(f"expected s to have a number for the root, got an empty list: {hint}")
    return tuple(checks.whole("s", value, 1, MOST_SAMPLES, hint=hint) for value in s)


def check_order(max_order: int | None) -> int | None:
    """The size of the largest condition set, or None."""
    hint = "it is the size of the largest condition set; None: no limit"
    return checks.whole_or_none("max_order", max_order, 0, hint)


def check_rows(max_rows: int | None) -> int | None:
    """The number of rows to learn from at most, or None."""
    return checks.whole_or_none("max_rows", max_rows, 2, "dependence can't be seen in fewer; None learns from all rows")


def check_limits(max_tests: int | None, max_seconds: float | None) -> tuple[int | None, float | None]:
    """The limits of a `Budget`."""
    tests = checks.whole_or_none("max_tests", max_tests, 0, "None sets no limit")
    return tests, checks.number_or_none("max_seconds", max_seconds, 0, "None sets no limit")


def choose_test(
    test: str | type[IndependenceTest], data: PreparedData | NDArray[Any], of_numbers: str = "gaussian"
) -> type[IndependenceTest]:
    """The test of a name or class; "auto" looks at the data, prepared or as a table (N, d)."""
    if isinstance(test, str) and test == AUTO:
        categories = data.only_categories if isinstance(data, PreparedData) else are_categories(data)
        return find_test("g2" if categories else of_numbers)
    return find_test(test)


def warn_of_few_rows(data: PreparedData) -> None:
    """Warn where there are fewer rows than columns."""
    if data.n < data.d:
        warn(
            f"expected more rows than columns, got {data.n:,} rows of {data.d:,}: much that is found will be chance; "
            "give more rows, or fewer features"
        )
