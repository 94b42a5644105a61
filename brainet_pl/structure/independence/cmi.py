"""The paper's test: conditional mutual information of codes against a threshold in nats."""

from __future__ import annotations

from brainet_pl.structure.independence.base import Floats, Ints
from brainet_pl.structure.independence.counts import CountTest, information, table_information
from brainet_pl.structure.statistics import CountSample


class ConditionalMutualInformation(CountTest):
    """The paper's test: independent when the conditional mutual information, in nats, is below `threshold`."""

    name = "cmi"
    unit = "nats"
    default_threshold = 0.02

    def __init__(self, sample: CountSample, threshold: float) -> None:
        super().__init__(sample, threshold)
        self.keeps_all = threshold <= 0  # information is never negative

    def block(self, condition: tuple[int, ...], left: Ints, right: Ints) -> Floats:
        """Computes the information less the threshold, (L, R)."""
        joint = self.sample.joint(condition, left, right)
        return information(joint, self.sample.n_log_n) / self.sample.total - self.threshold

    def small_list(self, x: Ints, y: Ints, conditions: Ints) -> Floats:
        """Computes margins (T,) from dense tables of counts."""
        counts = self.sample.pair_tables(x, y, conditions)
        return table_information(counts, self.sample.n_log_n) / self.sample.total - self.threshold
