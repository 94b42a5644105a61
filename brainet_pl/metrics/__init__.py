"""Numbers that say how good predictions are: measures for torchmetrics, curves, sums of shifted sets, losses.

Imports `_utils` and the functions of `uncertainty`.
"""
