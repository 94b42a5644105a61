"""The paper's test: conditional mutual information of codes against a threshold in nats."""

from __future__ import annotations

from brainet_pl.structure.data import PreparedData, Weights
from brainet_pl.structure.independence.base import Floats, IndependenceTest, Ints
from brainet_pl.structure.independence.counts import in_small_lists, information, table_information
from brainet_pl.structure.statistics import CountSample


class ConditionalMutualInformation(IndependenceTest):
    """The paper's test: independent when the conditional mutual information, in nats, is below `threshold`."""

    name = "cmi"
    kind = "discrete"
    unit = "nats"
    default_threshold = 0.02
    default_score = "bdeu"

    def __init__(self, sample: CountSample, threshold: float) -> None:
        self.sample, self.threshold = sample, threshold
        self.keeps_all = threshold <= 0  # information is never negative

    @classmethod
    def on(cls, data: PreparedData, weights: Weights | None, threshold: float) -> ConditionalMutualInformation:
        """The test on the codes of `data`, rows counted as often as `weights` (N,) says."""
        return cls(CountSample(data.table, weights), threshold)

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the information less the threshold, (L, R)."""
        joint = self.sample.joint(condition, left, right)
        return information(joint, self.sample.n_log_n) / self.sample.total - self.threshold

    def pairs(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes the information less the threshold, (T,)."""
        return in_small_lists(self, x, y, conditions)

    def small_list(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes margins (T,) from dense tables of counts."""
        counts = self.sample.pair_tables(x, y, conditions)
        return table_information(counts, self.sample.n_log_n) / self.sample.total - self.threshold
