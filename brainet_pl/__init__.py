"""BRAINet for PyTorch Lightning: heads whose wiring is learned from the data.

`learn_structure` and `rai` learn structures, `BRAINetHead` turns one into a module, `swap_head` puts it on a trained
model, `GenerativeScore` tells inputs unlike the training data, and `BRAINet` is the LightningModule around it all.
"""

from brainet_pl.generative import GenerativeScore
from brainet_pl.head import BRAINetHead
from brainet_pl.module import BRAINet, SwappedModel, swap_head
from brainet_pl.structure import GGT, learn_structure, rai

__version__ = "0.1.0"

__all__ = [
    "GGT",
    "BRAINet",
    "BRAINetHead",
    "GenerativeScore",
    "SwappedModel",
    "__version__",
    "learn_structure",
    "rai",
    "swap_head",
]
