"""BRAINet for PyTorch Lightning: heads whose wiring is learned from the data.

`learn_structure` and `rai` learn structures, `BRAINetHead` turns one into a module, `swap_head` puts it on a trained
model, `GenerativeScore` tells inputs unlike the training data, and `BRAINet` is the LightningModule around it all. Its
parts are in `brainet_pl.network` (heads), `brainet_pl.scores`, `brainet_pl.calibration` and `brainet_pl.tasks`.
"""

from brainet_pl.backbones import Backbone
from brainet_pl.module import BRAINet
from brainet_pl.network import BRAINetHead
from brainet_pl.scores import GenerativeScore
from brainet_pl.structure import GGT, learn_structure, rai
from brainet_pl.swap import SwappedModel, swap_head

__version__ = "0.2.0.dev0"

__all__ = [
    "GGT",
    "BRAINet",
    "BRAINetHead",
    "Backbone",
    "GenerativeScore",
    "SwappedModel",
    "__version__",
    "learn_structure",
    "rai",
    "swap_head",
]
