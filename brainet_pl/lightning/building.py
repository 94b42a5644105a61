"""Parts of a model from what a user gives, and the settings that make the same model again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from brainet_pl._utils.parts import make_part, primitive
from brainet_pl.backbones import Backbone, FeatureExtractor
from brainet_pl.calibration import Calibrator, DensityScaling
from brainet_pl.prediction.defaults import AUTO_CALIBRATION, default_scores
from brainet_pl.tasks import Classification, Task

if TYPE_CHECKING:
    from brainet_pl.lightning.module import BRAINet


def make_task(task: Any, num_classes: int | None) -> Task:
    """The task that a user names, or a classification of `num_classes`."""
    if task is None:
        if num_classes is None:
            raise ValueError("expected num_classes for classification, got none: set it, or task='Regression'")
        return Classification(num_classes)
    if isinstance(task, str) and task == "Classification" and num_classes is not None:
        return Classification(num_classes)
    made = make_part(Task, task, "task")
    if num_classes is not None and getattr(made, "num_classes", None) != num_classes:
        raise ValueError(
            f"expected num_classes or a task that has them, got num_classes={num_classes} and {made.describe()}: leave "
            "num_classes out"
        )
    return made


def make_backbone(backbone: Any) -> Backbone:
    """Settings of a backbone from a name, a module or a dictionary."""
    if isinstance(backbone, Backbone):
        return backbone
    if isinstance(backbone, Mapping):
        return Backbone(**backbone)
    return Backbone(backbone)


def scores_or_density(scores: Any, backbone: FeatureExtractor, calibration: Any) -> Any:
    """The scores that a user names; where nobody does, a density of features that do not move.

    A calibrator that fades by a density brings its own.
    """
    if scores is not None:
        return scores
    named = None if calibration in (None, AUTO_CALIBRATION) else make_part(Calibrator, calibration, "calibration")
    return default_scores(backbone) if backbone.frozen and not isinstance(named, DensityScaling) else []


def settings_of(model: BRAINet, backbone: Backbone) -> dict[str, Any]:
    """Everything that makes a model again, as primitives, for loggers and checkpoints.

    A backbone given as a module and metrics given as objects can't be written down; nor are weights that a checkpoint
    holds asked for in their file again.
    """
    named = None if isinstance(backbone.model, nn.Module) else vars(backbone) | {"weights": None}
    settings = {
        "backbone": named,
        "head": model.head_settings,
        "task": model.task,
        "scores": list(model.scores),
        "calibration": AUTO_CALIBRATION if model.calibrates_by_default else model.calibration,
        "verdict": vars(model.verdict),
        "conformal": model.conformal,
        "risk": model.risk.wanted,
        "columns": None if model.columns is None else vars(model.columns),
        "passes": model.passes,
        "lr": model.lr,
        "on_nan": model.guard.on_nan,
    }
    return primitive(settings)  # type: ignore[no-any-return]
