"""Builds the head of a model for its features, its tree, and the logits of the layer whose place it takes."""

from __future__ import annotations

from brainet_pl.features.extraction import Extracted
from brainet_pl.network import HeadSettings
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.structure import GGT
from brainet_pl.tasks import Task


def build_head(predictor: Predictor, settings: HeadSettings, tree: GGT | None, samples: Extracted) -> None:
    """Build the head of a model, which adds to the logits of the removed layer where these say something.

    Args:
        predictor: the model.
        settings: settings of its head.
        tree: the learned tree; None for a head that needs none.
        samples: training samples that tell the number of features, and whether base logits help.
    """
    helps = settings.asks_base_logits and base_logits_help(predictor.task, samples)
    predictor.build_head(settings, samples.features.shape[1], tree, helps)


def base_logits_help(task: Task, samples: Extracted) -> bool:
    """Whether the removed layer's logits say something of training targets: its classes may be others."""
    logits = samples.output.base_logits
    if logits is None or not task.base_fits(logits.shape[1]):
        return False
    return task.base_helps(logits, task.check(samples.targets))
