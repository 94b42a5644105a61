"""Lightning datamodules: digits, .npz arrays, torchvision's sets, folders and lists of images, UCI, any CSV file."""

from brainet_pl.datamodules.arrays import Arrays
from brainet_pl.datamodules.base import SplitData
from brainet_pl.datamodules.digits import Digits
from brainet_pl.datamodules.image_lists import ImageLists
from brainet_pl.datamodules.images import ImageFolder
from brainet_pl.datamodules.labelled_images import LabelledImages
from brainet_pl.datamodules.shifts import Shifts
from brainet_pl.datamodules.table import Table
from brainet_pl.datamodules.uci import UCI
from brainet_pl.datamodules.vision import TorchvisionData

__all__ = [
    "UCI",
    "Arrays",
    "Digits",
    "ImageFolder",
    "ImageLists",
    "LabelledImages",
    "Shifts",
    "SplitData",
    "Table",
    "TorchvisionData",
]
