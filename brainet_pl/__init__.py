"""BRAINet for PyTorch Lightning: heads whose wiring is learned from the data.

`learn_structure` and `rai` learn structures, `BRAINetHead` turns one into a module, `swap_head` puts it on a trained
model, `TreeDensity` tells inputs unlike the training data, and `BRAINet` is the LightningModule around it all. Its
parts are in `brainet_pl.network` (heads), `brainet_pl.scores`, `brainet_pl.calibration` and `brainet_pl.tasks`.
`BRAINetClassifier` and `BRAINetRegressor` are the same for people who know scikit-learn.

A name is imported when it is first used: the structure learner does not wait for Lightning and torchvision.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brainet_pl.backbones.loading import Backbone
    from brainet_pl.backbones.texts import TextEncoder
    from brainet_pl.batch import BatchPredictor
    from brainet_pl.decisions import find_label_issues, rank_for_labelling, risk_control
    from brainet_pl.export.folder import export_folder
    from brainet_pl.export.graph import export_onnx, export_program
    from brainet_pl.graphs import rai
    from brainet_pl.lightning.module import BRAINet
    from brainet_pl.monitoring import DriftMonitor
    from brainet_pl.network import BRAINetHead
    from brainet_pl.scores import TreeDensity
    from brainet_pl.serving import ExportedModel
    from brainet_pl.sklearn.estimators import BRAINetClassifier, BRAINetRegressor
    from brainet_pl.sklearn.several import BRAINetMultiLabelClassifier
    from brainet_pl.storage.runs import continue_run
    from brainet_pl.structure import GGT, learn_structure
    from brainet_pl.swap.file import load_swapped
    from brainet_pl.swap.in_place import calibrate_layer, explain_layer, predict_layer, swap_layer
    from brainet_pl.swap.layer import restore_layers
    from brainet_pl.swap.model import SwappedModel, swap_head
    from brainet_pl.swap.pixel_file import load_pixels
    from brainet_pl.swap.pixels import PixelModel, swap_pixels
    from brainet_pl.tables.labels import label_matrix

__version__ = "0.3.0"

__all__ = [
    "GGT",
    "BRAINet",
    "BRAINetClassifier",
    "BRAINetHead",
    "BRAINetMultiLabelClassifier",
    "BRAINetRegressor",
    "Backbone",
    "BatchPredictor",
    "DriftMonitor",
    "ExportedModel",
    "PixelModel",
    "SwappedModel",
    "TextEncoder",
    "TreeDensity",
    "__version__",
    "calibrate_layer",
    "continue_run",
    "explain_layer",
    "export_folder",
    "export_onnx",
    "export_program",
    "find_label_issues",
    "label_matrix",
    "learn_structure",
    "load_pixels",
    "load_swapped",
    "predict_layer",
    "rai",
    "rank_for_labelling",
    "restore_layers",
    "risk_control",
    "swap_head",
    "swap_layer",
    "swap_pixels",
]

_HOMES = {
    "GGT": "structure",
    "BRAINet": "lightning.module",
    "BRAINetClassifier": "sklearn",
    "BRAINetHead": "network",
    "BRAINetMultiLabelClassifier": "sklearn",
    "BRAINetRegressor": "sklearn",
    "Backbone": "backbones",
    "BatchPredictor": "batch",
    "DriftMonitor": "monitoring",
    "ExportedModel": "serving",
    "PixelModel": "swap.pixels",
    "SwappedModel": "swap.model",
    "TextEncoder": "backbones.texts",
    "TreeDensity": "scores",
    "calibrate_layer": "swap.in_place",
    "continue_run": "storage.runs",
    "explain_layer": "swap.in_place",
    "export_folder": "export.folder",
    "export_onnx": "export.graph",
    "export_program": "export.graph",
    "find_label_issues": "decisions",
    "label_matrix": "tables.labels",
    "learn_structure": "structure",
    "load_pixels": "swap.pixel_file",
    "load_swapped": "swap.file",
    "predict_layer": "swap.in_place",
    "rai": "graphs",
    "rank_for_labelling": "decisions",
    "restore_layers": "swap.layer",
    "risk_control": "decisions",
    "swap_head": "swap.model",
    "swap_layer": "swap.in_place",
    "swap_pixels": "swap.pixels",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "BRAINet":
        import_module(f"{__name__}.callbacks")  # registers the callbacks that every run of it has
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
