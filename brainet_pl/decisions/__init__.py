"""What people do with answers: let a model answer where it is safe, find wrong labels, choose what to label next.

All three take a model behind any door: `BRAINet`, the model of `swap_head`, a module with a swapped layer, an
estimator.
"""

from brainet_pl.decisions.issues import LabelIssues, find_label_issues, issues_of
from brainet_pl.decisions.quality import label_quality
from brainet_pl.decisions.ranking import rank_for_labelling
from brainet_pl.decisions.risk import risk_control

__all__ = [
    "LabelIssues",
    "find_label_issues",
    "issues_of",
    "label_quality",
    "rank_for_labelling",
    "risk_control",
]
