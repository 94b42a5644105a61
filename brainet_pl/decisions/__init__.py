"""What people do with answers: let a model answer where it is safe, and ask a person elsewhere.

It takes a model behind any door: `BRAINet`, the model of `swap_head`, a module with a swapped layer, an estimator.
"""

from brainet_pl.decisions.risk import risk_control

__all__ = ["risk_control"]
